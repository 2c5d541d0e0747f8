"""Make the golden files of a release: a developer's tool, run once for each release, with the code of that release.

    PYTHONPATH=. python tests/golden/make_golden.py [FOLDER]    # in the root of a checkout

Three scenarios (`golden_records`, `golden_samplers`, `golden_processes`) use everything that a journal or a checkpoint
can contain. The tool runs them with the imported package, and writes into `tests/golden/<version>/` (or another folder,
if records change between two releases):

    <scenario>.tar.gz   the files: journals, arenas, checkpoints
    expected.json       what this release finds in them, and how it goes on with them

The tests load these files with the code of later releases, which must find the same. Do not make the files of a release
again with later code, because the tests would then compare this code with itself. If a release adds a record or a
column, extend a scenario; leave the observations of earlier files as they are.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import golden_observations
import golden_processes
import golden_records
import golden_samplers
from golden_files import HERE, pack, write_expected
from golden_trees import filled

import transfer_queue as tq


def main() -> None:
    """Make the files of this release. Files of the same version are replaced."""
    release = HERE / (sys.argv[1] if len(sys.argv) > 1 else tq.__version__)
    shutil.rmtree(release, ignore_errors=True)
    release.mkdir()
    with tempfile.TemporaryDirectory(prefix="tq-golden-") as name:
        folder = Path(name)
        found = {make.__name__: make(release, folder) for make in (records, samplers, processes)}
        made = [folder / "records", folder / "processes", *(folder / name for name in found["samplers"])]
        empty = sorted(column for column, holds in filled(made).items() if not holds)
    assert not empty, f"these columns are empty in all files, extend a scenario: {empty}"
    write_expected(release, found)
    print(f"{release}: {sum(path.stat().st_size for path in release.iterdir()) >> 10} KiB")


def records(release: Path, folder: Path) -> dict[str, Any]:
    """A journal, the same journal with a snapshot, and a checkpoint of the same system."""
    files = folder / "records"
    facts = golden_records.make_files(files)
    tags = golden_records.tags_in(files / "journal")
    assert tags == golden_records.journaled(), f"the journal lacks {sorted(golden_records.journaled() - tags)}"
    pack(release, "records", {path.name: path for path in files.iterdir()})
    # the two copies of the journal are of different moments
    resumed, resumed_snapshot = (
        golden_observations.observe_resumed(files, copy, facts, folder / f"resumed {copy}")
        for copy in ("journal", "snapshot")
    )
    loaded = golden_observations.observe_loaded(files / "checkpoint", folder / "loaded")
    return {**facts, "tags": sorted(tags), "resumed": resumed, "resumed_snapshot": resumed_snapshot, "loaded": loaded}


def samplers(release: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint for each kind of sampler."""
    checkpoints, found = {}, {}
    for name in golden_samplers.SAMPLERS:
        golden_samplers.make_files(name, folder / name)
        checkpoints[name] = folder / name / "checkpoint"
        found[name] = golden_samplers.observe(name, checkpoints[name], folder / name / "other")
    pack(release, "samplers", checkpoints)
    return found


def processes(release: Path, folder: Path) -> dict[str, Any]:
    """Checkpoints of systems of processes, and the journal of one."""
    files, scratch, later, runtime = (folder / name for name in ("processes", "scratch", "later", "runtime"))
    for path in (scratch, later, runtime):
        path.mkdir(mode=0o700)
    with patch.dict(os.environ, TQ_RUNTIME_DIR=str(runtime)):
        golden_processes.make_files(files, scratch)
        found = golden_processes.observe(files, later, folder / "records" / "checkpoint")
    pack(release, "processes", {path.name: path for path in files.iterdir()})
    return found


if __name__ == "__main__":
    main()
