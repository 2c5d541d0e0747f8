"""Links that others have laid where a system's files belong are not followed; what others can read is not trusted.

That everything of a running system is private is in `test_node`.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
from server_processes import started
from transfer_queue.client.checkpoint.unit_blocks import fetch_state
from transfer_queue.errors import AttachError, StartError
from transfer_queue.net.session import Session
from transfer_queue.node.hosting.server_log import write_log_to
from transfer_queue.private_files import write_private
from transfer_queue.system_folder.paths import SystemFolder


@pytest.fixture
def planted(tmp_path: Path) -> SystemFolder:
    """A system's folder, and beside it what a stranger would like to have read or written."""
    (tmp_path / "system").mkdir(mode=0o700)
    (tmp_path / "system" / "logs").mkdir(mode=0o700)
    (tmp_path / "victim").write_bytes(b"v" * 32)
    (tmp_path / "victim").chmod(0o600)
    return SystemFolder(tmp_path / "system")


@pytest.mark.parametrize("file", ["key", "description"])
def test_a_file_that_is_a_link_is_not_read(planted: SystemFolder, file: str) -> None:
    getattr(planted, file).symlink_to(planted.folder.parent / "victim")
    with pytest.raises(AttachError, match="cannot be read"):
        getattr(planted, f"read_{file}")()


def test_a_key_that_others_may_read_is_not_used(planted: SystemFolder) -> None:
    planted.key.write_bytes(b"k" * 32)
    planted.key.chmod(0o640)
    with pytest.raises(AttachError, match="can be accessed by other users"):
        planted.read_key()


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="exists"):
        write_private(tmp_path / "key", b"secret")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_is_a_link_is_no_system(planted: SystemFolder) -> None:
    link = planted.folder.with_name("link")
    link.symlink_to(planted.folder)
    with pytest.raises(AttachError, match="is not a private folder"):
        SystemFolder(link).check_private()


def test_a_system_is_not_made_through_a_link(planted: SystemFolder) -> None:
    link = planted.folder.with_name("link")
    link.symlink_to(planted.folder.parent / "nowhere")
    with pytest.raises(StartError, match="cannot be created"):
        SystemFolder(link).create()
    assert not (planted.folder.parent / "nowhere").exists()


def test_a_log_is_not_written_through_a_link(planted: SystemFolder) -> None:
    planted.log("controller").symlink_to(planted.folder.parent / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        write_log_to(planted.log("controller"))
    assert (planted.folder.parent / "victim").read_bytes() == b"v" * 32


def test_removing_follows_no_link(planted: SystemFolder) -> None:
    treasure = planted.folder.parent / "treasure"
    treasure.mkdir()
    (treasure / "kept").write_text("kept")
    (planted.folder / "slots-0").symlink_to(treasure)
    planted.arena.symlink_to(treasure)
    planted.remove()
    assert (treasure / "kept").read_text() == "kept"
    assert not planted.folder.exists()


@pytest.fixture
def permissive() -> Iterator[None]:
    """A process whose new files are readable and writable for all users, unless it says otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """The files and folders below this one that other users can access."""
    found = [folder, *folder.rglob("*")]
    return [str(path) for path in found if not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) & 0o077]


def test_nothing_that_a_process_without_a_umask_makes_is_open_to_others(permissive: None, tmp_path: Path) -> None:
    offloading = {"offload": {"enabled": True, "path": str(tmp_path / "disk")}}
    (tmp_path / "disk").mkdir(mode=0o700)
    with started("permissive", backend={"SimpleStorage": offloading}):
        tq.kv_put("k", "p", {"x": torch.arange(3)})
        client, system = tq.get_client(), tq.interface.CURRENT.system
        tq.save_checkpoint(tmp_path / "whole")
        tq.save_checkpoint(tmp_path / "whole", metadata={"step": 1})
        tq.save_checkpoint(tmp_path / "part", partitions="p")
        client.save_controller_checkpoint(tmp_path / "state.pkl")
        pending = client.begin_checkpoint()
        session = Session("other-node", system.key, lambda target: system.controller)
        fetch_state(session, pending.state.name, tmp_path / "fetched")  # as a client on another node does
        session.close()
        client.end_checkpoint(pending)
        folders = [tmp_path / name for name in ("whole", "part", "state.pkl", "fetched")]
        folders += [system.folder, *(Path(os.path.realpath(system.folder / link)) for link in ("arena", "disk"))]
        assert [each for folder in folders for each in open_to_others(folder)] == []
