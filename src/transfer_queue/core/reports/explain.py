"""Explains in sentences why a sample is not delivered, and what a claim waits for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np

from transfer_queue.core.claims.final_rounds import REMAINDER
from transfer_queue.core.claims.plan import Plans
from transfer_queue.core.claims.row_leases import POISON
from transfer_queue.core.context import Context
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.locks import describe_lock
from transfer_queue.core.puts import limits
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, suggestion
from transfer_queue.core.tables.groups import Group
from transfer_queue.core.tables.rows import CHUNK_BITS, CLAIMED, MASK
from transfer_queue.core.timeline.abandoned_samples import Abandoned, AbandonedSamples
from transfer_queue.display import count_text, list_workers
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.queries import Explain
from transfer_queue.names import MAX_COMPARED, did_you_mean

NEAREST = 3  # rows that a timeout describes
WAITS_FOR = ", which waits for "  # what follows the description of a group


@handles(Explain, reads=True)
def handle_explain(context: Context, caller: Caller, request: Explain) -> Done:
    """Reply why a sample is not dealt, or what a claim with these arguments would wait for."""
    abandoned = context.services[AbandonedSamples].find(request.partition)
    if request.count is None or request.task is None or not request.fields:
        text = explain(context.state, request, context.group_size_of(request.partition, request.task), abandoned)
        return Done(text + _describe_locks(context.state, request, context.now))
    claim = Claim(request.partition, request.task, request.fields, request.count, request.sampling)
    plan = context.services[Plans].of(context.state.partitions.get(request.partition), claim)
    return Done(describe_waiting(context.state, claim, plan.group_size, abandoned))


def explain(state: State, request: Explain, dealt: int | None = None, abandoned: Sequence[Abandoned] = ()) -> str:
    """Describe one sample, named by global index or key, or what claims of the partition wait for.

    Args:
        state: The state.
        request: What to describe.
        dealt: The number of samples in the groups that the system's sampler deals; None if it deals single samples.
        abandoned: The abandoned samples of the partition. Default: none.
    """
    partition = state.partitions.get(request.partition)
    if partition is None:
        similar = suggestion(request.partition, state.partitions)
        end = "" if similar.endswith("?") else "."
        return (
            f"Partition {request.partition!r} does not exist (never created, or dropped). "
            f"{similar[0].upper()}{similar[1:]}{end}"
        )
    if request.key is not None:
        position = partition.keys.get(request.key, -1)
        name = f"Sample {request.key!r}"
        if position < 0:
            hint = did_you_mean(request.key, islice(reversed(partition.keys), MAX_COMPARED)).replace("; d", " D", 1)
            return f"{name} of partition {partition.name!r} does not exist: it was never put, or it was cleared.{hint}"
    elif request.row is not None:
        position = int(partition.rows.positions_of(np.array([request.row]))[0])
        name = f"Sample {request.row}"
        if position < 0:
            return f"{name} is not in partition {partition.name!r}: " + _describe_absent(state, partition, request.row)
    else:
        return _describe_partition(state, partition, request, dealt, abandoned)
    clauses = _row_clauses(state, partition, position, request, dealt)
    clauses += filter(None, (each.describe_sample(position) for each in abandoned))
    return f"{name} of partition {partition.name!r} " + "; it ".join(clauses) + "."


def _describe_locks(state: State, request: Explain, now: float) -> str:
    """Return a sentence if the key of the sample is locked, also if the sample does not exist."""
    key, partition = request.key, state.partitions.get(request.partition)
    if key is None and request.row is not None and partition is not None:
        (key,) = partition.keys_of(partition.rows.positions_of(np.array([request.row])))
    token = None if key is None else state.locks.of_key.get((request.partition, key))
    if key is None or token is None:
        return ""
    queue = state.waiting.locks.get(request.partition, {})
    waiting = sum(key in parked.lock.keys for parked in queue.values())
    behind = f"; requests that wait for it: {waiting}" if waiting else ""
    return f" Key {describe_lock(state, state.locks.by_token[token], now, {key})}{behind}."


def _describe_absent(state: State, partition: Partition, row: int) -> str:
    if row >= state.next_index or row < 0:
        return "no sample has this index yet."
    reason = partition.drops.reason(row)
    if reason is not None:
        return f"it was dropped: {reason}."
    for other in state.partitions.values():
        if int(other.rows.positions_of(np.array([row]))[0]) >= 0:
            return f"it is in partition {other.name!r}."
    return "it was cleared, or its partition was dropped. An index is never used again."


def _row_clauses(
    state: State, partition: Partition, position: int, request: Explain, dealt: int | None,
    mentioned: set[str] | None = None,
) -> list[str]:  # fmt: skip
    """Return the state of one sample in clauses that begin with a verb.

    mentioned: what the text has already said that groups wait for. It is not repeated for another sample of the group.
    """
    where = np.array([position])
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    if chunk.waiting[at]:
        return ["is pre-allocated, and no put has taken it yet"]
    clauses = []
    fields = request.fields if request.fields is not None else sorted(partition.fields)
    lack = partition.missing_fields(fields, position)
    have = [name for name in fields if name not in lack]
    if lack:
        lost = partition.losses.describe(lack, where)
        present = have or partition.common_fields(where)
        clauses.append(
            f"is missing the field{'' if len(lack) == 1 else 's'} {_names(lack)}"
            + (f" (it has {_names(present)})" if present else " (it has no field)")
            + (f": {lost}" if lost else "")
        )
        if not present:
            clauses.append("is reserved" + _by_whom(state, partition, where))
    elif fields:
        clauses.append(f"has {'the field' if len(have) == 1 else 'all the fields'} {_names(have)}")
    else:
        clauses.append("is reserved" + _by_whom(state, partition, where) + "; nothing was written yet")
    group, hindrance = _describe_group(partition, position, fields, dealt, request.task)
    # The words about what a group waits for name one of its samples, so equal words are about the same group.
    repeated = mentioned is not None and hindrance in mentioned and hindrance.startswith(f"{WAITS_FOR}sample ")
    clause = group if repeated else group + hindrance
    if mentioned is not None:
        mentioned.add(hindrance)
    clauses += [clause] if clause else []
    for task in [request.task] if request.task is not None else sorted(partition.tasks):
        clauses.append(_describe_task(state, partition, position, task))
    held = bool(hindrance) and dealt is not None  # the system's sampler deals groups, but it cannot deal this one
    open_ = request.task is not None and not chunk.consumed.get(request.task, np.zeros(at + 1))[at]
    if open_ and fields and not lack and not held:
        clauses.append(f"is ready for task {request.task!r} and waits for a claim that takes it")
    return clauses


def _names(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _by_whom(state: State, partition: Partition, where: np.ndarray) -> str:
    """Name the client that reserved a row and is expected to write it."""
    number = int(partition.rows.owners_of(where)[0])
    owner = next((name for name, given in partition.owners.items() if given == number), None)
    return "" if owner is None else f" by {state.describe_client(owner)}"


def _describe_task(state: State, partition: Partition, position: int, task: str) -> str:
    chunk, at = partition.rows.chunks[position >> CHUNK_BITS], position & MASK
    column = chunk.consumed.get(task)
    if column is None or not column[at]:
        return f"is not consumed by task {task!r}"
    if column[at] == CLAIMED:
        return _describe_claimed_row(state, partition, position, task)
    reason = partition.passed.reason(task, position)
    if reason is not None:
        more = " after the seal, too small for a batch of every dp_rank" if reason == REMAINDER else ""
        if reason == POISON:
            times = int(partition.leases.delivered.numbers_of(task, np.array([position]))[0])
            more = f" (delivered {'once' if times == 1 else f'{times} times'}, never acknowledged)"
        return f"is skipped by task {task!r}: {reason}{more}"
    dealt = chunk.dealt.get(task)
    if dealt is not None and dealt[at]:
        batch = partition.dealt[task].batches[int(dealt[at])]
        never = ", which has never asked" if batch.dp_rank in partition.dealt[task].unasked else ""
        return f"was dealt to task {task!r} in batch {batch.batch_index} of dp_rank {batch.dp_rank}{never}"
    return f"was consumed by task {task!r}"


def _describe_claimed_row(state: State, partition: Partition, position: int, task: str) -> str:
    """Describe a row that was delivered under a lease, or dealt to a rank, and is not acknowledged yet."""
    index = int(partition.rows.indexes_of(np.array([position]))[0])
    batch = partition.batch_of(task, position)
    text = f"was delivered to task {task!r}" if batch is None else f"was dealt to task {task!r}"
    text += "" if batch is None else f" in batch {batch[2]} of dp_rank {batch[1]}"
    held = [lease for lease in partition.leases.by_token.values() if lease.task == task and index in lease.rows]
    clients = list(dict.fromkeys(lease.client for lease in held))
    holders = list_workers(map(state.describe_client, clients))
    text += f" under a lease of {holders}, and is" if held else ", is not under a lease now, and is"
    text += " not acknowledged yet"
    times = int(partition.leases.delivered.numbers_of(task, np.array([position]))[0])
    earlier = f"{times} earlier {'delivery was' if times == 1 else 'deliveries were'}"
    return text + (f" ({earlier} not acknowledged either)" if times else "")


def _describe_group(
    partition: Partition, position: int, fields: list[str], dealt: int | None, task: str | None
) -> tuple[str, str]:
    """Return the group of a row in words, and why it is not dealt; "" for what does not apply."""
    groups = partition.groups
    size = groups.size or dealt
    if not groups.explicit:
        return _describe_by_order(partition, position, fields, dealt) if dealt is not None and dealt > 1 else ("", "")
    number = int(groups.groups_of(np.array([position]), 1)[0])
    if number < 0:
        return "", "has no group_id, but other samples of the partition have one, so group samplers never deal it"
    group = groups.declared[number]
    count = len(group.members)
    text = f"is one of {count} samples" if count > 1 else "is the only sample"
    text += f" of group {group.name!r}"
    if groups.size is not None:
        text += f" (group_size {groups.size})"
    if group.cleared:
        return text, f", which is orphaned: {_count_members(group.cleared)} cleared, so it can never be complete"
    if size is not None and len(group.members) > size:
        return text, f", which is too large: {_describe_size(group, size)}, so it can never be dealt"
    if task is not None and dealt is not None and not partition.consumption_states(task, np.array([position]))[0]:
        given = int(np.count_nonzero(partition.consumption_states(task, np.array(group.members, "i8"))))
        if given:
            dealt_text = f"{given} of which {'was' if given == 1 else 'were'} already dealt"
            return text, f", {dealt_text} to task {task!r}; the rest of a group is never dealt"
    absent = 0 if size is None else size - len(group.members)
    if absent and partition.sealed:
        return text, f", which is orphaned: {_count_members(absent)} never put, and the partition is sealed"
    return text, _waits_for(partition, group.members, fields, absent)


def _count_members(count: int) -> str:
    return f"{count} of its members {'was' if count == 1 else 'were'}"


def _describe_size(group: Group, size: int) -> str:
    members = count_text(len(group.members), "sample")
    return f"group {group.name!r} has {members}, but the sampler deals groups of {size}"


def _of_other_sizes(partition: Partition, ready: np.ndarray, dealt: int | None) -> str:
    """Return a sentence about groups of ready rows whose size is not the sampler's; "" if there are none."""
    groups = partition.groups
    size = groups.size or dealt
    if not groups.explicit or dealt is None or size is None:
        return ""
    ready_groups = (groups.declared[number] for number in np.unique(groups.groups_of(ready, 1)).tolist() if number >= 0)
    wrong = [group for group in ready_groups if len(group.members) != size]
    if not wrong:
        return ""
    text = _describe_size(wrong[0], size)
    others = len(wrong) - 1
    more = f"; {count_text(others, 'more group')} {'does' if others == 1 else 'do'} not have this size either"
    more = more if others else ""
    return f" {text[0].upper()}{text[1:]}{more}."


