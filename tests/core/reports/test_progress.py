"""The totals in `status`: rates are computed from them, so a clear must not reduce them."""

from __future__ import annotations

from harness import Harness

from transfer_queue.messages.claims import Claim, ResetConsumption
from transfer_queue.messages.reports.overview import MAX_PARTITIONS, ReadProgress
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


def test_progress_is_read_in_pages(h: Harness) -> None:
    names = [f"p{number}" for number in range(10)]
    for name in names:
        h.ask(h.publish(2, ("x",), partition=name))
    seen: list[str] = []
    after, pages = 0, 0
    while True:
        reply = h.look(ReadProgress(["p0", "unknown"], newest=1, page=3, after=after))
        found = [partition.name for partition in reply.status.partitions]
        assert found[:2] == ["p0", "p9"]
        assert (reply.newest, reply.count, reply.rows) == (["p9"], 10, 20)
        assert len(reply.numbers) == len(found)
        seen += found[2:]
        after, pages = reply.next, pages + 1
        if not after:
            break
    assert seen == names[1:9]
    assert pages == 3


def test_a_reply_has_a_limited_number_of_partitions(h: Harness) -> None:
    for number in range(MAX_PARTITIONS + 5):
        h.ask(h.publish(1, ("x",), partition=f"p{number}"))
    reply = h.look(ReadProgress([f"p{number}" for number in range(100)], newest=100, page=100))
    assert len(reply.status.partitions) == MAX_PARTITIONS
    assert reply.count == MAX_PARTITIONS + 5
