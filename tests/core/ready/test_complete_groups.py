"""Complete groups by order of reservation, compared with a count of their rows one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.tables.complete_groups import CompleteOrderedGroups
from transfer_queue.core.tables.groups import GroupTable
from transfer_queue.core.tables.rows import CHUNK, RowTable

NONE = np.zeros(0, "i8")
FAR = 1 << 40  # a position in a partition with many cleared rows

PLACES = st.integers(0, 40) | st.integers(0, 40).map(lambda at: at + 3 * CHUNK - 20) | st.integers(FAR, FAR + 9)
TURNS = st.lists(st.lists(PLACES, min_size=1, max_size=30, unique=True), max_size=8)


@given(st.integers(1, 5), TURNS, st.booleans())
def test_a_group_is_complete_if_all_its_rows_are_ready(size: int, turns: list[list[int]], asked: bool) -> None:
    groups, whole, ready = GroupTable(RowTable(), None), CompleteOrderedGroups(size), set[int]()
    if asked:
        assert whole.take_grown_groups() == set()
    for turn in turns:
        off = [place for place in turn if place in ready]
        on = [place for place in turn if place not in ready]
        whole.update_rows(np.array(on, "i8"), np.array(off, "i8"), groups)
        ready ^= set(turn)
        counts = Counter(place // size for place in ready)
        full = sorted(group for group, count in counts.items() if count == size)
        assert whole.ready_counts() == counts
        assert len(whole) == len(full)
        assert whole.first_groups(len(full) + 1) == full
        assert whole.first_groups(2) == full[:2]
        assert all(whole.is_partial(group) == (count < size) for group, count in counts.items())
        if asked:
            assert {place // size for place in on} <= whole.take_grown_groups()
    assert not whole.is_partial(7 * CHUNK)
    whole.update_rows(NONE, np.array(sorted(ready), "i8"), groups)
    assert not whole.counts, "groups without ready rows take no space"
