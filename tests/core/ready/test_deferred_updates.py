"""Ready sets process publications when a claim needs them, with the same result as at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.tables import ready_sets
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.core.tables.rows import CHUNK

SETS = [("t", ("x",)), ("u", ("x", "y")), ("v", ("y",)), ("w", ("z",))]
steps = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 4), st.sampled_from([("x",), ("x", "y"), ("z",)])),
        st.tuples(st.just("more"), st.integers(1, 6), st.sampled_from([("x",), ("y", "z")])),
        st.tuples(st.just("ask"), st.integers(0, 3), st.none()),
        st.tuples(st.just("claim"), st.integers(0, 3), st.none()),
        st.tuples(st.just("wait"), st.integers(0, 3), st.none()),
        st.tuples(st.just("clear"), st.integers(1, 3), st.none()),
    ),
    max_size=25,
)


@differential(40, costly=True)
@given(steps=steps, grouped=st.booleans())
def test_deferred_updates_have_the_result_of_immediate_ones(steps: list[tuple[str, int, Any]], grouped: bool) -> None:
    """After each event, `check_invariants` checks copies of the sets that have processed all publications."""
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(ready_sets, "MAX_ENTRIES", 4)
        limits.setattr(ready_sets, "MAX_ROWS", 12)
        h = Harness()
        h.put(2)
        partition, rows = h.state.partitions["p"], [0, 1]
        for what, number, fields in steps:
            if what == "new":
                groups = {"groups": [f"g{len(rows) // 2}"] * number} if grouped else {}
                rows += h.put(number, fields, **groups)
            elif what == "more" and rows:
                h.put(len(rows[::number]), fields, rows=rows[::number])
            elif what == "clear":
                h.clear(rows[::-number][:2])
                rows = [row for row in rows if row not in rows[::-number][:2]]
            elif what == "ask":
                partition.ready_set(*SETS[number]).whole_groups(2, partition.groups)
            elif what in ("claim", "wait"):
                task, names = SETS[number]
                h.claim(2 if what == "claim" else 9, task, names, wait=100 if what == "wait" else None)
            assert len(partition.unseen._entries) <= 4
        for task, names in SETS:
            found, fresh = partition.ready_set(task, names), ReadySet(task, names)
            fresh.unbuilt = list(partition.rows.chunks)
            fresh.build(partition.rows)
            assert found.page(0, found.total)[0].tolist() == fresh.page(0, fresh.total)[0].tolist()


def test_a_put_updates_no_set_for_which_no_claim_waits(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    h.put(4)
    for number in range(20):
        h.claim(1, f"task-{number}")
    waiting = h.claim(2, "late", wait=100)
    assert h.got(waiting) == [0, 1]
    waiting = h.claim(20, "late", wait=100)
    touched: list[tuple[str, list[int]]] = []
    update = ReadySet.update

    def noted(self: ReadySet, key: int, chunk: Any, at: np.ndarray, groups: Any) -> bool:
        touched.append((self.task, at.tolist()))
        return update(self, key, chunk, at, groups)

    monkeypatch.setattr(
        "transfer_queue.testing.state_recount._check_ready", lambda *_: None
    )  # because it reads all sets
    monkeypatch.setattr(ReadySet, "update", noted)
    for _ in range(6):
        h.put(1)
    assert touched == [("late", [row]) for row in range(4, 10)]
    touched.clear()
    h.put(1, rows=[3])
    h.put(2)
    h.claim(1, "task-7")
    assert touched[:2] == [("late", [3]), ("late", [10, 11])]
    assert touched[2] == ("task-7", [3, 4, 5, 6, 7, 8, 9, 10, 11])


def test_consecutive_unprocessed_rows_are_one_entry(h: Harness) -> None:
    h.put(CHUNK - 3)
    partition = h.state.partitions["p"]
    partition.ready_set("t", ("x",))
    for _ in range(6):
        h.put(1)
    assert [entry.at for entry in partition.unseen._entries] == [slice(CHUNK - 3, CHUNK), slice(0, 3)]
    assert partition.ready_set("t", ("x",)).total == CHUNK + 3
