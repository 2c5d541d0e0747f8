"""The journal of a controller: a folder of segments and, from time to time, a snapshot of the whole state.

    segment-<n>    records, in order (`segment.py`); each process and each snapshot begins a new one
    state-<n>      the state before the first record of segment n (`state_file.py`)
    load-<hex>     the state of a loaded checkpoint; a record names it (`state_file.py`)

Files older than the newest complete snapshot are removed. `recover` restores the state from the files, and `Journal`
appends to them. Waiting requests are not recorded: their clients send them again on their new connections.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from transfer_queue.core.appliers import apply_record
from transfer_queue.core.earlier import current_record
from transfer_queue.core.events.records import AnyRecord, Record, RequestParked, StateLoaded, Unparked
from transfer_queue.core.state import serialization
from transfer_queue.core.state.restore import shift_ages
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError, JournalError
from transfer_queue.journal import state_file
from transfer_queue.journal.segment import ClockIdentity, Reading, SegmentHeader, SegmentWriter
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.private_files import sync_folder

RecordT = TypeVar("RecordT", bound=Record)

_NAME = re.compile(r"(segment|state)-(\d{12})")
_DRAFT = re.compile(r"\.state-\d{12}\.draft")


def segment_path(folder: Path, number: int) -> Path:
    """Return the path of a segment."""
    return folder / f"segment-{number:012d}"


def snapshot_path(folder: Path, number: int) -> Path:
    """Return the path of the state before the first record of this segment."""
    return folder / f"state-{number:012d}"


def list_numbers(folder: Path) -> tuple[list[int], list[int]]:
    """Return the numbers of the segments and of the snapshots in a folder, ascending."""
    numbers: dict[str, list[int]] = {"segment": [], "state": []}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            numbers[match[1]].append(int(match[2]))
    return sorted(numbers["segment"]), sorted(numbers["state"])


def snapshot_of(state: State, clock: ClockIdentity) -> dict[str, Any]:
    """Return the content of a snapshot's file."""
    return {"boot": clock.boot, "offset": clock.offset, "state": serialization.save_state(state)}


@dataclass(frozen=True)
class Recovered:
    """The state that was recovered from a folder."""

    state: State
    number: int
    """The segment to continue with."""
    records: int
    """Records that were replayed after the snapshot."""
    nbytes: int
    """Bytes that were replayed after the snapshot."""
    torn: int
    """Bytes of an incomplete commit at the end. Its process died before it sent any reply."""
    fresh: bool
    """The folder was empty."""
    loaded: dict[str, int]
    """Files of loaded states -> the segment whose record names them."""


def recover(folder: Path, clock: ClockIdentity, capacity: int | None = None, watched: Iterable[str] = ()) -> Recovered:
    """Restore the state from the journal in a folder. Truncates a torn tail, and removes old and unfinished files.

    Reserved space of earlier processes is freed, because the next segment may not fit beside it.

    For `capacity` and `watched` see `State`. Raises JournalError if the journal is damaged or a partition has too many
    fields, and OSError as the file system does.
    """
    for path in folder.iterdir():
        if _DRAFT.fullmatch(path.name):
            path.unlink()  # its writer has died
    segments, snapshots = list_numbers(folder)
    first = snapshots[-1] if snapshots else 1
    _remove_before(folder, first)
    segments = [number for number in segments if number >= first]
    missing = sorted(set(range(first, segments[-1] + 1 if segments else first)) - set(segments))
    if missing:
        raise JournalError(
            f"the journal in {folder} lacks segment {missing[0]} ({segment_path(folder, missing[0])}), so its state "
            f"cannot be restored. Bring the file back, or start with an empty folder (durability.folder)"
        )
    state = _snapshot(folder, first, clock, capacity, watched) if snapshots else State(capacity)
    state.watched = list(watched)
    records = nbytes = torn = 0
    next_number = first
    loaded: dict[str, int] = {}
    for number in segments:
        path = segment_path(folder, number)
        count, end, size, files = _replay(state, path, clock, number == segments[-1])
        loaded.update(dict.fromkeys(files, number))
        nbytes += sum((folder / name).stat().st_size for name in files)
        records += count
        nbytes += end
        torn = size - end
        os.truncate(path, end)  # also frees the space that a killed process had reserved and not used
        next_number = number + 1
        if not end:
            path.unlink()
            next_number = number
    try:
        serialization.check_field_numbers(state)
    except CheckpointError as error:
        raise JournalError(
            f"the journal in {folder} cannot be used: {error}, or start with an empty folder (durability.folder)"
        ) from None
    states = LoadedStates(folder)
    for name in states.names():
        if name not in loaded:
            states.remove(name)
    return Recovered(state, next_number, records, nbytes, torn, not snapshots and not segments, loaded)


def _snapshot(folder: Path, number: int, clock: ClockIdentity, capacity: int | None, watched: Iterable[str]) -> State:
    path = snapshot_path(folder, number)
    try:
        tree = state_file.read(path)
        state = serialization.load_state(tree["state"], capacity, watched)
        shift_ages(state, clock.shift_from(ClockIdentity(tree["boot"], tree["offset"])))
    except (CheckpointError, LookupError, TypeError) as error:
        raise JournalError(
            f"the journal's snapshot {path} cannot be read: {error} Bring the file back, or start with an empty folder "
            f"(durability.folder)"
        ) from error
    return state


def shift_time(record: RecordT, shift: float) -> RecordT:
    """Return a record with its time, if it has one, by another clock, which shows `shift` seconds more."""
    if not record.by_clock:
        return record
    return msgspec.structs.replace(record, **{record.by_clock: getattr(record, record.by_clock) + shift})


