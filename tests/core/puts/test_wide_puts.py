"""A put of very many fields is prepared in steps, with other requests in between, and is applied all at once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from harness import OBJECT, Harness, column, encode, rows_of, tensor

from transfer_queue.core.puts import wide_puts
from transfer_queue.core.tables import field_groups
from transfer_queue.core.tables.field_types import FieldStats
from transfer_queue.core.tables.row_table import Chunk
from transfer_queue.errors import CapacityError, FieldTypeError, InvalidArgumentError
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.partitions import ClearPartition, ListPartitions
from transfer_queue.messages.puts import Publish, PublishReply
from transfer_queue.messages.queries import Lookup, ShowRows

COUNT = 80  # the columns of this many fields are also made together
NAMES = [f"f{number}" for number in range(COUNT)]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_puts, "WIDE", COUNT)
    monkeypatch.setattr(wide_puts, "STEP", 20)


@pytest.fixture
def h() -> Harness:
    return Harness()


def in_parts(request: Publish, size: int = 30) -> Publish:
    """Return the same put in the form in which a client sends it if it has very many fields."""
    assert request.block is not None
    schema = request.block.schema
    parts = [encode(schema[start : start + size]) for start in range(0, len(schema), size)]
    return msgspec.structs.replace(request, block=msgspec.structs.replace(request.block, schema=[], parts=parts))


def ended(h: Harness, sequence: int) -> PublishReply:
    """Do all steps; return the answer."""
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
    assert h.ask(ShowRows("p", NAMES)).produced == b"\1\1\1"
    assert h.dealt(3, fields=[NAMES[0], NAMES[-1]]) is not None


@pytest.mark.parametrize("there", [["f3"], ["f3", "other"], NAMES, NAMES[::2]])
def test_a_prepared_put_equals_a_direct_one(h: Harness, there: list[str]) -> None:
    first = h.put(2, there) if len(there) < COUNT else rows_of(ended(h, h.send(h.publish(2, there))))
    kinds = {name: tensor(shape=[(1,), (number % 3,)]) for number, name in enumerate(NAMES)}
    second = rows_of(ended(h, h.send(h.publish(2, kinds))))
    third = ended(h, h.send(h.publish(2, NAMES, rows=first)))
    assert rows_of(third) == first
    assert h.ask(ShowRows("p", NAMES)).produced == b"\1\1\1\1"
    assert h.dealt(4, fields=NAMES) == first + second
    h.clear(first)
    h.ask(ClearPartition("p"))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_puts_of_others_between_the_steps_are_taken_into_account(h: Harness, steps: int) -> None:
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
    assert rows_of(h.ask(ShowRows("p", ["f0"]))) == before


@pytest.mark.parametrize("at", [3, COUNT - 1])
@pytest.mark.parametrize("wrong", ["kind", "twice", "ndim"])
def test_a_block_with_a_wrong_description_is_refused(h: Harness, at: int, wrong: str) -> None:
    good = h.publish(2, NAMES)
    assert good.block is not None
    schema = list(good.block.schema)
    changes = {"kind": {"kind": "nothing"}, "twice": {"name": "f0"}, "ndim": {"ndim": 3}}
    schema[at] = msgspec.structs.replace(schema[at], **changes[wrong])
    sequence = h.send(msgspec.structs.replace(good, block=msgspec.structs.replace(good.block, schema=schema)))
    with pytest.raises(InvalidArgumentError):
        ended(h, sequence)
    assert h.ask(ListPartitions()).value == []


def test_a_repeated_put_is_answered_once_on_the_newest_connection(h: Harness) -> None:
    request = h.publish(2, NAMES)
    sequence = h.send(request)
    h.tick(h.now)
    h.send(request, sequence=sequence)
    assert len(rows_of(ended(h, sequence))) == 2
    assert len(rows_of(h.ask(ShowRows("p", ["f0"])))) == 2


def test_a_put_whose_connection_ends_leaves_nothing(h: Harness) -> None:
    h.send(h.publish(2, NAMES))
    h.tick(h.now)
    h.disconnect("w")
    assert not h.controller.wide_puts.jobs
    assert h.ask(ListPartitions(), "other").value == []


def test_nothing_of_the_state_changes_in_the_steps(h: Harness) -> None:
    h.put(3, ["other"])
    h.controller.take_records()
    sequence = h.send(h.publish(2, NAMES))
    before = h.state.snapshot()
    while h.reply(sequence) is None:
        assert h.state.snapshot() == before
        assert not h.controller.take_records()
        h.tick(h.now)
    (group,) = h.state.partitions["p"].field_groups.by_number.values()
    assert (group.width, group.live) == (COUNT, 2)
    (chunk,) = h.state.partitions["p"].rows.chunks.values()
    assert (list(chunk.field), list(chunk.shared)) == (["other"], [group.number])


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


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("change", ["put", "field", "grow", "clear", "drop", "gone", "save"])
def test_others_use_the_fields_between_the_steps(h: Harness, steps: int, change: str) -> None:
    rows = rows_of(ended(h, h.send(h.publish(15, NAMES))))
    sequence = h.send(h.publish(2, NAMES))
    for _ in range(steps):
        h.tick(h.now)
    if h.reply(sequence) is not None:
        rows += rows_of(h.reply(sequence))
    if change in ("put", "field", "grow"):
        h.put(40 if change == "grow" else 1, ["new" if change == "field" else "f3"], name="other")
    elif change == "clear":
        h.clear(rows[3:5])
        del rows[3:5]
    elif change == "drop":
        h.ask(ClearPartition("p"), "other")
        rows = []
    elif change == "save":
        h.check_saving()
    else:  # the put never comes
        old = h.client("w").peer
        h.connect("w")
        h.disconnect("w", old)
        sequence = h.send(h.publish(2, NAMES))
    if h.reply(sequence) is None:
        rows += rows_of(ended(h, sequence))
    assert [set(row) for row in h.lookup(rows, NAMES)] == [set(NAMES)] * len(rows)
    rows += rows_of(ended(h, h.send(h.publish(40, NAMES))))
    assert [set(row) for row in h.lookup(rows, NAMES)] == [set(NAMES)] * len(rows)
    h.replay()


def test_repeated_puts_of_the_same_fields_use_the_columns_of_the_last_one(h: Harness) -> None:
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
    assert h.ask(ShowRows("p", NAMES)).produced == b"\1" * len(rows)


@pytest.mark.parametrize("there", [[], ["f3"], ["f3", "other"], NAMES])
def test_a_schema_in_parts_is_the_same_schema(h: Harness, there: list[str]) -> None:
    if there:
        ended(h, h.send(h.publish(2, there)))
    kinds = {name: tensor(shape=[(1,), (number % 3,)]) for number, name in enumerate(NAMES)}
    rows = []
    for _ in range(3):
        rows += rows_of(ended(h, h.send(in_parts(h.publish(2, kinds)))))
    ended(h, h.send(in_parts(h.publish(2, NAMES[::-1], rows=rows[:2]))))
    ended(h, h.send(h.publish(2, NAMES)))
    assert [set(row) for row in h.lookup(rows, NAMES)] == [set(NAMES)] * 6
    block = h.publish(2, kinds).block
    assert block is not None
    assert h.look(Lookup("p", column(rows[2:4]))).blocks.schemas == [block.schema]


@pytest.mark.parametrize("wrong", ["both", "no part", "cut", "other", "empty", "number"])
def test_invalid_parts_of_a_schema_are_refused(h: Harness, wrong: str) -> None:
    good = in_parts(h.publish(2, NAMES))
    assert good.block is not None
    parts: list[bytes] = [*good.block.parts]
    schema: list[FieldSpec] = []
    if wrong == "both":
        schema = [FieldSpec("x", "tensor", "float32", 1, False)]
    elif wrong == "no part":
        parts[1] = b""
    elif wrong == "cut":
        parts[-1] = parts[-1][:-3]
    elif wrong == "other":
        parts[0] = encode({"a": 1})
    elif wrong == "empty":
        parts = [encode([])] * 3
    else:
        parts[-1] = encode([("f79", "tensor", "float32", 1 << 40, False)])
    block = msgspec.structs.replace(good.block, schema=schema, parts=parts)
    with pytest.raises(InvalidArgumentError):
        ended(h, h.send(msgspec.structs.replace(good, block=block)))
    assert h.ask(ListPartitions()).value == []
    assert len(rows_of(ended(h, h.send(good)))) == 2


def test_a_put_in_parts_may_wait_for_capacity() -> None:
    h = Harness(capacity=2)
    before = h.put(2)
    with pytest.raises(CapacityError):
        ended(h, h.send(in_parts(h.publish(2, NAMES))))
    sequence = h.send(in_parts(h.publish(2, NAMES, wait=10.0)))
    for _ in range(COUNT):
        h.tick(h.now)
    assert h.reply(sequence) is None
    h.clear(before)
    assert len(rows_of(ended(h, sequence))) == 2


def test_a_prepared_put_that_waits_is_decided_with_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness(capacity=4)
    before = [h.put(1)[0] for _ in range(3)]
    sequence = h.send(in_parts(h.publish(2, NAMES, wait=10.0)))
    for _ in range(COUNT):
        h.tick(h.now)
    later = h.send(h.publish(2, ["x"], name="other", wait=10.0), "other")

    def fail(*_: object) -> None:
        raise AssertionError("the put is prepared again")

    with monkeypatch.context() as patched:
        patched.setattr(wide_puts, "fields_of", fail)
        h.clear(before[:1])
        assert len(rows_of(h.reply(sequence))) == 2
    assert h.reply(later, "other") is None, "puts that wait are met in the order of their arrival"
    h.clear(before[1:])
    assert len(rows_of(h.reply(later, "other"))) == 2


@pytest.mark.parametrize("end", ["time", "connection", "another connection", "capacity"])
def test_a_put_that_waits_is_prepared_again_if_the_types_have_changed(end: str) -> None:
    h = Harness(capacity=3)
    before = h.put(2)
    sequence = h.send(in_parts(h.publish(2, NAMES, wait=10.0)))
    for _ in range(COUNT):
        h.tick(h.now)
    h.put(1, {"x": tensor(shape=(9,)), "f3": tensor(shape=(7,))}, rows=before[:1], name="other")
    h.clear(before[1:])
    for _ in range(3):
        h.tick(h.now)
    assert h.controller.wide_puts.jobs
    if end == "time":
        h.tick(h.now + 11)
        with pytest.raises(CapacityError):
            h.result(sequence)
    elif end == "connection":
        h.disconnect("w")
    elif end == "another connection":
        old = h.client("w").peer
        h.connect("w")
        h.send(in_parts(h.publish(2, NAMES, wait=10.0)), sequence=sequence)
        h.disconnect("w", old)
        assert len(rows_of(ended(h, sequence))) == 2
    else:
        h.put(1, name="other")
        while h.controller.wide_puts.jobs:
            h.tick(h.now)
        assert h.reply(sequence) is None
        h.clear(before[:1])
        while h.controller.wide_puts.jobs:
            h.tick(h.now)
        assert len(rows_of(h.reply(sequence) or ended(h, sequence))) == 2
    while h.controller.wide_puts.jobs:
        h.tick(h.now)
    assert ("f0" in h.state.partitions["p"].fields) == (end in ("another connection", "capacity"))


def test_what_a_put_replaces_is_freed_in_steps(h: Harness) -> None:
    ended(h, h.send(in_parts(h.publish(2, NAMES))))
    h.ask(ClearPartition("p"))
    assert h.state.blocks.discarded
    while h.controller.next_deadline() is not None:
        h.tick(h.now)
    assert not h.state.blocks.discarded


SHAPES: dict[str, Any] = {
    "the same": NAMES,
    "another shape": {name: tensor(shape=(5,)) for name in NAMES},
    "another dtype": {name: tensor("float64") for name in NAMES},
    "in another order": NAMES[::-1],
    "some of them": NAMES[::-1][10:],
    "as many others": [f"g{number}" for number in range(COUNT)],
    "these and others": [f"g{number}" for number in range(40)] + NAMES[40:],
}


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("again", SHAPES)
def test_the_event_of_the_put_examines_only_fields_that_were_put_alone(
    h: Harness, monkeypatch: pytest.MonkeyPatch, again: str, restarted: bool
) -> None:
    looked: list[str] = []

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def method(*arguments: Any) -> Any:
            looked.append(arguments[1] if owner is Chunk else arguments[0].name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, method)

    first = rows_of(ended(h, h.send(h.publish(3, NAMES))))
    h.put(1, ["f3", "f5"], rows=first[:1])
    if restarted:
        h.restart()
    for owner, name in ((FieldStats, "add"), (FieldStats, "check"), (Chunk, "field_columns")):
        counted(owner, name)
    for rows in (None, first[1:], None):  # the last makes the chunk grow
        count = 2 if rows else 7
        sequence = h.send(in_parts(h.publish(count, SHAPES[again], rows=rows)))
        while h.reply(sequence) is None:
            looked.clear()
            h.tick(h.now)
            assert len(looked) <= 3 * wide_puts.STEP
        assert set(looked) <= {"f3", "f4", "f5", "g1"}, "these were put alone"
        assert len(looked) <= 6
        assert len(rows_of(ended(h, sequence))) == count
        h.put(1, ["f3"])
        h.put(2, ["f4", "g1"], rows=first[:2])
    assert h.lookup(first, ["f3"]) != h.lookup(first, ["f4"])


BLOCKS = {
    "wide and small": (NAMES, ["x", "y"]),
    "small and wide": (["x", "y"], NAMES),
    "two wide ones": (NAMES, [f"g{number}" for number in range(COUNT + 7)]),
    "three": ([f"g{number}" for number in range(COUNT // 2)], ["x", "y"], NAMES),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_the_event_of_a_put_of_several_blocks_examines_no_single_field_of_the_wide_ones(
    h: Harness, monkeypatch: pytest.MonkeyPatch, blocks: str, whole: bool
) -> None:
    looked: list[str] = []

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def method(*arguments: Any) -> Any:
            looked.append(name)
            return real(*arguments)

        monkeypatch.setattr(owner, name, method)

    names = [name for fields in BLOCKS[blocks] for name in fields]
    single = sum(len(fields) for fields in BLOCKS[blocks] if len(fields) < field_groups.MANY_FIELDS)
    assert h.dealt(1, fields=["f3"]) == []
    for owner, name in ((FieldStats, "add"), (FieldStats, "check"), (Chunk, "field_columns")):
        counted(owner, name)
    first: list[int] = []
    for rows in ([], first[:2], []):
        kinds = [{name: tensor(shape=(len(first) + 1,)) for name in fields} for fields in BLOCKS[blocks]]
        more = {"rows": column(rows)} if rows else {}
        put = h.publish_blocks(2, (kinds[0], None), *((each, [1, 0]) for each in kinds[1:]), **more)
        made = [each if whole else parts_of(each) for each in put.blocks]
        sequence = h.send(msgspec.structs.replace(put, block=made[0], further=made[1:]))
        while h.reply(sequence) is None:
            looked.clear()
            h.tick(h.now)
            assert len(looked) <= 3 * wide_puts.STEP
        assert len(looked) <= single
        found = rows_of(ended(h, sequence))
        assert [{slot for _, slot in row.values()} for row in h.lookup(found, BLOCKS[blocks][0])] == [{0}, {1}]
        assert [{slot for _, slot in row.values()} for row in h.lookup(found, BLOCKS[blocks][1])] == [{1}, {0}]
        first += rows or found
        h.put(1, {"f3": tensor(shape=(50,))})
    assert h.dealt(4, fields=names) == sorted({*first})[:4]
    types = h.state.partitions["p"].fields
    assert {types[name].differs for name in names} == {1}
    h.restart()
    assert len(h.lookup(first, names)) == len(first)


def parts_of(block: NewBlock, size: int = 30) -> NewBlock:
    """Return the same block with its schema in parts."""
    parts = [encode(block.schema[start : start + size]) for start in range(0, len(block.schema), size)]
    return msgspec.structs.replace(block, schema=[], parts=parts)


@pytest.mark.parametrize("steps", range(0, 16, 3))
@pytest.mark.parametrize("change", ["field", "shape", "grow", "small field"])
def test_a_put_of_several_blocks_is_prepared_again_if_others_change_its_partition(
    h: Harness, steps: int, change: str
) -> None:
    h.put(1, ["other"])
    others = [f"g{number}" for number in range(COUNT)]
    put = h.publish_blocks(2, (NAMES, None), (["x"], None), (others, [1, 1]))
    made = [parts_of(block) for block in put.blocks]
    sequence = h.send(msgspec.structs.replace(put, block=made[0], further=made[1:]))
    for _ in range(steps):
        h.tick(h.now)
    kinds = {"field": ["g7", "z"], "shape": {"f7": tensor(shape=(9,))}, "small field": {"x": tensor(shape=(9,))}}
    h.put(30 if change == "grow" else 1, kinds.get(change, ["f7"]), name="other")
    rows = rows_of(ended(h, sequence))
    places = h.lookup(rows, [*NAMES, "x", *others])
    assert [len(row) for row in places] == [2 * COUNT + 1] * 2
    assert [{row[name][1] for name in NAMES} for row in places] == [{0}, {1}]
    assert [{row[name][1] for name in others} for row in places] == [{1}, {1}]


@pytest.mark.parametrize("wrong", ["twice", "empty", "kind"])
def test_several_wide_blocks_with_a_wrong_description_are_refused(h: Harness, wrong: str) -> None:
    others = {"twice": [*(f"g{number}" for number in range(COUNT)), "f3"], "empty": ["g"], "kind": ["g"]}[wrong]
    put = h.publish_blocks(2, (NAMES, None), (others, None))
    second = put.further[0]
    if wrong == "empty":
        second = msgspec.structs.replace(second, schema=[], parts=[encode([])] * 3)
    if wrong == "kind":
        second = msgspec.structs.replace(second, schema=[msgspec.structs.replace(second.schema[0], kind="nothing")])
    sequence = h.send(msgspec.structs.replace(put, block=parts_of(put.blocks[0]), further=[second]))
    with pytest.raises(InvalidArgumentError):
        ended(h, sequence)
    assert h.ask(ListPartitions()).value == []


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("change", ["field", "dtype", "shape", "grow", "dropped", "gone", "wide"])
def test_a_put_is_prepared_again_if_others_change_its_partition(h: Harness, steps: int, change: str) -> None:
    first = rows_of(ended(h, h.send(h.publish(2, NAMES))))
    sequence = h.send(in_parts(h.publish(2, {name: tensor(shape=(6,)) for name in NAMES[::-1]})))
    for _ in range(steps):
        h.tick(h.now)
    if change == "dropped":
        h.ask(ClearPartition("p"), "other")
        h.put(2, NAMES[:7], name="other")
    elif change == "gone":
        h.clear(first)
    elif change == "wide":
        h.send(in_parts(h.publish(3, NAMES, name="other")), "other")
    else:
        kinds = {"field": {"g": tensor()}, "dtype": {"f7": tensor("float64")}, "shape": {"f7": tensor(shape=(9,))}}
        h.put(30 if change == "grow" else 1, kinds.get(change, ["f7"]), name="other")
    rows = rows_of(ended(h, sequence))
    places = h.lookup(rows, NAMES)
    assert [set(row) for row in places] == [set(NAMES)] * 2
    assert [{slot for _, slot in row.values()} for row in places] == [{0}, {1}]
    assert len({place for row in places for place, _ in row.values()}) == 1
    if change == "shape":
        assert {field.name: field.differs for field in h.state.partitions["p"].fields.values()}["f7"] == 1


def test_a_step_decodes_no_more_than_some_parts(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    real = wide_puts.fields_of

    def fields_of(part: bytes) -> list[FieldSpec]:
        decoded.append(part)
        return real(part)

    monkeypatch.setattr(wide_puts, "fields_of", fields_of)
    put = in_parts(h.publish(2, NAMES))
    assert put.block is not None
    parts = [encode([])] * 1000 + put.block.parts
    sequence = h.send(msgspec.structs.replace(put, block=msgspec.structs.replace(put.block, parts=parts)))
    while h.reply(sequence) is None:
        decoded.clear()
        h.tick(h.now)
        assert len(decoded) <= wide_puts.STEP
    assert len(rows_of(h.reply(sequence))) == 2


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_known_put_is_prepared_again_if_another_put_comes_before_it(
    h: Harness, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    ended(h, h.send(in_parts(h.publish(2, NAMES))))
    sequence = h.send(in_parts(h.publish(2, NAMES)))
    for _ in range(steps):
        h.tick(h.now)
    assert h.reply(sequence) is None
    h.put(1, {"f7": tensor(shape=(9,))}, name="other")
    looked: list[str] = []
    real = FieldStats.add
    monkeypatch.setattr(FieldStats, "add", lambda self, *rest: looked.append(self.name) or real(self, *rest))
    while h.reply(sequence) is None:
        looked.clear()
        h.tick(h.now)
    assert not looked
    assert len(rows_of(h.reply(sequence))) == 2
