"""Checks the whole state against a full recount. Every test of the core ends with it.

The numbers at the beginning of messages are those of the invariants on the architecture page.
"""

from __future__ import annotations

import copy
from collections import Counter

import numpy as np

from transfer_queue.core.blocks.block_table import LiveBlock
from transfer_queue.core.columns.schema import require
from transfer_queue.core.ready.rankings import Bits, Ranking
from transfer_queue.core.ready.ready_sets import ReadySet
from transfer_queue.core.state import validation
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ClaimQueue, RequestKey, ShareKey, WatchQueue, share_key
from transfer_queue.core.tables.field_ranks import value_ranks
from transfer_queue.core.tables.row_table import CLAIMED, CONSUMED
from transfer_queue.messages.descriptors import DIGEST
from transfer_queue.sampler.numeric_tags import number as number_of
from transfer_queue.sampler.ready_views import RankKey


def check_invariants(state: State) -> None:
    """Raise BrokenInvariant if the state contradicts itself."""
    needed: Counter[int] = Counter()
    indexes: list[int] = []
    for name, partition in state.partitions.items():
        require(name == partition.name, f"partition {name!r} has the name {partition.name!r}")
        indexes += _check_rows(partition, needed)
    require(len(set(indexes)) == len(indexes), "2: two live samples have the same global index")
    require(all(i < state.next_index for i in indexes), "2: a live index is not below the next one")
    blocks = list(state.blocks.live_blocks())
    _check_blocks(state, needed, blocks)
    _check_stored(state, blocks)
    _check_all_else(state, blocks)


def check_loaded(state: State) -> None:
    """Check a state of a file from an unknown source. Takes some seconds for a million rows."""
    validation.check_references(state)
    validation.check_apart(state)
    _check_all_else(state, list(state.blocks.live_blocks()))


def _check_all_else(state: State, blocks: list[LiveBlock]) -> None:
    """Run the checks that recounted and loaded states have in common."""
    for partition in state.partitions.values():
        positions = partition.rows.live_positions()
        same = np.array_equal(partition.rows.positions_of(partition.rows.indexes_of(positions)), positions)
        require(same, f"2: an index of {partition.name} is not found at its position")
        require(partition.losses.counts == _lost(partition), f"7: {partition.name} miscounts its lost values")
        _check_changes(partition)
        _check_tasks(partition)
        _check_groups(partition)
        _check_holds(partition)
        for ready in partition.ready.values():
            _check_ready(partition, ready)
    tokens = [token for partition in state.partitions.values() for token in partition.leases.by_token]
    tokens += [token for partition in state.partitions.values() for token in partition.unseen_batches.by_token]
    tokens += state.locks.by_token
    require(len(set(tokens)) == len(tokens), "two leases or locks have the same token")
    require(all(token < state.next_token for token in tokens), "the token of a lease is not below the next one")
    _check_locks(state)
    _check_equal(state, blocks)
    _check_extents(state, blocks)
    _check_waiting(state)


