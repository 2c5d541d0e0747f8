"""A folder of segments and snapshots: what is recovered from it after a crash at any moment, and what stays in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from journal_writer import CLOCK, Writer

from transfer_queue.core.appliers import apply_record
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import RECORDS, Controller
from transfer_queue.core.events.records import AnyRecord, PartitionMade, RequestParked, SamplesPut, WriterPart
from transfer_queue.core.state import serialization
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.fields import MAX_FIELDS
from transfer_queue.errors import JournalError
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import (
    Recovered,
    list_numbers,
    recover,
    segment_path,
    snapshot_of,
    snapshot_path,
)
from transfer_queue.journal.segment import RESERVED_BYTES, ClockIdentity
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.descriptors import FieldSpec, NewBlock, PartitionOptions
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.sampler import SequentialSampler


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path)


def keys(found: Recovered) -> list[str]:
    return list(found.state.partitions["p"].keys) if "p" in found.state.partitions else []


def same(one: State, other: State) -> bool:
    return one.snapshot() == other.snapshot()


def test_an_empty_folder_is_fresh(tmp_path: Path) -> None:
    found = recover(tmp_path, CLOCK, capacity=5, watched=["w"])
    assert (found.fresh, found.number, found.records, found.torn) == (True, 1, 0, 0)
    assert (found.state.capacity, found.state.watched) == (5, ["w"])


@pytest.mark.parametrize("durable", [False, True])
def test_each_start_continues_from_the_journal(tmp_path: Path, durable: bool) -> None:
    for turn in range(4):
        writer = Writer(tmp_path, durable)
        assert writer.found.fresh == (turn == 0)
        assert keys(writer.found) == [f"{before}-{i}" for before in range(turn) for i in range(3)]
        for i in range(3):
            writer.put(f"{turn}-{i}")
        writer.journal.close()
        assert same(recover(tmp_path, CLOCK).state, writer.controller.state)
    assert writer.controller.state.next_index == 12


@pytest.mark.parametrize("snapshots", [0, 1, 2])
def test_a_death_at_any_byte_leaves_a_prefix_of_the_commits(tmp_path: Path, snapshots: int) -> None:
    folder = tmp_path / "journal"
    folder.mkdir()
    writer = Writer(folder)
    writer.put("0")
    for turn in range(snapshots):
        writer.journal.forget_before(writer.snapshot())
        writer.put(f"{turn + 1}")
    writer.put("last")
    writer.journal.close()
    whole = writer.keys()
    path = segment_path(folder, list_numbers(folder)[0][-1])
    data = path.read_bytes()
    seen = set()
    for size in range(len(data) - 1, -1, -1):
        os.truncate(path, size)
        found = recover(folder, CLOCK)
        got = keys(found)
        assert got == whole[: len(got)]
        seen.add(len(got))
        if not path.exists():  # not even its head was whole
            break
        assert Writer(folder).found.torn == 0, "the torn tail was cut off"
    assert len(seen) == 2


def test_the_space_that_killed_processes_had_reserved_is_free_again(tmp_path: Path) -> None:
    """Otherwise a small disk has no space for the segment of the next process."""
    for number in range(3):
        writer = Writer(tmp_path)  # the one before was killed: it has not closed its segment
        writer.journal.reserve_space()
        writer.put(f"k{number}")
    recover(tmp_path, CLOCK)
    allocated = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert allocated < RESERVED_BYTES


def test_waiting_requests_are_not_recorded(tmp_path: Path, writer: Writer) -> None:
    writer.put("a")
    size = writer.journal.size
    writer.ask(Claim("p", "t", ["x"], 1, wait=10.0))
    assert writer.controller.state.waiting.by_waiter
    assert writer.journal.size == size
    writer.journal.close()
    assert not recover(tmp_path, CLOCK).state.waiting.by_waiter
    parked: list[AnyRecord] = [RequestParked("c", 1, 0.0, 1.0, Claim("p", "t", [], 1))]
    writer.journal.append(parked)
    assert writer.journal.size == size


# ---------------------------------------------------------------- snapshots


def steps(writer: Writer) -> list[Callable[[], object]]:
    """The steps on disk from a fork to the removal of the old files. A crash may happen after each."""
    return [
        lambda: writer.journal.rotate(),
        lambda: writer.put("later"),
        lambda: writer.snapshot(),
        lambda: writer.journal.forget_before(writer.journal.number),
        lambda: writer.put("last"),
    ]


@pytest.mark.parametrize("crash", range(6))
def test_a_crash_around_a_snapshot_loses_nothing(tmp_path: Path, writer: Writer, crash: int) -> None:
    for i in range(5):
        writer.put(str(i))
    for step in steps(writer)[:crash]:
        step()
    writer.journal.close()
    found = recover(tmp_path, CLOCK)
    assert keys(found) == writer.keys()
    assert same(found.state, writer.controller.state)
    segments, snapshots = list_numbers(tmp_path)
    assert len(snapshots) <= 1
    assert all(number >= snapshots[0] for number in segments if snapshots)


def test_records_after_the_fork_are_not_in_its_snapshot_and_not_lost(tmp_path: Path, writer: Writer) -> None:
    writer.put("a")
    number = writer.journal.rotate()
    state_file.write(snapshot_path(tmp_path, number), snapshot_of(writer.controller.state, CLOCK))
    writer.put("b")
    writer.journal.forget_before(number)
    writer.journal.close()
    found = recover(tmp_path, CLOCK)
    assert (keys(found), found.records) == (["a", "b"], 2)


def test_an_unfinished_snapshot_is_removed(tmp_path: Path, writer: Writer) -> None:
    writer.put("a")
    writer.journal.close()
    draft = tmp_path / ".state-000000000002.draft"
    draft.write_bytes(b"half")
    assert keys(recover(tmp_path, CLOCK)) == ["a"]
    assert not draft.exists()


def test_the_folder_stays_small(tmp_path: Path, writer: Writer) -> None:
    """However much is written, the folder contains only a snapshot and the records after it."""
    largest = 0
    for turn in range(20):
        for i in range(20):
            writer.put(f"{i % 5}")
        writer.journal.forget_before(writer.snapshot())
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert size == writer.journal.size
        largest = max(largest, size) if turn > 5 else size
        assert size <= largest
        assert len(list(tmp_path.iterdir())) == 1
    writer.journal.close()
    assert keys(recover(tmp_path, CLOCK)) == writer.keys()


def test_a_rotation_without_records_needs_no_file(tmp_path: Path, writer: Writer) -> None:
    assert [writer.journal.rotate() for _ in range(3)] == [1, 1, 1]
    writer.put("a")
    assert [writer.journal.rotate() for _ in range(3)] == [2, 2, 2]
    writer.journal.close()
    assert list_numbers(tmp_path) == ([1], [])


# ---------------------------------------------------------------- damage


def filled(folder: Path) -> Writer:
    """Segments 2, 3 and 4 after a snapshot."""
    writer = Writer(folder)
    writer.put("a")
    writer.journal.forget_before(writer.snapshot())
    for key in "bcd":
        writer.put(key)
        writer.journal.rotate()
    writer.journal.close()
    return writer


def test_a_missing_segment_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    segment_path(tmp_path, 3).unlink()
    with pytest.raises(JournalError, match=r"segment 3 is missing .*segment-000000000003.*bring the file back|Bring"):
        recover(tmp_path, CLOCK)


def test_a_torn_segment_in_the_middle_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    path = segment_path(tmp_path, 3)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(JournalError, match="later segments exist"):
        recover(tmp_path, CLOCK)


@pytest.mark.parametrize("how", ["damaged", "foreign"])
def test_a_damaged_snapshot_is_an_error(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    path = snapshot_path(tmp_path, 2)
    if how == "damaged":
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        state_file.write(path, {"something": "else"})
    with pytest.raises(JournalError, match=r"snapshot .* cannot be read"):
        recover(tmp_path, CLOCK)


def test_records_that_do_not_fit_those_before_them_are_an_error(tmp_path: Path) -> None:
    writer = filled(tmp_path)
    state_file.write(snapshot_path(tmp_path, 2), {**snapshot_of(State(), CLOCK)})
    with pytest.raises(JournalError, match="does not fit"):
        recover(tmp_path, CLOCK)
    assert serialization.save_state(writer.controller.state)["next_index"] == 4


# ---------------------------------------------------------------- time


@pytest.mark.parametrize("snapshot", [False, True])
def test_after_another_boot_rows_have_aged_by_the_wall_clock(tmp_path: Path, snapshot: bool) -> None:
    """A machine that was down for an hour: its new clock begins at 0, its rows have aged an hour."""
    writer = Writer(tmp_path, clock=ClockIdentity(b"1" * 16, 1000.0))
    writer.ask(CreatePartition("p", 0, PartitionOptions(keep_seconds=7200.0)), now=500.0)
    writer.put("a", now=500.0)
    if snapshot:
        writer.journal.forget_before(writer.snapshot())
    writer.journal.close()
    booted = 1000.0 + 500.0 + 3600.0
    found = recover(tmp_path, ClockIdentity(b"2" * 16, booted))
    assert found.state.partitions["p"].births.first_time(0) == -3600.0
    controller = Controller(CoreConfig(SequentialSampler()), restored=found.state)
    controller.tick(3599.0)
    assert controller.state.partitions["p"].row_count == 1
    controller.tick(3601.0)
    assert controller.state.partitions["p"].row_count == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_time_of_a_lock_is_converted_to_the_clock_of_another_machine(tmp_path: Path, snapshot: bool) -> None:
    writer = Writer(tmp_path, clock=ClockIdentity(b"1" * 16, 1000.0))
    writer.ask(TakeLock("p", ["a"], 60.0), now=500.0)
    if snapshot:
        writer.journal.forget_before(writer.snapshot())
    writer.journal.close()
    found = recover(tmp_path, ClockIdentity(b"2" * 16, 200.0))
    assert [lock.since for lock in found.state.locks.by_token.values()] == [1300.0]


def test_every_time_of_a_record_in_the_journal_is_converted() -> None:
    """A time is an attribute of this name. Waiting requests are not in the journal."""
    for kind in RECORDS:
        times = {"time", "since", "deadline"} & set(kind.__struct_fields__)
        assert times == ({kind.by_clock} - {""}) or kind is RequestParked, kind


def test_on_the_same_boot_times_stay(tmp_path: Path, writer: Writer) -> None:
    writer.ask(CreatePartition("p", 0, PartitionOptions(keep_seconds=10.0)), now=500.0)
    writer.put("a", now=500.0)
    writer.journal.close()
    assert recover(tmp_path, ClockIdentity(CLOCK.boot, 3.0)).state.partitions["p"].births.first_time(0) == 500.0


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_partition_with_more_fields_than_are_allowed_is_named(tmp_path: Path, writer: Writer, snapshot: bool) -> None:
    """Such a journal is of an earlier release, which had no limit."""
    schema = [FieldSpec(f"f{number}", "object", "object", 1, False) for number in range(MAX_FIELDS + 1)]
    block = NewBlock(0, 1, 0, 1, 0, 1, schema, np.zeros(len(schema), "i8").tobytes())
    records = [
        PartitionMade("p", PartitionOptions()),
        SamplesPut("p", [WriterPart("c", 1, [block])], 0, 1, first_block=1),
    ]
    for record in records:
        apply_record(writer.controller.state, record)
    if snapshot:
        writer.snapshot()
    else:
        writer.journal.append(records)
        writer.journal.commit()
    writer.journal.close()
    with pytest.raises(JournalError, match=rf"partition 'p' has {MAX_FIELDS + 1} fields.*durability.folder"):
        recover(tmp_path, CLOCK)
