"""Puts: keys and tags, pre-allocated rows, seals, capacity; a refused put leaves nothing."""

from __future__ import annotations

import pytest
from harness import DELETE, Harness, column, rows_of

from transfer_queue.errors import (
    CapacityError,
    DuplicateError,
    InvalidArgumentError,
    ProtocolError,
    SealedError,
    StorageKeyNotFoundError,
    UnknownPartitionError,
)
from transfer_queue.messages.partitions import ClearPartition, CreatePartition, ListPartitions, Seal
from transfer_queue.messages.puts import ClearKeys, PublishReply, Reserve
from transfer_queue.messages.queries import (
    CheckConsumption,
    CheckProduction,
    ListKeys,
    ProductionStatus,
    RetrieveKeys,
    RetrieveMeta,
)
from transfer_queue.messages.storage import UnitStatus
from transfer_queue.messages.system import Status
from transfer_queue.messages.tag_table import TagTable, tag_rows
from transfer_queue.wire.objects.object_values import DELETE as REMOVED
from transfer_queue.wire.objects.tag_rows import table_of_tags


def tags(h: Harness, partition: str = "p") -> dict[str, dict[str, object]]:
    return h.ask(ListKeys([partition])).value[partition]  # type: ignore[no-any-return]


# ---------------------------------------------------------------- keys and tags


def test_keys_are_created_once(h: Harness) -> None:
    assert h.put(2, keys=["a", "b"]) == [0, 1]
    assert h.put(3, ("y",), keys=["c", "b", "a"]) == [2, 1, 0]
    assert list(tags(h)) == ["a", "b", "c"]
    assert h.ask(RetrieveKeys("p", column([2, 0, 9]))).value == ["c", "a", None]
    assert rows_of(h.ask(RetrieveMeta("p", ["c", "zzz", "a"]))) == [2, 0]


def test_the_reply_of_a_put_by_keys(h: Harness) -> None:
    h.put(1, keys=["a"], tags=[{"n": 1, "s": "old"}])
    reply = h.ask(h.publish(2, ("y",), keys=["a", "b"], tags=[{"s": "new"}, None]))
    assert isinstance(reply, PublishReply)
    assert (reply.tags, reply.fields) == ([{"n": 1, "s": "new"}, {}], ["y"])
    assert h.ask(h.publish(1, ("z",), keys=["a"])).fields == ["x", "y", "z"]
    reply = h.ask(h.publish(1, None, keys=["c"], tags=[{"n": 3}]))
    assert (reply.tags, reply.fields) == (None, None), "who puts new keys knows what they have"
    reply = h.ask(h.publish(1, None, keys=["c"], tags=[{"m": 4}]))
    assert (reply.tags, reply.fields) == ([{"n": 3, "m": 4}], [])


def table(rows: int, **tags: object) -> TagTable:
    """The same tag for each of these rows, as columns."""
    made = table_of_tags([tags] * rows, True)
    assert made is not None
    return made


def test_a_reply_does_not_repeat_tags_that_are_those_of_the_put(h: Harness) -> None:
    keys = [f"k{i}" for i in range(9)]

    def put(sent: object, **more: object) -> PublishReply:
        reply = h.ask(h.publish(9, None, keys=keys, tags=sent, **more))
        assert isinstance(reply, PublishReply)
        return reply

    assert not put(table(9, n=1)).tags_as_sent, "all keys were new"
    assert (put(table(9, n=2, m=None)).tags_as_sent, put(table(9, n=2, m=None)).tags) == (True, None)
    assert tags(h) == {key: {"n": 2, "m": None} for key in keys}
    merged = put(table(9, n=3))
    assert not merged.tags_as_sent
    assert tag_rows(merged.tags, 9) == [{"n": 3, "m": None}] * 9
    removed = put(table(9, n=REMOVED, m=4))
    assert (removed.tags_as_sent, tag_rows(removed.tags, 9)) == (False, [{"m": 4}] * 9)
    assert put(table(9, k="v"), replace_tags=True).tags_as_sent
    assert put(table(9)).tags_as_sent is False
    some = put([{"k": "w"}] * 9)
    assert (some.tags_as_sent, tag_rows(some.tags, 9)) == (False, [{"k": "w"}] * 9), "few rows have a dict each"


def test_tags_merge(h: Harness) -> None:
    h.put(2, keys=["a", "b"], tags=[{"n": 1, "status": "new"}, {}])
    h.ask(h.publish(1, None, keys=["a"], tags=[{"status": "running"}]))
    assert tags(h) == {"a": {"n": 1, "status": "running"}, "b": {}}
    h.ask(h.publish(2, None, rows=[0, 1], tags=[{"n": DELETE, "m": DELETE}, {"k": [1]}]))
    assert tags(h) == {"a": {"status": "running"}, "b": {"k": [1]}}
    h.ask(h.publish(2, None, rows=[1, 0], tags=[None, {"status": DELETE}]))
    assert tags(h) == {"a": {}, "b": {"k": [1]}}


