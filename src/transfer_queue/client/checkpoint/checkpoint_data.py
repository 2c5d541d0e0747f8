"""The data of a checkpoint: which files of blocks a save writes, and how a load copies their blocks into arenas.

A save links to those files of the previous checkpoint that contain enough of the needed blocks, and writes the rest
into a new file. A load copies the needed blocks out of the files into space that a client has reserved, without values
that need pickle if these are refused.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from transfer_queue.client.checkpoint.block_file import BlockFile, BlockSource, space_of_blocks, write_blocks
from transfer_queue.client.checkpoint.checkpoint_folder import (
    MANIFEST,
    SUFFIX,
    BlockFileEntry,
    read_manifest,
    write_json,
)
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.core.columns.schema import MOST
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.restore import lost_values
from transfer_queue.core.state.serialization import Columns
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import PLACE
from transfer_queue.core.tables.rows import Chunk
from transfer_queue.errors import (
    CheckpointError,
    InvalidArgumentError,
    ProtocolError,
    TransferQueueError,
    UncarriableValueError,
)
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.storage.protocols import Bytes, Reserved
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.buffers.block_layout import columns
from transfer_queue.wire.objects.extensions import encode_refused
from transfer_queue.wire.objects.object_decoder import decode_object
from transfer_queue.wire.objects.object_values import OBJECT_CODE

MAX_NAMED = 5  # samples that a warning names


@dataclass(frozen=True)
class CheckpointReport:
    """What was saved or loaded by `tq.save_checkpoint` and `tq.load_checkpoint` with `partitions`.

    Example:
        >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
        >>> tq.save_checkpoint("checkpoint", partitions="train_0")
        CheckpointReport(samples={'train_0': 1}, lost={})
    """

    samples: dict[str, int]
    """Partition -> number of samples."""
    lost: dict[str, dict[str | int, list[str]]] = field(default_factory=dict)
    """Partition -> key of a sample (its global index in the saved system if it has none) -> fields whose values are
    lost.

    Their storage unit was lost before the save. Put these fields again, or clear the samples.
    """


def warn_of_losses(report: CheckpointReport) -> None:
    """Log a warning that names the lost values, if there are any."""
    for partition, samples in report.lost.items():
        named = ", ".join(f"{key!r} ({', '.join(fields)})" for key, fields in list(samples.items())[:MAX_NAMED])
        more = f" and {len(samples) - MAX_NAMED} more" if len(samples) > MAX_NAMED else ""
        get_logger(__name__).warning(
            "%d samples of partition %r in the checkpoint have values that were lost with their storage unit: %s%s; "
            "put these fields again, or clear the samples",
            len(samples), partition, named, more,
        )  # fmt: skip


def report_on(state: State) -> CheckpointReport:
    """Return the report on a saved state."""
    samples = {name: partition.row_count for name, partition in state.partitions.items()}
    return CheckpointReport(samples, lost_values(state))


class PickledValues:
    """Removes the values of a saved state that need pickle."""

    def __init__(self, state: State) -> None:
        self.removed: Counter[tuple[str, str]] = Counter()
        """(partition, field or tag) -> number of removed values."""
        self._blocks = state.blocks
        self._rows: dict[tuple[int, str, int], tuple[str, int]] = {}
        """(block, field, row in the block) -> partition and global index, for all objects."""
        for partition in state.partitions.values():
            self._note_rows(partition)

    def _note_rows(self, partition: Partition) -> None:
        for name, column in partition.fields.items():
            if column.kind == "tensor":
                continue
            for chunk in partition.rows.chunks.values():
                if name in chunk.field:
                    numbers, slots = chunk.field[name]
                    at = np.flatnonzero(numbers)
                    for number, slot, index in zip(numbers[at].tolist(), slots[at].tolist(), chunk.index[at].tolist()):
                        self._rows[number, name, slot] = (partition.name, index)

    def strip(self, number: int, content: np.ndarray) -> None:
        """Overwrite the values that need pickle in the bytes (u1) of a block."""
        schema, dims, rows = self._blocks.shape_source(number)
        if not any(spec.kind == "object" for spec in schema):
            return
        for column in columns(schema, np.frombuffer(dims, "<i8"), rows):
            if column.spec.kind != "object":
                continue
            starts, lengths = column.locate(0, np.arange(rows))
            for slot, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
                value = content[start : start + length]
                if len(value) and needs_pickle(value.tobytes()):
                    partition, index = self._rows.get((number, column.spec.name, slot), ("", -1))
                    place = f"field {column.spec.name!r} of row {index} of partition {partition!r}"
                    self.removed[partition, f"field {column.spec.name!r}"] += index >= 0
                    value[:] = np.frombuffer(encode_refused(len(value), place), "u1")

    def strip_tags(self, state: State) -> None:
        """Replace the values that need pickle in the tags of all rows."""
        for partition in state.partitions.values():
            for chunk in partition.rows.chunks.values():
                if chunk.tags is not None:
                    self._strip_tags_of(partition, chunk)

    def _strip_tags_of(self, partition: Partition, chunk: Chunk) -> None:
        tags = chunk.tag_columns()
        for at, tag in enumerate(tags.rows(slice(0, chunk.size))):
            for name, value in tag.items():
                place = f"tag {name!r} of row {int(chunk.index[at])} of partition {partition.name!r}"
                kept = _without_pickle(value, place)
                if kept is not value:
                    tags.put([at], [{name: kept}])
                    self.removed[partition.name, f"tag {name!r}"] += 1

    def report(self) -> None:
        """Log how many values were refused."""
        counts = [f"{what} of {partition!r}: {count}" for (partition, what), count in self.removed.items() if count]
        if counts:
            get_logger(__name__).warning(
                "the checkpoint was loaded with allow_pickle=False; values that need pickle cannot be read: %s",
                "; ".join(counts[:20]),
            )


def needs_pickle(data: bytes) -> bool:
    """Whether decoding an object from these bytes needs pickle."""
    try:
        decode_object(data, allow_pickle=False)
    except UncarriableValueError:
        return True
    except (ProtocolError, InvalidArgumentError):
        return False  # every reader fails before it reaches pickle
    return False


def _without_pickle(value: Any, place: str) -> Any:
    """Return the value of a tag, in which each value that needs pickle is replaced."""
    if isinstance(value, Ext):
        data = bytes(value.data)
        return Ext(value.code, encode_refused(0, place)) if value.code == OBJECT_CODE and needs_pickle(data) else value
    if isinstance(value, list):
        kept: Any = [_without_pickle(each, place) for each in value]
        return value if all(a is b for a, b in zip(kept, value)) else kept
    if isinstance(value, dict):
        kept = {key: _without_pickle(each, place) for key, each in value.items()}
        return value if all(kept[key] is value[key] for key in value) else kept
    return value


PIECE = 16 << 20
"""Bytes that a load reserves at once. A larger block is reserved alone."""
MIN_PIECE = 1 << 20
"""The least bytes of a piece, so that each piece is an extent of its own."""
MAX_FILES = 32
"""The files of one checkpoint. The blocks of further files, the smallest ones, are written again into a new file."""

# ------------------------------------------------------------ saving


@dataclass(frozen=True)
class CheckpointSave:
    """A pending save."""

    name: str
    """See `messages.checkpoints.BeginCheckpoint`."""
    origin: str
    """See `messages.checkpoints.BeginCheckpointReply`."""
    state: Path
    """The file of the state."""
    blocks: Columns
    """Number, unit, offset, generation and nbytes of all blocks that the state needs, ascending by number."""
    origins: dict[str, int] = field(default_factory=dict)
    """See `messages.checkpoints.BeginCheckpointReply`."""
    report: CheckpointReport | None = None
    """What is saved; None if it is everything, and no value is lost."""


def save_blocks(
    draft: Path,
    cut: CheckpointSave,
    previous: Path | None,
    held: Callable[[int], BlockSource],
    backend_of: Callable[[int], str] = lambda unit: "",
) -> None:
    """Fill a folder with the files of all blocks of a pending save, and with a manifest of these files.

    Everything except the folder itself is synced.

    Args:
        draft: The folder.
        cut: The pending save.
        previous: The folder of an older checkpoint, whose files are linked to if they contain enough needed blocks.
        held: Returns the blocks of a unit.
        backend_of: Returns the backend of a unit. The blocks of each backend have files of their own.

    Raises:
        OSError: The disk is full or cannot be written to.
    """
    numbers = cut.blocks["number"]
    left = np.ones(len(numbers), bool)
    entries: list[BlockFileEntry] = []
    before = {} if previous is None else _backends_of_files(previous)
    for path, shared in reusable_files(previous, cut) if previous is not None else ():
        with contextlib.suppress(OSError):  # a file system without links: its blocks are written again
            os.link(path, draft / path.name, follow_symlinks=False)
            left[np.searchsorted(numbers, shared)] = False
            size, backend = path.stat().st_size, before.get(path.name, "")
            entries.append(BlockFileEntry(len(entries), path.stem, path.name, len(shared), size, backend))
    units: dict[str, list[int]] = {}
    for each in np.unique(cut.blocks["unit"][left]).tolist():
        units.setdefault(backend_of(each), []).append(each)
    for backend, unit_numbers in units.items():
        stem, chosen = uuid.uuid4().hex, left & np.isin(cut.blocks["unit"], unit_numbers)
        number, unit, offset, nbytes = (cut.blocks[name][chosen] for name in ("number", "unit", "offset", "nbytes"))
        size = write_blocks(draft / f"{stem}{SUFFIX}", cut.origin, number, unit, offset, nbytes, held)
        entries.append(BlockFileEntry(len(entries), stem, f"{stem}{SUFFIX}", int(chosen.sum()), size, backend))
    write_json(draft / MANIFEST, msgspec.to_builtins(entries))


def _backends_of_files(storage: Path) -> dict[str, str]:
    """Return the backend of each file of a checkpoint; {} if there is no checkpoint that can be read."""
    try:
        return {entry.file: entry.backend for entry in read_manifest(storage)}
    except (TransferQueueError, OSError):
        return {}


def shared_below(origin: str, own: str, origins: Mapping[str, int]) -> int:
    """Return the number below which blocks of another origin are the same blocks as those of the state.

    Args:
        origin: The origin of the numbers.
        own: The origin of the state.
        origins: The origins that the state was loaded from, with the number below which each shares its blocks.
    """
    return MOST if origin == own else origins.get(origin, 0)


def reusable_files(previous: Path, cut: CheckpointSave) -> list[tuple[Path, np.ndarray]]:
    """Return the files of an older checkpoint that this one can share, and the needed blocks in each of them.

    At least half of the bytes of such a file are needed, and none of the needed numbers is another block in it.
    """
    reusable = []
    for path in sorted(previous.glob(f"*{SUFFIX}")) if previous.is_dir() else ():
        try:
            with BlockFile(path) as file:
                index = file.index
        except (TransferQueueError, OSError):
            continue  # damaged, or a file of another program, so it cannot be shared
        held = index.column("number")
        taken = space_of_blocks(index.column("nbytes"))
        needed = np.isin(held, cut.blocks["number"])
        if (held[needed] >= shared_below(index.origin, cut.origin, cut.origins)).any():
            continue  # a load finds blocks by their numbers, and would use another block as one of this save
        if needed.any() and 2 * int(taken[needed].sum()) >= int(taken.sum()):
            reusable.append((int(taken.sum()), path, held[needed]))
    reusable.sort(key=lambda each: -each[0])
    return [(path, held) for _, path, held in reusable[: MAX_FILES - 1]]


# ------------------------------------------------------------ loading


@dataclass
class Loaded:
    """Blocks that a load has written and not published yet."""

    placed: list[Columns]
    """See `core.state.serialization.set_locations`."""
    reserved: list[Reserved] = field(default_factory=list)
    """The space that contains them."""
    pickled: PickledValues | None = None
    """The values that were refused, if the samples were loaded without pickle; else None."""


@dataclass(frozen=True)
class BlockLoadSource:
    """Blocks to load, in the order of files and positions."""

    files: list[BlockFile]
    file: np.ndarray
    """The position of the file of each block in `files`."""
    number: np.ndarray
    position: np.ndarray
    """The position of each block in its file."""
    nbytes: np.ndarray
    """The length of each block in bytes."""


def block_sources(
    files: list[BlockFile], numbers: np.ndarray | None, shared: Callable[[str], int] = lambda origin: MOST
) -> BlockLoadSource:
    """Return the places of blocks in files. A block that is in two files is read from the first one.

    Args:
        files: The files of one checkpoint.
        numbers: The requested blocks, ascending. Default: None, all.
        shared: Returns, for the origin of a file, the number below which its blocks are those of the state. The other
            blocks of the file are left out. Default: all its blocks are those of the state.

    Raises:
        CheckpointError: A requested block is not in any file.
    """
    columns = {name: [np.zeros(0, "i8")] for name in ("file", "number", "position", "nbytes")}
    for at, file in enumerate(files):
        is_shared = file.index.column("number") < shared(file.index.origin)
        columns["file"].append(np.full(int(is_shared.sum()), at))
        for name in ("number", "position", "nbytes"):
            columns[name].append(file.index.column(name)[is_shared])
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    _, first = np.unique(whole["number"], return_index=True)
    if numbers is not None:
        first = first[np.isin(whole["number"][first], numbers)]
        if len(first) != len(numbers):
            missing = np.setdiff1d(numbers, whole["number"])
            raise CheckpointError(
                f"{len(missing)} blocks of the state are not in any file of data, among them {missing[:5].tolist()}; "
                f"the state and the data are of different checkpoints: load both from one"
            )
    chosen = {name: column[np.sort(first)] for name, column in whole.items()}
    return BlockLoadSource(files, chosen["file"], chosen["number"], chosen["position"], chosen["nbytes"])


def layout_pieces(source: BlockLoadSource, is_external: bool = False) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Divide the blocks into pieces of space: return (piece of each block, its offset there, bytes of each piece).

    In an external store, an extent is one object, which is freed as a whole, so each large block has its own piece.
    """
    taken = space_of_blocks(source.nbytes)
    end = np.cumsum(taken)
    piece = (end - taken) // (GRANULE if is_external else PIECE)
    if is_external:
        large = taken >= GRANULE
        apart = (np.diff(piece, prepend=-1) != 0) | large
        apart[1:] |= large[:-1]
        piece = np.cumsum(apart)
    _, first, piece = np.unique(piece, return_index=True, return_inverse=True)
    within = end - taken - (end - taken)[first][piece]
    sizes = np.zeros(len(first), "i8")
    np.maximum.at(sizes, piece, within + taken)
    return piece, within, (sizes if is_external else np.maximum(sizes, MIN_PIECE)).tolist()


