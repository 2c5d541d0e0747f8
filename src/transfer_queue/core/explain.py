"""Answers "why is this sample not handed out?" in words."""

from __future__ import annotations

import numpy as np

from transfer_queue.core.partition import Partition
from transfer_queue.core.rows import CHUNK_BITS, MASK
from transfer_queue.core.state import State
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages import Claim, Explain

NEAREST = 3  # rows that a timeout explains


def explain(state: State, request: Explain) -> str:
    """One paragraph on one sample, named by global index or key; or on what claims of the partition wait for."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        there = ", ".join(map(repr, list(state.partitions)[:10])) or "none"
        return f"Partition {request.partition!r} does not exist (never made, or dropped). There are: {there}."
    if request.key is not None:
        position = partition.keys.get(request.key, -1)
        name = f"Sample {request.key!r}"
        if position < 0:
            return f"{name} of partition {partition.name!r} is unknown: it was never put, or it was cleared."
    elif request.row is not None:
        position = int(partition.rows.positions_of(np.array([request.row]))[0])
        name = f"Sample {request.row}"
        if position < 0:
            return f"{name} is not in partition {partition.name!r}: " + _absent(state, partition, request.row)
    else:
        return _partition_words(state, partition, request)
    return f"{name} of partition {partition.name!r} " + "; ".join(_row_words(partition, position, request)) + "."


def _absent(state: State, partition: Partition, row: int) -> str:
    if row >= state.next_index or row < 0:
        return "no sample has this index yet."
    for other in state.partitions.values():
        if int(other.rows.positions_of(np.array([row]))[0]) >= 0:
            return f"it is in partition {other.name!r}."
    return "it was cleared, or its partition was dropped. An index is never used again."


def _row_words(partition: Partition, position: int, request: Explain) -> list[str]:
    where = np.array([position])
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    if chunk.waiting[at]:
        return ["is pre-allocated, and no put has taken it yet"]
    words = []
    fields = request.fields if request.fields is not None else sorted(partition.fields)
    have = [name for name in fields if partition.blocks_of(name, where)[0][0]]
    lack = [name for name in fields if name not in have]
    if lack:
        words.append(f"misses the fields {lack}" + (f" (it has {have})" if have else " (it has none of them)"))
    elif fields:
        words.append(f"has all the fields {have}")
    else:
        words.append("is reserved; nothing was written yet")
    words += _group_words(partition, position, fields)
    for task in [request.task] if request.task is not None else sorted(partition.tasks):
        words.append(_task_words(partition, position, task))
    if request.task is not None and not lack and not chunk.consumed.get(request.task, np.zeros(at + 1))[at]:
        words.append(f"is ready for task {request.task!r} and waits for a claim that takes it")
    return words


def _task_words(partition: Partition, position: int, task: str) -> str:
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    column = chunk.consumed.get(task)
    if column is None or not column[at]:
        return f"is not consumed by task {task!r}"
    dealt = chunk.dealt.get(task)
    if dealt is not None and dealt[at]:
        batch = partition.dealt[task].batches[int(dealt[at])]
        return f"was dealt to task {task!r} in batch {batch.batch_index} of dp_rank {batch.dp_rank}"
    return f"was consumed by task {task!r}"


def _group_words(partition: Partition, position: int, fields: list[str]) -> list[str]:
    groups = partition.groups
    if not groups.explicit:
        return []
    number = int(groups.of(np.array([position]), 1)[0])
    if number < 0:
        return ["belongs to no group, while others here have a group_id: group samplers never deal it"]
    group = groups.declared[number]
    words = f"is one of {len(group.members)} samples of group {group.name!r}"
    if groups.size is not None:
        words += f" (group_size {groups.size})"
    if group.cleared:
        return [words + f", which is orphaned: {group.cleared} of its members were cleared, it can never be whole"]
    missing = []
    for member in group.members:
        lack = [name for name in fields if not partition.blocks_of(name, np.array([member]))[0][0]]
        if lack:
            index = int(partition.rows.indexes_of(np.array([member]))[0])
            missing.append(f"sample {index} (misses {lack})")
    if groups.size is not None and len(group.members) < groups.size:
        missing.append(f"{groups.size - len(group.members)} samples that were not put yet")
    if missing:
        words += ", which waits for " + ", ".join(missing[:4])
        if len(missing) > 4:
            words += f" and {len(missing) - 4} more"
    return [words]


def _partition_words(state: State, partition: Partition, request: Explain) -> str:
    if request.task is None or request.fields is None:
        raise InvalidArgumentError("explain needs a global_index or a key, or task and fields of a claim")
    return nearest(partition, request.task, request.fields)


def nearest(partition: Partition, task: str, fields: list[str]) -> str:
    """The rows nearest to ready for (task, fields), and what each of them waits for."""
    positions = partition.rows.live_positions(waiting=False)
    open_rows = positions[partition.consumed(task, positions) == 0]
    if not len(open_rows):
        return f"Task {task!r} has consumed every sample of partition {partition.name!r}; new ones are needed."
    have = partition.produced(fields, open_rows).sum(axis=1)
    unready = open_rows[have < len(fields)]
    if not len(unready):
        return f"All {len(open_rows)} samples that task {task!r} has not consumed are ready."
    order = np.argsort(-have[have < len(fields)], kind="stable")[:NEAREST]
    told = []
    for position in unready[order].tolist():
        index = int(partition.rows.indexes_of(np.array([position]))[0])
        (key,) = partition.keys_of(np.array([position]))
        request = Explain(partition.name, row=index, task=task, fields=fields)
        name = f"sample {index}" + (f" (key {key!r})" if key is not None else "")
        told.append(f"{name} " + "; ".join(_row_words(partition, position, request)[:2]))
    return "Nearest to ready: " + ". ".join(told) + "."


def timeout_words(state: State, claim: Claim, waited: float) -> str:
    """The text of a claim's WaitTimeoutError."""
    partition = state.partitions.get(claim.partition)
    begin = (
        f"Timeout: task {claim.task!r} waited {waited:.3g} s for {claim.count} samples with fields {claim.fields} in "
        f"partition {claim.partition!r}"
    )
    if partition is None:
        there = ", ".join(map(repr, list(state.partitions)[:10])) or "none"
        return f"{begin}; 0 available: the partition does not exist yet (there are: {there})."
    ready = partition.ready_set(claim.task, tuple(claim.fields)).total
    words = f"{begin}; {ready} available."
    if ready >= claim.count:
        words += " Enough are ready, but the sampler made no batch of them (whole groups, or all ranks' shares)."
    sealed = " The partition is sealed: no new rows will come." if partition.sealed else ""
    return f"{words} {nearest(partition, claim.task, claim.fields)}{sealed}"