def _check_rows(partition: Partition, needed: Counter[int]) -> list[int]:
    name = partition.name
    positions = partition.rows.live_positions()
    indexes = partition.rows.indexes_of(positions)
    require(len(positions) == partition.rows.count, f"7: {name} counts {partition.rows.count} rows: {len(positions)}")
    require(bool((np.diff(indexes) > 0).all()), f"2: the indexes of {name} do not ascend")
    for key, chunk in partition.rows.chunks.items():
        living = int(chunk.alive[: chunk.size].sum())
        require(chunk.living == living, f"7: chunk {key} of {name} counts {chunk.living} live rows, not {living}")
        dead = np.flatnonzero(chunk.alive[: chunk.size] == 0)
        for column, _ in chunk.field.values():
            require(not column[dead].any(), f"1: a cleared row of {name} still has a value")
    for field_name, field in partition.fields.items():
        numbers, slots = partition.blocks_of(field_name, positions)
        live = int(np.count_nonzero(numbers))
        require(field.live == live, f"7: field {field_name} of {name} counts {field.live} values, not {live}")
        require((not field.kind) == (live == 0), f"field {field_name} of {name} has no type, or a type without values")
        needed.update(numbers[numbers > 0].tolist())
        if field.kind == "tensor":
            ranks = value_ranks(partition.blocks, field_name, numbers, slots)
            validation.check_ranks(field, ranks[numbers > 0], f"field {field_name} of {name}")
        several = field_name in partition.field_ranks.names
        require(
            bool(field.further) == field.mixed_rank == several,
            f"field {field_name} of {name} has several ranks, or not",
        )
    waiting = [p for p in positions.tolist() if partition.rows.chunks[p >> 12].waiting[p & 4095]]
    require(waiting == partition.waiting, f"the list of pre-allocated rows of {name} is wrong")
    keyed = partition.keys_of(positions)
    listed = {key: p for key, p in zip(keyed, positions.tolist(), strict=True) if key is not None}
    require(listed == partition.keys, f"the keys of {name} are not those of its rows")
    return indexes.tolist()  # type: ignore[no-any-return]


def _lost(partition: Partition) -> dict[str, int]:
    """Return the number of lost values of each field, recounted."""
    counts: dict[str, int] = {}
    for chunk in partition.rows.chunks.values():
        for name, column in chunk.lost.items():
            at = np.flatnonzero(column)
            require(bool((chunk.alive[at] == 1).all()), f"1: a cleared row of {partition.name} has a lost {name}")
            columns = chunk.field.get(name)
            require(columns is None or not columns[0][at].any(), f"1: a {name} of {partition.name} counts as lost")
            known = set(column[at].tolist()) <= set(partition.losses.events)
            require(known, f"values of {name} of {partition.name} were lost by an unknown event")
            if len(at):
                counts[name] = counts.get(name, 0) + len(at)
    return counts


