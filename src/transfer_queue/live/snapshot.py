"""Snapshots: what the live page shows at one moment, as a file that `tq live FILE` shows without a system.

A snapshot is JSON, packed by gzip. It has no values of samples, and nothing that opens a system.
"""

from __future__ import annotations

import gzip
import re
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Struct
from msgspec.structs import asdict, replace

from transfer_queue.errors import ConnectionLostError, InvalidArgumentError, TransferQueueError, WaitTimeoutError
from transfer_queue.live.answers import LanesAnswer, MatrixAnswer, SampleAnswer
from transfer_queue.live.payload import LiveView, SystemState, to_json
from transfer_queue.live.serving.hub import ViewSource
from transfer_queue.messages.reports.overview import MAX_COLUMNS

KIND = "transfer_queue live snapshot"
FORMAT = 1
"""Higher after each change of the payload or the answers that makes files of an older version unreadable."""
MAX_BYTES = 256 << 20  # of the JSON
MAX_PACKED = 64 << 20  # of the file
MAX_SAMPLES = 8
MAX_HISTORY = 86_400.0  # seconds; the page draws a line for each minute
COLUMNS = 512
PAUSE = 2.1  # seconds between two reads, so that the parts which are made every two seconds are made twice
GZIP = 16  # of the bits of a window, for zlib
NO_VALUES = "a snapshot has no values"
WRONG_FILE = "give a file that `tq live --save FILE` or the page's button Save has written"

T = TypeVar("T")


class PageAnswers(Protocol):
    """Answers the questions of the page. Each method raises errors of the tree if it cannot."""

    def matrix(self, partition: str, first: int, last: int | None, columns: int) -> MatrixAnswer | None:
        """Return the matrix of a partition; None if the partition does not exist."""

    def sample(self, partition: str, index: int | None, key: str | None) -> SampleAnswer | None:
        """Return what is known of a sample; None if it is not known."""

    def explain(self, partition: str, index: int | None, key: str | None, task: str | None) -> str:
        """Return why a sample is not delivered, or what the claims of a task wait for."""

    def close(self) -> None:
        """Close the connections."""


class Header(Struct, frozen=True):
    """The beginning of a snapshot, in every format."""

    kind: str
    format: int
    version: str = ""
    """The version of the package that wrote it."""


class LiveSnapshot(Header, frozen=True, kw_only=True):
    """What the page showed."""

    saved: float
    """When it was saved, in Unix seconds."""
    view: LiveView
    """All parts of the stream."""
    matrices: list[MatrixAnswer]
    """The partitions that the page shows in full."""
    samples: list[SampleAnswer]
    """The samples that the page names because they are stuck, without their values."""


def take_snapshot(view: LiveView, answers: PageAnswers) -> LiveSnapshot:
    """Return a snapshot of a view.

    Args:
        view: The view.
        answers: Answers the questions about partitions and samples. What it cannot answer is left out.

    Raises:
        ConnectionLostError: The view lacks parts, because the page has not reached the system yet.
    """
    if _missing_parts(view):
        raise ConnectionLostError("the page has not reached the system yet; try again")
    assert view.system is not UNSET
    assert view.partitions is not UNSET
    assert view.waits is not UNSET
    listed = view.partitions.listed
    named = [(each.partition, each.sample) for each in view.waits] + [(each.name, each.sample) for each in listed]
    stuck = [each for each in dict.fromkeys(named) if each[1] is not None][:MAX_SAMPLES]
    matrices = _answered(partial(answers.matrix, each.name, 0, None, COLUMNS) for each in listed if each.shown)
    samples = _answered(partial(answers.sample, partition, index, None) for partition, index in stuck)
    return LiveSnapshot(
        KIND, FORMAT, view.system.version, saved=round(time.time(), 1),
        view=replace(view, system=replace(view.system, values=False)),
        matrices=matrices, samples=[_without_values(each) for each in samples],
    )  # fmt: skip


def observe(source: ViewSource, answers: PageAnswers) -> LiveSnapshot:
    """Read a system twice, because some numbers need two reads, and return a snapshot of it.

    Raises what `ViewSource.make` raises.
    """
    source.make()
    time.sleep(PAUSE)
    now, parts = source.make()
    view: Any = {**parts, **source.full_parts()}
    return take_snapshot(LiveView(0, now, **view), answers)


def _missing_parts(view: LiveView) -> list[str]:
    return [name for name, part in asdict(view).items() if part is UNSET]


def _answered(questions: Iterable[Callable[[], T | None]]) -> list[T]:
    """Return the answers that there are. A controller that does not reply once is not asked again."""
    replies = []
    for question in questions:
        try:
            answer = question()
        except WaitTimeoutError:
            break
        except (TransferQueueError, OSError):
            continue
        if answer is not None:
            replies.append(answer)
    return replies


def _without_values(sample: SampleAnswer) -> SampleAnswer:
    return replace(
        sample,
        fields=[
            replace(each, head=None, text=None, decoded=None, note=NO_VALUES if each.present else each.note)
            for each in sample.fields
        ],
        tags=[replace(each, value=None) for each in sample.tags],
    )


# ------------------------------------------------------------ files


def encode_snapshot(snapshot: LiveSnapshot) -> bytes:
    """Return the bytes of a file."""
    return gzip.compress(to_json(snapshot), 6)


