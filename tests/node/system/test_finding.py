"""A system that ends while another process looks for it is found or not; looking for it is no error."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.errors import AttachError
from transfer_queue.node.system import launcher
from transfer_queue.private_files import write_private
from transfer_queue.system_folder import paths
from transfer_queue.system_folder.paths import KEY_BYTES, Description, SystemFolder

FILES = ("system.json", "key")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SystemFolder:
    """The folder of a system that seems to run."""
    monkeypatch.setattr(launcher, "is_alive", lambda file: True)
    made = SystemFolder(tmp_path / "a")
    made.folder.mkdir(mode=0o700)
    write_private(made.key, os.urandom(KEY_BYTES))
    described = Description(
        "a", 1, 1, 2, "python", "someone", 0.0, False, str(made.folder), str(made.folder / "logs"), "controller"
    )
    write_private(made.description, msgspec.json.encode(described))
    return made


def test_a_system_is_found(folder: SystemFolder) -> None:
    found = launcher.find(str(folder.folder))
    assert found.folder == folder.folder


@pytest.mark.parametrize("gone", ["folder", *FILES])
@pytest.mark.parametrize("step", ["check_private", "read_private", "read_key"])
def test_it_ends_meanwhile(folder: SystemFolder, monkeypatch: pytest.MonkeyPatch, step: str, gone: str) -> None:
    """Before one of the steps, everything is removed at once, or first the description, or only the key."""
    owner: Any = paths if step == "read_private" else SystemFolder
    do = getattr(owner, step)

    def end_first(of: Any) -> Any:
        monkeypatch.setattr(owner, step, do)
        if gone == "folder":
            shutil.rmtree(folder.folder)
        else:
            (folder.folder / gone).unlink()
        return do(of)

    monkeypatch.setattr(owner, step, end_first)
    if gone == "key":  # a system that cannot be used, and not one that ends: the description is removed first
        with pytest.raises(AttachError, match="key cannot be read"):
            launcher.find(str(folder.folder))
    elif gone == "folder" or step != "read_key":
        assert launcher.find(str(folder.folder)) is None
    else:
        assert launcher.find(str(folder.folder)) is not None
