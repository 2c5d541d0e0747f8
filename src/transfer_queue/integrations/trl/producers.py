"""The producers of rollouts: generators, and the reward stage. Each is the main loop of a process, on any machine."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from transfer_queue.attachment import current_client
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.integrations.trl.policy_weights import (
    Publication,
    await_training,
    fetch_weights,
    read_publication,
)
from transfer_queue.integrations.trl.rollout_partition import (
    GENERATE,
    GENERATED,
    LEASE,
    PROMPT,
    ROLLOUTS,
    SCORE,
    SCORED,
    VERSION,
    check_positive,
    claim_groups,
    table,
)
from transfer_queue.metadata import BatchMeta
from transfer_queue.utils.logging_utils import get_logger

_logger = get_logger(__name__)

RewardFunction = Callable[..., Any]
"""A reward function of TRL: keyword arguments in, a number or None for each completion out; also as a coroutine."""


class Completion(NamedTuple):
    """One completion of a prompt."""

    prompt_ids: list[int]
    """The token ids of the prompt."""
    completion_ids: list[int]
    """The token ids of the completion, with the token that ends it."""
    logprobs: list[float]
    """The log-probability of each token of the completion, under the policy and temperature that sampled it."""
    content: Any
    """What the reward functions get: the text, or a list of messages if the prompt is one."""


class Engine(Protocol):
    """The interface through which a generator uses an inference engine."""

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights of the policy.

        Args:
            weights: Tensors in the memory of the host, under the names that the trainer's model has for them.
        """

    def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> Sequence[Sequence[Completion]]:
        """Generate completions.

        Args:
            rows: Rows of the dataset; `row["prompt"]` is a text or a list of messages.
            count: The number of completions of each prompt.

        Returns:
            `count` completions for each row, in the order of the rows.
        """
        ...


def generate_rollouts(
    engine: Engine, partition_id: str = ROLLOUTS, *, prompts_together: int = 8, lease: float = LEASE
) -> None:
    """Answer prompts until the training stops. This is the loop of a generator process; run as many as you like.

    Before each batch the engine gets the newest weights. If the process is killed, another generator gets its prompts
    when the lease ends.

    Args:
        engine: The inference engine.
        partition_id: The partition of the rollouts. Default: "rollouts".
        prompts_together: The maximum number of prompts in one call of `engine.generate`. Default: 8.
        lease: Seconds after which the prompts of a killed generator are answered by others. A generator renews its
            leases as long as it works. Default: 30.

    Raises:
        InvalidArgumentError: An argument is not valid, or the engine returned another number of completions.

    Example:
        A generator process, which attaches to the system of the trainer::

            tq.init(attach="require", task="generate")
            generate_rollouts(TransformersEngine(model, tokenizer, max_new_tokens=256))
    """
    loaded, version = "", -1
    for groups, newest, count in _claimed(partition_id, [PROMPT], GENERATE, prompts_together, lease):
        try:
            if newest.number != loaded:
                weights, version = fetch_weights(partition_id)
                engine.load_weights(weights)
                loaded = newest.number
            _answer(engine, groups, count, version)
        except StorageKeyNotFoundError as error:
            _logger.warning("the prompts of this generator were cleared, and it continues with others: %s", error)


def _claimed(
    partition_id: str, fields: Sequence[str], task: str, prompts_together: int, lease: float
) -> Iterator[tuple[list[BatchMeta], Publication, int]]:
    """Iterate over claimed groups, with what was published last and the size of a group, until the training stops."""
    check_positive("lease", lease)
    check_positive("prompts_together", prompts_together)
    while (training := await_training(partition_id)) is None:
        _logger.warning("no training has published weights for %r; this producer waits for one", partition_id)
    while True:
        groups, ended = claim_groups(partition_id, fields, task, training.group_size, prompts_together, lease)
        newest = read_publication(partition_id)
        if ended or newest is None or newest.stopped:
            for meta in groups:
                current_client().nack(meta, delivered=False)
            return
        if groups:
            yield groups, newest, training.group_size


def _answer(engine: Engine, groups: Sequence[BatchMeta], count: int, version: int) -> None:
    """Generate the completions of some prompts, and put each group as a whole."""
    client = current_client()
    rows = [client.get_data(meta)[PROMPT].tolist()[0] for meta in groups]
    answers = engine.generate(rows, count)
    sizes = [len(group) for group in answers]
    if sizes != [count] * len(rows):
        raise InvalidArgumentError(
            f"the engine must return {count} completions for each of {len(rows)} prompts, got groups of {sizes}"
        )
    for meta, group in zip(groups, answers):
        client.put(generated_columns(group), meta, tags=[{VERSION: version}] * len(group))
        client.ack(meta)


