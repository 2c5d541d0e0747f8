"""The declared form of a saved state: which keys and types each part of the tree of `core.state.serialization` has.

A tree comes out of a file that anybody may have written; a checksum says that it is whole, and not that it is true.
So nothing of it is used before it has this form, and what the form cannot say is looked at by `core.state.validation`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np

from transfer_queue.core.tables.row_table import CHUNK
from transfer_queue.messages.descriptors import FieldSpec, PartitionOptions, UnitInfo

MOST = 1 << 62  # what a number of the state is below, so that sums of two are numbers of 64 bits, too

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
OfChunk = Annotated[int, msgspec.Meta(ge=0, le=CHUNK)]  # of rows as of blocks
Bits = Annotated[int, msgspec.Meta(ge=0)]


class Column:
    """A numpy array of one dimension; subclasses say of which kind."""

    __slots__ = ()
    kinds: ClassVar[tuple[str, ...]] = ("|i1", "|u1", "<u2", "<i4", "<i8", "<f8")


class I8(Column):
    """Numbers of 64 bits."""

    __slots__ = ()
    kinds = ("<i8",)


class I4(Column):
    """Numbers of 32 bits."""

    __slots__ = ()
    kinds = ("<i4",)


class U2(Column):
    """Numbers from 0 to 65535."""

    __slots__ = ()
    kinds = ("<u2",)


class U1(Column):
    """Bytes."""

    __slots__ = ()
    kinds = ("|u1",)


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """What all keys of a dict are."""


class Joined(Form):
    """See `core.columns.schema`."""

    ends: I8
    values: I8


class JoinedBytes(Form):
    """The same; without any columns its values are `I8`."""

    ends: I8
    values: Column


class ChunkForm(Form):
    """`rows.Chunk`."""

    size: OfChunk
    living: OfChunk
    capacity: OfChunk
    index: I8
    alive: U1
    waiting: U1
    changed: I8
    group: I8 | None
    field: dict[str, tuple[I8, I4]]
    consumed: dict[str, U1]
    dealt: dict[str, I8]
    owner: I4
    held: dict[str, U2]
    finished: dict[str, U2]
    lost: dict[str, I4]
    tags: U1 | None


class RowsForm(Form):
    """`rows.Rows`."""

    chunks: dict[Count, ChunkForm]
    end: Count
    count: Count


class ChangesForm(Form):
    """`changes.Changes`."""

    newest: dict[Count, Count]
    cleared: list[tuple[Count, bytes, list[str | None] | None]]
    forgotten: Count
    made: Count
    sealed: Count


class LossesForm(Form):
    """`losses.Losses`."""

    events: dict[Count, tuple[Count, str, Count]]
    counts: dict[str, Count]


class GroupsForm(Form):
    """`groups.Groups`."""

    names: list[str]
    numbers: I8
    cleared: I8
    members: Joined
    next_number: Count
    unborn: dict[str, Count]
    largest: Count = 0


class BirthsForm(Form):
    """`births.Births`."""

    marks: list[tuple[float, float, Count]]
    end: Count


class HoldsForm(Form):
    """`holds.Holds`."""

    holders: list[tuple[str, str, int]]
    rows: Joined


class DropsForm(Form):
    """`drops.Drops`."""

    rows: dict[str, Count]
    latest: Joined
    reasons: list[str]


class WantsForm(Form):
    """`wants.Wants`."""

    groups: dict[str, Count]
    promised: list[tuple[str, str, Count]]


class DealtForm(Form):
    """`dealt.DealtBatches`."""

    batches: list[tuple[Count, int, int, int, Count]]
    rows: Joined
    issued: dict[int, tuple[list[int], list[int]]]
    counts: dict[int, Count]
    sizes: dict[int, int]
    rounds: tuple[list[int], list[int]]
    round_count: Count
    left: list[int]
    next_number: Count


class PassedForm(Form):
    """`passed.PassedRows`."""

    counts: list[tuple[str, str, Count]]
    reasons: list[str]
    codes: dict[str, dict[Count, U2]]


class LeasesForm(Form):
    """`leases.Leases`."""

    leases: list[tuple[Count, str, str, float, tuple[str, int, int] | None, Count, Count]]
    rows: Joined
    delivered: dict[str, dict[Count, U2]]
    acked: dict[str, dict[Count, U2]]


class PartitionForm(Form):
    """`partition.Partition`."""

    options: PartitionOptions
    number: Count
    nbytes: Count
    seals: Count
    rows: RowsForm
    changes: ChangesForm
    losses: LossesForm
    groups: GroupsForm
    admitted: int
    policy_version: int
    owners: dict[str, Count]
    births: BirthsForm
    holds: HoldsForm
    drops: DropsForm
    wants: WantsForm
    freed: Count
    fields: dict[str, tuple[Count, Count, str, str, int, list[Count], Bits, bool]]
    keys: JoinedBytes | list[str]  # as one list by older releases
    keyed: I8
    waiting: I8
    tasks: dict[str, Count]
    claimed: dict[str, Count]
    leases: LeasesForm
    consumed_ever: dict[str, Count]
    dealt: dict[str, DealtForm]
    passed: PassedForm
    version: Count
    dtypes: dict[str, list[str]] = {}  # further dtypes of fields; states of older releases do not have them


class BlockColumns(Form):
    """`blocks.BlockChunk.columns`."""

    unit: I4
    extent: I8
    offset: I8
    generation: I8
    nbytes: I8
    rows: I4
    schema: I4
    dims: I4
    live: I8
    owner: I8


class SecondPlaces(Form):
    """`blocks.BlockChunk.second`, where it is not empty."""

    unit: I4
    extent: I8
    offset: I8
    generation: I8


class BlockChunkForm(Form):
    """`blocks.BlockChunk`."""

    alive: OfChunk
    capacity: OfChunk
    columns: BlockColumns
    second: dict[str, Column]


class InternedForm(Form):
    """`blocks.Interned`."""

    uses: I8
    spare: I8


class BlocksForm(Form):
    """`blocks.BlockTable`."""

    chunks: dict[Count, BlockChunkForm]
    schemas: InternedForm
    schema_values: list[list[FieldSpec] | None]
    dims: InternedForm
    dims_values: JoinedBytes
    extents: list[tuple[Count, Count, str, Count, Count, bool]]
    freed: list[tuple[int, int]]
    live_bytes: Count
    leased: Count


class StateForm(Form):
    """`state.State`."""

    next_index: Count
    next_block: Count
    epoch: Count
    next_token: Count
    changes: Count
    blocks: BlocksForm
    partitions: dict[str, PartitionForm]
    clients: dict[str, tuple[int, tuple[list[int], list[int]], bytes]]
    fenced: list[str]
    draining: list[Count]
    origins: dict[str, Count]
    units: list[UnitInfo]
    lost_units: dict[Count, str]
    losses: Count


def _column(wanted: type[Any], value: Any) -> Any:
    """Where msgspec meets a type that it does not know; its errors say where that was."""
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.str not in wanted.kinds:
        there = f"a column of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"Expected a column of {' or '.join(wanted.kinds)}, got {there}")
    return wanted()


def check(tree: Any) -> None:
    """Raises msgspec.ValidationError, which names the place, where a tree has not the form of a saved state."""
    form = msgspec.convert(tree, StateForm, dec_hook=_column)
    for key, chunk in form.blocks.chunks.items():
        if chunk.second:
            try:
                msgspec.convert(tree["blocks"]["chunks"][key]["second"], SecondPlaces, dec_hook=_column)
            except msgspec.ValidationError as error:
                raise msgspec.ValidationError(f"{error} of the second places of blocks {key}") from None
