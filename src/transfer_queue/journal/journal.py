"""The journal of a controller: a folder of segments and, from time to time, a snapshot of the whole state.

    segment-<n>    records, in order (`segment.py`); a new one is begun with each process and each snapshot
    state-<n>      the state before the first record of segment n (`state_file.py`)
    load-<hex>     the state of a loaded checkpoint; a record names it (`loaded_states.py`)

What is older than the newest complete snapshot is removed. `recover` gives the state that the files tell, `Journal`
adds to them. Who waits is not written down: he asks again on his new connection.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.core.events.records import AgesRecorded, AnyRecord, RequestParked, StateLoaded, Unparked
from transfer_queue.core.state import serialization
from transfer_queue.core.state.apply import apply_record
from transfer_queue.core.state.restore import at_another_clock
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError, JournalError
from transfer_queue.journal import state_file
from transfer_queue.journal.loaded_states import LoadedStates
from transfer_queue.journal.segment import ClockIdentity, Reading, SegmentHeader, SegmentWriter, sync_folder

_NAME = re.compile(r"(segment|state)-(\d{12})")
_DRAFT = re.compile(r"\.state-\d{12}\.draft")


def segment_path(folder: Path, number: int) -> Path:
    """Where a segment lies."""
    return folder / f"segment-{number:012d}"


def snapshot_path(folder: Path, number: int) -> Path:
    """Where the state before the first record of this segment lies."""
    return folder / f"state-{number:012d}"


def numbers(folder: Path) -> tuple[list[int], list[int]]:
    """The numbers of the segments and of the snapshots in a folder, ascending."""
    found: dict[str, list[int]] = {"segment": [], "state": []}
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None:
            found[match[1]].append(int(match[2]))
    return sorted(found["segment"]), sorted(found["state"])


def snapshot_of(state: State, clock: ClockIdentity) -> dict[str, Any]:
    """What a snapshot's file holds."""
    return {"boot": clock.boot, "offset": clock.offset, "state": serialization.save_state(state)}


@dataclass(frozen=True)
class Recovered:
    """What a folder told. number: of the segment to go on with. records, nbytes: what was replayed after the snapshot.

    torn: bytes at the end that were not whole: of a commit that its process did not survive, so that nobody was
    answered. fresh: there was nothing. loaded: files of loaded states -> the segment whose record names them.
    """

    state: State
    number: int
    records: int
    nbytes: int
    torn: int
    fresh: bool
    loaded: dict[str, int]


