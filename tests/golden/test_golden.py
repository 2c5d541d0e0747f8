"""Simulated systems load the journals and checkpoints of earlier releases, find the same, and go on as these did."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden_observations
import golden_records
import golden_samplers
import pytest
from golden_files import releases
from golden_internals import CLOCK, recover, restored, saved, state_file
from golden_trees import assert_same, differences, filled, flip, state_files

from transfer_queue.errors import CheckpointError, JournalError


@pytest.fixture
def journal(files: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the journal, because a recovery changes it."""
    return shutil.copytree(files["records"] / "journal", tmp_path / "journal")


@pytest.fixture
def snapshot(files: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the journal that begins with a snapshot."""
    return shutil.copytree(files["records"] / "snapshot", tmp_path / "snapshot")


def test_a_release_has_golden_files() -> None:
    assert releases()


class TestCompleteness:
    def test_the_scenario_writes_every_kind_of_record(self, tmp_path: Path) -> None:
        """Who adds a record extends the scenario, so that the files of the next release contain it."""
        golden_records.make_files(tmp_path / "files")
        assert golden_records.tags_in(tmp_path / "files" / "journal") == golden_records.journaled()

    def test_the_journal_contains_every_kind_of_record_of_its_release(self, files: Any, expected: Any) -> None:
        assert golden_records.tags_in(files["records"] / "journal") == set(expected["records"]["tags"])

    def test_every_tag_of_the_release_is_still_known(self, expected: Any) -> None:
        assert golden_records.known() >= set(expected["records"]["tags"])

    def test_every_column_of_the_state_is_filled_in_some_file(self, files: Any) -> None:
        columns = filled(files.values())
        assert len(columns) >= 150
        assert [column for column, holds in columns.items() if not holds] == []


class TestStates:
    def test_every_column_comes_back(self, files: Any) -> None:
        """A state that is restored and saved again contains all that was in the file."""
        paths = [path for folder in files.values() for path in state_files(folder)]
        assert len(paths) >= 14
        for path in paths:
            tree = state_file.read(path)["state"]
            assert differences(tree, saved(restored(tree))) == [], path

    def test_the_records_lead_to_the_state_of_the_snapshot(self, journal: Path, snapshot: Path) -> None:
        (path,) = snapshot.glob("state-*")
        with golden_records.low_limits():  # as when the records were written
            found = recover(journal, CLOCK)
        assert found.torn == 0
        assert differences(state_file.read(path)["state"], saved(found.state)) == []


class TestSystems:
    @pytest.mark.parametrize("journal", ["journal", "snapshot"])
    def test_a_system_resumes_from_a_journal(self, journal: str, files: Any, expected: Any, tmp_path: Path) -> None:
        then = expected["records"]
        found = golden_observations.observe_resumed(files["records"], journal, then, tmp_path / "resumed")
        assert_same(found, then.get(f"resumed_{journal}", then["resumed"]))

    def test_a_system_loads_a_checkpoint(self, files: Any, expected: Any, tmp_path: Path) -> None:
        found = golden_observations.observe_loaded(files["records"] / "checkpoint", tmp_path / "loaded")
        assert_same(found, expected["records"]["loaded"])

    def test_every_sampler_goes_on_after_what_it_has_dealt(self, files: Any, expected: Any, tmp_path: Path) -> None:
        for name, then in expected["samplers"].items():
            found = golden_samplers.observe(name, files["samplers"] / name, tmp_path / name)
            assert_same(found, then)


class TestDamagedFiles:
    def test_a_damaged_segment(self, journal: Path) -> None:
        (path,) = (path for path in journal.glob("segment-*") if path.stat().st_size)
        flip(path, path.stat().st_size // 2)
        with pytest.raises(JournalError, match="damaged at byte"):
            recover(journal, CLOCK)

    def test_a_damaged_snapshot(self, snapshot: Path) -> None:
        (path,) = snapshot.glob("state-*")
        flip(path, path.stat().st_size // 2)
        with pytest.raises(JournalError, match=path.name):
            recover(snapshot, CLOCK)

    def test_a_journal_without_the_state_that_was_loaded(self, journal: Path) -> None:
        path = min(journal.glob("load-*"))
        path.unlink()
        with pytest.raises(JournalError, match=path.name):
            recover(journal, CLOCK)

    @pytest.mark.parametrize("pattern", ["controller_state.pkl", "simple_storage/*.blocks"])
    def test_a_damaged_checkpoint(self, pattern: str, files: Any, tmp_path: Path) -> None:
        checkpoint = shutil.copytree(files["records"] / "checkpoint", tmp_path / "checkpoint")
        path = next(checkpoint.glob(pattern))
        flip(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError):
            golden_observations.observe_loaded(checkpoint, tmp_path / "loaded")

    def test_a_checkpoint_that_lacks_a_file(self, files: Any, tmp_path: Path) -> None:
        checkpoint = shutil.copytree(files["records"] / "checkpoint", tmp_path / "checkpoint")
        next(checkpoint.glob("simple_storage/*.blocks")).unlink()
        with pytest.raises(CheckpointError, match="count mismatch"):
            golden_observations.observe_loaded(checkpoint, tmp_path / "loaded")