def _describe_by_order(partition: Partition, position: int, fields: list[str], size: int) -> tuple[str, str]:
    first = position // size * size
    members = range(first, min(first + size, partition.rows.end))
    text = f"is number {position - first + 1} of the {size} samples that form a group by order of reservation"
    if partition.rows.has_cleared(members):
        return text, ", which is orphaned: some of its members were cleared, so it can never be complete"
    clients = len(np.unique(partition.rows.owners_of(np.array(members))))
    if clients > 1:
        text += f" (reserved by {clients} clients: put samples with group_ids= so that groups do not mix prompts)"
    absent = size - len(members)
    if absent and partition.sealed:
        return text, f", which is orphaned: {_count_members(absent)} never put, and the partition is sealed"
    return text, _waits_for(partition, list(members), fields, absent)


def _waits_for(partition: Partition, members: list[int], fields: list[str], absent: int) -> str:
    """Return what a group still lacks. absent: the number of members that do not exist yet."""
    missing = []
    for member in members:
        lack = partition.missing_fields(fields, member)
        if lack:
            index = int(partition.rows.indexes_of(np.array([member]))[0])
            missing.append(f"sample {index} (missing {_names(lack)})")
    if absent:
        missing.append(f"{absent} {'sample that was' if absent == 1 else 'samples that were'} not put yet")
    if not missing:
        return ""
    more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
    return WAITS_FOR + ", ".join(missing[:4]) + more


