"""QueueRollouts: a `rollout_func` of TRL's GRPOTrainer whose completions come from generators in other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from transfer_queue.attachment import current_client
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.integrations.trl.policy_weights import mark_stopped, partition_of, publish_weights
from transfer_queue.integrations.trl.rollout_partition import (
    GENERATE,
    GENERATED,
    PROMPT,
    ROLLOUTS,
    VERSION,
    check_positive,
    is_worked_on,
    table,
)

WAIT = 5.0
"""Seconds after which a call that waits checks whether a generator is alive."""
CALL = "call"
"""Tag entry: the rank and the number of the call that put a sample."""


class QueueRollouts(TrainerCallback):  # type: ignore[misc]  # transformers is not installed with mypy
    """Let generators in other processes answer the prompts of `GRPOTrainer`.

    It is a `rollout_func` and a callback of the trainer. Each call publishes the weights if they have changed, puts the
    prompts, and waits until generators (`generate_rollouts`) have answered all of them. The trainer computes the
    rewards. If a generator is killed, another one answers its prompts. At the end of the training all generators end.

    Args:
        partition_id: The name of the partition. Default: "rollouts".
        producer_timeout: Seconds without a generator after which a call fails. Default: 300, in which an engine such
            as vLLM has started.

    Example:
        ::

            tq.init()
            rollouts = QueueRollouts()
            trainer = GRPOTrainer(
                model=model, reward_funcs=reward, args=args, train_dataset=dataset, rollout_func=rollouts,
                callbacks=[rollouts],
            )
            trainer.train()
    """

    def __init__(self, partition_id: str = ROLLOUTS, producer_timeout: float = 300.0) -> None:
        check_positive("producer_timeout", producer_timeout)
        self._partition = partition_id
        self._timeout = producer_timeout
        self._published = -1
        self._calls = 0
        self.__name__ = "queue_rollouts"

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Clear the samples that an earlier training has left."""
        if state.is_world_process_zero:
            for partition in (self._partition, partition_of(self._partition)):
                current_client().clear_partition(partition)
            current_client().create_partition(self._partition, group_size=1)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End all generators."""
        if state.is_world_process_zero:
            mark_stopped(self._partition)
            current_client().seal(self._partition)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return the completions of some prompts.

        Args:
            prompts: The prompts.
            trainer: The `GRPOTrainer`.

        Returns:
            "prompt_ids", "completion_ids" and "logprobs", each with an entry for every prompt, in their order.

        Raises:
            WaitTimeoutError: No generator has worked for `producer_timeout` seconds.
        """
        version = int(trainer.state.global_step)
        self._publish(trainer, version)
        client = current_client()
        call = f"{trainer.accelerator.process_index}/{self._calls}"
        self._calls += 1
        keys = [f"{call}/{number}" for number in range(len(prompts))]
        client.kv_batch_put(
            keys, self._partition, table({PROMPT: [{"prompt": prompt} for prompt in prompts]}),
            tags=[{CALL: call}] * len(keys), group_ids=keys,
        )  # fmt: skip
        self._await(call, version, len(keys))
        data = client.kv_batch_get(keys, self._partition, list(GENERATED), missing="error", layout="list")
        client.kv_clear(keys, self._partition)
        return _columns(*(data[name] for name in GENERATED[:3]))

    def _publish(self, trainer: Any, version: int) -> None:
        """Publish the weights of this step, if they are not published yet."""
        if version == self._published:
            return
        accelerator = trainer.accelerator
        if accelerator.is_main_process:
            model = accelerator.unwrap_model(trainer.model)
            publish_weights(model.named_parameters(), self._partition, version, group_size=1)
        accelerator.wait_for_everyone()
        self._published = version

    def _await(self, call: str, version: int, count: int) -> None:
        """Wait until all samples of a call are generated."""
        client = current_client()
        done: set[str | None] = set()
        since: int | None = None
        missing_since = time.monotonic()
        while len(done) < count:
            where = {CALL: call, VERSION: version}
            change = client.wait_for_change(self._partition, since, where, timeout=WAIT)
            since = change.version
            done.update(change.keys)
            if change or is_worked_on(self._partition, GENERATE):
                missing_since = time.monotonic()
            elif time.monotonic() - missing_since >= self._timeout:
                raise WaitTimeoutError(
                    f"no generator has worked for partition {self._partition!r} for {self._timeout:g} s, and "
                    f"{count - len(done)} of {count} prompts have no completion: start a process that calls "
                    f"generate_rollouts(engine, {self._partition!r})"
                )


def _columns(
    input_ids: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], logprobs: Sequence[torch.Tensor]
) -> dict[str, list[Any]]:
    """Return what the trainer expects, from the fields of samples."""
    chosen = [mask.bool() for mask in masks]
    return {
        "prompt_ids": [ids[~mask].tolist() for ids, mask in zip(input_ids, chosen)],
        "completion_ids": [ids[mask].tolist() for ids, mask in zip(input_ids, chosen)],
        "logprobs": [values[mask].tolist() for values, mask in zip(logprobs, chosen)],
    }
