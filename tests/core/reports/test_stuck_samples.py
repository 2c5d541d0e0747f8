"""Samples that do not change and are not finished, against a model that looks at each sample."""

from __future__ import annotations

import pytest
from harness import Harness, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from report_reader import find_stuck

from transfer_queue.core.reports import sample_report
from transfer_queue.core.timeline import event_ring
from transfer_queue.messages.puts import Reserve


def test_a_sample_is_stuck_until_it_has_all_fields_and_is_consumed(h: Harness) -> None:
    rows = h.put(2, ("x",), keys=["a", "b"])
    h.put(1, ("y",), rows=rows[:1])
    h.now = 100.0
    report = find_stuck(h, 60.0)
    assert [(each.key, each.missing, each.client) for each in report.samples] == [("b", ["y"], "w")]
    h.put(1, ("y",), rows=rows[1:])
    assert find_stuck(h, 60.0).total == 0
    h.claim(1)
    h.now = 300.0
    (stuck,) = find_stuck(h, 60.0).samples
    assert (stuck.index, stuck.time, [task.name for task in stuck.tasks]) == (rows[1], 100.0, ["t"])


def test_a_change_of_a_tag_counts(h: Harness) -> None:
    rows = h.put(2, ("x",))
    h.claim(5, wait=900.0)
    h.now = 50.0
    h.put(1, None, name="tagger", rows=rows[:1], tags=[{"a": 1}])
    h.now = 70.0
    assert [each.index for each in find_stuck(h, 60.0).samples] == [rows[1]]
    found = find_stuck(h, 10.0)
    assert [(each.index, each.time, each.client) for each in found.samples] == [
        (rows[1], 0.0, "w"), (rows[0], 50.0, "tagger"),
    ]  # fmt: skip


def test_samples_of_a_prompt_are_together(h: Harness) -> None:
    for second, keys in enumerate((["p1_0", "p2_0"], ["p1_1"], ["lonely"])):
        h.now = float(second)
        h.put(len(keys), ("x",), keys=keys)
    h.claim(9, wait=900.0)
    h.now = 100.0
    found = [(each.prompt, each.key) for each in find_stuck(h, 60.0).samples]
    assert found == [("p1", "p1_0"), ("p1", "p1_1"), ("", "p2_0"), ("", "lonely")]


def test_what_changed_before_a_restart_counts_from_then(h: Harness) -> None:
    h.put(1)
    h.now = 100.0
    h.restart()
    h.claim(5, wait=900.0)
    h.now = 130.0
    assert find_stuck(h, 60.0).total == 0
    h.now = 161.0
    (stuck,) = find_stuck(h, 60.0).samples
    assert stuck.time is None


def test_only_one_partition(h: Harness) -> None:
    h.put(1, partition="p")
    h.put(2, partition="q")
    for name in ("p", "q"):
        h.claim(9, wait=900.0, partition=name)
    h.now = 100.0
    assert find_stuck(h, 60.0).partitions == {"p": 1, "q": 2}
    assert find_stuck(h, 60.0, "q").partitions == {"q": 2}
    assert find_stuck(h, 60.0, "none").partitions == {}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "more", "tag", "claim", "clear", "reserve"]), st.integers(0, 9)),
        min_size=1, max_size=25,
    ),
    st.integers(0, 12),
    st.integers(1, 5),
)  # fmt: skip
def test_it_finds_the_same_as_a_check_of_each_sample(steps: list[tuple[str, int]], seconds: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sample_report, "MAX_COLUMNS", 1)
        patched.setattr(event_ring, "MAX_CHECKPOINTS", 10_000)
        h = Harness()
        changed: dict[int, float] = {}
        fields: dict[int, set[str]] = {}
        taken: set[int] = set()
        for second, (what, at) in enumerate(steps):
            h.now = float(second)
            chosen = sorted(changed)[at : at + 2]
            new: list[int] = []
            if what == "put":
                new = chosen = h.put(at % 3 + 1, ("x",))
            elif what == "reserve":
                new = rows_of(h.ask(Reserve("p", 1, None, pre_allocate=0)))
                changed[new[0]], fields[new[0]] = h.now, set()
                continue
            elif what == "more" and chosen:
                h.put(len(chosen), ("y",), rows=chosen)
            elif what == "tag" and chosen:
                h.put(len(chosen), None, rows=chosen, tags=[{"a": 1}] * len(chosen))
            elif what == "claim":
                taken |= set(h.dealt(1) or [])
                continue
            elif what == "clear":
                h.clear(chosen)
                for row in chosen:
                    del changed[row], fields[row]
                continue
            for row in chosen:
                changed[row] = h.now
                fields.setdefault(row, set()).update({"put": {"x"}, "more": {"y"}}.get(what, set()))
        everything = set().union(*fields.values()) if fields else set()
        claimed = any(partition.tasks for partition in h.state.partitions.values())
        expected = sorted(
            (changed[row], row)
            for row in changed
            if changed[row] <= h.now - seconds and ((claimed and row not in taken) or everything - fields[row])
        )
        found = find_stuck(h, float(seconds), limit=limit)
        assert found.total == len(expected)
        assert {(each.time, each.index) for each in found.samples} == set(expected[:limit])
