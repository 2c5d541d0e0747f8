"""Partitions with a limit of rows, bytes or seconds."""

from __future__ import annotations

from harness import BYTES, Harness
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transfer_queue.core.tables.windows import MARKS, RowAges
from transfer_queue.messages.queries import ListKeys
from transfer_queue.messages.system import Status


def status(h: Harness):
    return h.look(Status()).partitions[0]


def test_rows():
    h = Harness()
    h.create(keep_rows=5)
    h.put(4)
    h.put(3)
    assert h.live() == [2, 3, 4, 5, 6]
    h.put(9)
    assert h.live() == [11, 12, 13, 14, 15]
    assert status(h).dropped == {"retention: keep_rows": 11}


def test_bytes():
    h = Harness()
    h.create(keep_bytes=3 * BYTES)
    for _ in range(5):
        h.put(2)
    assert status(h).nbytes == 3 * BYTES
    assert h.live() == [4, 5, 6, 7, 8, 9]
    assert status(h).dropped == {"retention: keep_bytes": 4}


def test_age():
    h = Harness()
    h.create(keep_seconds=64.0)
    h.put(2)
    h.tick(30.0)
    h.put(1)
    assert h.controller.next_deadline() == 64.0
    h.tick(63.9)
    assert h.live() == [0, 1, 2]
    h.tick(64.0)
    assert h.live() == [2]
    assert h.controller.next_deadline() == 94.0
    h.tick(94.0)
    assert h.live() == []
    assert h.controller.next_deadline() is None
    assert status(h).dropped == {"retention: keep_seconds": 3}


def test_rows_cleared_by_hand_leave_no_deadline():
    h = Harness()
    h.create(keep_seconds=64.0)
    h.clear(h.put(2))
    assert h.controller.next_deadline() is None


def test_groups_are_dropped_completely():
    h = Harness()
    h.create(keep_rows=3, group_size=2)
    h.put(4, groups=["a", "b", "a", "b"])
    assert h.live() == [1, 3], "row 0 is one too many, and group 'a' is of no use without it"


def test_keys_are_dropped_with_their_rows():
    h = Harness()
    h.create(keep_rows=1)
    h.put(2, keys=["old", "new"])
    assert list(h.look(ListKeys(["p"])).value["p"]) == ["new"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(0, 3)), max_size=40))
def test_rows_are_never_dropped_too_early(steps):
    """No row goes before its time, and none stays a mark's width beyond it."""
    keep = 64.0
    births, now, end, came = RowAges(keep), 0.0, 0, []
    for pause, rows in steps:
        now += pause
        end += rows
        came += [now] * rows
        if rows:
            births.add(now, end, 0)
        gone = births.expired_end(now, keep)
        assert all(at + keep <= now for at in came[:gone])
        assert all(at > now - keep - keep / MARKS for at in came[gone:])
    assert len(births.marks) <= len(steps)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0, 1e6), st.floats(0.001, 1e5))
@example(0.30000000000000004, 0.1)
def test_at_its_deadline_a_row_is_dropped(came, keep):
    """Whatever the numbers round to, the deadline does not pass without a drop."""
    h = Harness()
    h.tick(came)
    h.create(keep_seconds=keep)
    h.put(1)
    deadline = h.controller.next_deadline()
    assert deadline is not None
    h.tick(deadline)
    assert h.live() == []
    assert h.controller.next_deadline() is None
