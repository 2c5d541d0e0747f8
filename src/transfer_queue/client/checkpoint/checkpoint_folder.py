"""The folder of a checkpoint: made beside its place and put there in one step, checked before it is loaded.

    <checkpoint>/metadata.json                      {"storage_saved": true, "user_metadata": {...}}, written last
    <checkpoint>/controller_state.pkl               the controller's state (`journal.state_file`; the name is callers')
    <checkpoint>/simple_storage/storage_unit_info.json   which files of blocks there are
    <checkpoint>/simple_storage/<id>.blocks         `client.checkpoint.block_file`
    .<checkpoint>.draft                             beside it, while one is being saved, or what a killed save left
    .<checkpoint>.old                               the older one, for a moment, where folders cannot be exchanged

What is saved is written into the draft and synced; then draft and checkpoint change places, and the older one goes.
Whoever dies in between leaves a whole checkpoint in its place (or, where folders cannot be exchanged, the older one
beside it, which is put back), and the next save sweeps the rest.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.errors import CheckpointError, CheckpointNotFoundError, TransferQueueError

METADATA = "metadata.json"
STATE = "controller_state.pkl"
STORAGE = "simple_storage"
MANIFEST = "storage_unit_info.json"
SUFFIX = ".blocks"
SAVED = (METADATA, STATE, STORAGE)

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class BlockFileEntry(msgspec.Struct, frozen=True):
    """One file of blocks in the manifest."""

    position: int
    storage_unit_id: str
    file: str = ""
    blocks: int = 0
    nbytes: int = 0


# ------------------------------------------------------------ saving


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of `target` at the end of the block, whole; target's parents are made.

    If the block fails, the folder goes and everything is as it was. Whoever else saves there meanwhile is refused.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    locked = _own(draft, target)
    try:
        put_back(target)
        try:
            yield draft
            sync(draft)
            swap(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(locked)


def _own(draft: Path, target: Path) -> int:
    """Makes the draft and locks it: the descriptor that holds the lock. What a killed save has left is removed."""
    while True:
        with contextlib.suppress(FileExistsError):
            draft.mkdir(mode=0o700)
        try:
            folder = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another one has just ended
        except OSError as error:
            raise CheckpointError(
                f"{draft} is needed for the new checkpoint, but cannot be replaced: {error}. It was not left by an "
                f"earlier save: remove it, or save to another folder"
            ) from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(folder), os.lstat(draft))
        except FileNotFoundError:
            ours = False
        except BlockingIOError:
            os.close(folder)
            raise CheckpointError(
                f"a checkpoint is being saved to {target} at this moment, by this or another process; save again when "
                f"that has ended, or to another folder"
            ) from None
        except BaseException:
            os.close(folder)
            raise
        if ours and not os.listdir(draft):
            return folder
        if ours:
            shutil.rmtree(draft)
        os.close(folder)


def put_back(target: Path) -> None:
    """Puts an older checkpoint back that a killed save had moved aside, or removes it where the new one is there."""
    old = target.with_name(f".{target.name}.old")
    if old.is_symlink() or not old.is_dir():
        return  # nothing is there, or it was not moved there by a save
    if target.exists():
        shutil.rmtree(old)
    else:
        old.rename(target)


def check_target(target: Path) -> None:
    """CheckpointError where saving would replace something that is no checkpoint."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a folder: save it to another place")
    if any(target.iterdir()) and not any((target / name).exists() for name in SAVED):
        raise CheckpointError(
            f"{target} has files in it and is no checkpoint; saving replaces a folder whole: name a new or empty one"
        )