def file_name(snapshot: LiveSnapshot) -> str:
    """Return a name for the file, such as "tq-live-default-20260131-235959.json.gz"."""
    assert snapshot.view.system is not UNSET
    system = re.sub(r"[^A-Za-z0-9._-]+", "_", snapshot.view.system.name)[:64]
    return f"tq-live-{system}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(snapshot.saved))}.json.gz"


def read_snapshot(path: Path) -> LiveSnapshot:
    """Return the snapshot in a file.

    Raises:
        InvalidArgumentError: The file cannot be read, or is not a snapshot that this version reads.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PACKED + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error.strerror or error}; {WRONG_FILE}") from None
    return decode_snapshot(data, str(path))


def decode_snapshot(data: bytes, name: str) -> LiveSnapshot:
    """Return the snapshot in the bytes of a file. `name` is that of the file, for the errors.

    Raises:
        InvalidArgumentError: The bytes are not a snapshot that this version reads.
    """
    text = _unpacked(data, name)
    try:
        header = msgspec.json.decode(text, type=Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(name, f"is not a snapshot of the live page: {error}") from None
    if header.kind != KIND:
        raise _damaged(name, f"is not a snapshot of the live page: its kind is {header.kind[:100]!r}")
    if header.format != FORMAT:
        raise InvalidArgumentError(
            f"{name} is a snapshot of format {header.format}, written by transfer_queue {header.version[:40] or '?'}; "
            f"this version reads format {FORMAT}: open the file with the version that wrote it"
        )
    try:
        snapshot = msgspec.json.decode(text, type=LiveSnapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _damaged(name, f"is a damaged snapshot: {error}") from None
    if missing := _missing_parts(snapshot.view):
        raise _damaged(name, f"is a damaged snapshot: it lacks {', '.join(missing)}")
    assert snapshot.view.system is not UNSET
    if not 0 < snapshot.view.system.history <= MAX_HISTORY:
        raise _damaged(name, f"is a damaged snapshot: its timeline covers {snapshot.view.system.history} s")
    if any(not 0 <= matrix.columns <= MAX_COLUMNS for matrix in snapshot.matrices):
        raise _damaged(name, f"is a damaged snapshot: a matrix has more than {MAX_COLUMNS:,} columns")
    return snapshot


def _unpacked(data: bytes, name: str) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        raise _damaged(name, f"is not a snapshot of the live page: it begins with {data[:12]!r}, not as gzip")
    packed = zlib.decompressobj(zlib.MAX_WBITS | GZIP)
    try:
        text = packed.decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise _damaged(name, f"is a damaged snapshot: {error}") from None
    if packed.unconsumed_tail:
        raise _damaged(name, f"is not a snapshot of the live page: it has more than {MAX_BYTES >> 20} MiB of text")
    if not packed.eof:
        raise _damaged(name, f"is a damaged snapshot: the file ends too early, after {len(data):,} bytes")
    return text


def _damaged(name: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {what}; {WRONG_FILE}")


# ------------------------------------------------------------ what the page shows of a file


class SnapshotSource(ViewSource):
    """Shows a snapshot where a page shows a system."""

    def __init__(self, snapshot: LiveSnapshot) -> None:
        view = snapshot.view
        state = SystemState("snapshot", snapshot.saved, "" if view.state is UNSET else view.state.words)
        self._now = view.now
        self._parts: dict[str, object] = {**asdict(view), "state": state}
        del self._parts["seq"], self._parts["now"]

    def make(self) -> tuple[float, dict[str, object]]:
        """Return the same view each time."""
        return self._now, dict(self._parts)

    def lanes(self, task: str, first: int, count: int, after: str) -> LanesAnswer | None:
        """Refuse: single ranks are not saved."""
        raise InvalidArgumentError("a snapshot does not have the single ranks of a line of many")

    def close(self) -> None:
        """Do nothing: there is no connection."""


class SnapshotAnswers(PageAnswers):
    """Answers the questions of the page from a snapshot."""

    def __init__(self, snapshot: LiveSnapshot) -> None:
        self._snapshot = snapshot

    def matrix(self, partition: str, first: int, last: int | None, columns: int) -> MatrixAnswer | None:
        """Return the matrix of a partition that the page showed in full."""
        matrix = next((each for each in self._snapshot.matrices if each.partition == partition), None)
        if matrix is None:
            raise InvalidArgumentError(f"the cells of partition {partition[:200]!r} are not in this snapshot")
        return matrix

    def sample(self, partition: str, index: int | None, key: str | None) -> SampleAnswer | None:
        """Return a sample that the page named."""
        samples = [each for each in self._snapshot.samples if each.partition == partition]
        sample = next((each for each in samples if (each.key == key if index is None else each.index == index)), None)
        if sample is None:
            named = ", ".join(f"{each.index:,} of {each.partition[:40]!r}" for each in self._snapshot.samples) or "none"
            raise InvalidArgumentError(
                f"this sample is not in the snapshot, which has only the samples that the page named: {named}"
            )
        return sample

    def explain(self, partition: str, index: int | None, key: str | None, task: str | None) -> str:
        """Refuse: a sample is explained for one task only, in `SampleAnswer.words`."""
        raise InvalidArgumentError("a snapshot has the explanation for the task at the end only")

    def close(self) -> None:
        """Do nothing: there is no connection."""