def test_tags_are_replaced(h: Harness) -> None:
    h.put(3, keys=["a", "b", "c"], tags=[{"n": 1}, {"n": 2}, {"n": 3}])
    h.ask(h.publish(3, None, rows=[0, 1, 2], tags=[{"m": 1}, {}, None], replace_tags=True))
    assert tags(h) == {"a": {"m": 1}, "b": {}, "c": {"n": 3}}
    h.ask(h.publish(1, None, rows=[0], tags=[{"k": DELETE, "j": 2}], replace_tags=True))
    assert tags(h)["a"] == {"j": 2}


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"keys": ["a", "a"]}, DuplicateError),
        ({"keys": ["a"]}, InvalidArgumentError),
        ({"rows": [0, 0]}, DuplicateError),
        ({"rows": [0]}, InvalidArgumentError),
        ({"rows": [0, 1], "keys": ["a", "b"]}, InvalidArgumentError),
        ({"rows": [0, 55]}, StorageKeyNotFoundError),
        ({"rows": [0, 3]}, StorageKeyNotFoundError),
        ({"tags": [{}]}, InvalidArgumentError),
        ({"groups": ["g"]}, InvalidArgumentError),
        ({"fields": None}, InvalidArgumentError),
        ({"partition": "nobody", "rows": [0, 1]}, StorageKeyNotFoundError),
    ],
    ids=str,
)
def test_refused_puts_leave_nothing(h: Harness, more: dict[str, object], error: type[Exception]) -> None:
    h.put(3)
    h.put(1, partition="q")
    request = h.publish(**{"count": 2, **more})  # type: ignore[arg-type]
    with h.refuses(error):
        h.ask(request)


def test_duplicates_are_named(h: Harness) -> None:
    for _ in range(2):  # of new keys, and then of known and new ones
        with pytest.raises(DuplicateError, match=r"Got duplicated keys in one put: \['a'\]"):
            h.put(3, keys=["a", "b", "a"])
        h.put(1, keys=["a"])
    h.put(1, keys=["b"])
    with pytest.raises(DuplicateError, match=r"Got duplicated keys in one put: \['b'\]"):
        h.put(3, ("y",), keys=["a", "b", "b"])
    h.put(8)
    with pytest.raises(DuplicateError, match=r"each sample once, but repeats \[1, 2, 3, 4, 5\] and 1 more"):
        h.put(14, rows=[*range(8), *range(1, 7)])


def test_invalid_numbers_of_rows_are_refused(h: Harness) -> None:
    kind, many = type(h.publish(1, None, tags=[{}])), 1 << 40
    for wrong in (
        kind("p", 0, tags=[]),
        kind("p", many, tags=[]),
        Reserve("p", many, None),
        CreatePartition("p", many),
    ):
        with pytest.raises(InvalidArgumentError):
            h.ask(wrong)
    assert h.ask(ListPartitions()).value == []


# ---------------------------------------------------------------- reservations and pre-allocation


def test_reserved_rows_may_be_written_later(h: Harness) -> None:
    reply = h.ask(Reserve("p", 3, None, 0))
    assert rows_of(reply) == [0, 1, 2]
    assert reply.produced == b"\0\0\0"
    assert h.dealt(1) == []
    h.put(2, rows=[2, 0])
    assert h.dealt(2) == [0, 2]


def test_reserve_by_keys(h: Harness) -> None:
    h.put(1, keys=["b"], tags=[{"n": 1}])
    reply = h.ask(Reserve("p", 0, ["a", "b", "c", "a"], 0))
    assert rows_of(reply) == [1, 0, 2, 1]
    assert reply.tags == [{}, {"n": 1}, {}, {}]
    assert h.ask(RetrieveKeys("p", column([0, 1, 2]))).value == ["b", "a", "c"]
    assert rows_of(h.ask(Reserve("p", 0, ["c"], 0))) == [2]


def test_reserve_with_groups(h: Harness) -> None:
    h.ask(Reserve("p", 2, None, 0, ["g", "g"]))
    assert h.state.partitions["p"].groups.by_name["g"].members == [0, 1]
    for wrong in (Reserve("p", 2, None, 0, ["g"]), Reserve("p", 1, ["k"], 0, ["g"])):
        with pytest.raises(InvalidArgumentError, match="group_ids"):
            h.ask(wrong)


