"""A put of very many fields is prepared in steps between which others are served, and is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from harness import OBJECT, Harness, rows_of, tensor

from transfer_queue.core import wide_columns, wide_puts
from transfer_queue.errors import FieldTypeError, InvalidArgumentError
from transfer_queue.messages import ClearPartition, ListPartitions, PublishReply, Show

COUNT = 80  # so many are also made together
NAMES = [f"f{number}" for number in range(COUNT)]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_puts, "WIDE", COUNT)
    monkeypatch.setattr(wide_puts, "STEP", 20)


@pytest.fixture
def h() -> Harness:
    return Harness()


def ended(h: Harness, sequence: int) -> PublishReply:
    """Has the steps done; the answer."""
    for _ in range(COUNT):
        if not h.controller.wide_puts.jobs:
            break
        assert h.controller.next_deadline() is not None
        h.tick(h.now)
    reply = h.result(sequence)
    assert isinstance(reply, PublishReply)
    return reply


def test_others_are_served_between_the_steps(h: Harness) -> None:
    sequence = h.send(h.publish(3, NAMES))
    for _ in range(3):
        h.tick(h.now)
        assert h.reply(sequence) is None
        h.put(1, partition="other", name="other")
        assert h.ask(ListPartitions()).value == ["other"]
    assert len(rows_of(ended(h, sequence))) == 3
    assert h.ask(Show("p", NAMES)).produced == b"\1\1\1"
    assert h.dealt(3, fields=[NAMES[0], NAMES[-1]]) is not None


@pytest.mark.parametrize("there", [["f3"], ["f3", "other"], NAMES, NAMES[::2]])
def test_it_is_the_same_put_whatever_the_partition_had(h: Harness, there: list[str]) -> None:
    first = h.put(2, there) if len(there) < COUNT else rows_of(ended(h, h.send(h.publish(2, there))))
    kinds = {name: tensor(shape=[(1,), (number % 3,)]) for number, name in enumerate(NAMES)}
    second = rows_of(ended(h, h.send(h.publish(2, kinds))))
    third = ended(h, h.send(h.publish(2, NAMES, rows=first)))
    assert rows_of(third) == first
    assert h.ask(Show("p", NAMES)).produced == b"\1\1\1\1"
    assert h.dealt(4, fields=NAMES) == first + second
    h.clear(first)
    h.ask(ClearPartition("p"))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_others_put_meanwhile_counts(h: Harness, steps: int) -> None:
    sequence = h.send(h.publish(2, NAMES, pre_allocate=0))
    for _ in range(steps):
        h.tick(h.now)
    h.put(1, {"f0": tensor(), "f25": tensor()})
    ended(h, sequence)
    assert h.dealt(3, fields=["f0", "f25"]) is not None


def test_a_type_that_does_not_fit_at_the_end_leaves_nothing(h: Harness) -> None:
    sequence = h.send(h.publish(2, NAMES, pre_allocate=0))
    h.tick(h.now)
    before = h.put(1, {"f0": OBJECT})
    with pytest.raises(FieldTypeError):
        ended(h, sequence)
    assert rows_of(h.ask(Show("p", ["f0"]))) == before


@pytest.mark.parametrize("at", [3, COUNT - 1])
@pytest.mark.parametrize("wrong", ["kind", "twice", "ndim"])
def test_a_block_that_describes_itself_wrongly_is_refused(h: Harness, at: int, wrong: str) -> None:
    good = h.publish(2, NAMES)
    assert good.block is not None
    schema = list(good.block.schema)
    changes = {"kind": {"kind": "nothing"}, "twice": {"name": "f0"}, "ndim": {"ndim": 3}}
    schema[at] = msgspec.structs.replace(schema[at], **changes[wrong])
    sequence = h.send(msgspec.structs.replace(good, block=msgspec.structs.replace(good.block, schema=schema)))
    with pytest.raises(InvalidArgumentError):
        ended(h, sequence)
    assert h.ask(ListPartitions()).value == []


def test_the_same_put_again_is_answered_once_on_the_newest_connection(h: Harness) -> None:
    request = h.publish(2, NAMES)
    sequence = h.send(request)
    h.tick(h.now)
    h.send(request, sequence=sequence)
    assert len(rows_of(ended(h, sequence))) == 2
    assert len(rows_of(h.ask(Show("p", ["f0"])))) == 2


def test_a_put_whose_connection_ends_leaves_nothing(h: Harness) -> None:
    h.send(h.publish(2, NAMES))
    h.tick(h.now)
    h.disconnect("w")
    assert not h.controller.wide_puts.jobs
    assert h.ask(ListPartitions(), "other").value == []


def test_columns_are_made_in_the_steps_and_nothing_of_the_state_changes(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Columns(wide_columns.WideColumns):
        def columns(self, start: int = 0, stop: int | None = None) -> Iterable[tuple[str, wide_columns.Columns]]:
            found = list(super().columns(start, stop))
            made.append(len(found))
            return found

    monkeypatch.setattr(wide_puts, "WideColumns", Columns)
    h.put(3, ["other"])
    h.controller.take_records()
    sequence = h.send(h.publish(2, NAMES))
    before = h.state.snapshot()
    while h.reply(sequence) is None:
        assert h.state.snapshot() == before
        assert not h.controller.take_records()
        h.tick(h.now)
    assert made == [wide_puts.STEP] * (COUNT // wide_puts.STEP)


@pytest.mark.parametrize("others", [0, 1, 20])
def test_others_may_fill_the_chunk_between_the_steps(h: Harness, others: int) -> None:
    h.put(3, ["other"])
    sequence = h.send(h.publish(2, NAMES))
    for _ in range(5):
        h.tick(h.now)
    if others:
        h.put(others, ["other"], name="other")
    rows = rows_of(ended(h, sequence))
    assert [set(row) for row in h.lookup(rows, NAMES)] == [set(NAMES)] * 2
    assert [slot for _, slot in (row["f7"] for row in h.lookup(rows, ["f7"]))] == [0, 1]


def test_puts_of_the_same_fields_again_and_again_lie_where_the_last_one_was_put(h: Harness) -> None:
    last: dict[int, object] = {}
    rows: list[int] = []

    def put(count: int, fields: list[str], onto: list[int] | None = None) -> None:
        reply = h.send(h.publish(count, fields, rows=onto))
        found = rows_of(ended(h, reply))
        places = h.lookup(found, fields)
        assert len({place for row in places for place, _ in row.values()}) == 1
        for slot, (row, place) in enumerate(zip(found, places)):
            assert {at for _, at in place.values()} == {slot}
            last[row] = place["f3"]
        rows.extend(set(found) - set(rows))
        assert [row["f3"] for row in h.lookup(rows, ["f3"])] == [last[row] for row in rows]

    put(5, NAMES)
    put(5, NAMES)
    put(20, NAMES)  # the chunk grows
    put(3, NAMES, onto=[rows[7], rows[2], rows[29]])
    put(2, ["f3", "f5"], onto=rows[1:3])
    put(4, NAMES, onto=rows[:4])
    h.clear(rows[2:6])
    del rows[2:6]
    put(3, NAMES)
    put(1, [*NAMES, "more"])
    put(2, NAMES)
    assert h.ask(Show("p", NAMES)).produced == b"\1" * len(rows)
