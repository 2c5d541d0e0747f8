"""A block must be inside an open extent of its writer and must not overlap other blocks."""

import random

import pytest
from harness import BYTES, EXTENT, Harness, column, schema_of
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.tables.extents import PublishedExtents, Spans
from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import BlockLocation, NewBlock
from transfer_queue.messages.puts import CloseExtents, Publish
from transfer_queue.messages.reports.unit_reports import ExtentsFreedReport, ExtentsRecalledReport, RegisterUnit

LENGTH = 8 * BYTES


def block(
    extent: int, offset: int, nbytes: int = BYTES, length: int = LENGTH, copies: list[BlockLocation] | None = None
):
    schema, dims = schema_of(("x",), 1)
    return NewBlock(0, extent, offset, 1, nbytes, 1, schema, dims, length, copies or [])


def put(h: Harness, extent: int, offset: int, nbytes: int = BYTES, name: str = "w", **more: object) -> None:
    h.ask(Publish("p", 1, block=block(extent, offset, nbytes), pre_allocate=0, **more), name)


@pytest.mark.parametrize("restart", [False, True])
def test_concurrent_puts_are_published_in_any_order(h: Harness, restart: bool) -> None:
    offsets = list(range(EXTENT, EXTENT + LENGTH, BYTES))
    random.Random(1).shuffle(offsets)
    for offset in offsets:
        put(h, 1, offset)
        if restart:
            h.restart()
    with pytest.raises(ProtocolError, match="beyond the end of the extent"):
        put(h, 1, EXTENT + LENGTH)


def test_after_a_restart_a_block_before_an_empty_one_and_a_gap_is_still_in_the_way(h: Harness) -> None:
    put(h, 1, EXTENT + 3 * BYTES)
    put(h, 1, EXTENT)
    put(h, 1, EXTENT, nbytes=0)
    h.restart()
    with pytest.raises(ProtocolError, match="extent 1"):
        put(h, 1, EXTENT)


def test_a_block_does_not_exceed_its_extent(h: Harness) -> None:
    with pytest.raises(ProtocolError):
        put(h, 1, EXTENT, LENGTH + 64)
    put(h, 1, EXTENT + BYTES)
    with pytest.raises(ProtocolError, match="beyond the end of the extent"):
        put(h, 1, EXTENT + LENGTH, 2 * BYTES)


def test_a_second_location_is_checked_like_the_first(h: Harness) -> None:
    assert h.ask(RegisterUnit("other.sock", "/other"), "unit-1") == Done(1)
    h.ask(Publish("p", 1, block=block(1, EXTENT, copies=[BlockLocation(1, 4, EXTENT, 1, LENGTH)])))
    for place in (
        BlockLocation(1, 4, EXTENT + 64, 1, LENGTH),
        BlockLocation(1, 5, EXTENT, 1, LENGTH),
        BlockLocation(1, 5, -64, 1, LENGTH),
    ):
        with pytest.raises(ProtocolError):
            h.ask(Publish("p", 1, block=block(1, EXTENT + BYTES, copies=[place])))


def test_a_block_in_a_freed_extent_is_refused(h: Harness) -> None:
    put(h, 1, EXTENT, closes=[(0, 1)])
    h.clear([0])
    assert h.freed == [(0, 1)]
    with pytest.raises(ProtocolError, match="was freed"):
        put(h, 1, EXTENT)
    h.ask(ExtentsFreedReport(0, column([1])), "unit-0")
    put(h, 2, EXTENT)


def test_the_bytes_of_a_removed_extent_are_free(h: Harness) -> None:
    put(h, 1, EXTENT, closes=[(0, 1)])
    h.clear([0])
    put(h, 2, EXTENT, name="v")


def test_an_extent_is_no_longer_than_its_unit(h: Harness) -> None:
    h.ask(RegisterUnit("other.sock", "/other", capacity=EXTENT), "unit-1")
    schema, dims = schema_of(("x",), 1)
    with pytest.raises(ProtocolError, match="extent that its unit has leased"):
        h.ask(Publish("p", 1, block=NewBlock(1, 1, 0, 1, BYTES, 1, schema, dims, EXTENT + 64)))


@pytest.mark.parametrize("place", [(0, -1), (0, 1 << 40), (7, 1)])
def test_an_extent_that_cannot_exist_cannot_be_closed(h: Harness, place: tuple[int, int]) -> None:
    with pytest.raises((ProtocolError, InvalidArgumentError)):
        h.ask(CloseExtents([place]))
    assert h.freed == []


def test_an_extent_cannot_be_recalled_to_a_negative_length(h: Harness) -> None:
    put(h, 1, EXTENT)
    with pytest.raises(ProtocolError):
        h.ask(ExtentsRecalledReport(0, column([1]), column([-1])), "unit-0")


# ---------------------------------------------------------------- the table, against lists


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5)), max_size=60))
def test_places_are_taken_and_refused_as_by_a_list_of_all_places(tries: list[tuple[int, int, int]]) -> None:
    table = PublishedExtents()
    taken: list[tuple[int, int, int]] = []  # first cell, one past the last, extent

    def fits(start: int, end: int, number: int) -> bool:
        mine = [(a, b) for a, b, n in taken if n == number] + [(start, end)]
        low, top = min(a for a, _ in mine), max(b for _, b in mine)
        others = [(a, b, n) for a, b, n in taken if n != number]
        spans = {
            n: (min(a for a, _, m in others if m == n), max(b for _, b, m in others if m == n)) for *_, n in others
        }
        apart = all(top <= a or b <= low for a, b in spans.values())
        return apart and all(end <= a or b <= start for a, b in mine[:-1]) and top - low <= 16

    for cell, cells, number in tries:
        start, nbytes = 64 * cell, 64 * cells
        fine = table.find_overlap(0, number, start, nbytes) is None
        assert fine == fits(cell, cell + cells, number)
        if fine:
            table.extent_for(0, number, 64 * 16, "w")
            table.mark_used(0, number, start, nbytes)
            taken.append((cell, cell + cells, number))


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_places_that_are_taken_do_not_overlap_even_if_there_are_empty_ones(tries: list[tuple[int, int, int]]) -> None:
    table = PublishedExtents()
    taken: list[tuple[int, int]] = []
    for cell, cells, number in tries:
        start, end = 64 * cell, 64 * (cell + cells)
        if table.find_overlap(0, number, start, end - start) is None:
            assert all(end <= first or last <= start for first, last in taken)
            table.extent_for(0, number, 64 * 16, "w")
            table.mark_used(0, number, start, end - start)
            taken.append((start, end))


def test_a_unit_has_many_extents() -> None:
    rng, spans = random.Random(3), Spans()
    listed: list[tuple[int, int]] = []
    for step in range(6000):
        if step < 4000 or rng.random() < 0.2:
            span = (rng.randrange(1 << 40), step)
            spans.add(span)
            listed.append(span)
        else:
            spans.remove(listed.pop(rng.randrange(len(listed))))
        if step % 97 == 0:
            listed.sort()
            assert list(spans) == listed
            at = (rng.randrange(1 << 40), 0)
            assert spans.last_before(at) == max([span for span in listed if span < at], default=None)
            assert spans.first_after(at) == min([span for span in listed if span > at], default=None)