def test_pre_allocated_rows_are_taken_in_order(h: Harness) -> None:
    assert h.ask(CreatePartition("p", 3)).value is True
    assert h.ask(CreatePartition("p", 9)).value is False
    assert h.put(2, pre_allocate=9) == [0, 1]
    assert h.put(2, pre_allocate=9, keys=["a", "b"]) == [2, 3]
    assert h.put(1) == [4]
    assert h.ask(ListKeys(["p"])).value == {"p": {"a": {}, "b": {}}}


def test_the_first_put_creates_the_partition(h: Harness) -> None:
    assert h.put(2, pre_allocate=4) == [0, 1]
    assert h.state.partitions["p"].waiting == [2, 3]
    assert h.put(3, pre_allocate=4, groups=["g", "g", "g"]) == [2, 3, 4]
    assert h.state.partitions["p"].groups.by_name["g"].members == [2, 3, 4]


def test_production_checks_are_false_until_all_rows_are_taken(h: Harness) -> None:
    h.put(1, pre_allocate=2)
    assert h.dealt(1) == [0]
    assert h.ask(CheckProduction("p", ["x"])).value is False
    assert h.ask(CheckConsumption("p", "t")).value is False
    assert h.ask(ProductionStatus("p", ["x"])).matrix == b"\1\0"
    h.put(1)
    assert h.ask(CheckProduction("p", ["x"])).value is True
    assert h.dealt(1) == [1]
    assert h.ask(CheckConsumption("p", "t")).value is True


def test_pre_allocated_rows_cannot_be_named_by_a_put(h: Harness) -> None:
    h.create(pre_allocate=2)
    with pytest.raises(InvalidArgumentError, match="pre-allocated"):
        h.put(1, rows=[0])
    h.clear([0])
    assert h.put(2) == [1, 2]


@pytest.mark.design("never-reserved pre-allocated rows vanish")
def test_a_seal_clears_pre_allocated_rows(h: Harness) -> None:
    h.put(2, pre_allocate=5)
    h.ask(Seal("p"))
    assert h.state.partitions["p"].rows.count == 2
    assert h.ask(CheckProduction("p", ["x"])).value is True
    assert h.dealt(2) == [0, 1]
    assert h.dealt(2) is None


# ---------------------------------------------------------------- seals


@pytest.mark.design("seal forbids new rows, not new fields")
def test_a_sealed_partition_accepts_fields_but_no_rows(h: Harness) -> None:
    h.put(1, keys=["a"])
    h.ask(Seal("p"))
    for request in (h.publish(1), h.publish(2, keys=["a", "b"]), Reserve("p", 1, None, 0)):
        with h.refuses(SealedError, "'p' is sealed"):
            h.ask(request)
    h.put(1, ("y",), keys=["a"])
    h.put(1, ("z",), rows=[0])
    assert h.dealt(1, fields=("x", "y", "z")) == [0]


@pytest.mark.design("producers=N seals after N seals")
def test_every_producer_seals(h: Harness) -> None:
    h.create(producers=3, pre_allocate=1)
    waiting = h.claim(1, wait=10)
    for _ in range(2):
        h.ask(Seal("p"))
        assert h.parked(waiting)
        assert not h.state.partitions["p"].sealed
    h.put(1)
    assert h.got(waiting) == [0]
    waiting = h.claim(1, wait=10)
    h.ask(Seal("p"))
    assert h.got(waiting) is None
    assert h.ask(Seal("p")).value is None, "a seal too many does nothing"
    assert h.state.partitions["p"].seals == 3


def test_a_partition_may_be_sealed_before_its_first_row(h: Harness) -> None:
    h.ask(Seal("p"))
    assert h.dealt(1) is None
    with pytest.raises(SealedError):
        h.put(1)
    h.ask(ClearPartition("p"))
    assert h.put(1) == [0], "a partition made anew is not sealed"


# ---------------------------------------------------------------- capacity


def test_a_put_beyond_the_capacity_leaves_nothing() -> None:
    h = Harness(capacity=3)
    h.put(2)
    request = h.publish(2, keys=["a", "b"], tags=[{"n": 1}, {}], groups=["g", "g"], partition="new")
    with h.refuses(CapacityError, r"capacity of 3 rows.*2 rows are stored, and this put adds 2"):
        h.ask(request)
    with h.refuses(CapacityError):
        h.ask(Reserve("p", 2, None, 0))
    h.put(2, ("y",), rows=[0, 1])
    h.put(1, pre_allocate=50, partition="q")
    h.clear([0])
    h.put(1)


