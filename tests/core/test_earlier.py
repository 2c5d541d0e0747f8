"""What earlier builds have saved: trees of states with groups of fields, and records with schemas in parts."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sameness
from harness import Harness, encode

from transfer_queue.core.columns.joined_columns import pack_texts
from transfer_queue.core.earlier import current_record
from transfer_queue.core.events import records as r
from transfer_queue.core.state.serialization import load_untrusted, save_state
from transfer_queue.errors import CheckpointError, InvalidArgumentError
from transfer_queue.messages.descriptors import NewBlock
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


@pytest.mark.parametrize("published", [False, True])
def test_the_schema_of_a_record_is_a_list(h: Harness, published: bool) -> None:
    first, second = h.publish_blocks(2, (NAMES, None), (["x"], None)).blocks
    parts = [encode(first.schema[:50]), encode(first.schema[50:])]
    sent = msgspec.structs.replace(first, schema=[], parts=parts)

    def record(block: NewBlock) -> r.AnyRecord:
        if published:
            return r.Published("p", b"", "w", 1, block, further=[second])
        return r.RowsPut("p", "w", 0, 2, block_number=1, block=block, further=[second])

    assert current_record(record(sent)) == record(first) == current_record(record(first))
    with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
        current_record(record(msgspec.structs.replace(sent, parts=[b"part"])))


def test_other_records_stay_as_they_are() -> None:
    record = r.PartitionDropped("p")
    assert current_record(record) is record
