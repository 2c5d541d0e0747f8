"""Systems of processes load the checkpoints and journals of earlier releases through the public interface."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden_processes
import pytest
from golden_systems import numbers
from golden_trees import assert_same, flip

import transfer_queue as tq
from transfer_queue.errors import CheckpointError, StartError


@pytest.fixture(scope="module")
def found(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What was observed of systems with all files, one after the other."""
    scratch = tmp_path_factory.mktemp("processes")
    return golden_processes.observe(files["processes"], scratch, files["records"] / "checkpoint")


@pytest.mark.parametrize("name", [*golden_processes.CHECKPOINTS, "journal"])
def test_a_system_goes_on_with_the_files(name: str, found: Any, expected: Any) -> None:
    assert_same(found[name], expected["processes"][name])


def test_a_system_finds_what_a_simulated_system_has_saved(found: Any, expected: Any) -> None:
    assert_same(found["records"]["partitions"], expected["records"]["loaded"]["now"]["partitions"])


@pytest.mark.parametrize("pattern", ["controller_state.pkl", "simple_storage/*.blocks"])
def test_a_damaged_checkpoint_changes_nothing(pattern: str, files: Any, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(files["processes"] / "second", tmp_path / "checkpoint")
    path = next(checkpoint.glob(pattern))
    flip(path, path.stat().st_size // 2)
    with golden_processes.system() as client:
        client.put(numbers(2), partition_id="before")
        with pytest.raises(CheckpointError):
            tq.load_checkpoint(checkpoint)
        assert client.get_partition_list() == ["before"]


def test_no_system_starts_with_a_damaged_journal(files: Any, tmp_path: Path) -> None:
    journal = shutil.copytree(files["processes"] / "journal", tmp_path / "journal")
    for path in journal.glob("segment-*"):
        flip(path, path.stat().st_size // 2)
    conf = {"journal": {"folder": str(journal)}}
    with pytest.raises(StartError, match="damaged at byte"), golden_processes.system(controller=conf):
        pass
