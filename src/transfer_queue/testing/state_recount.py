"""Checks the whole state against a full recount, what is derived included. Every test of the core ends with it.

`transfer_queue.core.state.check` checks what is saved, for files, too; this module calls it first. The numbers at the
beginning of messages are those of the invariants on the architecture page.
"""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np

from transfer_queue.core.columns.schema import require
from transfer_queue.core.state.check import check_ranks, check_state
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ClaimQueue, RequestKey, ShareKey, WatchQueue, share_key, size_of
from transfer_queue.core.tables.blocks import LiveBlock
from transfer_queue.core.tables.complete_groups import Bits, Ranking
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.sampler.numeric_tags import number as number_of
from transfer_queue.sampler.ready_views import RankKey


def check_invariants(state: State) -> None:
    """Raise BrokenInvariant if the state contradicts itself."""
    check_state(state)
    for partition in state.partitions.values():
        _check_derived(partition)
        _check_fields(partition)
        for ready in partition.ready.values():
            _check_ready(partition, ready)
    rows = sum(partition.row_count for partition in state.partitions.values())
    require(state.row_count == rows, "7: the number of rows of all partitions differs from a recount")
    blocks = list(state.blocks.live_blocks())
    _check_stored(state, blocks)
    _check_spans(state, blocks)
    _check_locks(state)
    _check_waiting(state)


