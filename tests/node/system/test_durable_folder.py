"""What belongs to a durable folder, and who may use it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from transfer_queue.errors import StartError
from transfer_queue.journal.terms import Terms
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.node.system.durable_folder import (
    DurableFolder,
    Identity,
    Wanted,
    known_folders,
    remove_arenas,
    used_at,
)
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.system_folder.liveness import hold_liveness
from transfer_queue.system_folder.paths import OWNER

KEY = bytes(range(32))


@pytest.fixture
def durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DurableFolder]:
    monkeypatch.setattr("transfer_queue.node.system.durable_folder.SHARED_MEMORY", tmp_path)  # not that of others
    made = DurableFolder(tmp_path / "kept")
    yield made
    if made.identity() is not None:
        made.discard()
    assert known_folders() == []


def wanted(durable: DurableFolder, **changes: object) -> Wanted:
    return msgspec.structs.replace(Wanted("s", KEY, durable.folder.parent, None, 1, 0), **changes)


class Start:
    """What a supervisor does at its start; `end` is the end of all its processes."""

    def __init__(self, durable: DurableFolder, *, mirrored: bool = False, **changes: object) -> None:
        before = _descriptors()
        try:
            durable.take(True)
            self.identity, self.warning = durable.prepare(wanted(durable, **changes), mirrored)
        finally:
            self._locks = _descriptors() - before
        durable.begin(Path("/run/s"))

    def end(self) -> None:
        for descriptor in self._locks:
            os.close(descriptor)


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # of the listing itself
            continue
        found.add(int(name))
    return found


def ended(durable: DurableFolder, **changes: Any) -> Identity:
    start = Start(durable, **changes)
    start.end()
    return start.identity


def refused(durable: DurableFolder, **changes: Any) -> str:
    before = _descriptors()
    with pytest.raises(StartError) as error:
        Start(durable, **changes)
    for descriptor in _descriptors() - before:
        os.close(descriptor)
    return str(error.value)


def test_the_next_start_finds_the_same_arenas_and_the_same_key(durable: DurableFolder) -> None:
    first = ended(durable)
    assert Path(first.arenas).name == f"transfer_queue-durable-{first.id}"
    assert os.readlink(Path(first.arenas) / OWNER) == str(durable.folder)
    assert durable.key() == KEY
    second = ended(durable, name="t")
    assert second == msgspec.structs.replace(first, name="t")
    assert "another process has started a system" in refused(durable, key=bytes(32))


def test_a_client_waits_while_the_system_was_not_stopped(durable: DurableFolder) -> None:
    ended(durable)
    assert durable.system() == Path("/run/s")
    assert durable.will_return(KEY)
    assert not durable.will_return(bytes(32)), "a later system with another key is not the one of the client"
    durable.mark_stopped()
    assert not durable.will_return(KEY)
    assert not DurableFolder(durable.folder / "missing").will_return(KEY)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"units": 2}, "num_data_storage_units = 1, but the settings say 2"),
        ({"disk": Path("/ssd"), "disk_units": 1}, "units on disk (backend.SimpleStorage.offload, replicas) = none"),
        ({"arenas": Path("/elsewhere")}, "backend.SimpleStorage.arena_folder = "),
    ],
)
def test_other_settings_are_refused(durable: DurableFolder, changes: dict[str, object], words: str) -> None:
    before = ended(durable)
    assert words in refused(durable, **changes)
    assert durable.identity() == before


def test_a_folder_in_use_can_be_neither_taken_nor_adopted_nor_discarded(
    durable: DurableFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.system_folder.liveness.LIVENESS_SECONDS", 0.0)
    start = Start(durable)
    assert start.identity.is_in_use()
    words = r"is used by the running system 's' \(/run/s\); stop it \(`tq stop --name s`\)"
    with pytest.raises(StartError, match=words):
        durable.take(True)
    with pytest.raises(StartError, match=words):
        durable.discard()
    with pytest.raises(StartError, match=words), durable.adopt():
        pass
    start.end()
    assert not start.identity.is_in_use()


def copied(durable: DurableFolder) -> DurableFolder:
    copy = DurableFolder(durable.folder.with_name("copy"))
    shutil.copytree(durable.folder, copy.folder)
    return copy


def test_a_copy_of_a_folder_is_refused_while_the_original_exists(durable: DurableFolder) -> None:
    identity = ended(durable)
    copy = copied(durable)
    words = f"{copy.folder} (durability.folder) is a copy of {durable.folder}, to which the values in {identity.arenas}"
    assert words in refused(copy)
    with pytest.raises(StartError, match="is a copy of"), copy.adopt():
        pass
    assert ended(durable) == identity, "the original is as it was"
    shutil.rmtree(durable.folder)
    assert f"the folder that was {durable.folder}: if it was moved here, run `tq adopt {copy.folder}`" in refused(copy)
    with copy.adopt("renamed") as adopted:
        assert (adopted.name, adopted.folder, adopted.id) == ("renamed", str(copy.folder), identity.id)
    assert ended(copy).id == identity.id
    copy.discard()
    assert not Path(identity.arenas).exists()


@pytest.mark.parametrize("runs", [False, True])
def test_a_copy_is_discarded_without_the_values_of_the_original(durable: DurableFolder, runs: bool) -> None:
    start = Start(durable)
    if not runs:
        start.end()
    copy = copied(durable)
    (Path(start.identity.arenas) / "value").write_bytes(b"x")
    copy.discard()
    assert not copy.folder.exists()
    assert (Path(start.identity.arenas) / "value").exists()
    assert known_folders() == [start.identity]
    if runs:
        start.end()


def test_an_original_that_cannot_be_read_keeps_its_values(durable: DurableFolder) -> None:
    identity = ended(durable)
    copy = copied(durable)
    content = (durable.folder / "identity.json").read_bytes()
    (durable.folder / "identity.json").write_bytes(b"{")
    assert "is a copy of" in refused(copy)
    copy.discard()
    assert Path(identity.arenas).exists()
    (durable.folder / "identity.json").write_bytes(content)


def test_another_folder_at_the_path_of_a_moved_one_is_not_its_original(durable: DurableFolder) -> None:
    identity = ended(durable)
    moved = DurableFolder(durable.folder.with_name("moved"))
    durable.folder.rename(moved.folder)
    other = ended(durable)
    assert other.id != identity.id
    assert "run `tq adopt" in refused(moved)
    with moved.adopt():
        pass
    assert moved.discard() >= 0
    assert not Path(identity.arenas).exists()
    assert Path(other.arenas).exists()


def test_what_belongs_to_a_folder_is_on_the_disk_before_a_start_goes_on(
    durable: DurableFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "fsync", note)
    ended(durable)
    for name in ("key", "identity.json", "running"):
        at = synced.index(f"{durable.folder / name}.new")
        assert str(durable.folder) in synced[at:], "the folder has the new name"


def test_a_folder_with_copies_on_disk_is_refused_by_a_system_that_would_not_keep_them(durable: DurableFolder) -> None:
    ended(durable, mirrored=True)
    mirror = durable.folder / "mirror-1-ab"
    mirror.mkdir()
    assert f"keeps copies of its values on disk, in {mirror}, but durability.values is processes" in (refused(durable))
    ended(durable, mirrored=True)


def test_a_system_of_several_nodes_keeps_no_memory_and_no_key(durable: DurableFolder) -> None:
    """A system of one machine that continues makes arenas, with the same id, which the next one of several refuses."""
    nodes = {"arenas": None, "units": 0}
    first = ended(durable, mirrored=True, **nodes)
    assert (first.arenas, first.disk, first.places, durable.key()) == ("", "", [], None)
    assert [known.folder for known in known_folders()] == [str(durable.folder)]
    assert ended(durable, mirrored=True, name="t", **nodes) == msgspec.structs.replace(first, name="t")
    alone = ended(durable, mirrored=True, units=3)
    assert (alone.id, alone.created_at, alone.units) == (first.id, first.created_at, 3)
    assert (Path(alone.arenas) / "clients").is_dir()
    assert durable.key() == KEY
    assert f"keeps values in {alone.arenas} on this machine" in refused(durable, mirrored=True, **nodes)
    shutil.rmtree(alone.arenas)
    assert ended(durable, mirrored=True, **nodes).places == []


def test_a_folder_that_another_node_has_taken_over_is_in_use(
    durable: DurableFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that takes over locks its term only, because the first may still have the lock of the folder."""
    monkeypatch.setattr("transfer_queue.system_folder.liveness.LIVENESS_SECONDS", 0.0)
    identity = ended(durable, mirrored=True, arenas=None, units=0)
    before = _descriptors()
    Terms(durable.folder).claim("s", lambda folder: hold_liveness(folder / "lock"))
    assert identity.is_in_use()
    with pytest.raises(StartError, match="is used by"):
        durable.discard()
    for descriptor in _descriptors() - before:
        os.close(descriptor)
    assert not identity.is_in_use()


