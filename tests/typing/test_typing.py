"""User code is accepted by mypy --strict and by pyright, and mistakes in it are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = sorted(HERE.glob("user_*.py"))

MISTAKES = """\
import transfer_queue as tq

client = tq.get_client()
client.get_meta(["x"], "four", "p")
client.put([1, 2], partition_id="p")
tq.kv_put(3, "p")
done: str = client.check_production_status(["x"], "p")
tq.StreamingDataset(None, 4, 2, ["x"], "p", "t")
"""
LINES = [4, 5, 6, 7, 8]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def lines_of(output: str, name: str) -> list[int]:
    """The lines of this file that errors are told of."""
    found = [line.split(f"{name}:")[1] for line in output.splitlines() if f"{name}:" in line and "error" in line]
    return sorted({int(rest.split(":")[0]) for rest in found})


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("typing") / "mistakes.py"
    path.write_text(MISTAKES)
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("mypy"))


def test_there_are_programs() -> None:
    assert [path.name for path in PROGRAMS] == ["user_code.py", "user_simulation.py"]


def test_mypy(cache: str) -> None:
    done = run("mypy", "--strict", "--cache-dir", cache, *map(str, PROGRAMS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_finds_mistakes(cache: str, mistakes: Path) -> None:
    done = run("mypy", "--strict", "--cache-dir", cache, str(mistakes))
    assert lines_of(done.stdout, mistakes.name) == LINES, done.stdout + done.stderr


def test_pyright() -> None:
    done = run("pyright", "--pythonpath", sys.executable, "--level", "warning", *map(str, PROGRAMS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_finds_mistakes(mistakes: Path) -> None:
    done = run("pyright", "--pythonpath", sys.executable, str(mistakes))
    assert lines_of(done.stdout, mistakes.name) == LINES, done.stdout + done.stderr
