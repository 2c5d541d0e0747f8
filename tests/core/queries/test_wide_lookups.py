"""A lookup of very many fields is done in steps, and its reply is that of a lookup at one of the moments meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness, column, encode, places, tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.queries import value_locations, wide_lookups
from transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.envelopes import ReplyEnvelope
from transfer_queue.messages.partitions import ClearPartition, ListPartitions
from transfer_queue.messages.puts import ClearRows
from transfer_queue.messages.queries import Lookup, LookupReply

NAMES = [f"f{number}" for number in range(10)]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_lookups, "WIDE", 4)
    monkeypatch.setattr(wide_lookups, "STEP", 2)


@pytest.fixture
def h() -> Harness:
    made = Harness()
    made.put(3, NAMES)
    return made


def by_rows(rows: list[int], fields: list[str] | None) -> Lookup:
    return Lookup("p", column(rows), fields=fields)


def decoded(reply: Any) -> Any:
    """Return the reply as its client gets it."""
    return msgspec.msgpack.decode(encode(ReplyEnvelope(1, reply)), type=ReplyEnvelope).body


def ended(h: Harness, sequence: int, name: str = "w") -> Any:
    for _ in range(200):
        if h.reply(sequence, name) is not None:
            break
        assert h.controller.next_deadline() is not None
        h.tick(h.now)
    return decoded(h.reply(sequence, name))


def direct(h: Harness, request: Lookup) -> Any:
    try:
        return decoded(value_locations.locate(h.state, request))
    except TransferQueueError as error:
        return Failure(type(error).__name__, str(error))


def test_others_are_served_between_the_steps(h: Harness) -> None:
    sequence = h.send(by_rows([0, 2], NAMES))
    for _ in range(4):
        assert h.reply(sequence) is None
        assert h.ask(ListPartitions()).value == ["p"]
        h.tick(h.now)
    assert ended(h, sequence) == direct(h, by_rows([0, 2], NAMES))
    assert not h.controller.wide_lookups.jobs


@pytest.mark.parametrize("fields", [None, NAMES, NAMES[::-1], [*NAMES, "f3"], [*NAMES, "missing"]])
@pytest.mark.parametrize("rows", [[0], [2, 0], [0, 3], [3], [0, 9]])
def test_the_reply_is_that_of_one_step(h: Harness, rows: list[int], fields: list[str] | None) -> None:
    h.put(1, [*NAMES[:5], "more"])
    request = by_rows(rows, fields)
    assert ended(h, h.send(request)) == direct(h, request)


@pytest.mark.parametrize("fields", [None, NAMES, [*NAMES, "missing"]])
@pytest.mark.parametrize("keys", [["a"], ["b", "a"], ["a", "unknown"], ["unknown"]])
@pytest.mark.parametrize("versions", [False, True])
def test_the_reply_for_keys_is_that_of_one_step(keys: list[str], fields: list[str] | None, versions: bool) -> None:
    h = Harness()
    h.put(2, NAMES, keys=["a", "b"])
    h.put(1, ["more"], keys=["a"])
    request = Lookup("p", None, keys, fields, versions=versions)
    assert ended(h, h.send(request)) == direct(h, request)


def test_rows_that_are_cleared_between_the_steps_are_an_error(h: Harness) -> None:
    sequence = h.send(by_rows([0, 1], NAMES))
    h.tick(h.now)
    h.clear([1])
    ended(h, sequence)
    with pytest.raises(StorageKeyNotFoundError, match="cleared"):
        h.result(sequence)


def test_a_lookup_whose_rows_always_change_is_answered(h: Harness) -> None:
    sequence = h.send(by_rows([0], NAMES))
    for _ in range(200):
        if h.reply(sequence) is not None:
            break
        h.put(1, ["f0"], rows=[0])
        h.tick(h.now)
    assert decoded(h.reply(sequence)).count == 1


def test_a_lookup_ends_with_its_connection(h: Harness) -> None:
    sequence = h.send(by_rows([0], NAMES))
    h.tick(h.now)
    old = h.client("w").peer
    h.connect("w")
    h.disconnect("w", old)
    assert not h.controller.wide_lookups.jobs
    h.send(by_rows([0], NAMES), sequence=sequence)
    assert ended(h, sequence).count == 1


changes = st.sampled_from(["put", "replace", "clear", "drop", "other", "type"])


@differential(60)
@given(
    steps=st.lists(st.lists(changes, max_size=2), max_size=12),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
    fields=st.sampled_from([None, NAMES, NAMES[:4]]),
)
def test_the_reply_is_right_at_a_moment_of_the_steps(
    steps: list[list[str]], rows: list[int], fields: list[str] | None
) -> None:
    h = Harness()
    h.put(4, NAMES)
    request = by_rows(rows, fields)
    sequence = h.send(request)
    moments = [direct(h, request)]
    for some in steps:
        for change in some:
            if change == "put":
                h.put(1, NAMES)
            elif change == "replace" and "p" in h.state.partitions:
                live = h.state.partitions["p"].rows.positions_of(np.arange(1))
                if live[0] >= 0:
                    h.put(1, NAMES[:3], rows=[0])
            elif change == "clear":
                h.ask(ClearRows("p", column([1])))
            elif change == "drop":
                h.ask(ClearPartition("p"))
            elif change == "other":
                h.put(1, ["other"], partition="other")
            else:
                h.put(1, {"f2": tensor("float64")})
            moments.append(direct(h, request))
        h.tick(h.now)
    reply = ended(h, sequence)
    if isinstance(reply, Failure):
        assert any(isinstance(moment, Failure) and moment.kind == reply.kind for moment in moments)
        return
    assert isinstance(reply, LookupReply)
    found = [moment for moment in moments if isinstance(moment, LookupReply) and moment.count == reply.count]
    assert any(
        places(moment) == places(reply) and [each.name for each in moment.types] == [each.name for each in reply.types]
        for moment in found
    )


def test_fields_whose_rows_differ_in_rank_have_the_type_of_the_rows(h: Harness) -> None:
    h.put(2, dict.fromkeys(NAMES, tensor("float32", [(2, 2), ()])))
    for rows in ([0, 1], [3], [4], [1, 4], [3, 4]):
        request = by_rows(rows, NAMES)
        found = ended(h, h.send(request))
        assert found == direct(h, request)
        assert {each.mixed_rank for each in found.types} == {len(rows) == 2 and rows != [0, 1]}