def layout_by_backend(
    source: BlockLoadSource, backends: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, list[tuple[str, int]]]:
    """Divide the blocks into pieces of space in the backend of each file.

    Returns:
        The piece of each block, its offset there, and the backend and the bytes of each piece.
    """
    piece, within = np.zeros(len(source.number), "i8"), np.zeros(len(source.number), "i8")
    sizes: list[tuple[str, int]] = []
    of_file = np.array(backends, object)
    for backend in dict.fromkeys(backends):
        blocks = np.flatnonzero((of_file == backend)[source.file])
        if len(blocks):
            columns = (source.file[blocks], source.number[blocks], source.position[blocks], source.nbytes[blocks])
            pieces, starts, lengths = layout_pieces(BlockLoadSource(source.files, *columns), backend != SIMPLE)
            piece[blocks], within[blocks] = pieces + len(sizes), starts
            sizes += [(backend, length) for length in lengths]
    return piece, within, sizes


def copy_blocks(
    source: BlockLoadSource,
    piece: np.ndarray,
    within: np.ndarray,
    spaces: list[list[Bytes]],
    amend: Callable[[int, np.ndarray], None] | None = None,
) -> None:
    """Copy blocks out of their files, segment by segment, into the spaces of their pieces, and check all checksums.

    `amend` is called with the number and the bytes of each block before the copy, and may change the bytes.
    """
    if not len(source.number):
        return
    taken = space_of_blocks(source.nbytes)
    apart = np.diff(source.file, prepend=-1) != 0
    apart[1:] |= source.position[1:] != source.position[:-1] + taken[:-1]
    apart |= np.diff(piece, prepend=-1) != 0
    for at, file in enumerate(source.files):
        blocks = np.flatnonzero(source.file == at)
        if not len(blocks):
            continue
        position = source.position[blocks]
        buffer = np.empty(0, np.uint8)
        for _, start, length, checksum in file.index.segments():
            a, b = np.searchsorted(position, [start, start + length]).tolist()
            if a == b:
                continue
            if len(buffer) < length:
                buffer = np.empty(length, np.uint8)
            file.read(buffer[:length], start, checksum)
            some = blocks[a:b]
            if amend is not None:
                for block in some.tolist():
                    first_byte = int(source.position[block]) - start
                    amend(int(source.number[block]), buffer[first_byte : first_byte + int(source.nbytes[block])])
            cuts = [0, *(np.flatnonzero(apart[some][1:]) + 1).tolist(), len(some)]
            for first, last in pairwise(cuts):
                block, end = some[first], some[last - 1]
                size = int(source.position[end] + taken[end] - source.position[block])
                read = int(source.position[block]) - start
                put = int(within[block])
                for space in spaces[int(piece[block])]:
                    space[put : put + size] = buffer[read : read + size]


