"""Makes the golden files of a release: a developer's tool, run once for each release with the code of that release.

    PYTHONPATH=. python tests/golden/make_golden.py    # in the root of a checkout

It drives the package that is imported through everything that its journals and checkpoints can hold (`golden_records`,
`golden_samplers`, `golden_processes`), and writes into `tests/golden/<version>/`

    <story>.tar.gz   the files: a journal, a snapshot, arenas, checkpoints
    expected.json    what this release finds in them, and how it goes on with them

`test_golden.py` loads these files with the code of later releases, which must find the same. Never make the files of a
release again with later code: the tests would compare that code with itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import golden_records
import golden_samplers
import golden_trees
from golden_files import HERE, pack, write_expected
from golden_internals import state_file

import transfer_queue as tq


def main() -> None:
    """Makes the files of this release, which replace older ones of the same version."""
    release = HERE / tq.__version__
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir()
    began = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = {"records": make_records(release, Path(folder)), "samplers": make_samplers(release, Path(folder))}
        finally:
            os.chdir(began)
    check_columns(found) if "-x" not in sys.argv else None
    write_expected(release, found)
    print(f"{release}: {sum(path.stat().st_size for path in release.iterdir()) >> 10} KiB")


def make_records(release: Path, folder: Path) -> dict[str, Any]:
    """A journal of the release, the same one with a snapshot, and a checkpoint of the same system."""
    told = golden_records.tell(folder / "told")
    tags = golden_records.tags_in(folder / "told" / "journal")
    assert tags == golden_records.journaled(), f"the journal lacks {sorted(golden_records.journaled() - tags)}"
    told["tags"] = sorted(tags)
    parts = {path.name: path for path in (folder / "told").iterdir()}
    pack(release, "records", parts)
    told["columns"] = held([folder / "told" / "snapshot", folder / "told" / "checkpoint"])
    told["resumed"] = golden_records.shown_over(folder / "told", "journal", told, folder / "journal")
    told["loaded"] = golden_records.shown_loaded(folder / "told" / "checkpoint", folder / "loaded")
    return told


def make_samplers(release: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint for each kind of sampler."""
    parts, found = {}, {}
    for name in golden_samplers.SAMPLERS:
        golden_samplers.tell(name, folder / name)
        parts[name] = folder / name / "checkpoint"
        found[name] = golden_samplers.shown(name, parts[name], folder / name / "other")
    pack(release, "samplers", parts)
    return {"columns": held(list(parts.values())), "kinds": found}


def held(folders: list[Path]) -> dict[str, bool]:
    """Column -> whether any state in these folders has something in it."""
    found: dict[str, bool] = {}
    for folder in folders:
        for path in [*folder.glob("state-*"), *folder.glob("controller_state.pkl")]:
            tree = state_file.read(path)
            for column, holds in golden_trees.columns(tree["state"]).items():
                found[column] = holds or found.get(column, False)
    return dict(sorted(found.items()))


def check_columns(found: dict[str, Any]) -> None:
    """Every column that is saved holds something in one of the files."""
    every: dict[str, bool] = {}
    for story in found.values():
        for column, holds in story["columns"].items():
            every[column] = holds or every.get(column, False)
    empty = sorted(column for column, holds in every.items() if not holds)
    assert not empty, f"these columns hold nothing in any of the files: {empty}"


if __name__ == "__main__":
    main()
