"""Rows of many small blocks come back as they were put, on every path from a block to a reader.

The model is the list of rows that were put. The paths include encoding, layouts, runs, joined pieces, cells, cuts,
pieces of other nodes, and rows that are received in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from carried_values import DTYPES_OF_EACH_SIZE, bits, pattern, same, same_tensor
from codec_arenas import Arenas
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack

from differential import differential, row_lengths, small
from simulated import rows_of
from transfer_queue.client.data import device_copies
from transfer_queue.client.data.device_copies import HostArenas
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks import encode, remote_ranges
from transfer_queue.wire.blocks import gather as gathering
from transfer_queue.wire.blocks.device_memory import DeviceBlock, ReceivedArena, host_to_device
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather, gather_each
from transfer_queue.wire.blocks.remote_ranges import HERE, find_remote
from transfer_queue.wire.blocks.row_addressing import Memory, Place
from transfer_queue.wire.blocks.row_addressing import gather as gather_units
from transfer_queue.wire.buffers import copies, tensors

Shape = tuple[int, ...]
NUMPY = {torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64, torch.complex128}
OBJECTS = ["", "a", "bb", None, {"k": 1}, [1], b"\0", 7]


@dataclass(frozen=True)
class Kind:
    """The kind of the rows of a field. dtype: None for objects. free: the dimensions in which rows may differ.

    mixed: rows differ in rank.
    """

    dtype: torch.dtype | None
    shape: Shape = ()
    free: tuple[int, ...] = ()
    mixed: bool = False


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    which = draw(st.sampled_from(["ragged", "ragged", "dense", "several", "mixed", "object"]))
    if which == "object":
        return Kind(None)
    dtype = draw(st.sampled_from(DTYPES_OF_EACH_SIZE))
    if which == "mixed":
        return Kind(dtype, mixed=True)
    shape = tuple(draw(st.lists(small, min_size=which != "dense", max_size=3)))
    free: tuple[int, ...] = ()
    if which == "ragged":
        free = (draw(st.sampled_from([0, 0, 0, *range(len(shape))])),)
    elif which == "several":
        free = tuple(range(len(shape)))
    return Kind(dtype, shape, free)


@st.composite
def rows_of_kind(draw: st.DrawFn, kind: Kind, count: int, seed: int) -> list[Any]:
    """Return this number of values, each with different bits."""
    if kind.dtype is None:
        return [draw(st.sampled_from(OBJECTS)) for _ in range(count)]
    if kind.mixed:
        shapes = [tuple(draw(st.lists(small, max_size=2))) for _ in range(count)]
    else:
        columns = [draw(row_lengths(count)) if d in kind.free else [size] * count for d, size in enumerate(kind.shape)]
        shapes = [tuple(column[row] for column in columns) for row in range(count)]
    return [pattern(kind.dtype, shape, 1000 * seed + row) for row, shape in enumerate(shapes)]


def concatenated(rows: list[torch.Tensor], dtype: torch.dtype, before: int = 0, after: int = 0) -> torch.Tensor:
    """Rows that agree in all but their first dimension, one after the other, with some other elements around them."""
    rest = tuple(rows[0].shape[1:])
    some = [pattern(dtype, (count, *rest), 77) for count in (before, after)]
    whole = b"".join([bits(some[0]), *map(bits, rows), bits(some[1])])
    count = before + sum(row.size(0) for row in rows) + after
    flat = torch.frombuffer(bytearray(whole), dtype=torch.uint8) if whole else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(count, *rest)


def containers(rows: list[Any], kind: Kind) -> list[str]:
    """The containers that can hold these rows."""
    found = ["list", "stack of data"]
    if kind.dtype is None:
        return found
    alike = len({row.shape for row in rows}) == 1
    if alike:
        found += ["dense", "strided", "every other"]
        found += ["array", "reversed array"] if kind.dtype in NUMPY else []
    trailing = {tuple(row.shape[1:]) for row in rows}
    if not kind.mixed and kind.shape and len(trailing) == 1 and 0 not in next(iter(trailing)):
        found += ["jagged", "jagged from the middle", "jagged with gaps"]
    if not kind.mixed and kind.shape and kind.dtype in (torch.float32, torch.int64):
        found.append("nested")
    return found


def contained(rows: list[Any], kind: Kind, how: str) -> Any:
    """The rows in a container of this kind."""
    if how == "list" or kind.dtype is None:
        return rows if how == "list" else NonTensorStack(*rows)
    if how == "stack of data":
        return NonTensorStack(*rows)
    if how.startswith("jagged"):
        gaps = 2 if how.endswith("gaps") else 0
        padded = [concatenated([row], kind.dtype, 0, gaps) for row in rows]
        before = 0 if how == "jagged" else 3
        values = concatenated(padded, kind.dtype, before, before)
        ends = before + np.cumsum([0, *(row.size(0) for row in padded)])
        sizes = torch.tensor([row.size(0) for row in rows]) if gaps else None
        return torch.nested.nested_tensor_from_jagged(values, torch.from_numpy(ends), sizes)
    if how == "nested":
        return torch.nested.nested_tensor(rows)
    whole = concatenated([row.unsqueeze(0) for row in rows], kind.dtype)
    if how == "strided":
        order = list(reversed(range(whole.dim())))
        bit_view = whole.view(tensors.BITS[whole.element_size()])
        return bit_view.permute(order).contiguous().permute(order).view(kind.dtype)
    if how == "every other":
        twice = concatenated([row.unsqueeze(0) for row in rows for _ in range(2)], kind.dtype)
        return twice[::2]
    if how.endswith("array"):
        return whole.numpy() if how == "array" else whole.numpy()[::-1].copy()[::-1]
    return whole


@dataclass
class Case:
    """The rows that were put, and those to get. values: by field and block, the rows; pairs: by field, (block, row)."""

    arenas: Arenas
    kinds: dict[str, Kind]
    values: dict[str, list[list[Any]]]
    pairs: dict[str, list[tuple[int, int]]]

    @property
    def reply(self) -> LookupReply:
        return self.arenas.reply(fields=self.pairs)

    def wanted(self, name: str) -> list[Any]:
        return [self.values[name][block][row] for block, row in self.pairs[name]]


@st.composite
def selections(draw: st.DrawFn, sizes: list[int]) -> list[tuple[int, int]]:
    """Rows to get: some of any blocks, often repeated; all; all in another order; or a run of a block."""
    every = [(block, row) for block, size in enumerate(sizes) for row in range(size)]
    how = draw(st.sampled_from(["any", "few", "all", "permuted", "run"]))
    if how == "any":
        return draw(st.lists(st.sampled_from(every), min_size=1, max_size=24))
    if how == "few":
        few = draw(st.lists(st.sampled_from(every), min_size=1, max_size=3))
        return draw(st.lists(st.sampled_from(few), min_size=1, max_size=24))
    if how == "run":
        block = draw(st.integers(0, len(sizes) - 1))
        first = draw(st.integers(0, sizes[block] - 1))
        return [(block, row) for row in range(first, draw(st.integers(first, sizes[block] - 1)) + 1)]
    return every if how == "all" else draw(st.permutations(every))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    units = draw(st.integers(1, 2))
    arenas = Arenas(units, 1 << 13)
    fields = {name: draw(kinds()) for name in "abc"[: draw(st.integers(1, 3))]}
    sizes = draw(st.lists(st.sampled_from([1, 1, 2, 3, 6]), min_size=1, max_size=6))
    values: dict[str, list[list[Any]]] = {name: [] for name in fields}
    for block, size in enumerate(sizes):
        columns = {}
        for number, (name, kind) in enumerate(fields.items()):
            rows = draw(rows_of_kind(kind, size, 10 * block + number))
            values[name].append(rows)
            columns[name] = contained(rows, kind, draw(st.sampled_from(containers(rows, kind))))
        unit = draw(st.integers(0, units - 1))
        arenas.ends[unit] += draw(st.sampled_from([0, 0, 64, 8192]))  # between blocks, which pieces do not contain
        arenas.write(encode_columns(columns, size), unit)
    first = draw(selections(sizes))
    other = draw(st.permutations(first)) if draw(st.booleans()) else first
    pairs = {name: draw(st.sampled_from([first, other])) for name in fields}
    return Case(arenas, fields, values, pairs)


def padded(rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """The rows filled up with zeros to the largest."""
    sizes = np.max([tuple(row.shape) for row in rows], axis=0).tolist() if rows[0].dim() else []
    out = []
    for row in rows:
        whole = torch.zeros(int(np.prod(sizes, dtype=np.int64)) * row.element_size(), dtype=torch.uint8)
        view = whole.view(tensors.BITS[row.element_size()]).reshape(sizes)
        view[tuple(slice(size) for size in row.shape)] = row.view(tensors.BITS[row.element_size()])
        out.append(view.view(row.dtype))
    return out


def check(case: Case, name: str, column: Any, layout: str) -> None:
    kind, rows = case.kinds[name], case.wanted(name)
    if kind.dtype is not None and layout == "padded":
        rows = padded(rows)
    found = rows_of(column)
    assert len(found) == len(rows)
    for value, wanted in zip(found, rows, strict=True):
        assert same_tensor(value, wanted) if isinstance(wanted, torch.Tensor) else same(value, wanted)
    if kind.dtype is not None and layout in ("dense", "padded"):
        assert not column.is_nested
    if kind.dtype is not None and layout == "jagged":
        (field,) = [each for each in case.reply.types if each.name == name]
        check_container(field, column, rows)


def check_container(field: FieldType, column: Any, rows: list[torch.Tensor]) -> None:
    """The container follows from the type alone."""
    if field.mixed_rank:
        assert isinstance(column, NonTensorStack)
    elif field.ndim == 0:
        assert column.shape == (len(rows),)
    elif field.differs.bit_count() > 1:
        assert column.is_nested
        assert column.layout == torch.strided
    else:
        assert column.layout == torch.jagged
        ragged = field.differs.bit_length() or 1
        lengths = [row.shape[ragged - 1] for row in rows]
        assert column._ragged_idx == ragged
        assert column.is_contiguous()
        assert column.offsets().tolist() == [0, *np.cumsum(lengths).tolist()]
        assert (column._maybe_min_seqlen, column._maybe_max_seqlen) == (min(lengths), max(lengths))


def possible(case: Case, name: str, layout: str) -> bool:
    """Whether a layout is made for these rows."""
    if case.kinds[name].dtype is None or layout in ("jagged", "list"):
        return True
    shapes = {tuple(row.shape) for row in case.wanted(name)}
    return len(shapes) == 1 if layout == "dense" else len({len(shape) for shape in shapes}) == 1


@contextlib.contextmanager
def thresholds(**given_: int) -> Iterator[None]:
    """Lower limits of the shortcuts, so that small inputs take them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given_.items():
            for module in (copies, tensors, encode, gathering, remote_ranges):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        yield