def _describe_partition(
    state: State, partition: Partition, request: Explain, dealt: int | None, abandoned: Sequence[Abandoned]
) -> str:
    if request.task is None:
        raise InvalidArgumentError("explain needs a global_index or a key, or the task of a claim")
    awaited = {task: list(wanted) for task, wanted in state.waiting.awaited(partition.name)}
    fields = request.fields if request.fields is not None else awaited.get(request.task)
    if fields is None:
        hint = did_you_mean(request.task, awaited)
        raise InvalidArgumentError(
            f"no claim of task {request.task!r} waits in partition {partition.name!r}{hint}; to explain a claim that "
            f"does not wait, give its fields"
        )
    nearest = nearest_rows(state, partition, request.task, fields, dealt, abandoned)
    uneven = _describe_uneven_ranks(state, partition, request.task)
    return nearest + uneven + _describe_held(partition, request.task) + _describe_flow(partition)


def _describe_held(partition: Partition, task: str) -> str:
    """Return sentences about rows that are held for ranks that have never asked, of other tasks than this one.

    What this task waits for may be what another one puts after it was dealt such rows.
    """
    others = (partition.dealt[other].describe_held(other) for other in sorted(partition.dealt) if other != task)
    return "".join(f" {text[0].upper()}{text[1:]}." for text in others if text)


