"""A put that its client cancels is withdrawn, unless somebody has used its rows."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness, column, rows_of
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Cancel, ClaimReply
from transfer_queue.messages.partitions import AwaitDone, Seal
from transfer_queue.messages.puts import ClearRows, Drop, Publish, PublishReply, Reserve
from transfer_queue.sampler import GRPOGroupNSampler


def put(h: Harness, count: int = 1, name: str = "w", **more: Any) -> int:
    """Send a put, and return its sequence."""
    return h.send(h.publish(count, name=name, **more), name)


def cancel(h: Harness, sequence: int, name: str = "w") -> bool:
    return h.ask(Cancel(sequence), name).value is True


def test_a_cancelled_request_is_refused_if_it_comes_again() -> None:
    h = Harness()
    request = h.publish(1)
    sequence = h.send(request)
    assert cancel(h, sequence)
    h.send(request, sequence=sequence)
    with pytest.raises(ProtocolError, match="acknowledged"):
        h.result(sequence)
    assert h.live() == []


def test_a_request_that_arrives_after_its_cancellation_is_refused() -> None:
    h = Harness()
    h.create()
    late = h.client("w").sequence + 2
    assert h.ask(Cancel(late)) == Done(False)
    h.send(h.publish(1), sequence=late)
    with pytest.raises(ProtocolError, match="acknowledged"):
        h.result(late)
    assert h.live() == []


def test_a_cancellation_that_is_sent_again_has_one_outcome() -> None:
    h = Harness()
    sequence = put(h)
    cancelling = h.send(Cancel(sequence))
    assert h.result(cancelling) == Done(True)
    h.send(Cancel(sequence), sequence=cancelling)
    assert h.result(cancelling) == Done(True)


USES: dict[str, Any] = {
    "claimed": lambda h: h.dealt(1),
    "leased": lambda h: h.lease(1),
    "tagged": lambda h: h.ask(Publish("p", 1, keys=["a"], tags=[{"n": 1}]), "v"),
    "tagged by index": lambda h: h.ask(Publish("p", 1, rows=column([1]), tags=[{"n": 1}]), "v"),
    "written": lambda h: h.put(1, ["y"], name="v", rows=[1]),
    "cleared": lambda h: h.ask(ClearRows("p", column([1])), "v"),
}


@pytest.mark.parametrize("use", USES)
def test_a_put_of_which_a_row_was_used_stays(use: str) -> None:
    h = Harness()
    h.create(free_when=["t"])
    request = h.publish(2, keys=["a", "b"])
    sequence = h.send(request)
    reply = h.result(sequence)
    USES[use](h)
    before = h.live()
    assert not cancel(h, sequence)
    assert h.live() == before
    h.send(request, sequence=sequence)
    assert h.result(sequence) == reply


@pytest.mark.parametrize("target", [{"keys": ["a"]}, {"rows": [0]}, {"keys": ["a", "new"]}])
def test_a_put_into_existing_rows_stays(target: dict[str, Any]) -> None:
    h = Harness()
    h.put(1, keys=["a"])
    sequence = put(h, len(next(iter(target.values()))), **target)
    before = h.live()
    assert not cancel(h, sequence)
    assert h.live() == before


def test_a_put_that_waits_for_space_is_not_carried_out() -> None:
    h = Harness()
    h.create(max_rows=1, free_when=["t"])
    (first,) = h.put(1)
    sequence, behind = put(h, wait=10.0), put(h, wait=10.0, name="v")
    assert cancel(h, sequence)
    assert h.dealt(1) == [first]
    assert rows_of(h.result(behind, "v")) == h.live()[-1:]
    assert h.state.partitions["p"].admitted == 2


def test_a_withdrawn_put_makes_space_and_ends_a_join() -> None:
    h = Harness()
    h.create(max_rows=1, free_when=["t"])
    sequence = put(h)
    joins = h.send(AwaitDone("p", 10.0), "j")
    behind = put(h, wait=10.0, name="v")
    assert h.parked(joins, "j")
    assert h.parked(behind, "v")
    h.send(Cancel(behind), "v")
    assert cancel(h, sequence)
    assert h.result(joins, "j").value is True
    sequence = put(h)
    behind = put(h, wait=10.0, name="v")
    assert cancel(h, sequence)
    assert rows_of(h.result(behind, "v")) == h.live()


def test_a_withdrawn_put_makes_room_for_staleness() -> None:
    h = Harness()
    h.create(max_staleness=0, rows_per_version=2)
    assert cancel(h, put(h, 2))
    assert len(h.put(2)) == 2


def test_a_withdrawn_put_ends_a_sealed_partition() -> None:
    h = Harness()
    sequence = put(h)
    h.ask(Seal("p"))
    waits = h.claim(1, fields=["y"], wait=10.0)
    assert h.parked(waits, "r")
    assert cancel(h, sequence)
    assert h.got(waits) is None


def test_a_group_that_was_too_large_is_complete_without_the_withdrawn_member() -> None:
    h = Harness(GRPOGroupNSampler(n_samples_per_prompt=2))
    h.create()
    sequence = put(h, groups=["g"])
    rows = [*h.put(1, groups=["g"], name="v"), *h.put(1, groups=["g"], name="v")]
    waits = h.claim(2, wait=10.0)
    assert h.parked(waits, "r")
    assert cancel(h, sequence)
    assert h.got(waits) == rows


def test_a_reservation_is_withdrawn() -> None:
    h = Harness()
    h.create()
    assert cancel(h, h.send(Reserve("p", 2, ["a", "b"], 0)))
    assert (h.live(), h.state.partitions["p"].keys) == ([], {})
    h.put(1, keys=["a"])
    assert not cancel(h, h.send(Reserve("p", 2, ["a", "b"], 0))), "one of its rows existed before"
    sequence = h.send(Reserve("p", 1, None, 0))
    (row,) = rows_of(h.result(sequence))
    h.ask(Publish("p", 1, rows=column([row]), tags=[{"n": 1}]), "v")
    assert not cancel(h, sequence)


def test_puts_that_were_applied_together_are_withdrawn_one_by_one() -> None:
    h = Harness()
    h.put(1)
    mine, other = h.send_together([(name, h.publish(1, name=name)) for name in ("u", "v")])
    (row,) = rows_of(h.result(other, "v"))
    assert cancel(h, mine, "u")
    assert h.live() == [0, row]


def test_a_drop_that_withdraws_leaves_what_tasks_have() -> None:
    h = Harness()
    h.create(free_when=["t"])
    rows = h.put(3)
    taken = h.dealt(1)
    assert h.ask(Drop("p", "cancelled", column(rows), withdraws=True)) == Done(2)
    assert h.live() == taken
    partition = h.state.partitions["p"]
    assert (partition.undone, partition.drops.rows) == (1, {})


PUTS = st.fixed_dictionaries(
    {
        "count": st.integers(1, 3),
        "keyed": st.booleans(),
        "group": st.sampled_from([None, "g", "h"]),
        "field": st.sampled_from(["x", "y"]),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), PUTS),
        st.tuples(st.just("withdrawn put"), PUTS),
        st.tuples(st.just("claim"), st.sampled_from([1, 2, 4])),
    ),
    max_size=14,
)


@differential(40, costly=True)
@given(STEPS, st.sampled_from([1, 2]))
def test_a_withdrawn_put_changes_nothing_that_anybody_sees(steps: list[tuple[str, Any]], group: int) -> None:
    """A partition with withdrawn puts behaves like one in which they were never made."""
    one, two = (Harness(GRPOGroupNSampler(n_samples_per_prompt=group)) for _ in range(2))
    names = 0
    for h in (one, two):
        h.create(max_rows=12, free_when=["t"])
        h.put(1, ["x", "y"], groups=["first"])
    for kind, step in steps:
        got = []
        names += 3
        for h in (one, two):
            if kind == "claim":
                reply = h.reply(h.claim(step), "r")
                got.append(reply.tags if isinstance(reply, ClaimReply) else None)
            elif h is one or kind == "put":
                count = step["count"]
                sequence = h.send(
                    h.publish(
                        count, ["y"] if step["field"] == "y" else ["x"],
                        keys=[f"k{names + at}" for at in range(count)] if step["keyed"] else None,
                        groups=None if step["group"] is None else [step["group"]] * count,
                        tags=[{"n": names + at} for at in range(count)],
                    )
                )  # fmt: skip
                got.append(type(h.reply(sequence)))
                if kind == "withdrawn put" and got[-1] is PublishReply:
                    assert cancel(h, sequence)
        assert kind == "withdrawn put" or got[0] == got[1]
        assert _seen(one) == _seen(two)


def _seen(h: Harness) -> Any:
    partition = h.state.partitions["p"]
    positions = partition.rows.live_positions()
    groups = {name: (len(group.members), group.cleared) for name, group in partition.groups.by_name.items()}
    return (
        partition.tags_of(positions), partition.keys_of(positions), groups, partition.nbytes, partition.undone,
        partition.open_rows, {name: field.live for name, field in partition.fields.items() if field.live},
    )  # fmt: skip
