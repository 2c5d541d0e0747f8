from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from transfer_queue.errors import InvalidArgumentError, ProtocolError
from transfer_queue.storage.arena.extent_table import GRANULE, ExtentTable, LeasedExtent


def table_of(granules: int) -> ExtentTable:
    table = ExtentTable()
    table.grow(granules)
    return table


def leased(table: ExtentTable, nbytes: int, slot: int = 1) -> LeasedExtent:
    return table.lease(slot, nbytes)


def test_what_is_not_leased_cannot_be_freed() -> None:
    table = table_of(1)
    number = leased(table, 1).number
    table.free(number)
    with pytest.raises(ProtocolError, match="freed before"):
        table.free(number)
    with pytest.raises(ProtocolError, match="ever leased"):
        table.free(99)
    assert "slot 1" in table.describe(leased(table, 1).number)
    table.check()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_extent_must_have_at_least_one_byte(nbytes: int) -> None:
    with pytest.raises(InvalidArgumentError):
        table_of(1).lease(1, nbytes)
    with pytest.raises(InvalidArgumentError):
        ExtentTable().grow(nbytes)


class AgainstGranules(RuleBasedStateMachine):
    """Compares the table with one that records an owner for each granule."""

    extents = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.table = ExtentTable()
        self.granules: list[int] = []
        self.last = 0

    @rule(granules=st.integers(1, 12))
    def grow(self, granules: int) -> None:
        self.table.grow(granules)
        self.granules += [0] * granules

    @rule(target=extents, slot=st.integers(1, 3), nbytes=st.integers(1, 6 * GRANULE))
    def lease(self, slot: int, nbytes: int):
        count = -(-nbytes // GRANULE)
        fits = [i for i in range(len(self.granules)) if self.granules[i : i + count] == [0] * count]
        extent = self.table.lease(slot, nbytes)
        if not fits:
            assert extent is None
            return multiple()
        assert (extent.offset, extent.length) == (fits[0] * GRANULE, count * GRANULE)
        assert extent.number > self.last
        self.last = extent.number
        self.granules[fits[0] : fits[0] + count] = [extent.number] * count
        assert extent.number in self.table.extents_of_slot(slot)
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: LeasedExtent) -> None:
        assert self.table.free(extent.number) == extent
        self.granules = [0 if number == extent.number else number for number in self.granules]

    @invariant()
    def counters(self) -> None:
        self.table.check()
        free = self.granules.count(0)
        assert self.table.held == len(self.granules) * GRANULE
        assert self.table.free_bytes == free * GRANULE
        assert self.table.leased == (len(self.granules) - free) * GRANULE
        tail = len(self.granules) - max((i + 1 for i, number in enumerate(self.granules) if number), default=0)
        assert self.table.tail == tail * GRANULE


TestAgainstGranules = AgainstGranules.TestCase
TestAgainstGranules.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