limits = st.fixed_dictionaries(
    {},
    optional={
        "CELLS_PER_ROW": st.sampled_from([0, 10**9]), "RUN": st.just(0), "HUGE": st.just(0),
        "MIN_PART": st.just(1), "MIN_SHARE": st.sampled_from([0, 10**9]), "NEAR": st.sampled_from([0, 64]),
    },
)  # fmt: skip
layouts = st.sampled_from(["jagged", "jagged", "list", "dense", "padded"])


@given(cases(), layouts, limits)
@differential(40)
def test_rows_of_mapped_blocks(case: Case, layout: str, given_: dict[str, int]) -> None:
    names = [name for name in case.kinds if possible(case, name, layout)]
    for name in case.kinds.keys() - names:
        with pytest.raises(InvalidArgumentError, match=f"field '{name}'"):
            gather(case.arenas.reply(fields={name: case.pairs[name]}), case.arenas.memory, layout)
    case.pairs = {name: case.pairs[name] for name in names}
    if not names:
        return
    with thresholds(**given_):
        table = gather(case.reply, case.arenas.memory, layout)
    for memory in case.arenas.memories:
        memory[:] = 0x5A  # what was gathered is a copy
    for name in names:
        check(case, name, table.get(name), layout)


@given(cases(), layouts, limits, st.data())
@differential(30)
def test_rows_of_several_gets(case: Case, layout: str, given_: dict[str, int], data: st.DataObject) -> None:
    """Each gets what it would get alone, in memory of its own."""
    count = len(next(iter(case.pairs.values())))
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1))) if count > 1 else [])
    parts = [
        Case(case.arenas, case.kinds, case.values, {name: pairs[start:end] for name, pairs in case.pairs.items()})
        for start, end in zip([0, *cuts], [*cuts, count], strict=True)
    ]
    names = [name for name in case.kinds if all(possible(part, name, layout) for part in parts)]
    for each in (case, *parts):
        each.pairs = {name: each.pairs[name] for name in names}
    if not names:
        return
    counts = [len(part.pairs[names[0]]) for part in parts]
    with thresholds(**given_):
        tables = gather_each(case.reply, counts, case.arenas.memory, layout, shared=False, allow_pickle=True)
    assert tables is not None
    for memory in case.arenas.memories:
        memory[:] = 0x5A
    for part, table in zip(parts, tables, strict=True):
        for name in names:
            check(part, name, table.get(name), layout)
        for name in names:
            for row in rows_of(table.get(name)):
                if isinstance(row, torch.Tensor):
                    row.untyped_storage().fill_(0x5A)


