"""Samplers for a running system are sent through its private folder, never in a message."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path

import pytest

from transfer_queue.errors import InvalidArgumentError, SamplerError
from transfer_queue.node.controller.sampler_loading import SamplerFiles
from transfer_queue.node.system.sampler_transfer import PickledSampler, dump
from transfer_queue.sampler import GRPOGroupNSampler, SequentialSampler


def test_the_last_sampler_that_was_taken_is_current(tmp_path: Path) -> None:
    files = SamplerFiles(tmp_path)
    assert files.current() is None
    for size in (2, 3):
        name = files.write_sampler(dump(GRPOGroupNSampler(size), alone=True))
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        taken = files.load_sampler(name)
        assert isinstance(taken, GRPOGroupNSampler)
        found = SamplerFiles(tmp_path).current()
        assert isinstance(found, GRPOGroupNSampler)
        assert (taken.n_samples_per_prompt, found.n_samples_per_prompt) == (size, size)
    assert [path.name for path in tmp_path.iterdir()] == ["current"]


@pytest.mark.parametrize("name", ["../key", "current", "", "a" * 31, "A" * 32, "/etc/passwd"])
def test_a_name_must_not_be_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="the name of a sampler's file must be 32 hex digits"):
        SamplerFiles(tmp_path).load_sampler(name)


def test_a_file_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="of the sampler does not exist; send the sampler again"):
        SamplerFiles(tmp_path).load_sampler("0" * 32)


def test_a_file_without_a_sampler_is_removed_and_the_current_sampler_stays(tmp_path: Path) -> None:
    files = SamplerFiles(tmp_path)
    files.load_sampler(files.write_sampler(dump(SequentialSampler())))
    (tmp_path / ("0" * 32)).write_bytes(b"nonsense")
    with pytest.raises(SamplerError, match="does not contain a sampler"):
        files.load_sampler("0" * 32)
    with pytest.raises(InvalidArgumentError, match="sampler"):
        files.load_sampler(files.write_sampler(PickledSampler(pickle.dumps(5), [], {})))
    assert [path.name for path in tmp_path.iterdir()] == ["current"]
    assert isinstance(files.current(), SequentialSampler)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """No other user can write there; even so, a link is not followed."""
    folder = tmp_path / "samplers"
    folder.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    name = SamplerFiles(elsewhere).write_sampler(dump(SequentialSampler()))
    os.symlink(elsewhere / name, folder / name)
    with pytest.raises(OSError, match="symbolic links"):
        SamplerFiles(folder).load_sampler(name)
