"""Which mirrors are in a durable folder, and which of them are of earlier terms."""

from __future__ import annotations

from pathlib import Path

from transfer_queue.journal.terms import Term, Terms
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.node.unit.mirror_folders import (
    boot_ids,
    list_arenas,
    list_mirrors,
    mirror_bytes,
    mirror_folder,
    remove_mirrors,
    retire_arenas,
)
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.extent_table import GRANULE


def arena_in(mirror: Path) -> Arena:
    return Arena.create(mirror / "unit-1", 4 * GRANULE, MIRROR)


def test_each_term_has_a_mirror_of_its_own(tmp_path: Path) -> None:
    terms = Terms(tmp_path)
    first, second = terms.claim("s"), terms.claim("s")
    folders = [mirror_folder(tmp_path, term) for term in (None, first, second)]
    assert [folder.name.rpartition("-")[0] for folder in folders] == ["", "mirror-1", "mirror-2"]
    same = Term(second.number, second.folder, "open-0123")
    assert mirror_folder(tmp_path, same) != folders[2], "a term that failed may have had the same number"


def test_arenas_of_earlier_terms_are_retired_and_remains_are_removed(tmp_path: Path) -> None:
    term = Term(2, tmp_path / "term", "open-0a")
    own, later = mirror_folder(tmp_path, term), tmp_path / "mirror-3-0b"
    for mirror in (tmp_path / "mirror", tmp_path / "mirror-1-0c", own, later):
        arena_in(mirror)
    for name in ("mirror-1-ff", "mirror-2-ff", "mirror-of-mine"):  # of a start that was killed, and of somebody else
        (tmp_path / name / "unit-0").mkdir(parents=True)
    assert retire_arenas(tmp_path, term) == [tmp_path / "mirror" / "unit-1", tmp_path / "mirror-1-0c" / "unit-1"]
    assert not (tmp_path / "mirror-1-ff").exists()
    assert (tmp_path / "mirror-2-ff").exists(), "it may be that of the term that begins"
    assert len(list_arenas(tmp_path)) == len(boot_ids(tmp_path)) == 4
    assert mirror_bytes(tmp_path) > 0
    remove_mirrors(tmp_path)
    assert list_mirrors(tmp_path) == []
    assert (tmp_path / "mirror-of-mine").is_dir()
    assert mirror_bytes(tmp_path) == 0
    assert list_mirrors(tmp_path / "missing") == []
