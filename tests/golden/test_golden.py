"""Files of earlier releases are loaded, show what they showed then, and the system goes on with them as it did then."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import golden_records
import golden_samplers
import pytest
from golden_files import expected, releases, unpack
from golden_internals import CLOCK, recover, restored, saved, state_file
from golden_trees import differences

from transfer_queue.errors import CheckpointError, JournalError

STORIES = ("records", "samplers")


@pytest.fixture(scope="module", params=releases())
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found_then(release: str) -> dict[str, Any]:
    """What the release found in its files."""
    return expected(release)


@pytest.fixture(scope="module")
def files(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The files of the release, by story; nobody changes them."""
    folder = tmp_path_factory.mktemp("golden")
    yield {story: unpack(release, story, folder) for story in STORIES}
    shutil.rmtree(folder)


@pytest.fixture
def journal(files: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the journal, which a recovery changes."""
    return shutil.copytree(files["records"] / "journal", tmp_path / "journal")


@pytest.fixture
def snapshot(files: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the journal that begins with a snapshot."""
    return shutil.copytree(files["records"] / "snapshot", tmp_path / "snapshot")


def state_files(files: dict[str, Path]) -> list[Path]:
    return sorted(path for folder in files.values() for path in folder.rglob("*") if path.name.startswith(STATES))


STATES = ("state-", "controller_state.pkl", "load-")


def test_there_are_files_of_a_release() -> None:
    assert releases()


class TestCompleteness:
    def test_the_story_has_every_record_that_a_journal_can_have(self, tmp_path: Path) -> None:
        """If a record is added, the story must be, so that the files of the next release have it."""
        golden_records.tell(tmp_path / "told")
        assert golden_records.tags_in(tmp_path / "told" / "journal") == golden_records.journaled()

    def test_the_journal_has_every_record_of_its_release(self, files: Any, found_then: Any) -> None:
        tags = found_then["records"]["tags"]
        assert golden_records.tags_in(files["records"] / "journal") == set(tags)

    def test_every_record_of_the_release_is_known_by_its_tag(self, found_then: Any) -> None:
        assert golden_records.journaled() >= set(found_then["records"]["tags"])

    def test_every_column_holds_something_in_some_file(self, found_then: Any) -> None:
        held: dict[str, bool] = {}
        for story in found_then.values():
            for column, holds in story["columns"].items():
                held[column] = holds or held.get(column, False)
        assert len(held) >= 150
        assert {column for column, holds in held.items() if not holds} <= {"lost_units.*"}


class TestTrees:
    def test_every_saved_state_is_restored_whole(self, files: Any) -> None:
        """What is saved of it again has all that was in the file."""
        assert len(state_files(files)) >= 10
        for path in state_files(files):
            tree = state_file.read(path)["state"]
            assert differences(tree, saved(restored(tree))) == [], path

    def test_the_records_lead_to_the_state_of_the_snapshot(self, journal: Path, snapshot: Path) -> None:
        (path,) = snapshot.glob("state-*")
        with golden_records.little_is_spared():
            found = recover(journal, CLOCK)
        assert found.torn == 0
        assert differences(state_file.read(path)["state"], saved(found.state)) == []


class TestSimulatedSystems:
    @pytest.mark.parametrize("journal", ["journal", "snapshot"])
    def test_a_system_goes_on_from_the_journal(self, journal: str, files: Any, found_then: Any, tmp_path: Path) -> None:
        told = found_then["records"]
        shown = golden_records.shown_over(files["records"], journal, told, tmp_path / "resumed")
        assert_same(shown, told["resumed"])

    def test_a_system_goes_on_from_the_checkpoint(self, files: Any, found_then: Any, tmp_path: Path) -> None:
        shown = golden_records.shown_loaded(files["records"] / "checkpoint", tmp_path / "loaded")
        assert_same(shown, found_then["records"]["loaded"])

    @pytest.mark.parametrize("name", golden_samplers.SAMPLERS)
    def test_a_sampler_goes_on_with_what_it_has_dealt(
        self, name: str, files: Any, found_then: Any, tmp_path: Path
    ) -> None:
        shown = golden_samplers.shown(name, files["samplers"] / name, tmp_path / "other")
        assert_same(shown, found_then["samplers"]["kinds"][name])


def assert_same(shown: Any, then: Any) -> None:
    assert differences(then, shown) == []
    assert shown == then


class TestDamagedFiles:
    def test_a_damaged_segment(self, journal: Path) -> None:
        (path,) = (path for path in journal.glob("segment-*") if path.stat().st_size)
        flip(path, path.stat().st_size // 2)
        with pytest.raises(JournalError, match="damaged at byte"):
            recover(journal, CLOCK)

    def test_a_damaged_snapshot(self, snapshot: Path) -> None:
        (path,) = snapshot.glob("state-*")
        flip(path, path.stat().st_size // 2)
        with pytest.raises(JournalError):
            recover(snapshot, CLOCK)

    def test_a_state_of_a_loaded_checkpoint_that_is_missing(self, journal: Path) -> None:
        (path,) = journal.glob("load-*")
        path.unlink()
        with pytest.raises(JournalError, match=path.name):
            recover(journal, CLOCK)

    @pytest.mark.parametrize("pattern", ["controller_state.pkl", "simple_storage/*.blocks"])
    def test_a_damaged_checkpoint(self, pattern: str, files: Any, tmp_path: Path) -> None:
        checkpoint = shutil.copytree(files["records"] / "checkpoint", tmp_path / "checkpoint")
        path = next(checkpoint.glob(pattern))
        flip(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError):
            golden_records.shown_loaded(checkpoint, tmp_path / "loaded")

    def test_a_checkpoint_without_one_of_its_files(self, files: Any, tmp_path: Path) -> None:
        checkpoint = shutil.copytree(files["records"] / "checkpoint", tmp_path / "checkpoint")
        next(checkpoint.glob("simple_storage/*.blocks")).unlink()
        with pytest.raises(CheckpointError, match="count mismatch"):
            golden_records.shown_loaded(checkpoint, tmp_path / "loaded")


def flip(path: Path, at: int) -> None:
    """Another byte at this place."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(content)