def _check_changes(partition: Partition) -> None:
    name, changes = partition.name, partition.changes
    versions = list(changes.newest.values())
    require(versions == sorted(versions), f"the chunks of {name} are not in order of change")
    for key, chunk in partition.rows.chunks.items():
        changed = chunk.changed[: chunk.size]
        newest = int(changed.max(initial=0))
        require(newest <= changes.newest.get(key, 0), f"chunk {key} of {name} has changed after its listed version")
        require(newest <= partition.version, f"a row of {name} has a later version than its partition")
        require(not changed[chunk.alive[: chunk.size] == 0].any(), f"a cleared row of {name} still counts as changed")
    require(set(changes.newest) <= set(partition.rows.chunks), f"{name} lists a chunk that does not exist")
    require(changes.count == sum(len(i) // 8 for _, i, _ in changes.cleared), f"7: {name} miscounts its clears")


def _check_tasks(partition: Partition) -> None:
    positions = partition.rows.live_positions()
    ever = max(0, partition.admitted + sum(partition.drops.rows.values()))
    require(partition.done <= ever, f"7: {partition.done} rows of {partition.name} are done, and {ever} were added")
    window = partition.window
    fine = window.limit is None or window.unfinished == window.count_unfinished()
    require(fine, f"7: {partition.name} miscounts the rows that are not finished")
    require(set(partition.claimed) <= set(partition.tasks), f"{partition.name} has claimed rows of an unknown task")
    for task, count in partition.tasks.items():
        taken = partition.consumption_states(task, positions)
        require(set(taken.tolist()) <= {0, CONSUMED, CLAIMED}, f"3: a row of {partition.name} has an unknown state")
        consumed, claimed = int((taken == CONSUMED).sum()), int((taken == CLAIMED).sum())
        require(consumed == count, f"7: task {task} of {partition.name} miscounts what it consumed")
        require(
            claimed == partition.claimed.get(task, 0), f"7: task {task} of {partition.name} miscounts what it claimed"
        )
        _check_claimed(partition, task, positions[taken == CLAIMED])
        _check_unseen(partition, task, positions[taken == CONSUMED])
    for task, dealt in partition.dealt.items():
        seen: set[int] = set()
        for key, number in dealt.by_key.items():
            batch = dealt.batches[number]
            require(key == (batch.dp_rank, batch.batch_index), f"4: a dealt batch of {task} has another key")
            where = partition.rows.positions_of(batch.rows)
            require(batch.live == int((where >= 0).sum()) > 0, f"7: batch {key} of {task} miscounts its live rows")
            rows = set(batch.rows.tolist())
            require(not rows & seen, f"4: a row is in two dealt batches of {task}")
            seen |= rows
            fine = bool(partition.consumption_states(task, where[where >= 0]).all())
            require(fine, f"3: batch {key} of {task} has rows that are neither consumed nor claimed")


def _check_claimed(partition: Partition, task: str, claimed: np.ndarray) -> None:
    """Check the leases of a task. `claimed` contains the positions of its claimed rows."""
    kept = {p for p in claimed.tolist() if partition.batch_of(task, p) is not None}
    alone: Counter[int] = Counter()
    for token, lease in partition.leases.by_token.items():
        require(lease.token == token and lease.replicas > 0, f"lease {token} of {partition.name} has another token")
        if lease.task != task:
            continue
        where = partition.rows.positions_of(partition.leases.live_rows(lease)).tolist()
        require(set(where) <= set(claimed.tolist()), f"3: lease {token} of {partition.name} has rows not claimed")
        for p in where:
            require(partition.batch_of(task, p) == lease.batch, f"4: lease {token} has a row of another batch")
        listed = lease.batch is None or lease in partition.leases.leases_of_batch(lease.batch)
        require(listed, f"lease {token} of {partition.name} is not listed with its batch")
        if lease.batch is None:
            alone.update(where)
    require(set(alone) == set(claimed.tolist()) - kept, f"3: rows of {partition.name} are claimed under no lease")
    require(all(count == 1 for count in alone.values()), f"3: a row of {partition.name} is in two leases")
    acked = partition.leases.acked.counts_of(task, partition.rows.live_positions())
    waits = set(partition.rows.live_positions()[acked > 0].tolist())
    require(waits <= kept, f"7: rows of {partition.name} count acknowledgements although they are in no dealt batch")


def _check_unseen(partition: Partition, task: str, consumed: np.ndarray) -> None:
    """Check the batches of a task that were not handed over. `consumed` has the positions of its consumed rows."""
    held: Counter[int] = Counter()
    for token, batch in partition.unseen_batches.by_token.items():
        require(batch.token == token, f"batch {token} of {partition.name} has another token")
        require(batch.task in partition.tasks, f"batch {token} of {partition.name} is of an unknown task")
        if batch.task == task:
            positions = partition.rows.positions_of(batch.indexes)
            held.update(positions[positions >= 0].tolist())
    require(set(held) <= set(consumed.tolist()), f"3: a row of {partition.name} was dealt and is not consumed")
    require(all(count == 1 for count in held.values()), f"3: a row of {partition.name} is in two batches")


def _check_groups(partition: Partition) -> None:
    groups = partition.groups
    for number, group in groups.declared.items():
        require(
            group.number == number and groups.by_name[group.name] is group, "a group has another number than listed"
        )
        members = np.array(group.members, "i8")
        alive = [p for p in group.members if p >> 12 in partition.rows.chunks]
        living = sum(int(partition.rows.chunks[p >> 12].alive[p & 4095]) for p in alive)
        require(
            living == len(members) - group.cleared > 0,
            f"7: group {group.name} of {partition.name} miscounts itself",
        )
        if groups.size is not None:
            require(len(members) <= groups.size, f"4: group {group.name} has more members than its group_size")
    broken = sum(1 for group in groups.declared.values() if group.cleared)
    require(broken == groups.broken, f"7: {partition.name} counts {groups.broken} broken groups, not {broken}")


def _check_holds(partition: Partition) -> None:
    holds = partition.holds
    held: Counter[tuple[str, int]] = Counter()
    for (task, _, _), rows in holds.by_holder.items():
        positions = partition.rows.positions_of(rows)
        held.update((task, position) for position in positions[positions >= 0].tolist())
    counted: Counter[tuple[str, int]] = Counter()
    for key, chunk in partition.rows.chunks.items():
        for task, column in chunk.held.items():
            for at in np.flatnonzero(column[: chunk.size]).tolist():
                counted[task, (key << 12) + at] = int(column[at])
    require(held == counted, f"7: {partition.name} miscounts the references to its rows")
    positions = partition.rows.live_positions()
    require(not holds.finished_rows(positions).any(), f"rows of {partition.name} are finished and were not cleared")


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
    require(bool((fresh.positions() == ready.positions()).all()), f"3: ready set {ready.fields} contains other rows")
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


def _check_blocks(state: State, needed: Counter[int], blocks: list[LiveBlock]) -> None:
    counted = {number: live for number, live, _, _ in blocks}
    require(counted == dict(needed), "7: the live values of a block differ from a recount")
    nbytes = sum(size for _, _, _, size in blocks)
    require(nbytes == state.blocks.live_bytes, "7: the bytes of live blocks differ from a recount")
    rows = sum(partition.row_count for partition in state.partitions.values())
    require(state.row_count == rows, "7: the number of rows of all partitions differs from a recount")
    require(
        sum(partition.nbytes for partition in state.partitions.values()) == nbytes, "7: partitions miscount their bytes"
    )


def _check_equal(state: State, blocks: list[LiveBlock]) -> None:
    """Check that every digest names a row of a live block that has the field."""
    live, listed = {number for number, _, _, _ in blocks}, state.blocks.equal.of_block
    fields = {(partition.number, name): field for partition in state.partitions.values()
              for name, field in partition.fields.items()}  # fmt: skip
    numbers: Counter[int] = Counter()
    for key, known in state.blocks.equal.fields.items():
        require(key in fields and fields[key].live > 0, f"digests are kept of field {key}, which has no values")
        for digest, (number, slot) in known.items():
            require(number in live, f"a digest names block {number}, which was freed")
            schema, _, rows = state.blocks.shape_source(number)
            there = 0 <= slot < rows and any(spec.name == key[1] for spec in schema)
            require(there, f"a digest names row {slot} of block {number}, which does not have field {key[1]!r}")
            require(len(digest) == DIGEST, "a digest has another length")
            numbers[number] += 1
    require(numbers == {number: len(values) for number, values in listed.items()}, "the digests of a block are wrong")


def _check_stored(state: State, blocks: list[LiveBlock]) -> None:
    """Check the bytes of partitions in each unit, and the owners of blocks, against what the rows need."""
    expected: dict[int, Counter[int]] = {}
    owners: dict[int, int] = {}
    for partition in state.partitions.values():
        positions = partition.rows.live_positions()
        for name in partition.fields:
            numbers = partition.blocks_of(name, positions)[0].tolist()
            owners |= dict.fromkeys(filter(None, numbers), partition.number)
    recorded = state.blocks.column("owner", np.array([number for number, _, _, _ in blocks], "i8")).tolist()
    for (number, _, places, nbytes), said in zip(blocks, recorded, strict=True):
        require(said == owners[number], f"block {number} is recorded as another partition's")
        counted = expected.setdefault(said, Counter())
        for place in places:
            counted[place.unit] += nbytes
    there = {partition.number for partition in state.partitions.values()}
    require(state.blocks.stored.keys() <= there, "bytes are counted for a partition that does not exist")
    for number in there:
        same = expected.get(number, Counter()) == state.blocks.stored.get(number, Counter())
        require(same, "7: the bytes of a partition in each unit differ from a recount")
    saved: Counter[int] = Counter()
    for (number, live, _, nbytes), owner in zip(blocks, recorded, strict=True):
        schema, _, rows = state.blocks.shape_source(number)
        saved[owner] += max(0, live - rows * len(schema)) * (nbytes // max(1, rows * len(schema)))
    require(+saved == +state.blocks.saved, "7: the bytes that partitions save differ from a recount")


def _check_extents(state: State, blocks: list[LiveBlock]) -> None:
    extents: Counter[tuple[int, int]] = Counter()
    for number, _, places, _ in blocks:
        for location in places:
            extents[location.unit, location.extent] += 1
        require(len({place.unit for place in places}) == len(places), f"block {number} is in one unit twice")
    leased: Counter[int] = Counter()
    for (unit, _), extent in state.blocks.extents.items():
        leased[unit] += extent.length
    _check_spans(state, blocks)
    require(leased.total() == state.blocks.leased, "7: the lengths of extents differ from a recount")
    require(leased == Counter(state.blocks.leased_in), "7: the bytes of each unit differ from a recount")
    for place, extent in state.blocks.extents.items():
        require(extent.blocks == extents[place], f"7: extent {place} miscounts its blocks")
        require(extent.blocks > 0 or not extent.closed, f"extent {place} is closed and empty, and was not freed")


def _check_spans(state: State, blocks: list[LiveBlock]) -> None:
    """Check that each block is in the used range of its extent and in no gap, and that extents are listed in order."""
    listed: dict[int, list[tuple[int, int]]] = {}
    for (unit, number), extent in state.blocks.extents.items():
        if extent.top >= 0:
            listed.setdefault(unit, []).append((extent.low, number))
    for unit, spans in state.blocks.spans.items():
        require(list(spans) == sorted(listed.pop(unit, [])), f"the extents of unit {unit} are not listed in order")
    require(not listed, "the extents of a unit are not listed")
    for number, _, places, nbytes in blocks:
        for place in places:
            extent, end = state.blocks.extents[place.unit, place.extent], place.offset + nbytes
            inside = extent.low <= place.offset and end <= extent.top
            inside = inside and all(end <= first or last <= place.offset for first, last in extent.gaps)
            require(inside, f"block {number} is outside of the used range of its extent")


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
    require(
        queues.of_client == Counter(client for client, _ in queues.by_waiter),
        "7: the waiting requests of a client",
    )
    sizes: Counter[str] = Counter()
    for (client, _), size in queues.sizes.items():
        sizes[client] += size
    require(
        queues.bytes_of_client == sizes and queues.sizes.keys() == queues.by_waiter.keys(),
        "7: bytes that wait",
    )
    for client, kept in state.clients.items():
        require(not any(map(kept.is_finished, kept.replies)), f"6: a reply is kept that {client} has acknowledged")


def _check_locks(state: State) -> None:
    held = [((lock.partition, key), token) for token, lock in state.locks.by_token.items() for key in lock.keys]
    require(len(dict(held)) == len(held), "9: two locks have the same key")
    require(dict(held) == state.locks.of_key, "9: the locks by key are not those by token")
    of_client: dict[str, dict[int, None]] = {}
    for token, lock in state.locks.by_token.items():
        require(lock.token == token > 0 and bool(lock.keys), f"9: lock {token} has another token, or no keys")
        of_client.setdefault(lock.client, {})[token] = None
    require(of_client == state.locks.of_client, "9: the locks by client are not those by token")


def _check_watches(state: State, watches: WatchQueue, name: str) -> list[RequestKey]:
    require(bool(watches.groups) and all(watches.groups.values()), f"an empty queue of watches of {name} was left")
    for key, group in watches.groups.items():
        alike = {watches.key(waiting.watch) for waiting in group.values()}
        require(alike == {key}, f"a watch of {name} is in the group of another key")
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
