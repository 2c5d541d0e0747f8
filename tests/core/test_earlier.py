"""What earlier builds have saved: trees of states with groups of fields, and records with schemas in parts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sameness
from harness import Harness, encode

from transfer_queue.core import earlier
from transfer_queue.core.columns.kinds import pack_texts
from transfer_queue.core.earlier import current_record
from transfer_queue.core.events import records as r
from transfer_queue.core.state.serialization import load_untrusted, save_state
from transfer_queue.errors import CheckpointError, InvalidArgumentError
from transfer_queue.journal.segment import JournalRecord
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.testing.state_recount import check_invariants

NAMES = [f"f{number}" for number in range(70)]
GROUPS = {1: NAMES[:64], 3: NAMES[64:]}


@pytest.fixture
def h() -> Harness:
    """A state in which all fields of a group have the same values."""
    h = Harness()
    h.put(3, [*NAMES, "other"])
    h.put(2, NAMES[:64])
    h.put(1, ["other"], partition="q")
    return h


def with_groups(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree in the form in which the fields of p are in groups."""
    groups = {number: pack_texts(names) for number, names in GROUPS.items()}
    partitions = {name: {**each, "field_groups": {}} for name, each in tree["partitions"].items()}
    rows = partitions["p"]["rows"]
    chunks = {
        key: {
            **chunk,
            "field": {name: columns for name, columns in chunk["field"].items() if name not in NAMES},
            "shared": {number: chunk["field"][names[0]] for number, names in GROUPS.items()},
        }
        for key, chunk in rows["chunks"].items()
    }
    partitions["p"].update(field_groups=groups, rows={**rows, "chunks": chunks})
    for chunk in partitions["q"]["rows"]["chunks"].values():
        chunk["shared"] = {}
    return {**tree, "partitions": partitions}


def test_each_field_of_a_group_gets_columns_of_its_own(h: Harness) -> None:
    state = load_untrusted(with_groups(save_state(h.state)))
    check_invariants(state)
    assert {**state.snapshot(), "waiting": []} == {**h.state.snapshot(), "waiting": []}
    assert sorted(sameness.differences(h.state, state)) == sorted(_order_of_fields(h, state))
    (chunk,) = state.partitions["p"].rows.chunks.values()
    columns = [array for name in NAMES for array in chunk.field[name]]
    assert not any(np.shares_memory(columns[0], other) for other in columns[1:])
    assert all(array.flags.writeable for array in columns)


def _order_of_fields(h: Harness, state: Any) -> list[str]:
    """Return the only difference: the columns of a chunk are in another order."""
    before, now = (list(each.partitions["p"].rows.chunks[0].field) for each in (h.state, state))
    return [f"state.partitions.p.rows.chunks.0.field: has {before!r}, and then {now!r}"]


@pytest.mark.parametrize("wrong", ["members", "columns", "number", "field"])
def test_a_tree_with_wrong_groups_is_refused(h: Harness, wrong: str) -> None:
    tree = with_groups(save_state(h.state))
    partition = tree["partitions"]["p"]
    (chunk,) = partition["rows"]["chunks"].values()
    if wrong == "members":
        partition["field_groups"][1] = "x"
    elif wrong == "columns":
        chunk["shared"][1] = 7
    elif wrong == "number":
        chunk["shared"][2] = chunk["shared"][1]
    else:
        partition["field_groups"][3] = pack_texts(["unknown"])
    with pytest.raises(CheckpointError):
        load_untrusted(tree)


BLOCK = NewBlock(0, 1, 0, 1, 8, 2, [FieldSpec("x", "object", "object", 1, False)], bytes(8))
FURTHER = msgspec.structs.replace(BLOCK, offset=64, schema=[FieldSpec("y", "object", "object", 1, False)])
ROWS = np.array([4, 7], "<i8").tobytes()
SHARED = [r.SharedField("x", b"t", b"b", b"s")]
NOTED = [r.NotedField("x", 3, b"d", b"s")]

RECORDS = [
    (
        earlier.RowsReserved("p", 5, 2, 1, ["a", "b", "c"], ["g", None, "g"], False, "c"),
        r.SamplesPut("p", [r.WriterPart("c", 3)], 5, 2, ["a", "b", "c"], ["g", None, "g"], taken=1),
    ),
    (
        earlier.RowsReserved("p", 0, 4, pre_allocated=True),
        r.SamplesPut("p", [r.WriterPart("", 4)], 0, 4, pre_allocated=True),
    ),
    (
        earlier.Published("p", ROWS, "w", 3, BLOCK, [{"n": 1}, None], True, ["g", "h"], [FURTHER]),
        r.SamplesPut(
            "p", [r.WriterPart("w", 2, [BLOCK, FURTHER])], groups=["g", "h"], tags=[{"n": 1}, None], first_block=3,
            rows=ROWS, replace_tags=True,
        ),
    ),
    (
        earlier.RowsPut("p", "c", 5, 2, ["a", "b"], ["g", "h"], [{"n": 1}, None], 3, BLOCK, [FURTHER]),
        r.SamplesPut(
            "p", [r.WriterPart("c", 2, [BLOCK, FURTHER])], 5, 2, ["a", "b"], ["g", "h"], [{"n": 1}, None], 3
        ),
    ),
    (
        earlier.RowsPutTogether("p", 5, 3, [("c", BLOCK), ("d", FURTHER)], list("abcd"), [{"n": 1}, None, None, None]),
        r.SamplesPut(
            "p", [r.WriterPart("c", 2, [BLOCK]), r.WriterPart("d", 2, [FURTHER])], 5, 4, list("abcd"), None,
            [{"n": 1}, None, None, None], 3,
        ),
    ),
    (earlier.ValuesShared("p", ROWS, SHARED), r.SamplesPut("p", [r.WriterPart("", 2)], rows=ROWS, shared=SHARED)),
    (earlier.DigestsNoted("p", NOTED), r.SamplesPut("p", [], rows=b"", noted=NOTED)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "present"), RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_of_a_journal_is_converted(before: JournalRecord, present: r.SamplesPut) -> None:
    packed = msgspec.msgpack.encode(before)
    assert current_record(msgspec.msgpack.decode(packed, type=JournalRecord)) == present


@pytest.mark.parametrize("published", [False, True])
def test_the_schema_of_a_record_is_a_list(h: Harness, published: bool) -> None:
    first, second = h.publish_blocks(2, (NAMES, None), (["x"], None)).blocks
    parts = [encode(first.schema[:50]), encode(first.schema[50:])]
    sent = msgspec.structs.replace(first, schema=[], parts=parts)

    def record(block: NewBlock) -> JournalRecord:
        if published:
            return earlier.Published("p", b"", "w", 1, block, further=[second])
        return earlier.RowsPut("p", "w", 0, 2, block_number=1, block=block, further=[second])

    converted = current_record(record(sent))
    assert isinstance(converted, r.SamplesPut)
    assert converted.puts[0].blocks == [first, second]
    with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
        current_record(record(msgspec.structs.replace(sent, parts=[b"part"])))


def test_digests_alone_are_no_change_of_the_partition(h: Harness) -> None:
    h.put(1)
    version = h.state.partitions["p"].version
    noted = earlier.DigestsNoted("p", [r.NotedField("f0", 1, bytes(16), bytes(4))])
    h.controller.context.log.apply(current_record(noted))
    assert h.state.partitions["p"].version == version
    assert h.state.blocks.equal.find(h.state.partitions["p"].number, "f0", [bytes(16)]) == [(1, 0)]


def test_other_records_stay_as_they_are() -> None:
    record = r.PartitionDropped("p")
    assert current_record(record) is record
