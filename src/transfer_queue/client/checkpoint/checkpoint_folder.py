"""The folder of a checkpoint: it is written beside its place and moved there in one step, and checked before a load.

    <checkpoint>/metadata.json                      {"storage_saved": true, "user_metadata": {...}}, written last; also
                                                    "partitions" if it has only some, and "lost" values by key
    <checkpoint>/controller_state.pkl               the controller's state (`journal.state_file`; callers name it)
    <checkpoint>/simple_storage/storage_unit_info.json   the manifest: which files of blocks there are
    <checkpoint>/simple_storage/<id>.blocks         `client.checkpoint.block_file`
    .<checkpoint>.draft                             the draft of a save that is running or was killed
    .<checkpoint>.old                               the older checkpoint, if folders cannot be exchanged in one step

A save writes everything into the draft and syncs it. Then draft and checkpoint are exchanged, and the older checkpoint
is removed. If the process dies at any point, there is a complete checkpoint in its place (or, if folders cannot be
exchanged, the older one is beside it and is put back). The next save removes the rest.
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
from transfer_queue.private_files import no_link, sync_folder

METADATA = "metadata.json"
STATE = "controller_state.pkl"
STORAGE = "simple_storage"
MANIFEST = "storage_unit_info.json"
SUFFIX = ".blocks"
PARTITIONS = "partitions"
"""The entry of metadata.json that names the partitions of a checkpoint which does not contain the whole system."""
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
    backend: str = ""
    """The backend that the blocks were in; "" if it is not known."""


# ------------------------------------------------------------ saving


@contextlib.contextmanager
def replace_folder(target: Path) -> Iterator[Path]:
    """Provide a new folder that replaces `target` in one step at the end of the block. Creates missing parents.

    If the block fails, the folder is removed and nothing has changed. Other saves to `target` meanwhile are refused.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.draft")
    locked = _lock_draft(draft, target)
    try:
        put_back(target)
        try:
            yield draft
            sync(draft)
            exchange(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    finally:
        os.close(locked)


def _lock_draft(draft: Path, target: Path) -> int:
    """Create the draft, lock it, and return the descriptor with the lock. Removes the draft of a killed save."""
    while True:
        with contextlib.suppress(FileExistsError):
            draft.mkdir(mode=0o700)
        try:
            folder = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another save has just ended
        except OSError as error:
            raise CheckpointError(
                f"{draft} is needed for the new checkpoint, but cannot be replaced: {error}. It is not the draft of an "
                f"earlier save: remove it, or save to another folder"
            ) from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(folder), os.lstat(draft))
        except FileNotFoundError:
            is_same = False
        except BlockingIOError:
            os.close(folder)
            raise CheckpointError(
                f"another save to {target} is running, in this or another process; save again when it has ended, or to "
                f"another folder"
            ) from None
        except BaseException:
            os.close(folder)
            raise
        if is_same and not os.listdir(draft):
            return folder
        if is_same:
            shutil.rmtree(draft)
        os.close(folder)


def put_back(target: Path) -> None:
    """Put an older checkpoint back that a killed save has moved aside, or remove it if the new one is in its place."""
    old = target.with_name(f".{target.name}.old")
    if old.is_symlink() or not old.is_dir():
        return  # there is no such folder, or no save has moved it there
    if target.exists():
        shutil.rmtree(old)
    else:
        old.rename(target)


def check_target(target: Path) -> None:
    """Raise `CheckpointError` if a save would replace something that is not a checkpoint."""
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"a checkpoint must be a folder, got the file {target}; save to another place")
    if any(target.iterdir()) and not any((target / name).exists() for name in SAVED):
        raise CheckpointError(
            f"{target} has files and is not a checkpoint. A save replaces the entire folder: name a new or empty one"
        )


def exchange(draft: Path, target: Path) -> None:
    """Move the draft to the place of the target. The previous target then has the draft's name, or is removed."""
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
    """Exchange two folders in one step. Returns False if the system cannot."""
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
    """Sync the names in a folder and in those below it. The files must be synced already."""
    for path, _, _ in os.walk(folder):
        sync_folder(Path(path))


