"""The distributions that are built from the repository, and their metadata."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import setuptools.build_meta as build, sys; print(getattr(build, sys.argv[1])(sys.argv[2]))"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, as far as builds look at it."""
    tree = tmp_path_factory.mktemp("repository") / "tree"
    left_out = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("src", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def build(tree: Path, what: str, folder: Path) -> Path:
    """Return the path of the distribution that `what` of setuptools builds."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(folder)], cwd=tree, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Deprecat" not in done.stdout + done.stderr  # such as forms that setuptools will refuse
    return folder / done.stdout.split()[-1]


def test_the_wheel_has_the_package_and_nothing_else(tree: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tree, "build_wheel", tmp_path)) as archive:
        names = archive.namelist()
    modules = {path.relative_to(tree / "src").as_posix() for path in (tree / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"transfer_queue"}


def test_the_source_distribution_has_the_package_and_no_test_of_it(tree: Path, tmp_path: Path) -> None:
    with tarfile.open(build(tree, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        (info,) = [name for name in archive.getnames() if name.count("/") == 1 and name.endswith("/PKG-INFO")]
        content = archive.extractfile(info)
        assert content is not None
        metadata = Parser().parsestr(content.read().decode())
    assert {"src/transfer_queue/__init__.py", "src/transfer_queue/config.yaml", "LICENSE", "README.md"} <= names
    assert [name for name in names if name.startswith(("tests", "benchmarks"))] == []
    assert (metadata["License-Expression"], metadata["License-File"]) == ("Apache-2.0", "LICENSE")
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License")]


def test_the_pinned_versions_work_with_the_first_patch_of_python() -> None:
    """Debian 12 has Python 3.11.2: a version that needs a later patch ends the commands of the README there."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE))
    first = f"{sys.version_info[0]}.{sys.version_info[1]}.0"
    needs = {}
    for name, version in pins.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # of other environments
            found = importlib.metadata.distribution(name)
            if found.version.partition("+")[0] == version.partition("+")[0]:
                needs[name] = found.metadata["Requires-Python"] or ""
    assert len(needs) > 20
    assert {name: need for name, need in needs.items() if first not in SpecifierSet(need)} == {}
