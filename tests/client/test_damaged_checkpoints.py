"""Damaged checkpoints: each is loaded, or raises a documented error that says what is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from simulated import numbers
from transfer_queue import interface
from transfer_queue.client.checkpoint.block_file import BlockFile, BlockIndex
from transfer_queue.client.checkpoint.checkpoint_folder import MANIFEST, METADATA, STATE, STORAGE
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError

FLIPS = 40  # of each file


@pytest.fixture
def saved(a, tmp_path, monkeypatch) -> Path:
    """A checkpoint of keys a and b."""
    monkeypatch.setattr(interface, "_checkpoint_client", lambda: a)
    a.kv_batch_put(["a", "b"], "p", numbers(2), tags=[{"n": 1}, {"n": 2}])
    interface.save_checkpoint(tmp_path / "ck", metadata={"step": 7})
    return tmp_path / "ck"


def blocks_of(folder: Path) -> Path:
    return next((folder / STORAGE).glob("*.blocks"))


FILES: dict[str, Callable[[Path], Path]] = {
    METADATA: lambda folder: folder / METADATA,
    STATE: lambda folder: folder / STATE,
    MANIFEST: lambda folder: folder / STORAGE / MANIFEST,
    "blocks": blocks_of,
    STORAGE: lambda folder: folder / STORAGE,
}


def load(folder: Path) -> bool:
    """Whether it could be loaded."""
    try:
        interface.load_checkpoint(folder)
    except (CheckpointError, CheckpointNotFoundError):
        return False
    return True


@pytest.mark.parametrize("name", [METADATA, STATE, MANIFEST, "blocks"])
def test_flipped_and_missing_bytes(a, saved, name):
    rng = random.Random(name)
    path = FILES[name](saved)
    whole = path.read_bytes()
    for _ in range(FLIPS):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 0xFF, 0x80, rng.randrange(256)))
        path.write_bytes(data)
        load(saved)
        path.write_bytes(whole[: rng.randrange(len(whole))])
        load(saved)
        path.write_bytes(whole + rng.randbytes(rng.randrange(1, 200)))
        load(saved)
        path.write_bytes(rng.randbytes(rng.randrange(200)))
        load(saved)
    path.write_bytes(whole)
    assert load(saved)
    assert sorted(a.kv_list()["p"]) == ["a", "b"]


def another(path: Path, how: str) -> None:
    """Replace a file or folder by something else."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "orphaned link":
        path.symlink_to(path.with_name("nowhere"))
    elif how == "link to itself":
        path.symlink_to(path)
    elif how == "link to what cannot be read":
        path.symlink_to("/proc/self/mem")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "file":
        path.write_bytes(b"")


@pytest.mark.parametrize(
    "how",
    ["nothing", "folder", "orphaned link", "link to itself", "link to what cannot be read", "pipe", "file"],
)
@pytest.mark.parametrize("name", list(FILES))
def test_something_else_in_the_place_of_a_file(a, saved, name, how):
    another(FILES[name](saved), how)
    assert not load(saved)
    assert sorted(a.kv_list()["p"]) == ["a", "b"], "nothing was changed"


@pytest.mark.parametrize("how", ["folder", "orphaned link", "link to itself", "pipe", "file"])
def test_something_else_beside_a_checkpoint(saved, how):
    """In the place where a save prepares a checkpoint, or moves the older one to."""
    for name in (".ck.draft", ".ck.old"):
        path = saved.with_name(name)
        path.touch()
        another(path, how)
        load(saved)
        with contextlib.suppress(CheckpointError):
            interface.save_checkpoint(saved)
        if path.is_symlink() or path.exists():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    assert load(saved)


@pytest.mark.skipif(os.geteuid() != 0, reason="the user is changed to one who may not read the folder")
def test_a_folder_that_its_reader_may_not_look_into(saved):
    saved.chmod(0o700)
    saved.parent.chmod(0o700)
    os.seteuid(65534)
    try:
        with pytest.raises((CheckpointError, CheckpointNotFoundError), match=r"cannot be read|does not exist"):
            interface.load_checkpoint(saved)
    finally:
        os.seteuid(0)


def test_a_manifest_that_is_not_text(saved):
    (saved / STORAGE / MANIFEST).write_bytes(b'[{"position": 0, "storage_unit_id": "\xff\xfe"}]')
    with pytest.raises(CheckpointError, match=MANIFEST):
        interface.load_checkpoint(saved)


def test_metadata_that_is_nested_without_end(saved):
    (saved / METADATA).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=METADATA):
        interface.load_checkpoint(saved)


@pytest.mark.parametrize("column", ["number", "position", "nbytes", "first", "checksum"])
def test_an_index_of_blocks_that_contradicts_itself(saved, column):
    with BlockFile(blocks_of(saved)) as file:
        index, end = file.index, file.index.end
    assert index.is_sound(end)
    values = {field: getattr(index, field) for field in BlockIndex.__struct_fields__}
    for wrong in (values[column] + bytes(4), values[column] * 2, b"\xff" * len(values[column]), b""):
        if column == "number" and len(wrong) == len(values[column]):
            continue  # any number may be a block's
        if column == "checksum" and len(wrong) == len(values[column]):
            continue  # it is compared with the bytes
        assert not BlockIndex(**{**values, column: wrong}).is_sound(end)


def test_metadata_stays_what_a_user_has_given(saved):
    assert json.loads((saved / METADATA).read_text())["user_metadata"] == {"step": 7}
