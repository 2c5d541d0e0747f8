"""Records of puts that the first builds of release 0.2.0 wrote into journals, with schemas in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness, encode

from transfer_queue.core import earlier
from transfer_queue.core.earlier import current_record
from transfer_queue.core.events import records as r
from transfer_queue.errors import InvalidArgumentError, JournalError
from transfer_queue.journal.segment import ClockIdentity, Frames, JournalRecord, Reading, SegmentHeader
from transfer_queue.messages.descriptors import FieldSpec, NewBlock

BLOCK = NewBlock(0, 1, 0, 1, 8, 2, [FieldSpec("x", "object", "object", 1, False)], bytes(8))
ROWS = np.array([4, 7], "<i8").tobytes()
TAGS = [{"n": 1}, None]

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
        earlier.Published("p", ROWS, "w", 3, BLOCK, TAGS, True, ["g", "h"]),
        r.SamplesPut(
            "p", [r.WriterPart("w", 2, [BLOCK])], groups=["g", "h"], tags=TAGS, first_block=3, rows=ROWS,
            replace_tags=True,
        ),
    ),
    (
        earlier.RowsPut("p", "c", 5, 2, ["a", "b"], ["g", "h"], TAGS, 3, BLOCK),
        r.SamplesPut("p", [r.WriterPart("c", 2, [BLOCK])], 5, 2, ["a", "b"], ["g", "h"], TAGS, 3),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("before", "present"), RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_of_a_journal_is_converted(before: JournalRecord, present: r.SamplesPut) -> None:
    packed = msgspec.msgpack.encode(before)
    assert current_record(msgspec.msgpack.decode(packed, type=JournalRecord)) == present


@pytest.mark.parametrize("published", [False, True])
def test_the_schema_of_a_record_is_a_list(h: Harness, published: bool) -> None:
    (block,) = h.publish_blocks(2, ([f"f{number}" for number in range(70)], None)).blocks
    parts = [encode(block.schema[:50]), encode(block.schema[50:])]
    sent = msgspec.structs.replace(block, schema=[], parts=parts)

    def record(block: NewBlock) -> JournalRecord:
        if published:
            return earlier.Published("p", b"", "w", 1, block)
        return earlier.RowsPut("p", "w", 0, 2, block_number=1, block=block)

    converted = current_record(record(sent))
    assert isinstance(converted, r.SamplesPut)
    assert converted.puts[0].blocks == [block]
    with pytest.raises(InvalidArgumentError, match="cannot be decoded"):
        current_record(record(msgspec.structs.replace(sent, parts=[b"part"])))


def test_other_records_stay_as_they_are() -> None:
    record = r.PartitionDropped("p")
    assert current_record(record) is record


@pytest.mark.parametrize(
    "record",
    [
        ["RowsPutTogether", "p", 5, 3, [["c", BLOCK]], None, None],
        ["RowsPut", "p", "c", 5, 2, None, None, None, 3, BLOCK, [BLOCK]],
        ["Published", "p", ROWS, "w", 3, BLOCK, None, False, None, [BLOCK]],
    ],
    ids=["unknown record", "put of several blocks", "values of several blocks"],
)
def test_a_journal_with_a_record_that_no_release_wrote_is_refused(record: Any) -> None:
    """It would lose values: a decoder skips the further entries of a record unless it must not."""
    head = SegmentHeader.new(1, ClockIdentity.now())
    data = head.pack() + Frames(head).pack([record])
    wanted = r"file folder/segment is damaged .*: another release wrote its records .* start with an empty folder"
    with pytest.raises(JournalError, match=wanted):
        list(Reading(Path("folder/segment"), data, last=True).frames())