def test_a_mirror_that_lacks_a_file_is_named_and_kept(durable: DurableFolder) -> None:
    """Its unit would begin with an empty arena, and what only the disk has would be gone."""
    ended(durable, mirrored=True)
    unit = durable.folder / "mirror-2-ab" / "unit-1"
    Arena.create(unit, GRANULE, MIRROR).close()
    (unit / "header").write_bytes(b"")
    assert str(unit) in refused(durable, mirrored=True)
    assert (unit / "arena").exists()


def test_a_new_folder_beside_one_of_the_same_system_is_a_warning(durable: DurableFolder) -> None:
    """A path that was mistyped looks like a system without values."""
    ended(durable)
    mistyped = DurableFolder(durable.folder.with_name("kpet"))
    start = Start(mistyped)
    start.end()
    assert f"{mistyped.folder} (durability.folder) is new, but a system named 's' keeps values in {durable.folder}" in (
        str(start.warning)
    )
    again = Start(mistyped)
    again.end()
    assert again.warning is None, "it is not new any more"
    mistyped.discard()
    other = Start(mistyped, name="t")
    other.end()
    assert other.warning is None
    mistyped.discard()


def test_a_folder_that_others_can_change_is_refused(durable: DurableFolder) -> None:
    durable.folder.mkdir()
    durable.folder.chmod(0o777)
    assert "has the mode 777, so that other users could change it" in refused(durable)
    durable.take(False)  # a journal alone is no risk that was not there before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_user_is_refused_until_it_is_adopted(durable: DurableFolder) -> None:
    identity = ended(durable)
    os.chown(durable.folder, 12345, -1)
    said = refused(durable)
    assert "belongs to user 12345, but this process runs as root (0)" in said
    assert f"tq adopt {durable.folder}" in said
    os.chown(durable.folder, 0, -1)
    path = durable.folder / "identity.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(identity, user=12345)))
    assert "belong to user 12345, but this process runs as root (0): run `tq adopt" in refused(durable)
    with durable.adopt():
        pass
    assert ended(durable) == identity


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"format": 2, "other": 1}', "was written by another release, in format 2, but this release reads format 1"),
        (b"{", "has an identity.json that cannot be read"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused(durable: DurableFolder, content: bytes, words: str) -> None:
    ended(durable)
    path = durable.folder / "identity.json"
    written = path.read_bytes()
    path.write_bytes(content)
    assert words in refused(durable)
    path.write_bytes(written)


def test_arenas_that_are_gone_are_a_warning_if_there_was_state(durable: DurableFolder) -> None:
    identity = ended(durable)
    shutil.rmtree(identity.arenas)
    again = Start(durable)
    assert again.warning is None, "nothing was stored yet"
    again.end()
    shutil.rmtree(identity.arenas)
    (durable.folder / "segment-000000000001").touch()
    again = Start(durable)
    assert f"kept in {identity.arenas} are lost" in str(again.warning)
    again.end()


def test_a_folder_is_known_until_it_is_discarded_even_if_it_was_removed(durable: DurableFolder) -> None:
    identity = ended(durable)
    assert known_folders() == [identity]
    assert used_at(identity) >= identity.created_at
    shutil.rmtree(durable.folder)
    assert known_folders() == [identity]
    assert used_at(identity) == identity.created_at
    Path(identity.record).unlink()
    (found,) = known_folders()
    assert (found.id, found.folder, found.arenas) == (identity.id, identity.folder, identity.arenas)
    remove_arenas(identity)
    assert not Path(identity.arenas).exists()
    assert known_folders() == []


def test_a_discarded_folder_keeps_what_is_not_of_the_system(durable: DurableFolder) -> None:
    ended(durable)
    for name in ("segment-000000000001", "load-x", "space-7", ".state-000000000001.draft", "mine"):
        (durable.folder / name).write_bytes(b"x" * 100)
    assert durable.discard() >= 400
    assert [path.name for path in durable.folder.iterdir()] == ["mine"]


def test_files_that_a_killed_start_left_are_removed(durable: DurableFolder) -> None:
    durable.folder.mkdir(mode=0o700)
    (durable.folder / "space-1").touch()
    (durable.folder / "identity.json.new").write_bytes(b"half")
    os.close(hold_liveness(durable.lock))
    ended(durable)
    assert not (durable.folder / "space-1").exists()
    assert not (durable.folder / "identity.json.new").exists()