class _Replayed(NamedTuple):
    """A segment that was replayed."""

    records: int
    valid: int
    """Its valid bytes."""
    size: int
    """Its bytes."""
    files: list[str]
    """The files of loaded states that it names."""


def _replay(state: State, path: Path, clock: ClockIdentity, last: bool) -> _Replayed:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # an empty file cannot be mapped
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    reading = Reading(path, data, last)
    count = 0
    files: list[str] = []
    states = LoadedStates(path.parent)
    shift = 0.0 if reading.head is None else clock.shift_from(reading.head.clock)
    for records in reading.frames():
        for record in records:
            if shift:
                record = shift_time(record, shift)
            if isinstance(record, StateLoaded):
                _read_loaded(states, state, record, path)
                files.append(record.file)
            try:
                apply_record(state, current_record(record))
            except Exception as error:  # any error here means that the record is invalid
                raise JournalError(
                    f"record {count} of the journal's file {path} does not fit the records before it "
                    f"({type(record).__name__}: {error!r}). Start with an empty folder (durability.folder)"
                ) from error
            count += 1
    return _Replayed(count, reading.end, size, files)


def _read_loaded(states: LoadedStates, state: State, record: StateLoaded, path: Path) -> None:
    try:
        states.prepare(state, record)
    except (CheckpointError, OSError, LookupError, TypeError) as error:
        raise JournalError(
            f"the journal's file {path} names the state of a loaded checkpoint, but the file of that state, "
            f"{states.path(record.file)}, cannot be read: {error}. Restore the file, or start with an empty folder "
            f"(durability.folder)"
        ) from error


def _remove_before(folder: Path, number: int) -> None:
    segments, snapshots = list_numbers(folder)
    for old in snapshots:
        if old < number:
            snapshot_path(folder, old).unlink(missing_ok=True)
    for old in segments:
        if old < number:
            segment_path(folder, old).unlink(missing_ok=True)


class Journal:
    """Appends to the journal in a folder."""

    def __init__(
        self, folder: Path, recovered: Recovered, clock: ClockIdentity, durable: bool, late: bool = False
    ) -> None:
        """Begin a new segment.

        If `durable` is set, a committed record survives a crash of the machine; with `late`, only after the caller has
        written `unsynced_files` through.
        """
        self.folder = folder
        self.number = recovered.number
        """The segment that is being written."""
        self.records = recovered.records
        """Records that were appended or, before that, replayed."""
        self._before = recovered.nbytes
        """Bytes of the segments before this one, and of loaded states, since the snapshot."""
        self._loaded = dict(recovered.loaded)
        self._clock = clock
        self._durable = durable
        self._late = late
        self._ended: list[int] = []
        """Descriptors of ended segments that `unsynced_files` has not returned yet, if `late` is set."""
        self._segment = self._begin()
        self._old_bytes = 0
        """Bytes of all files but the segment."""
        self.measure()

    def _begin(self) -> SegmentWriter:
        head = SegmentHeader.new(self.number, self._clock)
        return SegmentWriter(segment_path(self.folder, self.number), head, self._durable, self._late)

    @property
    def written(self) -> int:
        """Bytes that were appended or, before that, replayed."""
        return self._before + self._segment.size

    @property
    def size(self) -> int:
        """Bytes of all files, including those that are not committed yet."""
        return self._old_bytes + self._segment.size

    def measure(self) -> None:
        """Determine the size of the older files."""
        names = [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        names = [*names, *self._loaded]
        self._old_bytes = sum(self._size_of(name) for name in names if name != self._segment.path.name)

    def _size_of(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Append records. The next `commit` writes all of them or none."""
        kept = [record for record in records if not isinstance(record, (RequestParked, Unparked))]
        if kept:
            self._segment.append(kept)
            self.records += len(kept)
            for record in kept:
                if isinstance(record, StateLoaded):
                    self._add_loaded(record.file)

    def _add_loaded(self, name: str) -> None:
        """Count a loaded state that a record now names, because a replay has to read it like the record itself."""
        size = self._size_of(name)
        self._loaded[name] = self.number
        self._before += size
        self._old_bytes += size

    @property
    def committed(self) -> bool:
        """Whether everything that was appended is written."""
        return self._segment.committed

    def commit(self) -> None:
        """Write what was appended. After an error it is incomplete: call it again."""
        self._segment.commit()

    def reserve_space(self) -> None:
        """See `SegmentWriter.reserve_space`."""
        self._segment.reserve_space()

    def unsynced_files(self) -> list[int]:
        """Return descriptors of the files that the disk may not have yet. The caller closes them."""
        current = self._segment.descriptor()
        files, self._ended = [*self._ended, *([] if current is None else [current])], []
        return files

    def rotate(self) -> int:
        """Begin a new segment, when everything is committed. Returns its number."""
        assert self._segment.committed, "a segment ends with a commit"
        if self._segment.size:
            ended = self._segment.descriptor() if self._late else None
            self._ended += [] if ended is None else [ended]
            self._segment.close()
            self._old_bytes += self._segment.size
            self._before += self._segment.size
            self.number += 1
            self._segment = self._begin()
        return self.number

    def forget_before(self, number: int) -> None:
        """Remove the files that the snapshot before this segment replaces."""
        if self._durable:
            sync_folder(self.folder)
        _remove_before(self.folder, number)
        states = LoadedStates(self.folder)
        for name in [name for name, segment in self._loaded.items() if segment < number]:
            states.remove(name)
            del self._loaded[name]
        self.measure()

    def close(self) -> None:
        """Close the file."""
        self._segment.close()