def swap(draft: Path, target: Path) -> None:
    """Puts the draft into the place of target; what was there is under the draft's name then, or gone."""
    if not target.exists():
        draft.rename(target)
    elif not _exchange(draft, target):
        old = target.with_name(f".{target.name}.old")
        target.rename(old)
        try:
            draft.rename(target)
        except BaseException:
            old.rename(target)
            raise
        shutil.rmtree(old)
    sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Lets two folders change places in one step; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if not rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def sync(folder: Path) -> None:
    """Sees to it that the names in a folder, and in those below it, survive a crash; the files are synced already."""
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def sync_folder(folder: Path) -> None:
    """Sees to it that the names in one folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """A JSON file that survives a crash."""
    with open(path, "x", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def write_manifest(storage: Path, entries: list[BlockFileEntry]) -> None:
    """Says which files of blocks a folder has."""
    write_json(storage / MANIFEST, msgspec.to_builtins(entries))


def broken(target: Path) -> CheckpointError:
    """What a save ends with that found something gone at its end."""
    return CheckpointError(
        f"the checkpoint {target} was not saved: the controller or a storage unit was restarted meanwhile, so that "
        f"what was copied may not be whole; an older one there is as it was. Save again"
    )


def user_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a user keeps with a checkpoint, as JSON values. CheckpointError where it cannot be."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata of a checkpoint is kept as JSON, and {error}; keep other things in a file of your own"
        ) from None
    return plain


def move(source: Path, target: Path) -> None:
    """Moves a file whose content is synced; copies it where it lies on another file system."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        source.unlink()


def copy(source: Path, target: Path) -> None:
    """Copies a file, and syncs it."""
    with open(source, "rb") as opened, open(target, "xb") as made:
        os.fchmod(made.fileno(), 0o600)
        shutil.copyfileobj(opened, made, 1 << 20)
        made.flush()
        os.fsync(made.fileno())


# ------------------------------------------------------------ loading


@contextlib.contextmanager
def reading(what: Path) -> Iterator[None]:
    """Raise CheckpointError if a file or folder cannot be read, because of its permissions or an error of the disk."""
    try:
        yield
    except TransferQueueError:
        raise
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{error.filename or what} is missing from a checkpoint") from error
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or what} cannot be read: {error.strerror or error}; nothing was changed. Make it "
            f"readable, or load another checkpoint"
        ) from error


def check(folder: Path) -> None:
    """Raises where this is no checkpoint, or not all of one; nothing has changed then.

    Raises:
        CheckpointNotFoundError: the folder, metadata.json or the state file is missing.
        CheckpointError: the manifest does not match the files ("count mismatch"), metadata.json is not valid, or a file
            cannot be read.
    """
    with reading(folder):
        _check(folder)


def _check(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no checkpoint folder {folder}")
    for name in (METADATA, STATE):
        if not (folder / name).is_file():
            raise CheckpointNotFoundError(
                f"{folder / name} is missing: {folder} is no checkpoint, or not all of one; it holds "
                f"{sorted(path.name for path in folder.iterdir())[:8]}"
            )
    try:
        content = json.loads((folder / METADATA).read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / METADATA} is no JSON: {error}; load another checkpoint") from None
    if not isinstance(content, dict) or "storage_saved" not in content:
        raise CheckpointError(f"{folder / METADATA} is not that of a checkpoint: {str(content)[:80]}")
    manifest(folder / STORAGE)


def manifest(storage: Path) -> list[BlockFileEntry]:
    """The files of blocks of a checkpoint; see `check`."""
    with reading(storage):
        return _manifest(storage)


def _manifest(storage: Path) -> list[BlockFileEntry]:
    path = storage / MANIFEST
    if not path.is_file():
        raise CheckpointNotFoundError(f"{path} is missing: the checkpoint is not whole, or another program's")
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[BlockFileEntry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: bytes that are no text
        raise CheckpointError(f"{path} cannot be read: {error}; load another checkpoint") from None
    there = sorted(found.name for found in storage.iterdir() if found.name != MANIFEST)
    named = sorted(entry.file for entry in entries)
    if len(there) != len(named):
        raise CheckpointError(
            f"count mismatch: {path} names {len(named)} files of data and {len(there)} are there "
            f"({there[:4]}); the checkpoint is not whole"
        )
    if there != named:
        strange = sorted(set(named) ^ set(there))[:4]
        raise CheckpointError(f"count mismatch: {path} and the files beside it do not name the same: {strange}")
    return entries