def _describe_flow(partition: Partition) -> str:
    """Return sentences about the limits on producers, and about dropped samples."""
    text = ""
    most = limits.row_limit(partition)
    if most is not None and partition.admitted >= most:
        text += (
            f" New samples wait for the policy: {count_text(partition.admitted, 'sample')} "
            f"{'was' if partition.admitted == 1 else 'were'} admitted, and the limit at policy "
            f"version {partition.policy_version} is {most}: {limits.describe_counted(partition)}. "
            f"set_policy_version raises it."
        )
    if partition.options.max_rows is not None and not limits.admits_rows(partition):
        text += (
            f" New samples wait for consumers: {count_text(partition.open_rows, 'sample')} "
            f"{'waits' if partition.open_rows == 1 else 'wait'} for the tasks, and max_rows is "
            f"{partition.options.max_rows}."
        )
    if partition.options.producers > 1 and not partition.sealed and partition.seals:
        have = "has" if partition.seals == 1 else "have"
        text += f" {partition.seals} of {partition.options.producers} producers {have} sealed."
    drops = ", ".join(f"{rows} ({reason})" for reason, rows in partition.drops.rows.items())
    return text + (f" Dropped so far: {drops}." if drops else "")


def _describe_uneven_ranks(state: State, partition: Partition, task: str) -> str:
    """Return a sentence if the dp_ranks that were dealt batches, or wait for some, have different numbers of them."""
    dealt = partition.dealt.get(task)
    if dealt is None:
        return ""
    queue = state.waiting.claim_queues(partition.name).get(task)
    waiting = {} if queue is None or partition.sealed else {rank: 0 for rank, _ in queue.shares}
    counts = {**waiting, **dealt.counts}
    if len(set(counts.values())) < 2:
        return ""
    counts_text = ", ".join(f"{rank}: {count}" for rank, count in sorted(counts.items())[:10])
    text = f" The dp_ranks of task {task!r} were dealt different numbers of batches ({counts_text})"
    if partition.sealed:
        return text + (
            ": too few samples were left after the seal to make them equal, so the ranks that were behind got them."
        )
    return f"{text}: dp_rank {max(counts, key=lambda rank: counts[rank])} is ahead."


