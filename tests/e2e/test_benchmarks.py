"""`python -m benchmarks --quick`: each benchmark verifies contents, and gives rows in the documented form."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import warm
from benchmarks import two_builds
from benchmarks.harness.payloads import Payload, column, differences, make, nbytes
from benchmarks.harness.report import Row, against, compared, table
from benchmarks.harness.runner import NAMES, main, missing, module

POSSIBLE = [name for name in NAMES if missing(name) is None]
FORM = {"what", "ours", "unit", "reference", "against", "ratio", "target", "then", "peers", "more", "met"}


Told = Callable[[str], "dict[str, Any]"]


def bench(pipe: Connection[Any, Any]) -> None:
    """Run `python -m benchmarks --quick --json`, with the output in the pipe."""
    with pipe, os.fdopen(os.dup(pipe.fileno()), "w") as out, contextlib.redirect_stdout(out):
        code = main(["--quick", "--json"])
    sys.exit(code)


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    """told(question): what its JSON line holds, of one run of all, which goes on meanwhile."""
    found: dict[str, dict[str, Any]] = {}
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = warm.process(bench, theirs, daemon=False)
    process.start()
    theirs.close()
    with ours, os.fdopen(os.dup(ours.fileno())) as lines:

        def of(question: str) -> dict[str, Any]:
            while question not in found:
                line = lines.readline()
                assert line, f"the run ended before it told of {question}"
                each = json.loads(line)
                found[each["question"]] = each
            return found[question]

        yield of
        rest = lines.read()
    process.join()
    assert process.exitcode == 0
    assert list(found) + [json.loads(line)["question"] for line in rest.splitlines()] == POSSIBLE


@pytest.mark.parametrize("name", POSSIBLE)
def test_rows_have_their_form(told: Told, name: str) -> None:
    """Numbers are numbers, names are told once, and a ratio stands beside what it is a ratio to."""
    document = told(name)
    rows = document["rows"]
    assert document["quick"]
    assert rows
    assert module(name).QUESTION.endswith("?")
    assert len({row["what"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == FORM
        assert math.isfinite(row["ours"])
        assert row["ours"] >= 0
        assert (row["ratio"] is None) == (row["reference"] is None) == (not row["against"])
        assert (row["met"] is None) == (row["target"] is None)
        assert all(math.isfinite(value) for value in row["more"].values())


@pytest.mark.parametrize("kind", ["dense", "jagged", "objects", "mixed"])
def test_a_wrong_byte_is_found(kind: str) -> None:
    """A benchmark that moved other bytes, or too few, must not tell a figure."""
    payload = Payload(kind, 6, 3, 10)
    batch = make(payload, 1)
    assert differences(batch, payload, 1) == []
    assert nbytes(batch) > 0
    assert set(differences(batch, payload, 2)) == set(batch.keys())
    name = sorted(batch.keys())[0]
    batch[name] = column(Payload(kind, 6, 3, 11 if kind != "objects" else 0), name, 1 if kind != "objects" else 5)
    assert differences(batch, payload, 1) == [name]
    del batch[name]
    assert differences(batch, payload, 1) == [name]


def test_a_ratio_is_the_median_of_rounds_and_a_target_has_a_direction() -> None:
    row = compared("x", "ms", [1.0, 20.0, 3.0], [1.0, 10.0, 1.0], "memcpy", target=3.0)
    assert (row.ours, row.reference, row.ratio, row.met) == (3.0, 1.0, 2.0, True)
    assert against("y", "a second", 10.0, 5.0, "peer", target=20.0).met is False
    assert Row("z", 1.0, "ms").met is None
    assert "memcpy 1.00" in table([row])


def test_an_unknown_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speed"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "unknown benchmark speed" in error
    assert all(name in error for name in NAMES)


def test_two_builds_are_compared_by_each_measure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The second one is a program that takes the place of an interpreter: its name is what it was started with."""
    other = tmp_path / "python"
    figures = json.dumps(dict.fromkeys(two_builds.GOALS, 2.0))
    other.write_text(f'#!/bin/sh\necho "\\"$PYTHONPATH $*\\""\nwhile read -r line; do echo \'{figures}\'; done\n')
    other.chmod(0o700)
    assert two_builds.main(["src", str(other), "--rounds", "1", "--quick"]) == 0
    head, _, *rows = [line.strip("| ").split(" | ") for line in capfd.readouterr().out.splitlines()]
    assert head[1:3] == [str(Path("src").resolve()), f"{os.getcwd()} -W ignore -m benchmarks.two_builds_rounds --quick"]
    assert [row[0] for row in rows] == list(two_builds.GOALS)
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)
    assert {row[2] for row in rows} == {"2.0"}


def test_a_build_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the process of a build ended"):
        two_builds.Build("/bin/false", quick=True)
