"""Folders take each other's place whole, whatever fails in between, and nothing else stays."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from transfer_queue.client.checkpoint import checkpoint_folder
from transfer_queue.client.checkpoint.checkpoint_folder import check_target, exchange, put_back, replace_folder
from transfer_queue.errors import CheckpointError, CheckpointNotFoundError


def older(target: Path) -> Path:
    """A checkpoint folder in place, with "old" in it."""
    target.mkdir(parents=True)
    (target / "metadata.json").write_text('{"storage_saved": true, "user_metadata": {}}')
    (target / "which").write_text("old")
    return target


def save(target: Path, which: str = "new") -> None:
    with replace_folder(target) as draft:
        (draft / "which").write_text(which)


def which(target: Path) -> str:
    return (target / "which").read_text()


@pytest.fixture(params=[True, False], ids=["exchange", "without"])
def exchanges(request, monkeypatch):
    """Whether the file system lets folders change places."""
    if not request.param:
        monkeypatch.setattr(checkpoint_folder, "_exchange", lambda one, other: False)
    return request.param


def test_replaces_whole(tmp_path, exchanges):
    """What the older one held is gone, and nothing lies beside the new one."""
    target = older(tmp_path / "ck")
    save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert [path.name for path in target.iterdir()] == ["which"]
    assert which(target) == "new"


def test_makes_parents(tmp_path):
    """The folders above are made."""
    save(tmp_path / "a" / "b" / "ck")
    assert which(tmp_path / "a" / "b" / "ck") == "new"


def test_failure(tmp_path, exchanges):
    """A block that fails leaves the older one, and nothing beside it."""
    target = older(tmp_path / "ck")

    def fail() -> None:
        with replace_folder(target) as draft:
            (draft / "half").write_text("x")
            raise OSError("disk is full")

    with pytest.raises(OSError, match="disk is full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert which(target) == "old"


def test_failure_of_the_second_rename(tmp_path, monkeypatch):
    """Where folders cannot be exchanged and the new one cannot be put in place, the older one is put back."""
    monkeypatch.setattr(checkpoint_folder, "_exchange", lambda one, other: False)
    target = older(tmp_path / "ck")
    rename = Path.rename

    def refusing(path: Path, to: Path) -> Path:
        if path.name.endswith(".draft"):
            raise OSError("no")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(OSError, match="no"):
        save(target)
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]
    assert which(target) == "old"


def _killed_at(target: Path, step: int, exchange: bool) -> None:
    """Saves, and is killed at the step-th of the calls that change the file system."""
    left = step

    def counting(function):
        def counted(*arguments, **keywords):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return counted

    Path.mkdir = counting(Path.mkdir)  # type: ignore[method-assign]
    Path.rename = counting(Path.rename)  # type: ignore[method-assign]
    fcntl.flock = counting(fcntl.flock)
    os.fsync = counting(os.fsync)
    os.unlink = counting(os.unlink)
    os.rmdir = counting(os.rmdir)
    found = checkpoint_folder._exchange
    checkpoint_folder._exchange = counting(found if exchange else lambda one, other: False)
    save(target)


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_anywhere(tmp_path, exchange):
    """Killed at any step, a whole one is in place (or put back), and the next save sweeps what is left."""
    context = multiprocessing.get_context("fork")
    for step in range(40):
        target = older(tmp_path / str(step) / "ck")
        child = context.Process(target=_killed_at, args=(target, step, exchange))
        child.start()
        child.join()
        put_back(target)
        assert which(target) in ("old", "new")
        save(target, "next")
        assert which(target) == "next"
        assert [path.name for path in target.parent.iterdir()] == ["ck"]
        if child.exitcode == 0:
            break
    else:
        raise AssertionError("it never came to its end")
    assert step > 5


def test_two_at_once(tmp_path):
    """Who saves where somebody saves is refused, and disturbs nobody."""
    target = tmp_path / "ck"
    with replace_folder(target) as draft:
        with pytest.raises(CheckpointError, match="another save to"), replace_folder(target):
            raise AssertionError("unreachable")
        (draft / "which").write_text("first")
    assert which(target) == "first"
    save(target, "second")
    assert which(target) == "second"


def test_other_things_are_not_replaced(tmp_path):
    """A folder of other things, or a file, is nothing that a save replaces."""
    (tmp_path / "work").mkdir()
    check_target(tmp_path / "work")  # an empty one is
    (tmp_path / "work" / "thesis.tex").write_text("all of it")
    for name in ("work", "work/thesis.tex"):
        with pytest.raises(CheckpointError):
            check_target(tmp_path / name)


def test_swap_into_nothing(tmp_path):
    """Without an older one the draft is renamed."""
    (tmp_path / "draft").mkdir()
    exchange(tmp_path / "draft", tmp_path / "ck")
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


class TestCheck:
    @pytest.fixture
    def folder(self, tmp_path):
        """A whole checkpoint without data."""
        (tmp_path / "ck" / "simple_storage").mkdir(parents=True)
        (tmp_path / "ck" / "metadata.json").write_text(json.dumps({"storage_saved": True, "user_metadata": {}}))
        (tmp_path / "ck" / "controller_state.pkl").write_bytes(b"x")
        (tmp_path / "ck" / "simple_storage" / "storage_unit_info.json").write_text("[]")
        checkpoint_folder.check_folder(tmp_path / "ck")
        return tmp_path / "ck"

    @pytest.mark.parametrize("name", ["metadata.json", "controller_state.pkl", "simple_storage/storage_unit_info.json"])
    def test_missing(self, folder, name):
        """What is missing is named."""
        (folder / name).unlink()
        with pytest.raises(CheckpointNotFoundError, match=Path(name).name):
            checkpoint_folder.check_folder(folder)

    @pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', "null"])
    def test_strange_metadata(self, folder, content):
        """A metadata.json that is none is told."""
        (folder / "metadata.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"metadata\.json"):
            checkpoint_folder.check_folder(folder)

    @pytest.mark.parametrize("content", ["", "{}", "[1]", '[{"position": "x", "storage_unit_id": 1}]', '[["x"]]'])
    def test_strange_manifest(self, folder, content):
        """A manifest that is none is told."""
        (folder / "simple_storage" / "storage_unit_info.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"storage_unit_info\.json"):
            checkpoint_folder.check_folder(folder)

    def test_paths_in_the_manifest(self, folder):
        """A manifest names files of its own folder; what it says of others is a mismatch."""
        entry = {"position": 0, "storage_unit_id": "a", "file": "../controller_state.pkl"}
        (folder / "simple_storage" / "storage_unit_info.json").write_text(json.dumps([entry]))
        (folder / "simple_storage" / "other").write_text("x")
        with pytest.raises(CheckpointError, match="count mismatch"):
            checkpoint_folder.check_folder(folder)

    def test_user_metadata(self):
        """What is no JSON is told before anything is written."""
        assert checkpoint_folder.user_metadata({"a": (1, 2), "b": None}) == {"a": [1, 2], "b": None}
        with pytest.raises(CheckpointError, match="must be JSON"):
            checkpoint_folder.user_metadata({"a": object()})