@given(cases(), limits, st.sampled_from([2, 4, 8]))
@differential(10)
def test_rows_that_several_threads_copy(case: Case, given_: dict[str, int], threads: int) -> None:
    with thresholds(**given_, PARALLEL=0, PER_THREAD=1, _most=threads):
        table = gather(case.reply, case.arenas.memory)
    for name in case.kinds:
        check(case, name, table.get(name), "jagged")


@given(cases(), layouts, limits, st.sets(st.integers(0, 1), min_size=1))
@differential(40)
def test_rows_of_blocks_that_are_received(case: Case, layout: str, given_: dict[str, int], away: set[int]) -> None:
    """Only the requested pieces come into the reader's buffer, where whole fields stay."""
    names = [name for name in case.kinds if possible(case, name, layout)]
    case.pairs = {name: case.pairs[name] for name in names}
    found = find_remote(case.reply, away) if names else None
    if found is None:
        return
    arenas = case.arenas
    with thresholds(**given_):
        buffer = np.full(found.nbytes, 0xEE, np.uint8)
        pieces = found.pieces(arenas.memory)
        taken = np.zeros(found.nbytes, bool)
        for each in pieces:
            assert each.unit in away
            assert (np.diff(each.starts) > 0).all()
            for start, length, at in zip(each.starts.tolist(), each.lengths.tolist(), each.at.tolist(), strict=True):
                buffer[at : at + length] = arenas.memory(each.unit)[start : start + length]
                assert not taken[at : at + length].any()
                taken[at : at + length] = True
        assert found.needed_bytes(pieces).sum() == taken.sum() == sum(each.nbytes for each in pieces)
        table = gather(found.reply, lambda unit: buffer if unit == HERE else arenas.memory(unit), layout)
    for name in names:
        check(case, name, table.get(name), layout)


