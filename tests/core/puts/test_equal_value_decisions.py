"""Puts with digests: rows get values of earlier puts, and the index of digests forgets a value with its block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness, column, places, rows_of, tensor

from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.state.check import check_state
from transfer_queue.errors import EqualValueGoneError, InvalidArgumentError
from transfer_queue.messages.descriptors import DIGEST, EqualField
from transfer_queue.messages.puts import ClearKeys, Publish
from transfer_queue.messages.queries import FindEqual, Lookup

replace = msgspec.structs.replace
NOTHING: Any = None


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST, "big")


def equal(name: str, wanted: Sequence[int], known: Sequence[int] = ()) -> EqualField:
    """The digests of rows, given by numbers; 0 for a row that is not hashed."""
    distinct = list(dict.fromkeys(filter(None, wanted)))
    numbers = [distinct.index(number) if number else -1 for number in wanted]
    return EqualField(
        name, b"".join(map(digest, distinct)), np.array(numbers, "<i4").tobytes(),
        bytes(number in known for number in distinct),
    )  # fmt: skip


def put(h: Harness, wanted: Sequence[int], known: Sequence[int] = (), field: str = "x", **more: Any) -> Publish:
    """A put of rows with these digests, which writes the values that are not known."""
    written = [number for number in dict.fromkeys(wanted) if number not in known]
    told = [equal(field, wanted, known)]
    if not written:
        return Publish(more.pop("partition", "p"), len(wanted), equal=told, **{"pre_allocate": 0, **more})
    slots = [-1 if number in known else written.index(number) for number in wanted]
    return h.publish_blocks(len(wanted), ([field], slots), equal=told, **more)


def known(h: Harness, *numbers: int, field: str = "x", partition: str = "p") -> list[bool]:
    reply = h.look(FindEqual(partition, [(field, b"".join(map(digest, numbers)))]))
    return [bool(each) for each in reply.known[0]]


def found(h: Harness, rows: Sequence[int], field: str = "x") -> list[tuple[int, int]]:
    return [row[field] for row in places(h.look(Lookup("p", column(rows), fields=[field])))]


def test_rows_get_the_values_of_earlier_puts(h: Harness) -> None:
    first = rows_of(h.ask(put(h, [1, 2, 1])))
    assert known(h, 1, 2, 3) == [True, True, False]
    held = h.state.blocks.live_bytes
    second = rows_of(h.ask(put(h, [2, 1], known=[1, 2])))
    assert h.state.blocks.live_bytes == held
    one, two, _ = found(h, first)
    assert found(h, second) == [two, one]
    third = rows_of(h.ask(put(h, [3, 1, 3, 2], known=[1, 2])))
    assert [found(h, third)[at] for at in (1, 3)] == [one, two]
    assert found(h, third)[0] == found(h, third)[2] != one
    assert h.dealt(9) == first + second + third


def test_an_unknown_partition_or_field_has_no_digests(h: Harness) -> None:
    assert known(h, 1) == [False]
    h.ask(put(h, [1]))
    assert known(h, 1, field="y") == known(h, 1, partition="q") == [False]


@pytest.mark.parametrize("target", ["keys", "rows"])
def test_rows_that_have_the_value_already_keep_its_block(h: Harness, target: str) -> None:
    keys = {"keys": ["a", "b"]}
    rows = rows_of(h.ask(put(h, [1, 2], **keys)))
    more = keys if target == "keys" else {"rows": column(rows)}
    h.ask(put(h, [1, 1], known=[1], **more))
    h.ask(put(h, [1, 3], known=[1], **more))
    first, second = found(h, rows)
    assert first != second
    assert known(h, 1, 3) == [True, True]
    h.ask(ClearKeys("p", ["a", "b"]))
    assert h.state.blocks.live_bytes == 0
    assert known(h, 1, 2, 3) == [False] * 3


def test_a_digest_is_forgotten_with_its_block_and_with_its_field(h: Harness) -> None:
    one, two = rows_of(h.ask(put(h, [1]))), rows_of(h.ask(put(h, [2])))
    h.clear(one)
    assert known(h, 1, 2) == [False, True]
    both = h.publish_blocks(1, (["x", "y"], [0]), equal=[equal("x", [3]), equal("y", [4])])
    rows = rows_of(h.ask(both))
    h.put(1, ["x"], rows=rows)  # the block stays, for its other field
    h.clear(two)
    assert known(h, 3) == [True]
    h.ask(put(h, [3], known=[3]))
    h.clear(rows)
    assert known(h, 3) == [True]
    assert known(h, 4, field="y") == [False]


def test_a_put_of_a_value_that_was_freed_leaves_nothing(h: Harness) -> None:
    rows = rows_of(h.ask(put(h, [1])))
    late = put(h, [1, 5], known=[1])
    h.clear(rows)
    with pytest.raises(EqualValueGoneError, match="1 values of field 'x'"):
        h.ask(late)
    assert h.dealt(1) is None or h.dealt(1) == []
    assert known(h, 5) == [False]


def test_a_digest_that_is_written_again_stays_where_it_is(h: Harness) -> None:
    first = rows_of(h.ask(put(h, [1])))
    second = rows_of(h.ask(put(h, [1])))
    third = rows_of(h.ask(put(h, [1], known=[1])))
    assert found(h, third) == found(h, first) != found(h, second)
    h.clear(first + third)
    assert known(h, 1) == [False]


def test_a_claim_is_met_by_a_put_of_known_values(h: Harness) -> None:
    h.ask(put(h, [1]))
    h.dealt(1)
    waiting = h.claim(2, wait=10.0)
    rows = rows_of(h.ask(put(h, [1, 1], known=[1])))
    assert h.got(waiting) == rows


WRONG: dict[str, Callable[[Publish], Publish]] = {
    "a field twice": lambda put: replace(put, equal=put.equal * 2),
    "a digest too short": lambda put: _told(put, digests=put.equal[0].digests[:-1]),
    "a digest twice": lambda put: _told(put, digests=digest(1) * 2),
    "a number without a digest": lambda put: _told(put, numbers=np.array([0, 2, 1], "<i4").tobytes()),
    "a number below -1": lambda put: _told(put, numbers=np.array([0, -2, 1], "<i4").tobytes()),
    "too few numbers": lambda put: _told(put, numbers=bytes(8)),
    "neither known nor unknown": lambda put: _told(put, known=b"\2\0"),
    "too few of known": lambda put: _told(put, known=b"\1"),
    "a value that is written and known": lambda put: _told(put, known=b"\1\1"),
    "a value that is neither written nor known": lambda put: _told(put, known=b"\0\0"),
    "no digests": lambda put: replace(put, equal=[]),
    "no block": lambda put: replace(put, block=None),
    "every value in the block": lambda put: replace(put, block=replace(put.blocks[0], slots=bytes(12))),
}


def _told(put: Publish, **changes: Any) -> Publish:
    return replace(put, equal=[replace(put.equal[0], **changes)])


@pytest.mark.parametrize("wrong", WRONG)
def test_digests_that_do_not_match_the_blocks_are_refused(h: Harness, wrong: str) -> None:
    h.ask(put(h, [1]))
    good = put(h, [1, 2, 1], known=[1])
    with pytest.raises(InvalidArgumentError):
        h.ask(WRONG[wrong](good))
    assert len(rows_of(h.ask(good))) == 3


def test_a_state_whose_digests_name_a_freed_block_is_refused(h: Harness) -> None:
    h.ask(put(h, [1]))
    known_values = h.state.blocks.equal.fields
    (key,) = known_values
    kept = dict(known_values[key])
    known_values[key] = {each: (number + 7, slot) for each, (number, slot) in kept.items()}
    h.state.blocks.equal.derive()
    with pytest.raises(BrokenInvariant, match="was freed"):
        check_state(h.state)
    known_values[key] = kept
    h.state.blocks.equal.derive()
    check_state(h.state)


def test_a_put_of_known_values_that_waits_for_capacity_is_decided_again(h: Harness) -> None:
    h = Harness(capacity=2)
    rows = rows_of(h.ask(put(h, [1, 2])))
    waiting = h.send(put(h, [1], known=[1], wait=5.0))
    assert h.parked(waiting, "w")
    h.clear(rows)
    with pytest.raises(EqualValueGoneError):
        h.result(waiting, "w")


def test_shared_values_of_another_rank_are_counted_and_forgotten_with_the_rank(h: Harness) -> None:
    (scalar,) = h.put(1, {"x": tensor(shape=())})
    odd = {"x": tensor(shape=(2, 2)), "y": tensor()}
    (first,) = rows_of(h.ask(h.publish_blocks(1, (odd, [0]), equal=[equal("x", [1])])))
    (second,) = rows_of(h.ask(put(h, [1], known=[1])))

    def ranks() -> dict[int, int]:
        field = h.state.partitions["p"].fields["x"]
        return {field.ndim: field.live - field.counts.total(), **field.counts}

    assert ranks() == {0: 1, 2: 2}
    h.clear([second])
    assert ranks() == {0: 1, 2: 1}
    h.put(1, {"x": tensor(shape=())}, rows=[first])
    assert ranks() == {0: 2}
    assert known(h, 1) == [False], "although its block is needed for y"
    h.ask(put(h, [2], rows=column([scalar])))
    assert ranks() == {0: 1, 1: 1}
    h.ask(put(h, [2], known=[2], rows=column([first])))
    assert ranks() == {1: 2}
