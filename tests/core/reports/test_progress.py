"""The totals in `status`: rates are computed from them, so a clear must not reduce them."""

from __future__ import annotations

from harness import Harness

from transfer_queue.messages.claims import Claim, ResetConsumption
from transfer_queue.messages.system import Status


def ever(h: Harness) -> tuple[dict[str, int], dict[str, int]]:
    """Field -> values produced so far, task -> rows consumed so far."""
    (partition,) = h.ask(Status()).partitions
    return {f.name: f.produced_ever for f in partition.fields}, {t.name: t.consumed_ever for t in partition.tasks}


def test_total_counts_outlive_clears(h: Harness) -> None:
    h.put(3, ("x",))
    h.put(1, ("y",), rows=[1])
    h.ask(Claim("p", "t", ["x"], 2))
    assert ever(h) == ({"x": 3, "y": 1}, {"t": 2})
    h.clear([0, 1, 2])
    h.put(2, ("x",))
    h.ask(Claim("p", "t", ["x"], 1))
    assert ever(h) == ({"x": 5, "y": 1}, {"t": 3})
    (partition,) = h.ask(Status()).partitions
    assert [f.produced for f in partition.fields] == [2, 0]
    assert [t.consumed for t in partition.tasks] == [1]


def test_a_value_that_is_replaced_is_not_produced_again(h: Harness) -> None:
    h.put(2, ("x",))
    h.put(2, ("x",), rows=[0, 1])
    assert ever(h)[0] == {"x": 2}


def test_rows_consumed_again_count_again(h: Harness) -> None:
    h.put(2, ("x",))
    h.ask(Claim("p", "t", ["x"], 2))
    h.ask(ResetConsumption("p"))
    h.ask(Claim("p", "t", ["x"], 2))
    assert ever(h)[1] == {"t": 4}