@given(cases(), layouts, limits)
@differential(30)
def test_rows_of_blocks_that_are_received_on_a_device(case: Case, layout: str, given_: dict[str, int]) -> None:
    """The host's memory is used in place of a device's."""
    names = [name for name, kind in case.kinds.items() if kind.dtype is not None and possible(case, name, layout)]
    case.pairs = {name: case.pairs[name] for name in names}
    found = find_remote(case.reply, {0, 1}) if names else None
    pieces = [] if found is None else found.pieces(case.arenas.memory)
    if found is None or len(pieces) != 1:  # a landing is of one unit
        return
    packed = DeviceBlock(pieces[0])
    memory = torch.full((packed.nbytes,), 0xEE, dtype=torch.uint8)
    places = packed.packed_places(pieces[0].at)
    for start, length, at in zip(*(column.tolist() for column in (pieces[0].starts, pieces[0].lengths, places))):
        memory[at : at + length] = torch.from_numpy(case.arenas.memory(pieces[0].unit)[start : start + length])
    with thresholds(**given_):
        table = gather(found.reply, ReceivedArena(memory, found.nbytes, packed), layout)
    for name in names:
        check(case, name, table.get(name), layout)


class Copies:
    """In place of `DeviceCopies`: the device is the host. It cannot hold arenas if `holds` is false."""

    def __init__(self, memory: Memory, holds: bool) -> None:
        self.memory = memory
        self.holds = holds

    def copy_held(self, reply: LookupReply, runs: Sequence[Place], into: torch.Tensor) -> bool:
        at = 0
        for unit, start, nbytes in runs if self.holds else ():
            host_to_device(into[at : at + nbytes], self.memory(unit)[start : start + nbytes])
            at += nbytes
        assert at == len(into) or not self.holds
        return self.holds

    def copy_gathered(self, memory: Memory, units: Any, starts: Any, lengths: Any, into: torch.Tensor) -> None:
        staged = torch.full((len(into),), 0xEE, dtype=torch.uint8)
        gather_units(memory, units, starts, lengths, into=staged.numpy())
        into.copy_(staged)


