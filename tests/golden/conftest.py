"""The golden files of each release, unpacked once for each module of tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_files import read_expected, releases, unpack

SCENARIOS = ("records", "samplers", "processes")


@pytest.fixture(scope="module", params=releases())
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(release: str) -> dict[str, Any]:
    """What the release found in its files."""
    return read_expected(release)


@pytest.fixture(scope="module")
def files(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The files of the release, by scenario; tests do not change them."""
    folder = tmp_path_factory.mktemp("golden")
    yield {scenario: unpack(release, scenario, folder) for scenario in SCENARIOS}
    shutil.rmtree(folder)