def nearest_rows(
    state: State, partition: Partition, task: str, fields: list[str], dealt: int | None = None,
    abandoned: Sequence[Abandoned] = (),
) -> str:  # fmt: skip
    """Describe the rows that are nearest to ready for a task and its fields, and what each of them waits for.

    The arguments are those of `explain`.
    """
    abandoned = [
        each for each in abandoned
        if each.task == task or not partition.produced_flags(fields, each.positions).all()
    ]  # fmt: skip
    nearest = _nearest_rows(state, partition, task, fields, dealt, abandoned)
    return nearest + "".join(f" {text[0].upper()}{text[1:]}." for text in (each.describe() for each in abandoned))


def _nearest_rows(
    state: State, partition: Partition, task: str, fields: list[str], dealt: int | None, abandoned: Sequence[Abandoned]
) -> str:
    positions = partition.rows.first_positions()
    open_rows = positions[partition.consumption_states(task, positions) == 0]
    claimed = partition.claimed.get(task, 0)
    dealt_batches = partition.dealt.get(task)
    held = "" if dealt_batches is None else dealt_batches.describe_held(task)
    if held and not len(open_rows):
        return f"Every sample of partition {partition.name!r} was dealt to task {task!r}, but {held}."
    more = f" {held[0].upper()}{held[1:]}." if held else ""
    if claimed and not len(open_rows):
        return (
            f"Every sample of partition {partition.name!r} was delivered to task {task!r}, and {claimed} of them "
            f"{_be(claimed)} not acknowledged yet{_unacknowledged(state, partition, task)}; new ones are needed, or "
            f"some must be returned."
        )
    if not len(positions) and not partition.consumed_ever.get(task, 0):
        return f"Partition {partition.name!r} has no samples; new ones are needed."
    if not len(open_rows):
        reasons = ", ".join(f"{rows} ({reason})" for reason, rows in partition.passed.counts_of(task).items())
        over = f" Skipped so far: {reasons}." if reasons else ""
        return f"Task {task!r} has consumed every sample of partition {partition.name!r}; new ones are needed.{over}"
    have = partition.produced_flags(fields, open_rows).sum(axis=1)
    unready = open_rows[have < len(fields)]
    sizes = _of_other_sizes(partition, open_rows[have == len(fields)], dealt)
    if not len(unready):
        if claimed:
            return (
                f"{_all_samples(len(open_rows))} that task {task!r} has not received {_be(len(open_rows))} ready; "
                f"received and not acknowledged yet: {claimed}{_unacknowledged(state, partition, task)}.{sizes}{more}"
            )
        rows = len(open_rows)
        return f"{_all_samples(rows)} that task {task!r} has not consumed {_be(rows)} ready.{sizes}{more}"
    come = ~np.isin(unready, np.concatenate([unready[:0], *(each.positions for each in abandoned)]))
    if not come.any():
        rows = len(unready)
        lack = "lacks" if rows == 1 else "lack"
        return f"{_all_samples(rows)} that {lack} a field of {fields} may be lost to another task.{sizes}{more}"
    unready, have = unready[come], have[have < len(fields)][come]
    order = np.argsort(-have, kind="stable")[:NEAREST]
    samples: list[str] = []
    waits: set[str] = set()
    for position in unready[order].tolist():
        index = int(partition.rows.indexes_of(np.array([position]))[0])
        (key,) = partition.keys_of(np.array([position]))
        request = Explain(partition.name, row=index, task=task, fields=fields)
        name = f"{'Sample' if samples else 'sample'} {index}" + (f" (key {key!r})" if key is not None else "")
        samples.append(f"{name} " + "; it ".join(_row_clauses(state, partition, position, request, dealt, waits)[:2]))
    return "Nearest to ready: " + ". ".join(samples) + "." + sizes + more


def _all_samples(count: int) -> str:
    return "The only sample" if count == 1 else f"All {count:,} samples"


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _unacknowledged(state: State, partition: Partition, task: str) -> str:
    """Name some dealt batches, or else some clients, whose ack is awaited."""
    dealt = partition.dealt.get(task)
    batches: list[str] = []
    for batch in [] if dealt is None else dealt.batches.values():
        positions = partition.rows.positions_of(batch.rows)
        if len(batches) < NEAREST and (partition.consumption_states(task, positions[positions >= 0]) == CLAIMED).any():
            batches.append(f"batch {batch.batch_index} of dp_rank {batch.dp_rank}")
    if batches:
        return f" (among them {', '.join(batches)})"
    clients = list(dict.fromkeys(lease.client for lease in partition.leases.by_token.values() if lease.task == task))
    leases = "a lease" if len(clients) == 1 else "leases"
    return f" (under {leases} of {list_workers(map(state.describe_client, clients))})" if clients else ""