def recover(folder: Path, clock: ClockIdentity, capacity: int | None = None, watched: Iterable[str] = ()) -> Recovered:
    """The state that the journal in a folder tells; cuts a torn tail off, and removes what is older or unfinished.

    capacity, watched: see `State`. JournalError where the folder is damaged; OSError as the file system does.
    """
    for path in folder.iterdir():
        if _DRAFT.fullmatch(path.name):
            path.unlink()  # its writer has died
    segments, snapshots = numbers(folder)
    first = snapshots[-1] if snapshots else 1
    _remove_before(folder, first)
    segments = [number for number in segments if number >= first]
    missing = sorted(set(range(first, segments[-1] + 1 if segments else first)) - set(segments))
    if missing:
        raise JournalError(
            f"of the journal in {folder} segment {missing[0]} is missing ({segment_path(folder, missing[0])}): what it "
            f"held cannot be restored. Bring the file back, or begin with an empty folder (controller.journal.folder)"
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
        if end < size:
            torn = size - end
            os.truncate(path, end)
        next_number = number + 1
        if not end:
            path.unlink()
            next_number = number
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
        at_another_clock(state, clock.shift_from(ClockIdentity(tree["boot"], tree["offset"])))
    except (CheckpointError, LookupError, TypeError) as error:
        raise JournalError(
            f"the journal's snapshot cannot be read: {error} Begin with an empty folder (controller.journal.folder), "
            f"or bring the file back"
        ) from error
    return state


def _replay(state: State, path: Path, clock: ClockIdentity, last: bool) -> tuple[int, int, int, list[str]]:
    """How many records a segment had, how many of its bytes are whole, how many it has; the loaded states it names."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        # an mmap object of a file without bytes cannot be made
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    reading = Reading(path, data, last)
    count = 0
    files: list[str] = []
    states = LoadedStates(path.parent)
    shift = 0.0 if reading.head is None else clock.shift_from(reading.head.clock)
    for records in reading.frames():
        for record in records:
            if shift and isinstance(record, (AgesRecorded, StateLoaded)):
                record = msgspec.structs.replace(record, time=record.time + shift)
            if isinstance(record, StateLoaded) and record.file:
                _read_loaded(states, state, record, path)
                files.append(record.file)
            try:
                apply_record(state, record)
            except Exception as error:  # whatever a record leads to: it is the record's fault
                raise JournalError(
                    f"record {count} of the journal's file {path} does not fit to those before it "
                    f"({type(record).__name__}: {error!r}). Begin with an empty folder (controller.journal.folder)"
                ) from error
            count += 1
    return count, reading.end, size, files


def _read_loaded(states: LoadedStates, state: State, record: StateLoaded, path: Path) -> None:
    try:
        states.prepare(state, record)
    except (CheckpointError, OSError, LookupError, TypeError) as error:
        raise JournalError(
            f"the journal's file {path} names the state of a loaded checkpoint, but the file of that state, "
            f"{states.path(record.file)}, cannot be read: {error}. Restore the file, or start with an empty folder "
            f"(controller.journal.folder)"
        ) from error


def _remove_before(folder: Path, number: int) -> None:
    segments, snapshots = numbers(folder)
    for old in snapshots:
        if old < number:
            snapshot_path(folder, old).unlink(missing_ok=True)
    for old in segments:
        if old < number:
            segment_path(folder, old).unlink(missing_ok=True)


class Journal:
    """Adds to the journal in a folder.

    number: of the segment that is being written. records, written: how many records and bytes were added, beginning
    with those that were replayed.
    durable: a commit is on the disk when it returns, also if the machine then fails.
    """

    def __init__(self, folder: Path, recovered: Recovered, clock: ClockIdentity, durable: bool) -> None:
        self.folder = folder
        self.number = recovered.number
        self.records = recovered.records
        self._before = recovered.nbytes  # written before the segment, and states that were loaded
        self._loaded = dict(recovered.loaded)
        self._clock = clock
        self._durable = durable
        self._segment = self._begin()
        self._old_bytes = 0  # of the files before the segment
        self.measure()

    def _begin(self) -> SegmentWriter:
        head = SegmentHeader.new(self.number, self._clock)
        return SegmentWriter(segment_path(self.folder, self.number), head, self._durable)

    @property
    def written(self) -> int:
        """See the class."""
        return self._before + self._segment.size

    @property
    def size(self) -> int:
        """Bytes of all files, with what is not committed yet."""
        return self._old_bytes + self._segment.size

    def measure(self) -> None:
        """Looks at how large the older files are."""
        names = [path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        names = [*names, *self._loaded]
        self._old_bytes = sum(self._size_of(name) for name in names if name != self._segment.path.name)

    def _size_of(self, name: str) -> int:
        try:
            return (self.folder / name).stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, records: Sequence[AnyRecord]) -> None:
        """Adds what happened; the next `commit` writes it, all of it or nothing."""
        kept = [record for record in records if not isinstance(record, (RequestParked, Unparked))]
        if kept:
            self._segment.append(kept)
            self.records += len(kept)
            for record in kept:
                if type(record) is StateLoaded and record.file:
                    self._add_loaded(record.file)

    def _add_loaded(self, name: str) -> None:
        """Count a loaded state that a record now names. To replay it takes as long as if it were in the record."""
        size = self._size_of(name)
        self._loaded[name] = self.number
        self._before += size
        self._old_bytes += size

    def commit(self) -> None:
        """Writes what was added. OSError: not all of it could be; to be called again."""
        self._segment.commit()

    def take_room(self) -> None:
        """See `SegmentWriter.take_room`."""
        self._segment.take_room()

    def rotate(self) -> int:
        """Begins a new segment, everything being committed; its number."""
        assert self._segment.committed, "a segment ends with a commit"
        if self._segment.size:
            self._segment.close()
            self._old_bytes += self._segment.size
            self._before += self._segment.size
            self.number += 1
            self._segment = self._begin()
        return self.number

    def forget_before(self, number: int) -> None:
        """Removes what the snapshot before this segment makes needless."""
        if self._durable:
            sync_folder(self.folder)
        _remove_before(self.folder, number)
        states = LoadedStates(self.folder)
        for name in [name for name, segment in self._loaded.items() if segment < number]:
            states.remove(name)
            del self._loaded[name]
        self.measure()

    def close(self) -> None:
        """Closes the file."""
        self._segment.close()