def block_locations(
    source: BlockLoadSource, piece: np.ndarray, within: np.ndarray, reserved: list[Reserved]
) -> list[Columns]:
    """Return the locations of the loaded blocks, ascending by number, and those of the copies that some have."""
    order = np.argsort(source.number)
    locations = []
    for copy in range(max((len(space.places) for space in reserved), default=0)):
        has_copy = np.array([len(space.places) > copy for space in reserved])
        spaces = [space.places[min(copy, len(space.places) - 1)] for space in reserved]
        columns = {name: np.array([getattr(space, name) for space in spaces], "i8")[piece] for name in PLACE}
        columns["offset"] = columns["offset"] + within
        columns["number"] = source.number
        chosen = order[has_copy[piece][order]]
        locations.append({name: column[chosen] for name, column in columns.items()})
    return locations or [dict.fromkeys(("number", *PLACE), np.zeros(0, "i8"))]


def has_stale_blocks(blocks: Columns, is_stale: Callable[[int, np.ndarray, np.ndarray], bool]) -> bool:
    """Whether any block is not at its location any more. `is_stale` checks blocks of one unit."""
    units = blocks["unit"]
    return any(
        is_stale(unit, blocks["offset"][units == unit], blocks["generation"][units == unit])
        for unit in np.unique(units).tolist()
    )
