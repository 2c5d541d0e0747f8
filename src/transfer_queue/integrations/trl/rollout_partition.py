"""The partition that prompts pass through on their way to the trainer: its fields, tasks and claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict

from transfer_queue.attachment import current_client
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.reports.progress import PartitionProgress
from transfer_queue.metadata import BatchMeta

ROLLOUTS = "rollouts"
"""The default name of the partition."""
PROMPT = "prompt"
"""The field with the prompt: a row of the dataset."""
GENERATED = ("input_ids", "completion_mask", "old_log_probs", "completion")
"""The fields that a generator adds: token ids of prompt and completion, 1 for each token of the completion, the
log-probabilities of these tokens (0 for the prompt), and the completion as text or messages."""
SCORED = ("advantage", "metrics")
"""The fields that the reward stage adds."""
GROUP, VERSION = "group", "policy_version"
"""Tag entries: the number of the prompt, and the version of the policy that generated the sample."""
GENERATE, SCORE, TRAIN = "generate", "score", "train"
"""The tasks of generators, of the reward stage and of the trainer."""
WAIT = 1.0
"""Seconds after which a producer that waits for samples checks whether the training has stopped."""
LEASE = 30.0
"""Default seconds of a lease: samples of a process that was killed are delivered again after this time."""


def claim_group(
    partition_id: str, fields: Sequence[str], task: str, group_size: int, groups: int, lease: float, timeout: float
) -> tuple[BatchMeta, bool]:
    """Claim whole groups. Return their metadata, empty if there were none in time, and whether the task has ended."""
    config = {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": group_size}
    return current_client().await_batch(
        fields, group_size * groups, partition_id, task, config, lease=lease, timeout=timeout
    )


def claim_groups(
    partition_id: str, fields: Sequence[str], task: str, group_size: int, most: int, lease: float
) -> tuple[list[BatchMeta], bool]:
    """Wait for one group, and claim up to `most` groups if more are ready.

    Returns:
        The metadata of each group, and whether the task has ended: the partition is sealed, and everything is dealt.
    """
    first, ended = claim_group(partition_id, fields, task, group_size, 1, lease, WAIT)
    claimed = [first] if len(first) else []
    ask = most - 1 if claimed else 0
    while ask > 0:
        more, _ = claim_group(partition_id, fields, task, group_size, ask, lease, 0)
        claimed += [more] if len(more) else []
        ask = min(most - sum(map(len, claimed)) // group_size, ask if len(more) else ask // 2)
    return [group for meta in claimed for group in meta.chunk(len(meta) // group_size)], ended and not claimed


def progress_of(partition_id: str) -> PartitionProgress | None:
    """Return the progress of a partition; None if it does not exist."""
    return next((p for p in current_client().status().partitions if p.name == partition_id), None)


def is_worked_on(partition_id: str, task: str) -> bool:
    """Return whether a process works for a task now: it has claimed samples, or waits for some."""
    progress = progress_of(partition_id)
    entries = [] if progress is None else [entry for entry in progress.tasks if entry.name == task]
    return any(entry.claimed or entry.waiting for entry in entries)


def table(columns: Mapping[str, Sequence[Any]]) -> TensorDict:
    """Return a TensorDict of columns: lists of tensors become nested tensors, numbers stacked, others objects."""
    made: dict[str, Any] = {}
    rows = 0
    for name, values in columns.items():
        rows = len(values)
        if isinstance(values[0], torch.Tensor):
            made[name] = torch.nested.as_nested_tensor(list(values), layout=torch.jagged)
        elif isinstance(values[0], float):
            made[name] = torch.tensor(values, dtype=torch.float64)
        else:
            made[name] = NonTensorStack(*values)
    return TensorDict(made, batch_size=[rows])


def check_positive(name: str, value: object) -> None:
    """Raise InvalidArgumentError unless a value is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise InvalidArgumentError(f"{name} must be a positive number, got {value!r}")