def describe_timeout(
    state: State, claim: Claim, waited: float, dealt: int | None = None, abandoned: Sequence[Abandoned] = ()
) -> str:
    """Return the message of a claim's WaitTimeoutError. dealt, abandoned: as in `explain`."""
    reasons = _hindrances(state, claim, dealt, abandoned)
    return f"Timeout: task {claim.task!r} waited {waited:.3g} s for {_describe_request(claim)}; {reasons}"


def describe_waiting(state: State, claim: Claim, dealt: int | None = None, abandoned: Sequence[Abandoned] = ()) -> str:
    """Return why a claim that is not met yet waits. dealt, abandoned: as in `explain`."""
    return f"Task {claim.task!r} waits for {_describe_request(claim)}; {_hindrances(state, claim, dealt, abandoned)}"


def _describe_request(claim: Claim) -> str:
    rank, batch = claim.sampling.get("dp_rank"), claim.sampling.get("batch_index")
    share = "" if rank is None or batch is None else f" (batch {batch} of dp_rank {rank})"
    count = count_text(claim.count, "sample")
    count = count if claim.least in (None, claim.count) else f"{claim.least} to {count}"
    return f"{count} with fields {claim.fields} in partition {claim.partition!r}{share}"


def _hindrances(state: State, claim: Claim, dealt: int | None, abandoned: Sequence[Abandoned]) -> str:
    """Return why a claim is not met."""
    partition = state.partitions.get(claim.partition)
    if partition is None:
        hint = suggestion(claim.partition, state.partitions)
        return f"0 available: the partition does not exist yet ({hint})."
    ready = partition.ready_set(claim.task, tuple(claim.fields)).total
    text = f"{ready} available."
    if ready >= claim.count:
        text += " Enough are ready, but the sampler cannot make a batch of them"
        text += " (it may need complete groups, batches for all ranks, or full micro-batches)."
    sealed = " The partition is sealed: no new samples can be put." if partition.sealed else ""
    near = nearest_rows(state, partition, claim.task, claim.fields, dealt, abandoned)
    near += _similar_fields(partition, claim.fields)
    if near.endswith(" ready.") and ready < claim.count and not partition.sealed:
        near += f" {claim.count - ready} more must come; if none will, call seal({partition.name!r})."
    held = _describe_held(partition, claim.task)
    return f"{text} {near}{_ranks_ahead(partition, claim)}{held}{sealed}{_describe_flow(partition)}"


def _similar_fields(partition: Partition, fields: Sequence[str]) -> str:
    """Return a sentence for each field that no sample has and whose name resembles that of another one."""
    others = [name for name in partition.fields if name not in fields]
    hints = {name: did_you_mean(name, others) for name in fields if name not in partition.fields}
    return "".join(f" No sample has the field {name!r}{hint}" for name, hint in hints.items() if hint)


def _batches(count: int) -> str:
    return f"{count:,} batch{'' if count == 1 else 'es'}"


def _ranks_ahead(partition: Partition, claim: Claim) -> str:
    """Return a sentence that names the dp_ranks that were dealt more batches than the one that waits."""
    dealt, rank = partition.dealt.get(claim.task), claim.sampling.get("dp_rank")
    if dealt is None or not isinstance(rank, int):
        return ""
    own_count = dealt.counts.get(rank, 0)
    ahead = sorted((-count, other) for other, count in dealt.counts.items() if count > own_count)
    if not ahead:
        return ""
    listed = ", ".join(f"dp_rank {other} ({_batches(-count)})" for count, other in ahead[:NEAREST])
    more = f" and {len(ahead) - NEAREST} more" if len(ahead) > NEAREST else ""
    text = f" Ahead of dp_rank {rank}, which was dealt {_batches(own_count)}: {listed}{more}."
    if claim.sampling.get("dp_size") is None and not partition.sealed:
        text += " Pass dp_size= to the datasets, so that no rank takes samples that another one needs."
    return text