def write_json(path: Path, content: Any) -> None:
    """Write a new JSON file and sync it."""
    with open(path, "x", encoding="utf-8", opener=no_link) as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def incomplete_save_error(target: Path) -> CheckpointError:
    """Return the error of a save whose samples were not available until its end."""
    return CheckpointError(
        f"the checkpoint {target} was not saved: the controller or a storage unit was restarted meanwhile, so the "
        f"copies may not be complete; an older checkpoint there is unchanged. Save again"
    )


def user_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a user's metadata of a checkpoint as JSON values. Raises `CheckpointError` if this is not possible."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the metadata of a checkpoint must be JSON, but {error}; write other data into a file of your own"
        ) from None
    return plain


def move(source: Path, target: Path) -> None:
    """Move a file whose content is synced; copy it if the target is on another file system."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        copy(source, target)
        source.unlink()


def copy(source: Path, target: Path) -> None:
    """Copy a file and sync it."""
    with open(source, "rb") as opened, open(target, "xb", opener=no_link) as made:
        shutil.copyfileobj(opened, made, 1 << 20)
        made.flush()
        os.fsync(made.fileno())


# ------------------------------------------------------------ loading


@contextlib.contextmanager
def read_guard(what: Path) -> Iterator[None]:
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


def check_folder(folder: Path) -> None:
    """Check that a folder is a complete checkpoint.

    Raises:
        CheckpointNotFoundError: The folder, metadata.json or the state file is missing.
        CheckpointError: The manifest does not match the files ("count mismatch"), metadata.json is not valid, or a file
            cannot be read.
    """
    with read_guard(folder):
        if not folder.is_dir():
            raise CheckpointNotFoundError(
                f"the checkpoint {folder} does not exist; pass the folder that save_checkpoint has written"
            )
        for name in (METADATA, STATE):
            if not (folder / name).is_file():
                raise CheckpointNotFoundError(
                    f"{folder / name} is missing: {folder} is not a complete checkpoint; it contains "
                    f"{sorted(path.name for path in folder.iterdir())[:8]}"
                )
        try:
            content = json.loads((folder / METADATA).read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{folder / METADATA} is not valid JSON: {error}; load another checkpoint") from None
        if not isinstance(content, dict) or "storage_saved" not in content:
            raise CheckpointError(f"{folder / METADATA} is not the metadata of a checkpoint: {str(content)[:80]}")
        read_manifest(folder / STORAGE)


def check_complete(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint, which `check_folder` has checked, does not contain the whole system."""
    names = json.loads((folder / METADATA).read_bytes()).get(PARTITIONS)
    if names is not None:
        raise CheckpointError(
            f"{folder} contains only the partitions {names}, so it cannot replace the system; add them to it: "
            f"load_checkpoint(..., partitions={names})"
        )


def read_manifest(storage: Path) -> list[BlockFileEntry]:
    """Return the files of blocks of a checkpoint; see `check_folder`."""
    path = storage / MANIFEST
    with read_guard(storage):
        if not path.is_file():
            raise CheckpointNotFoundError(f"{path} is missing: the checkpoint is not complete, or of another program")
        try:
            entries = msgspec.json.decode(path.read_bytes(), type=list[BlockFileEntry])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: bytes that are not text
            raise CheckpointError(f"{path} cannot be read: {error}; load another checkpoint") from None
        files = sorted(file.name for file in storage.iterdir() if file.name != MANIFEST)
    named = sorted(entry.file for entry in entries)
    if len(files) != len(named):
        raise CheckpointError(
            f"count mismatch: {path} names {len(named)} files of data, but there are {len(files)} ({files[:4]}); the "
            f"checkpoint is not complete"
        )
    if files != named:
        unmatched = sorted(set(named) ^ set(files))[:4]
        raise CheckpointError(f"count mismatch: {path} does not name the files of data that there are: {unmatched}")
    return entries
