"""The scripts in tools that make environments, with a fake Python that records its calls and installs nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent


def torch_of(constraints: str) -> str:
    return next(line for line in (ROOT / constraints).read_text().splitlines() if line.startswith("torch=="))


TORCH = torch_of("constraints.txt")
GPU = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/gpus").exists()
FAKE_PYTHON = """#!/usr/bin/env bash
case "$1 $2" in
    "--version "*) echo "Python $VERSION" ;;
    "-c "*) exec "$REAL" -c "import sys; sys.version_info = tuple(map(int, '$VERSION'.split('.'))); $2" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip")
        if [[ " $* " == *" --dry-run "* ]]; then exit "$NO_CPU_BUILD"; fi
        echo "$*" >>"$CALLS" ;;
esac
"""


class Tree:
    """A repository that contains only the scripts and the files that they read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        (folder / "src").mkdir()
        for name in (
            "tools/bootstrap", "tools/bootstrap_oldest", "tools/torch_build.sh", "pyproject.toml", "constraints.txt",
            "constraints-oldest.txt", "tools/bootstrap_trl", "constraints-trl.txt", "tools/bootstrap_verl",
            "constraints-verl.txt",
        ):  # fmt: skip
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "python"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def run(
        self, *words: str, version: str = "3.12.0", offered: bool = True, script: str = "bootstrap"
    ) -> tuple[list[str], str]:
        """Run a script; return the arguments of pip's calls, and the output."""
        calls = self.folder / "calls"
        calls.write_text("")
        environment = {
            **os.environ, "PYTHON": str(self.python), "REAL": sys.executable, "VERSION": version, "CALLS": str(calls),
            "NO_CPU_BUILD": "0" if offered else "1",
        }  # fmt: skip
        done = subprocess.run(
            [str(self.folder / "tools" / script), *words],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == (2 if "usage" in words else 0), done.stdout
        return calls.read_text().splitlines(), done.stdout


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_demo_installs_what_it_needs_and_prints_its_size(tree: Tree) -> None:
    (call,), said = tree.run("demo")
    assert call.endswith("--editable .[demo]")
    assert "--constraint constraints.txt" in call
    assert "--quiet" not in call  # pip shows its progress
    assert "to download" in said
    assert tree.run("demo") == ([], "")


def test_the_tests_install_the_rest_and_the_demo_then_needs_nothing(tree: Tree) -> None:
    tree.run("demo")
    (call,), _ = tree.run("dev")
    assert call.endswith("--editable .[dev]")
    assert tree.run("dev") == tree.run() == tree.run("demo") == ([], "")


def test_another_version_of_python_makes_it_again(tree: Tree) -> None:
    tree.run("demo")
    assert tree.run("demo", version="3.13.0")[0] != []


@pytest.mark.skipif(GPU, reason="a machine with a GPU takes the build with CUDA")
def test_without_a_gpu_the_cpu_build_of_torch_is_taken_if_the_index_offers_one(tree: Tree, tmp_path: Path) -> None:
    (call,), said = tree.run("demo")
    assert f" {TORCH}+cpu " in call
    assert "about 250 MB" in said
    shutil.rmtree(tmp_path / ".venv")
    (call,), said = tree.run("demo", offered=False)
    assert "torch" not in call
    assert "about 3 GB" in said
    assert "has no CPU build" in said


def test_python_3_10_takes_only_torch_and_tensordict_from_the_constraints(tree: Tree, tmp_path: Path) -> None:
    (call,), said = tree.run("demo", version="3.10.13")
    assert "--constraint .venv/constraints.txt" in call
    names = [line.partition("==")[0] for line in (tmp_path / ".venv" / "constraints.txt").read_text().splitlines()]
    assert sorted(names) == ["tensordict", "torch"]
    assert "need Python 3.11" in said


def test_another_purpose_is_a_usage_error(tree: Tree) -> None:
    assert tree.run("usage")[1] == "tools/bootstrap: the purpose must be demo or dev, got 'usage'\n"


@pytest.mark.parametrize("purpose", ["oldest", "verl"])
@pytest.mark.parametrize("offered", [True, False])
def test_a_further_environment_is_made_once(tree: Tree, offered: bool, purpose: str) -> None:
    def run() -> tuple[list[str], str]:
        return tree.run(version="3.11.0", offered=offered, script=f"bootstrap_{purpose}")

    (call,), _ = run()
    torch = torch_of(f"constraints-{purpose}.txt")
    assert f"--constraint constraints-{purpose}.txt" in call
    assert f" {torch}+cpu " in call if offered and not GPU else f" {torch} " in call
    assert run() == ([], "")


@pytest.mark.parametrize("offered", [True, False])
def test_the_environment_of_trl_is_made_once_with_two_versions(tree: Tree, offered: bool) -> None:
    def run() -> tuple[list[str], str]:
        return tree.run(version="3.11.0", offered=offered, script="bootstrap_trl")

    (everything, oldest), _ = run()
    assert "--constraint constraints.txt --constraint constraints-trl.txt" in everything
    assert "--editable .[trl,tensorboard]" in everything
    assert f" {TORCH}+cpu " in everything if offered and not GPU else f" {TORCH} " in everything
    (bound,) = re.findall(r'"trl>=([\d.]+),<', (ROOT / "pyproject.toml").read_text())
    assert oldest.endswith(f"--no-deps --target .trl/trl-oldest trl=={bound}.0")
    assert run() == ([], "")


def test_the_oldest_versions_are_those_that_the_package_declares() -> None:
    (listed,) = re.findall(r"^dependencies = (\[.*\])$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    bounds = {name: Version(version) for name, version in (line.split(">=") for line in json.loads(listed))}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = {name: Version(version) for name, version in (line.split("==") for line in lines if line[0] != "#")}
    assert pinned == bounds
