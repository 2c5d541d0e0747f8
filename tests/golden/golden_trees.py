"""Trees of plain values and columns: which columns of a saved state hold anything, and where two trees differ."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from golden_internals import state_file

from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.tag_table import SentTags

# Dicts whose keys are not names of columns, but of partitions, clients, fields or tasks, or are numbers.
MAPS = {
    "clients", "origins", "lost_units", "blocks.chunks", "blocks.chunks.*.second",
    "blocks.chunks.*.shared", "partitions", "samplers",
    *(
        f"partitions.*.{name}"
        for name in (
            "owners", "fields", "dtypes", "field_ranks", "tasks", "claimed", "consumed_ever", "dealt", "dealt.*.issued",
            "dealt.*.counts", "dealt.*.sizes", "passed.codes", "passed.codes.*", "leases.delivered",
            "leases.delivered.*", "leases.acked", "leases.acked.*", "wants.groups", "drops.rows", "groups.unborn",
            "losses.events", "losses.counts", "changes.newest", "rows.chunks",
        )
    ),
    *(f"partitions.*.rows.chunks.*.{name}" for name in ("field", "consumed", "dealt", "held", "finished", "lost")),
}  # fmt: skip


def columns(tree: Any, path: str = "") -> dict[str, bool]:
    """Column of a tree -> whether it contains anything but zeros."""
    if not isinstance(tree, dict):
        return {path: bool(np.any(tree)) if isinstance(tree, np.ndarray) else bool(tree)}
    found = {path: True} if path in MAPS and tree else {path: False} if not tree else {}
    for key, value in tree.items():
        name = "*" if path in MAPS else str(key)
        for column, holds in columns(value, f"{path}.{name}" if path else name).items():
            found[column] = holds or found.get(column, False)
    return found


def tags_of(packed: np.ndarray) -> list[dict[str, Any]]:
    """The tag of each row in the column of a chunk, without the last ones that are empty. It has two forms."""
    tags = [tag or {} for tag in msgspec.msgpack.decode(packed.data, type=SentTags)]
    while tags and not tags[-1]:
        tags.pop()
    return tags


DEFAULTS = msgspec.to_builtins(PartitionOptions())

decode_replies = msgspec.msgpack.Decoder(dict[int, AnyReply]).decode


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """List what an older tree contains that a newer one lacks, or has with another value. Additions are allowed."""
    if path.endswith(".tags") and isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return [] if tags_of(old) == tags_of(new) else [f"{path}: {tags_of(old)!r} became {tags_of(new)!r}"]
    if path.startswith(".clients.") and isinstance(old, bytes) and isinstance(new, bytes):
        same = decode_replies(old) == decode_replies(new)  # later releases add entries with defaults to a reply
        return [] if same else [f"{path}: {old!r} became {new!r}"]
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{path}.{key} is missing" for key in old if key not in new]
        found = (differences(old[key], new[key], f"{path}.{key}") for key in old if key in new)
        return missing + [words for part in found for words in part]
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        equal = (
            isinstance(old, np.ndarray)
            and isinstance(new, np.ndarray)
            and old.dtype == new.dtype
            and np.array_equal(old, new)
        )
        return [] if equal else [f"{path}: {old!r} became {new!r}"]
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if path.endswith(".options") and list(new[len(old) :]) == DEFAULTS[len(old) :]:
            new = new[: len(old)]  # options that a later release has, with their defaults
        if len(old) != len(new):
            return [f"{path}: {len(old)} entries became {len(new)}"]
        parts = (differences(*pair, f"{path}[{at}]") for at, pair in enumerate(zip(old, new, strict=True)))
        return [words for part in parts for words in part]
    return [] if old == new else [f"{path}: {old!r} became {new!r}"]


def assert_same(observed: Any, then: Any) -> None:
    """Raise AssertionError, which names the differences, if an observation differs from the one of the release."""
    assert differences(then, observed) == []
    assert observed == then


def flip(path: Path, at: int) -> None:
    """Damage one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(content)


def filled(folders: Iterable[Path]) -> dict[str, bool]:
    """Column of the state -> whether it contains anything in any state file of these folders."""
    found: dict[str, bool] = {}
    for folder in folders:
        for path in state_files(folder):
            for column, holds in columns(state_file.read(path)["state"]).items():
                found[column] = holds or found.get(column, False)
    return found


def state_files(folder: Path) -> list[Path]:
    """The files with a saved state in a folder and in the folders below it."""
    names = ("state-", "controller_state.pkl", "load-")
    return sorted(path for path in folder.rglob("*") if path.name.startswith(names))
