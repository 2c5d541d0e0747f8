"""Frames of records: complete ones are read, a torn tail is cut off, other damage is an error, never another record."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.events.records import AgesRecorded, AnyRecord, ReplySent, RowsCleared, SealCounted
from transfer_queue.errors import JournalError
from transfer_queue.journal.segment import (
    HEAD_BYTES,
    MARKER,
    ClockIdentity,
    Frames,
    Reading,
    SegmentHeader,
    SegmentWriter,
)
from transfer_queue.messages.base import Done

CLOCK = ClockIdentity(b"b" * 16, 1000.0)
HEAD = SegmentHeader.new(1, CLOCK)
COMMITS: list[list[AnyRecord]] = [
    [SealCounted("p")],
    [RowsCleared("p", b"\0" * 40), ReplySent("c", 1, 0, Done(True))],
    [AgesRecorded("p", 1.5), ReplySent("c", 2, 1, Done("x" * 300), [(5, 7)])],
]


def written(commits: list[list[AnyRecord]], head: SegmentHeader = HEAD) -> bytes:
    frames = Frames(head)
    return head.pack() + b"".join(frames.pack(records) for records in commits)


def read(data: bytes, last: bool = True) -> tuple[list[list[AnyRecord]], int]:
    reading = Reading(Path("segment"), data, last)
    return list(reading.frames()), reading.end


def ends(commits: list[list[AnyRecord]]) -> list[int]:
    """Return the ends of the head and of each frame."""
    return [len(written(commits[:count])) for count in range(len(commits) + 1)]


def test_frames_are_read_as_they_were_written() -> None:
    data = written(COMMITS)
    assert read(data, last=False) == (COMMITS, len(data))
    assert SegmentHeader.read(data) == HEAD


def test_a_tail_torn_at_any_byte_is_cut() -> None:
    data, whole = written(COMMITS), ends(COMMITS)
    for size in range(len(data)):
        commits, end = read(data[:size])
        count = sum(1 for at in whole[1:] if at <= size)
        assert commits == COMMITS[:count]
        assert end == (whole[count] if size >= HEAD_BYTES else 0)


def test_a_torn_tail_with_zeros_behind_it_is_cut() -> None:
    """As a file system leaves it that had allocated more than it wrote."""
    data, whole = written(COMMITS), ends(COMMITS)
    assert read(data[:-1] + b"\0" * 5000) == (COMMITS[:-1], whole[-2])


def test_only_the_last_segment_may_be_torn() -> None:
    data = written(COMMITS)
    for size in (0, 3, HEAD_BYTES + 3, len(data) - 1):
        with pytest.raises(JournalError, match="damaged at byte"):
            read(data[:size], last=False)


def test_damage_before_a_complete_frame_is_an_error() -> None:
    data, whole = written(COMMITS), ends(COMMITS)
    for at in range(whole[-2]):
        changed = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        with pytest.raises(JournalError, match=r"segment is damaged at byte \d+ of \d+.*bring the file back"):
            read(changed)


def test_a_missing_and_a_repeated_frame_are_errors() -> None:
    data, whole = written(COMMITS), ends(COMMITS)
    for changed in (data[: whole[0]] + data[whole[1] :], data[: whole[1]] + data[whole[0] :]):
        with pytest.raises(JournalError):
            read(changed)


def test_bytes_of_a_frame_inside_a_value_are_not_read_as_a_frame() -> None:
    """To make such a frame, a user would have to know the salt."""
    inner = written(COMMITS, SegmentHeader.new(1, CLOCK))[HEAD_BYTES:]
    commits: list[list[AnyRecord]] = [COMMITS[0], [ReplySent("c", 3, 0, Done(inner + MARKER * 20))]]
    data, whole = written(commits), ends(commits)
    assert read(data) == (commits, len(data))
    for size in range(whole[1], len(data), 7):
        assert read(data[:size]) == (commits[:1], whole[1])


@given(st.data())
def test_fuzzed_frames_never_result_in_other_records(data: st.DataObject) -> None:
    """The result is a prefix of what was written, or an error."""
    changed = bytearray(written(COMMITS))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(changed) - 1)))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "delete"]))
        if kind == "flip" and changed:
            changed[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del changed[at:]
        elif kind == "insert":
            changed[at:at] = data.draw(st.binary(max_size=60))
        else:
            del changed[at : at + data.draw(st.integers(1, 40))]
    try:
        commits, end = read(bytes(changed))
    except JournalError:
        return
    assert commits == COMMITS[: len(commits)]
    assert end in (0, *ends(COMMITS))


@pytest.mark.parametrize("durable", [False, True])
def test_a_writer_continues_where_the_disk_was_full(tmp_path: Path, durable: bool) -> None:
    """A commit that failed in the middle loses no record and writes none twice."""
    path = tmp_path / "segment"
    writer = SegmentWriter(path, HEAD, durable)
    big: list[AnyRecord] = [ReplySent("c", 9, 0, Done("y" * 100_000))]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        writer.append(COMMITS[0])
        writer.commit()
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        writer.append(big)
        for _ in range(3):
            with pytest.raises(OSError, match="too large"):
                writer.commit()
        assert not writer.committed
        assert read(path.read_bytes())[0] == COMMITS[:1]
        writer.append(COMMITS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    writer.commit()
    writer.close()
    assert writer.committed
    assert read(path.read_bytes()) == ([COMMITS[0], big, COMMITS[1]], writer.size)


def test_bytes_that_could_not_be_synced_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may have dropped these bytes, so a sync that succeeds later would prove nothing."""
    path = tmp_path / "segment"
    writer = SegmentWriter(path, HEAD, durable=True)

    def fails(file: int) -> None:
        raise OSError(5, "no disk")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        writer.append(COMMITS[0])
        with pytest.raises(OSError, match="no disk"):
            writer.commit()
        path.write_bytes(b"")  # what the system has kept of it
    writer.commit()
    writer.close()
    assert read(path.read_bytes())[0] == COMMITS[:1]


def test_a_file_is_created_with_its_first_record(tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path / "segment", HEAD, durable=False)
    writer.commit()
    assert (writer.size, list(tmp_path.iterdir())) == (0, [])
    writer.append(COMMITS[0])
    writer.commit()
    writer.close()
    assert writer.size == (tmp_path / "segment").stat().st_size
    assert (tmp_path / "segment").stat().st_mode & 0o777 == 0o600


def test_clocks_of_different_boots_are_distinguished() -> None:
    now = ClockIdentity.now()
    assert now.shift_from(now) == 0
    assert ClockIdentity(b"x" * 16, 500.0).shift_from(ClockIdentity(b"y" * 16, 800.0)) == 300.0
