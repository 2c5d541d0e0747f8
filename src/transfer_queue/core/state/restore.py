"""Replaces the present state by a saved one, or adds the partitions of a saved state to the present one.

A client may first reduce the state of a checkpoint to chosen partitions and keys (`select_samples`).

Samples that are added get new global indexes and their blocks new numbers. A partition that does not exist is created
like the saved one, from whose chunks of rows it takes over the keys, the tags and the values, because to copy those of
100,000 samples takes 50 ms. If the partition exists, the samples are added to it like those of a put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from transfer_queue.core.events import records as r
from transfer_queue.core.events.registry import applies
from transfer_queue.core.puts.apply import clear_all, clear_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State, require_partition
from transfer_queue.core.tables.blocks import CHUNK_BITS as BLOCK_BITS
from transfer_queue.core.tables.blocks import BlockTable
from transfer_queue.core.tables.changes import LossEvent
from transfer_queue.core.tables.fields import check_number
from transfer_queue.core.tables.rows import CHUNK_BITS, CONSUMED, Chunk
from transfer_queue.errors import (
    CapacityError,
    CheckpointError,
    DuplicateError,
    InvalidArgumentError,
    SealedError,
    StorageKeyNotFoundError,
)
from transfer_queue.messages.descriptors import FieldSpec, PartitionOptions
from transfer_queue.messages.tag_table import TagTable

MAX_NAMED = 5  # keys that an error names
MAX_ORIGINS = 32  # checkpoints that are remembered; a checkpoint has no more files


@applies(r.StateLoaded)
def replace_state(state: State, record: r.StateLoaded) -> None:
    """Replace the partitions by those of a saved state. Clients, units and waiting requests remain.

    Counters never decrease. All leases end, the present ones and the saved ones, and their samples are delivered again.
    All locks end, too: what their holders have read does not belong to the loaded state.
    Promises and reservations of clients are forgotten. A client that is still connected keeps its saved references to
    rows; those of other clients go to the next client that asks for their task and rank. All checks come first.
    """
    tree, loaded = take_loaded(state, record)
    _join(state, loaded.blocks)
    state.epoch = max(state.epoch, loaded.epoch) + 1
    state.next_index = max(state.next_index, loaded.next_index)
    state.next_block = max(state.next_block, loaded.next_block)
    state.next_token = max(state.next_token, loaded.next_token)
    state.losses = max(state.losses, loaded.losses)
    state.changes = max(state.changes, loaded.changes) + 1
    state.blocks = loaded.blocks
    state.locks.clear()
    keep_samplers(state, loaded)
    state.origins = dict([*loaded.origins.items(), (tree["origin"], loaded.next_block)][-MAX_ORIGINS:])
    shift_ages(loaded, record.time - tree["time"])
    state.partitions, state.aging, state.counted = loaded.partitions, loaded.aging, loaded.counted
    for partition in state.partitions.values():
        partition.awaited = state.waiting.awaited
        partition.version = partition.changes.made = state.changes
        partition.epoch = state.epoch
        partition.wants.promised.clear()
        partition.owners = {f"before epoch {state.epoch}: {n}": number for n, number in partition.owners.items()}
        partition.end_all_leases()


def take_loaded(state: State, record: r.StateLoaded) -> tuple[dict[str, Any], State]:
    """Return the saved tree that a record names, and the state in it."""
    assert state.prepared is not None, "the state that a record names must be read before the record is applied"
    prepared_for, tree, loaded = state.prepared
    assert prepared_for is record
    state.prepared = None
    loaded.watch(state.watched)  # usually they are already watched
    return tree, loaded


def keep_samplers(state: State, loaded: State) -> None:
    """Add the samplers of tasks that were saved. Those that datasets of this system have registered stay."""
    state.samplers = {**loaded.samplers, **state.samplers}


def check_new_extents(state: State, blocks: BlockTable) -> None:
    """Raise CheckpointError unless the extents of the blocks to load are of this system, and new in it."""
    for unit, extent in blocks.extents:
        if unit not in state.units or (unit, extent) in state.blocks.extents:
            raise CheckpointError(f"the state to load has blocks in extent {extent} of unit {unit}, which is not new")


def free_partitions(partitions: list[Partition]) -> None:
    """Free partitions that were replaced, in a thread beside the event loop. Empties the list.

    To free a million rows with keys and tags at once would take 30 ms or more, in which no other thread runs.
    """
    while partitions:
        partition = partitions.pop()
        keys, chunks = partition.keys, list(partition.rows.chunks.values())
        del partition
        del keys  # before the chunks, which refer to the same strings, so that these are freed chunk by chunk
        while chunks:
            chunks.pop()


def _join(state: State, blocks: BlockTable) -> None:
    """Check that the extents of the blocks are new, and add the present extents that writers still fill."""
    check_new_extents(state, blocks)
    blocks.freed, blocks.unreported = state.blocks.freed, state.blocks.unreported
    for place, before in state.blocks.extents.items():
        blocks.enter_empty(place, before)
    blocks.close([place for place, before in state.blocks.extents.items() if before.closed])


def shift_ages(state: State, shift: float) -> None:
    """Change the times of rows by this number of seconds, from the former clock to the present one."""
    state.locks.shift(shift)
    for partition in state.partitions.values():
        partition.births.shift(shift)


# ------------------------------------------------------------ adding partitions


def check_merge(state: State, loaded: State) -> None:
    """Raise an error if the partitions of a saved state cannot be added to the state.

    Raises:
        SealedError: A partition of that name is sealed.
        InvalidArgumentError: It has other settings, its fields hold values of another type (`FieldTypeError`), or both
            have too many fields.
        DuplicateError: It has samples with the same keys.
        CheckpointError: The samples were not written into new space of this system.
        CapacityError: The samples would exceed the capacity of the system (`total_storage_size`).
    """
    check_new_extents(state, loaded.blocks)
    for source in loaded.partitions.values():
        existing = state.partitions.get(source.name)
        if existing is not None:
            _check_partition(existing, source)
    if state.capacity is not None and state.row_count + loaded.row_count > state.capacity:
        raise CapacityError(
            f"the capacity of {state.capacity} rows (backend.SimpleStorage.total_storage_size) is exceeded: "
            f"{state.row_count} rows are stored, and the checkpoint adds {loaded.row_count}. Nothing was changed; "
            f"clear rows that are not needed any more, or raise the limit"
        )


def _check_partition(known: Partition, source: Partition) -> None:
    if known.sealed and source.row_count:
        raise SealedError(
            f"partition {known.name!r} is sealed, so the {source.row_count} samples of the checkpoint cannot be added; "
            f"nothing was changed. Drop it first (clear_partition)"
        )
    if known.options != source.options:
        raise InvalidArgumentError(
            f"partition {known.name!r} exists with other settings than it was saved with: "
            f"{_differences(known.options, source.options)}; nothing was changed. Create it with the saved settings, "
            f"or drop it first (clear_partition)"
        )
    same = sorted(known.keys.keys() & source.keys.keys())
    if same:
        more = f" and {len(same) - MAX_NAMED} more" if len(same) > MAX_NAMED else ""
        raise DuplicateError(
            f"partition {known.name!r} already has samples with the keys {same[:MAX_NAMED]}{more}; nothing was "
            f"changed. Clear them first (kv_clear), or load other keys (keys=)"
        )
    for name, field in source.fields.items():
        if field.live and name in known.fields:
            for dtype in (field.dtype, *field.others):
                known.fields[name].check(FieldSpec(name, field.kind, dtype, field.ndim, True))
    check_number(known.name, known.fields, [name for name, field in source.fields.items() if field.live])


def _differences(existing: PartitionOptions, saved: PartitionOptions) -> str:
    return ", ".join(
        f"{name} is {getattr(existing, name)!r}, but was {getattr(saved, name)!r}"
        for name in PartitionOptions.__struct_fields__
        if getattr(existing, name) != getattr(saved, name)
    )


def merge_state(state: State, loaded: State) -> None:
    """Apply a `records.StateMerged`: add the partitions of `loaded`, which must not be used afterwards."""
    keep_samplers(state, loaded)
    targets = [(source, *_target_of(state, source)) for source in loaded.partitions.values()]
    owners = {source.number: target.number for source, target, _ in targets}
    numbers = sorted(loaded.blocks.chunks)
    shift = 0
    if numbers:
        free = -(-state.next_block >> BLOCK_BITS)
        shift = (free - numbers[0]) << BLOCK_BITS
        state.next_block = (numbers[-1] + 1 << BLOCK_BITS) + shift
    state.blocks.absorb(loaded.blocks, owners, shift >> BLOCK_BITS)
    for source, target, made in targets:
        _Merge(state, source, target, made, shift).run()


def _target_of(state: State, source: Partition) -> tuple[Partition, bool]:
    """Return the partition that gets the samples of `source`, and whether it is new."""
    existing = state.partitions.get(source.name)
    if existing is not None:
        return state.new_version(source.name), False
    made = state.make_partition(source.name, source.options)
    made.policy_version = source.policy_version
    made.wants.groups = source.wants.groups
    return made, True


class _Merge:
    """Adds the samples of one saved partition to a partition."""

    def __init__(self, state: State, source: Partition, target: Partition, made: bool, shift: int) -> None:
        self._state = state
        self._source = source
        self._target = target
        self._made = made
        self._shift = shift
        """The offset that is added to the number of each block."""
        self._from = source.rows.first_positions()
        """The positions of the samples in the saved partition, ascending."""
        self._to = self._append_rows()
        """Their positions in the other partition, ascending."""

    def run(self) -> None:
        """Copy everything that is recorded about the samples."""
        source, target = self._source, self._target
        finished = (source if self._made else target).window.finished
        if not self._made:
            self._copy_names()
        self._copy_groups()
        self._copy_consumption()
        self._copy_values()
        self._copy_losses()
        if self._made:  # nobody takes the pre-allocated rows any more
            clear_rows(target, np.array(source.waiting, "i8"))
        target.changes.mark_changed(target.version, self._to)
        self._state.counted.mark_changed(target.name)
        if self._made:
            target.admitted, target.done = source.admitted, source.done
            for _ in range(source.seals):
                target.seal()
        else:
            target.admitted += len(self._to)
        free = self._to[target.holds.finished_rows(self._to)]
        clear_rows(target, free)
        target.freed += len(free)
        # to load rows finishes none: they count as they did when they were saved, or in the partition before
        target.window.finished = finished
        target.window.recount(target.tasks)

    def _append_rows(self) -> np.ndarray:
        """Add a row for each sample, and return their positions."""
        state, rows, source = self._state, self._target.rows, self._source.rows
        if not self._made:
            first = rows.end
            rows.append(state.next_index, len(self._from))
            state.next_index += len(self._from)
            return np.arange(first, rows.end)
        # Groups by order of reservation depend on the positions, so these stay the same, with those of cleared rows.
        for key, chunk in source.chunks.items():
            rows.add_chunk(key, Chunk.with_names_of(chunk, state.next_index))
            state.next_index += chunk.size
        rows.end = source.end
        self._target.keys = self._source.keys
        return self._from

    def _copy_names(self) -> None:
        """Copy the keys and tags."""
        target, keys = self._target, self._source.keys
        names, places = np.empty(len(keys), object), self._moved(np.fromiter(keys.values(), "i8", len(keys)))
        names[:] = list(keys)
        target.keys.update(zip(keys, places.tolist(), strict=True))
        for _, chunk, at, where in target.rows.split(places):
            listed = np.empty(chunk.capacity, object)
            listed[:] = chunk.key_list()
            listed[at] = names[where]
            chunk.keys = listed.tolist()
        tags = self._source.packed_tags_of(self._from)
        if tags is not None:
            target.set_tags(self._to, tags if isinstance(tags, TagTable) else [*tags], replace=False)

    def _copy_groups(self) -> None:
        """Make the samples members of their declared groups. Members that are not loaded may still be put."""
        groups = self._source.groups
        if self._made:
            self._target.groups.take_over(groups)
            self._target.groups.largest = groups.largest
            return
        place = dict(zip(self._from.tolist(), self._to.tolist(), strict=True)) if groups.declared else {}
        for group in groups.declared.values():
            members = [place[member] for member in group.members if member in place]
            self._target.join([group.name] * len(members), members)

    def _copy_consumption(self) -> None:
        """Copy what tasks have consumed and skipped. Rows under a lease, or not handed over, are ready again."""
        source, target = self._source, self._target
        for token in list(source.unseen_batches.by_token):
            source.take_back(token)
        for task in source.tasks:
            taken = source.consumption_states(task, self._from) == CONSUMED
            skipped = source.passed.rows_of(task)
            for reason, positions in skipped.items():
                target.pass_over(task, self._moved(positions), reason)
                taken &= ~np.isin(self._from, positions)
            target.consume(task, self._to[taken])
            target.holds.skip(task, self._to[taken])

    def _copy_values(self) -> None:
        """Copy the fields of the samples with their types, and show them to the ready sets."""
        source, target = self._source, self._target
        target.nbytes += source.nbytes
        live = {name: field for name, field in source.fields.items() if field.live}
        for name, field in live.items():
            known = target.fields.get(name)
            if known is not None and known.live:
                known.absorb(field)
            else:
                field.ever += 0 if known is None else known.ever
                target.fields[name] = field
            (self._take_columns if self._made else self._copy_columns)(name)
        target.learnt = None
        target.field_ranks.derive()
        if target.ready:
            fields = frozenset(source.fields)
            for key, chunk, at, _ in target.rows.split(self._to):
                target.unseen.add(fields, key, chunk, at)
            target.update_awaited_sets(fields)

    def _take_columns(self, name: str) -> None:
        """Take over the columns of a field."""
        for key, chunk in self._source.rows.chunks.items():
            columns = chunk.field.get(name)
            if columns is not None:
                np.add(columns[0], self._shift, out=columns[0], where=columns[0] != 0)
                self._target.rows.chunks[key].field[name] = columns

    def _copy_columns(self, name: str) -> None:
        """Copy the columns of a field."""
        blocks, slots = self._source.blocks_of(name, self._from)
        has = blocks != 0
        blocks, slots = blocks[has] + self._shift, slots[has]
        for _, chunk, at, where in self._target.rows.split(self._to[has]):
            columns = chunk.field_columns(name)
            columns[0][at], columns[1][at] = blocks[where], slots[where]

    def _copy_losses(self) -> None:
        """Copy which values are lost."""
        source, target, state = self._source.losses, self._target, self._state
        for number, loss in source.events.items():
            state.losses += 1
            target.losses.events[state.losses] = LossEvent(loss.unit, loss.when, target.version)
            for name in source.counts:
                lost = self._to[source.events_of(name, self._from) == number]
                if name not in target.fields:  # all its values are lost
                    target.fields[name] = self._source.fields[name]
                for _, chunk, at, _ in target.rows.split(lost):
                    target.losses.mark(chunk, name, at, state.losses)

    def _moved(self, positions: np.ndarray) -> np.ndarray:
        """Return the new positions of these samples of the saved partition."""
        moved: np.ndarray = self._to[np.searchsorted(self._from, positions)]
        return moved


# ------------------------------------------------------------ reducing a saved state

Lost = dict[str, dict["str | int", list[str]]]
"""Partition -> key of a sample (its global index if it has none) -> the fields whose values are lost."""


def select_samples(state: State, names: Sequence[str], keys: Sequence[str] | None = None) -> None:
    """Remove all other partitions from a state, and all other samples.

    Rows that were reserved and never written are removed, too.

    Args:
        state: The state.
        names: The partitions to keep.
        keys: The keys of the samples to keep, of a single partition. Default: None, all samples.

    Raises:
        UnknownPartitionError: The state does not have one of the partitions.
        StorageKeyNotFoundError: The partition does not have one of the keys.
    """
    for name in names:
        require_partition(state.partitions, name, "Nothing was changed. Name only partitions that the checkpoint has")
    for name in [name for name in state.partitions if name not in names]:
        partition = state.partitions.pop(name)
        clear_all(partition)
        state.blocks.stored.pop(partition.number, None)
        state.blocks.saved.pop(partition.number, None)
        state.aging.pop(name, None)
        state.counted.mark_changed(name)
    for partition in state.partitions.values():
        chosen = _written_rows(partition) if keys is None else _rows_with_keys(partition, keys)
        clear_rows(partition, np.setdiff1d(partition.rows.live_positions(), chosen))
        state.counted.mark_changed(partition.name)


def _rows_with_keys(partition: Partition, keys: Sequence[str]) -> np.ndarray:
    unknown = [key for key in keys if key not in partition.keys]
    if unknown:
        more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        raise StorageKeyNotFoundError(
            f"partition {partition.name!r} has no samples with the keys {unknown[:MAX_NAMED]}{more}; name keys that "
            f"it has (kv_list). Nothing was changed"
        )
    return np.unique(np.array([partition.keys[key] for key in keys], "i8"))


def _written_rows(partition: Partition) -> np.ndarray:
    """Return the positions of the rows that have a value, a tag or a key, ascending."""
    parts = [np.zeros(0, "i8")]
    for number, chunk in partition.rows.chunks.items():
        size = chunk.size
        written = np.zeros(size, bool)
        for blocks, _ in chunk.field.values():
            written |= blocks[:size] != 0
        for lost in chunk.lost.values():
            written |= lost[:size] != 0
        if chunk.keys is not None:
            written |= np.array([bool(key) for key in chunk.keys[:size]], bool)
        if chunk.tags is not None:
            written |= chunk.tags.tagged(slice(0, size))
        written &= (chunk.alive[:size] == 1) & (chunk.waiting[:size] == 0)
        parts.append(np.flatnonzero(written) + (number << CHUNK_BITS))
    return np.concatenate(parts)


def lost_values(state: State) -> Lost:
    """Return the samples of a state with lost values."""
    lost_fields: Lost = {}
    for partition in state.partitions.values():
        positions, fields = partition.losses.lost_since(-1)
        keys, indexes = partition.keys_of(positions), partition.rows.indexes_of(positions).tolist()
        for at, (key, index) in enumerate(zip(keys, indexes, strict=True)):
            names = [name for name, lost in fields.items() if lost[at]]
            lost_fields.setdefault(partition.name, {})[index if key is None else key] = names
    return lost_fields