def test_puts_wait_for_space_in_order() -> None:
    h = Harness(capacity=4)
    h.put(4)
    first = h.send(h.publish(2, wait=10, name="a"), "a")
    second = h.send(h.publish(1, wait=10, name="b"), "b")
    third = h.send(Reserve("p", 1, None, 0, wait=20), "c")
    assert all(h.parked(s, n) for s, n in ((first, "a"), (second, "b"), (third, "c")))
    h.clear([0, 1])
    assert rows_of(h.result(first, "a")) == [4, 5]
    assert h.parked(second, "b")
    h.ask(ClearPartition("q"))
    h.clear([2])
    assert rows_of(h.result(second, "b")) == [6]
    h.tick(9)
    assert h.parked(third, "c")
    h.clear([3])
    assert rows_of(h.result(third, "c")) == [7]


def test_a_large_put_does_not_starve_smaller_ones() -> None:
    h = Harness(capacity=4)
    h.put(4)
    large = h.send(h.publish(4, wait=10, name="a"), "a")
    small = h.send(h.publish(1, wait=10, name="b"), "b")
    h.clear([0])
    assert rows_of(h.result(small, "b")) == [4]
    assert h.parked(large, "a")


@pytest.mark.parametrize("wait", [None, 0.0, -1.0])
def test_without_a_wait_a_put_fails_at_once(wait: float | None) -> None:
    h = Harness(capacity=1)
    h.put(1)
    with pytest.raises(CapacityError):
        h.ask(h.publish(1, wait=wait))


def test_the_wait_for_space_ends() -> None:
    h = Harness(capacity=1)
    h.put(1)
    sequence = h.send(h.publish(1, wait=5))
    known = h.send(h.publish(2, ("y",), keys=["a", "b"], wait=7))
    assert h.controller.next_deadline() == 5
    h.tick(5)
    with pytest.raises(CapacityError, match=r"capacity of 1 rows.*It waited 5 s"):
        h.result(sequence)
    h.tick(7)
    with pytest.raises(CapacityError, match="capacity"):
        h.result(known)
    assert h.controller.next_deadline() is None


def test_a_parked_put_is_refused_when_its_partition_is_sealed_meanwhile() -> None:
    h = Harness(capacity=1)
    h.put(1)
    sequence = h.send(h.publish(1, wait=5))
    h.ask(Seal("p"), "other")
    with pytest.raises(SealedError):
        h.result(sequence)


def test_a_parked_put_ends_with_its_connection() -> None:
    h = Harness(capacity=1)
    h.put(1)
    sequence = h.send(h.publish(1, wait=5, name="a"), "a")
    h.disconnect("a")
    h.clear([0])
    assert not h.parked(sequence, "a")
    assert h.state.row_count == 0


# ---------------------------------------------------------------- partitions


def test_partitions_are_listed_in_order(h: Harness) -> None:
    for name in ("b", "a", "c"):
        assert h.create(name)
    assert not h.create("a")
    h.ask(ClearPartition("a"))
    h.ask(ClearPartition("nobody"))
    assert h.ask(ListPartitions()).value == ["b", "c"]
    for wrong in ({"group_size": 0}, {"producers": 0}):
        with pytest.raises(InvalidArgumentError):
            h.create("d", **wrong)


def test_unknown_partitions_everywhere(h: Harness) -> None:
    h.put(1)
    before = h.state.snapshot()["partitions"]
    with pytest.raises(UnknownPartitionError, match=r"'nobody'.*'p'"):
        h.ask(RetrieveKeys("nobody", column([0])))
    assert rows_of(h.ask(RetrieveMeta("nobody", ["a"]))) == []
    h.clear([0], "nobody")
    h.ask(ClearKeys("nobody", ["a"]))
    assert h.ask(CheckProduction("nobody", ["x"])).value is False
    assert h.ask(CheckConsumption("nobody", "t")).value is False
    assert h.ask(ProductionStatus("nobody", ["x"])).known is False
    assert h.dealt(1, partition="nobody") == []
    assert h.state.snapshot()["partitions"] == before


def test_status(h: Harness) -> None:
    h.put(3, ("x", "y"), pre_allocate=5, groups=["g", "g", "k"])
    h.dealt(2)
    h.clear([0])
    h.claim(9, wait=100, task="u")
    h.now = 4.0
    (found,) = h.ask(Status()).partitions
    assert (found.name, found.rows, found.reserved, found.sealed, found.orphaned_groups) == ("p", 2, 2, False, 1)
    assert [(f.name, f.produced, f.type) for f in found.fields] == [("x", 2, "float32[4]"), ("y", 2, "float32[4]")]
    assert [(t.name, t.consumed, t.waiting, t.longest_wait) for t in found.tasks] == [
        ("t", 1, 0, 0.0),
        ("u", 0, 1, 4.0),
    ]
    counters = h.ask(Status()).counters
    assert counters["dealt_rows"] == 2
    assert counters["published_rows"] == 3


def test_messages_that_are_not_requests_to_a_controller(h: Harness) -> None:
    with pytest.raises(ProtocolError, match="UnitStatus"):
        h.ask(UnitStatus())