def _check_derived(partition: Partition) -> None:
    name, rows = partition.name, partition.rows
    positions = rows.live_positions()
    same = np.array_equal(rows.positions_of(rows.indexes_of(positions)), positions)
    require(same, f"2: an index of {name} is not found at its position")
    window = partition.window
    fine = window.limit is None or window.unfinished == window.count_unfinished()
    require(fine, f"7: {name} miscounts the rows that are not finished")
    cleared = sum(len(indexes) // 8 for _, indexes, _ in partition.changes.cleared)
    require(partition.changes.count == cleared, f"7: {name} miscounts its clears")
    broken = sum(1 for group in partition.groups.declared.values() if group.cleared)
    counted = partition.groups.broken
    require(broken == counted, f"7: {name} counts {counted} broken groups, not {broken}")
    for task, dealt in partition.dealt.items():
        keys = {(batch.dp_rank, batch.batch_index): number for number, batch in dealt.batches.items()}
        require(dealt.by_key == keys, f"4: a dealt batch of {task} has another key")
    for token, lease in partition.leases.by_token.items():
        listed = lease.batch is None or lease in partition.leases.leases_of_batch(lease.batch)
        require(listed, f"lease {token} of {name} is not listed with its batch")


def _check_fields(partition: Partition) -> None:
    positions = partition.rows.live_positions()
    for field_name, field in partition.fields.items():
        several = field_name in partition.field_ranks.names
        require(several == bool(field.further), f"field {field_name} of {partition.name} has several ranks, or not")
        if field.kind == "tensor":
            numbers, slots = partition.blocks_of(field_name, positions)
            has_value = numbers > 0
            check_ranks(
                partition.blocks, field, numbers[has_value], slots[has_value], f"field {field_name} of {partition.name}"
            )


def _check_ready(partition: Partition, ready: ReadySet) -> None:
    begun = ready.unbuilt or any(whole.uncounted or whole.unmarked for whole in ready.whole.values())
    if begun or ready.seen < partition.unseen.newest:
        ready = copy.deepcopy(ready)  # a copy processes the publications, so that the check changes nothing
        ready.build(partition.rows)
        copy.copy(partition.unseen).apply_to(ready)
        for whole in list(ready.whole.values()):
            ready.whole_groups(whole.size, partition.groups)
            whole.mark(partition.groups, len(whole.unmarked))
    fresh = ReadySet(ready.task, ready.fields)
    fresh.unbuilt = list(partition.rows.chunks)[::-1]
    fresh.build(partition.rows)
    require(fresh.total == ready.total and fresh.counts == ready.counts, f"3: ready set {ready.fields} miscounts")
    require(sorted(ready.counts) == ready.keys, f"3: ready set {ready.fields} lists other chunks than it counts")
    same = np.array_equal(fresh.page(0, ready.total)[0], ready.page(0, ready.total)[0])
    require(same, f"3: ready set {ready.fields} contains other rows")
    for size, whole in ready.whole.items():
        again = fresh.whole_groups(size, partition.groups)
        numbers, of_size = again.first_groups(len(again)), f"groups of {size} in {ready.fields}"
        require(
            whole.first_groups(len(whole)) == numbers and len(whole) == len(numbers), f"4: wrong complete {of_size}"
        )
        require(whole.ready_counts() == again.ready_counts(), f"7: {of_size} miscount their ready members")
        if whole.rankings:
            members = partition.groups.members_of(numbers, size)
            marked = [np.flatnonzero(bits) + (key << 12) for key, bits in sorted(whole.bits.items())]
            rows = np.concatenate([np.zeros(0, "i8"), *marked])
            require(rows.tolist() == members.tolist(), f"7: the ranked rows are not those of complete groups of {size}")
            _check_rankings(partition, whole.rankings, whole.bits)
    _check_rankings(partition, ready.rankings, ready.bits)


def _check_rankings(partition: Partition, rankings: dict[RankKey, Ranking], bits: Bits) -> None:
    for key, ranking in rankings.items():
        for number, chunk in partition.rows.chunks.items():
            tags = [{}] * chunk.capacity if chunk.tags is None else chunk.tags.rows(slice(0, chunk.capacity))
            values = [number_of(tag.get(key.tag)) for tag in tags]
            wrong = {at for at, value in enumerate(values) if value is None}
            column = np.array([np.nan if value is None else value for value in values])
            same = np.array_equal(chunk.numbers[key.tag], column, equal_nan=True) and chunk.wrong[key.tag] == wrong
            require(same, f"7: the column of tag {key.tag!r} of {partition.name} differs from the tags")
            if number in ranking.dirty:
                continue
            at = np.flatnonzero(bits[number]) if number in bits else np.zeros(0, "i8")
            highest = float(key.keys_of(column[at], chunk.index[at]).max()) if len(at) else None
            require(
                ranking.highest.get(number) == highest, f"7: the highest key of chunk {number} differs from a recount"
            )


def _check_stored(state: State, blocks: list[LiveBlock]) -> None:
    """Check the bytes of partitions in each unit, and those that they save, and the blocks of digests."""
    stored: dict[int, Counter[int]] = {partition.number: Counter() for partition in state.partitions.values()}
    saved: Counter[int] = Counter()
    owners = state.blocks.column("owner", np.array([number for number, _, _, _ in blocks], "i8")).tolist()
    for (number, live, places, nbytes), owner in zip(blocks, owners, strict=True):
        for place in places:
            stored[owner][place.unit] += nbytes
        schema, _, rows = state.blocks.shape_source(number)
        saved[owner] += max(0, live - rows * len(schema)) * (nbytes // max(1, rows * len(schema)))
    require(state.blocks.stored.keys() <= stored.keys(), "bytes are counted for a partition that does not exist")
    for number, expected in stored.items():
        same = expected == state.blocks.stored.get(number, Counter())
        require(same, "7: the bytes of a partition in each unit differ from a recount")
    require(+saved == +state.blocks.saved, "7: the bytes that partitions save differ from a recount")
    digests: dict[int, set[object]] = {}
    for key, known in state.blocks.equal.fields.items():
        for digest, (number, _) in known.items():
            digests.setdefault(number, set()).add((key, digest))
    require(digests == state.blocks.equal.of_block, "the digests of a block are wrong")


def _check_spans(state: State, blocks: list[LiveBlock]) -> None:
    """Check that each block is in the used range of its extent and in no gap, and that extents are listed in order."""
    leased: Counter[int] = Counter()
    listed: dict[int, list[tuple[int, int]]] = {}
    for (unit, number), extent in state.blocks.extents.items():
        leased[unit] += extent.length
        if extent.top >= 0:
            listed.setdefault(unit, []).append((extent.low, number))
    require(leased == Counter(state.blocks.leased_in), "7: the bytes of each unit differ from a recount")
    for unit, spans in state.blocks.spans.items():
        require(list(spans) == sorted(listed.pop(unit, [])), f"the extents of unit {unit} are not listed in order")
    require(not listed, "the extents of a unit are not listed")
    for number, _, places, nbytes in blocks:
        for place in places:
            extent, end = state.blocks.extents[place.unit, place.extent], place.offset + nbytes
            inside = extent.low <= place.offset and end <= extent.top
            inside = inside and all(end <= first or last <= place.offset for first, last in extent.gaps)
            require(inside, f"block {number} is outside of the used range of its extent")


def _check_locks(state: State) -> None:
    of_key: dict[tuple[str, str], int] = {}
    for token, lock in state.locks.by_token.items():
        of_key.update({(lock.partition, key): token for key in lock.keys})
    require(of_key == state.locks.of_key, "9: the locks by key are not those by token")


def _check_waiting(state: State) -> None:
    queues = state.waiting
    listed = list(queues.space) + [waiter for producers in queues.work.values() for waiter in producers]
    for name, queue_of_locks in queues.locks.items():
        require(bool(queue_of_locks), f"an empty queue of locks of {name} was left")
        require(all(waiting.lock.partition == name for waiting in queue_of_locks.values()), "a lock waits elsewhere")
        listed += queue_of_locks
    for name, watches in queues.watches.items():
        listed += _check_watches(state, watches, name)
    for name, tasks in queues.claims.items():
        for task, queue in tasks.items():
            listed += queue.claims
            _check_queue(queue, f"{name}, {task}")
    require(sorted(listed) == sorted(queues.by_waiter), "a request waits in no queue, or in two")
    sizes: dict[str, dict[RequestKey, int]] = {}
    for waiter, waiting in queues.by_waiter.items():
        sizes.setdefault(waiter[0], {})[waiter] = size_of(waiting.request)
    require(queues.of_client == sizes, "7: the waiting requests of a client")


def _check_watches(state: State, watches: WatchQueue, name: str) -> list[RequestKey]:
    require(bool(watches.groups) and all(watches.groups.values()), f"an empty queue of watches of {name} was left")
    for key, group in watches.groups.items():
        keys = {watches.key(waiting.watch) for waiting in group.values()}
        require(keys == {key}, f"a watch of {name} is in the group of another key")
    return [waiter for group in watches.groups.values() for waiter in group]


def _check_queue(queue: ClaimQueue, where: str) -> None:
    require(bool(queue.claims), f"an empty queue of {where} was left")
    numbers: Counter[tuple[str, ...]] = Counter()
    shares: dict[ShareKey, dict[tuple[str, int], None]] = {}
    for waiter, waiting in queue.claims.items():
        fields = tuple(waiting.claim.fields)
        numbers[fields] += 1
        least = queue.wanted[fields][1] if fields in queue.wanted else waiting.claim.count + 1
        require(least <= waiting.claim.count, f"7: the lower bound of the queue of {where} is above a claim's count")
        key = share_key(waiting.claim.sampling)
        if key is not None:
            shares.setdefault(key, {})[waiter] = None
    require(dict(numbers) == {f: n for f, (n, _) in queue.wanted.items()}, f"7: the queue of {where} miscounts")
    require(shares == queue.shares, f"the queue of {where} lists its claims under other shares")