def generated_columns(group: Sequence[Completion]) -> Any:
    """Return the fields that a generator puts."""
    values = [
        (
            torch.tensor([*row.prompt_ids, *row.completion_ids]),
            torch.tensor([0] * len(row.prompt_ids) + [1] * len(row.completion_ids)),
            torch.tensor([0.0] * len(row.prompt_ids) + list(row.logprobs), dtype=torch.float32),
            row.content,
        )
        for row in group
    ]
    return table(dict(zip(GENERATED, zip(*values))))


def score_rollouts(
    reward_functions: RewardFunction | Sequence[RewardFunction],
    partition_id: str = ROLLOUTS,
    *,
    prompts_together: int = 8,
    lease: float = LEASE,
) -> None:
    """Compute rewards and advantages of generated groups until the training stops. This is the loop of a process.

    The rewards of several functions are added. The advantage of a completion is its reward minus the mean of its group,
    divided by the standard deviation of the group, as in TRL's own worker.

    Args:
        reward_functions: One or several reward functions of TRL. They are called with the keyword arguments `prompts`,
            `completions`, `completion_ids` and the other columns of the dataset, each with an entry for every
            completion of a group, and return a number or None for each. They may be coroutine functions.
        partition_id: The partition of the rollouts. Default: "rollouts".
        prompts_together: The maximum number of groups that are claimed at once. Default: 8.
        lease: Seconds after which the groups of a killed process are scored by another one. Default: 30.

    Raises:
        InvalidArgumentError: An argument is not valid, or a function returned another number of rewards.

    Example:
        A process of the reward stage::

            tq.init(attach="require", task="score")
            score_rollouts(accuracy_reward)
    """
    functions = [reward_functions] if callable(reward_functions) else list(reward_functions)
    if not functions:
        raise InvalidArgumentError("reward_functions must have at least one function, got none")
    for groups, _, _ in _claimed(partition_id, [PROMPT, *GENERATED], SCORE, prompts_together, lease):
        for meta in groups:
            try:
                _score(functions, meta)
            except StorageKeyNotFoundError as error:
                _logger.warning("a group was cleared while it was scored: %s", error)


def _score(functions: Sequence[RewardFunction], meta: BatchMeta) -> None:
    client = current_client()
    data = client.get_data(meta, layout="list")
    rows = data[PROMPT].tolist()
    ids = [row[mask.bool()].tolist() for row, mask in zip(data["input_ids"], data["completion_mask"])]
    arguments = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    arguments |= {
        "prompts": [row["prompt"] for row in rows],
        "completions": data["completion"].tolist(),
        "completion_ids": ids,
    }
    advantages, metrics = advantages_of(
        {_name(function): _rewards(function, arguments, len(rows)) for function in functions}
    )
    client.put(table(dict(zip(SCORED, (advantages, metrics)))), meta)
    client.ack(meta)


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _rewards(function: RewardFunction, arguments: Mapping[str, Any], count: int) -> list[float]:
    result = function(**arguments)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    rewards = [math.nan if reward is None else float(reward) for reward in result]
    if len(rewards) != count:
        raise InvalidArgumentError(
            f"reward function {_name(function)!r} must return {count} rewards, one for each completion, "
            f"got {len(rewards)}"
        )
    return rewards


async def _awaited(result: Any) -> Any:
    return await result


def advantages_of(rewards: Mapping[str, Sequence[float]]) -> tuple[list[float], list[dict[str, float]]]:
    """Return the advantages and metrics of one group.

    Args:
        rewards: Name of the reward function -> the rewards of the group; NaN for a completion that it cannot judge.

    Returns:
        The advantage of each completion (0 for one that no function can judge), and its metrics under TRL's names.
    """
    values = np.array(list(rewards.values()), dtype=float)
    sums = np.where(np.isnan(values).all(axis=0), np.nan, np.nansum(values, axis=0))
    judged = ~np.isnan(sums)
    mean, deviation = (float(sums[judged].mean()), float(sums[judged].std())) if judged.any() else (0.0, math.nan)
    advantages = np.where(judged, (sums - mean) / (deviation + 1e-8), 0.0)
    metrics = [
        {
            "reward": float(total),
            "reward_std": deviation,
            **{f"rewards/{name}": float(column[row]) for name, column in zip(rewards, values)},
        }
        for row, total in enumerate(sums)
    ]
    return advantages.tolist(), metrics