@given(cases(), layouts, limits, st.booleans(), st.integers(1, 64))
@differential(30)
def test_rows_that_a_device_copies_out_of_arenas(
    case: Case, layout: str, given_: dict[str, int], holds: bool, least: int
) -> None:
    names = [name for name in case.kinds if possible(case, name, layout)]
    case.pairs = {name: case.pairs[name] for name in names}
    if not names:
        return
    memory = case.arenas.memory
    with thresholds(**given_), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_copies, "MIN_DIRECT", least)
        stand_in: Any = Copies(memory, holds)
        table = gather(case.reply, HostArenas(stand_in, torch.device("cpu"), case.reply, memory), layout)
    for name in names:
        check(case, name, table.get(name), layout)


def arenas_of_three_kinds() -> Arenas:
    """Fields whose first two rows have one shape: in "jagged" and "inner", the third differs in a dimension."""
    arenas = Arenas()
    lengths = (2, 2, 1)
    columns = {
        "dense": torch.rand(3, 2),
        "jagged": torch.nested.nested_tensor([torch.rand(length) for length in lengths], layout=torch.jagged),
        "inner": [torch.rand(2, length) for length in lengths],
    }
    arenas.write(encode_columns(columns, 3))
    return arenas


@pytest.mark.parametrize("layout", gathering.LAYOUTS)
@pytest.mark.parametrize("name", ["dense", "jagged", "inner"])
def test_which_rows_of_a_block_are_views(name: str, layout: str) -> None:
    arenas = arenas_of_three_kinds()
    viewed: list[Place] = []

    def views(places: list[Place]) -> list[gathering.View]:
        viewed.extend(places)
        return [arenas.memory(unit)[start : start + nbytes] for unit, start, nbytes in places]

    reply = arenas.reply([(0, 0), (0, 1)], [name])
    values = rows_of(gather(reply, arenas.memory, layout, views=views)[name])
    copied = rows_of(gather(reply, arenas.memory, layout)[name])
    assert bool(viewed) == (name == "dense" or (name, layout) == ("jagged", "jagged"))
    arenas.memory(0)[:] = 0
    assert [not value.any() for value in values] == [bool(viewed)] * 2
    assert all(value.any() for value in copied)


@pytest.mark.parametrize("layout", gathering.LAYOUTS)
@pytest.mark.parametrize("name", ["dense", "jagged", "inner"])
def test_which_received_rows_stay_where_they_are(name: str, layout: str) -> None:
    arenas = arenas_of_three_kinds()
    found = find_remote(arenas.reply([(0, 0), (0, 1)], [name]), {0})
    assert found is not None
    buffer = np.concatenate([arenas.memory(0)[: found.nbytes]])
    values = rows_of(gather(found.reply, lambda unit: buffer, layout)[name])
    with thresholds(MIN_SHARE=0):  # the field is a small part of what was received
        small_part = rows_of(gather(found.reply, lambda unit: buffer, layout)[name])
    gather(found.reply, lambda unit: buffer, layout, views=lambda places: pytest.fail(f"{places} are not in an arena"))
    buffer[:] = 0
    assert [not value.any() for value in values] == [(name, layout) == ("dense", "jagged")] * 2
    assert all(value.any() for value in small_part)
