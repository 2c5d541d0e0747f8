"""`python -m benchmarks --quick`: each benchmark verifies contents, and gives rows in the documented form."""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import warm
from benchmarks import large_machine, two_builds
from benchmarks.harness import kept_results, plots, raw_tables
from benchmarks.harness.machine import ThreadedMemcpy
from benchmarks.harness.payloads import Payload, column, differences, make, nbytes
from benchmarks.harness.report import Row, against, compared, document, table
from benchmarks.harness.runner import NAMES, main, missing, module
from tools import make_figures

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


def test_threads_copy_everything() -> None:
    for threads in (1, 3, 16):
        copies = ThreadedMemcpy(1_000_001)
        assert not copies.target.any()
        assert copies.seconds(threads) > 0
        assert copies.target.all()


def test_a_large_machine_runs_every_benchmark_once() -> None:
    assert sorted((*large_machine.ALONE, *large_machine.OTHERS)) == sorted(NAMES)


def test_a_benchmark_that_takes_too_long_is_killed_with_what_it_has_started() -> None:
    """The child of the command keeps its output open, so that the call would wait for it."""
    run = large_machine.run
    assert run(["sh", "-c", "echo done; exit 3"], dict(os.environ), 60.0) == ("done\n", 3)
    assert run(["sh", "-c", "sleep 600 & wait"], dict(os.environ), 0.1)[1] is None
    assert run(["no such command"], {}, 0.0) == ("", None)


def kept(name: str, *rows: Row) -> dict[str, Any]:
    """Return a document as it is kept."""
    about = {"quick": False, "seconds": 7.0, "machine": "cores", "date": "2026-11-27", "load": 0.5}
    return json.loads(json.dumps(document(name, False, 7.0, rows) | about))


def test_results_are_read_by_machine_and_the_machine_with_the_most_comes_first(tmp_path: Path) -> None:
    for machine, names in (("16-cores", ["kv"]), ("2-cores", ["kv", "tags"])):
        (tmp_path / machine).mkdir()
        for name in names:
            found = kept(name, Row(f"put on {machine}", 2.0, "ms"))
            (tmp_path / machine / f"{name}.json").write_text(json.dumps(found))
    results = kept_results.read(tmp_path)
    assert [(machine, list(each)) for machine, each in results.items()] == [
        ("2-cores", ["kv", "tags"]),
        ("16-cores", ["kv"]),
    ]
    assert kept_results.row_of(results["16-cores"], "kv", "put on")["ours"] == 2.0


def test_a_machine_with_peers_comes_first_and_tables_name_what_each_machine_has(tmp_path: Path) -> None:
    name, rows = "Tiny, in batches, 2 ranks", []
    for what, ours, more in (("put to yield, p50", 2.0, {}), ("put to yield, p99", 9.0, {}),
                             ("controller", 12.5, {"samples_a_second": 40.0})):  # fmt: skip
        rows.append(Row(f"{name}: {what}", ours, "ms", more=more))
    rows.append(against(f"{name}: bytes of puts and gets", "MB/s", 5.0, 500.0, "memcpy"))
    first_row = Row("put 1024 rows x 9 x 8192", 20.0, "ms", peers={"Ray": 30.0})
    for machine, each in (
        ("16-cores", {"trainings": rows, "kv": [replace(first_row, ours=7.0, peers={})], "tags": []}),
        ("2-cores", {"kv": [first_row]}),
    ):
        (tmp_path / machine).mkdir()
        for benchmark, found in each.items():
            (tmp_path / machine / f"{benchmark}.json").write_text(json.dumps(kept(benchmark, *found)))
    results = kept_results.read(tmp_path)
    assert list(results) == ["2-cores", "16-cores"]
    (training,) = make_figures.trainings(results).splitlines()[2:]
    assert training == "| Tiny | `16-cores` | 40.0 | 2.00, 9.00 | - | 12.5 %, 1.00 % |"
    place = ("kv", "put 1024 rows x 9 x 8192")
    head, _, line = make_figures.by_machine(results, {place: "put 288 MiB"}).splitlines()
    assert (head, line) == ("| TransferQueue | `2-cores` | `16-cores` |", "| put 288 MiB | 20.0 ms | 7.00 ms |")
    assert "Only `2-cores`" in make_figures.by_machine({"2-cores": results["2-cores"]})


def test_the_page_of_a_machine_shows_runs_targets_and_all_rows() -> None:
    results = {"kv": kept("kv", Row("put", 2.0, "ms", target=3.0), Row("get", 1.0, "ms")), "tags": kept("tags")}
    runs, targets, kv, tags = raw_tables.page_of("2-cores", results).split("\n## ")
    assert "- cores, 2026-11-27. Seconds of each benchmark: kv 7, tags 7." in runs
    assert "| put | - |  | 3.00 ms | 2.00 ms | yes |  |" in targets
    assert "| get" not in targets
    assert kv.index("| put | 2.00 ms") < kv.index("| get | 1.00 ms")
    assert tags.startswith("tags: ")


def test_results_with_a_peer_that_is_nearly_as_fast_are_shown_the_worst_first() -> None:
    rows = [
        Row("put", 2.0, "ms", peers={"Ray": 2.9}),
        Row("get", 2.0, "ms", peers={"Ray": 20.0, "TransferQueue 0.1.11": 3.1}),
        Row("puts", 10.0, "a second", peers={"Ray": 40.0}),
        Row("balance 256 x 8, pareto, L, equal counts: time", 2.0, "ms", peers={"TransferQueue 0.1.11": 1.5}),
        Row("balance 256 x 8, bimodal, L, equal counts: time", 2.0, "ms", peers={"TransferQueue 0.1.11": 1.0}),
    ]
    assert make_figures.near({"kv": kept("kv", *rows)}).splitlines()[2:] == [
        "| puts | 10.0 a second | **40.0 a second** | - |",
        "| divide 256 samples among 8 ranks, equal counts | 2.00 ms | - | **1.00 ms** |",
        "| put | **2.00 ms** | 2.90 ms | - |",
    ]


def test_the_figure_shows_how_many_times_as_long_others_take() -> None:
    figure = plots.comparison(
        "title", [("get <x>", {"Ray": 0.126}), ("put", {"Ray": 14.9, "old": 1234.0})], ["Ray", "old"]
    )
    words = " ".join(ElementTree.fromstring(figure).itertext())
    assert "get <x>: Ray 0.13x; put: Ray 15x, old 1,200x" in words


def test_an_unknown_benchmark_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["speed"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "unknown benchmark speed" in error
    assert all(name in error for name in NAMES)


OPERATIONS = (
    "put of a row", "put of 64 rows", "claim of 32", "by rank", "get of 64 rows", "get_data", "tag update", "kv_list",
    "loader, 0 workers", "loader, 2 workers", "put to a queue", "get of a queue", "get_async", "get_many", "prefetch",
    "async puts", "async gets", "as views", "ranks woken", "kv_list of 10,000", "save of", "load of", "drop of 10,000",
)  # fmt: skip


def build_of(path: Path, measures: Sequence[str] = ("put", "claim"), **figures: float) -> str:
    """Write a program that takes the place of an interpreter: its name is what it was started with."""
    names, line = json.dumps(measures), json.dumps(figures)
    path.write_text(
        f"""#!/bin/sh
        echo '{{"build": "'"$PYTHONHASHSEED $PYTHONPATH $*"'", "measures": {names}}}'
        while read -r line; do echo '{line}'; done
        """
    )
    path.chmod(0o700)
    return str(path)


def test_two_builds_are_compared_by_each_measure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build = build_of(tmp_path / "python", time=2.0, cpu=1.0)
    assert two_builds.main([build, "src", "--starts", "1", "--pairs", "1", "--quick"]) == 0
    before, after, _, _, _, *lines = capfd.readouterr().out.splitlines()
    assert before == f"before: 0 {os.getcwd()} -W ignore -m benchmarks.two_builds_windows --quick"
    assert after == f"after: {Path('src').resolve()}"
    rows = [line.strip("| ").split(" | ") for line in lines]
    measures = [row[0] for row in rows]
    assert set(two_builds.GOALS) <= set(measures)
    assert [word for word in OPERATIONS if not any(word in name for name in measures)] == []
    assert all(float(row[3].replace(",", "")) > 0 for row in rows)
    assert {row[2] for row in rows} == {"2.0"}


def test_the_result_of_two_builds_is_the_median_of_the_ratios_of_neighbours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    builds = [build_of(tmp_path / name, time=time, cpu=1.0) for name, time in (("before", 2.0), ("after", 3.0))]
    assert two_builds.main([*builds, "--starts", "2", "--pairs", "3", "--only", "cla", "none"]) == 0
    (row,) = capfd.readouterr().out.splitlines()[5:]
    assert row.startswith("| claim | 6 | 2.0 | 3.0 | 1.500 | 1.500 to 1.500 | 1.500 to 1.500 | 1.0 | 1.0 | 1.000 |")
    drifting: list[two_builds.Pair] = [({"time": speed}, {"time": speed * 1.1}) for speed in (1.0, 5.0, 2.0, 9.0)]
    assert statistics.median(two_builds.ratios(drifting, "time")) == pytest.approx(1.1)
    assert two_builds.interval([float(number) for number in range(100)]) == (39, 60)
    with pytest.raises(SystemExit) as ended:
        two_builds.main([*builds, "--only", "nothing"])
    assert ended.value.code == 2
    assert "put, claim" in capfd.readouterr().err


def test_two_builds_count_the_instructions_of_client_and_servers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build = build_of(tmp_path / "python", ["tag update of a row"], instructions=4000.0)
    options = ["--starts", "1", "--pairs", "2", "--instructions", "--only", "tag update of a row", "first get"]
    assert two_builds.main([build, "src", *options]) == 0
    (row,) = capfd.readouterr().out.splitlines()[5:]
    name, pairs, before, after, _, interval, *_ = row.strip("| ").split(" | ")
    assert (name, pairs, before) == ("tag update of a row", "2", "4,000.0")
    # The client alone executes about 2,000 of them, the controller about as many.
    assert float(after.replace(",", "")) > 3000
    low, high = map(float, interval.split(" to "))
    assert low == pytest.approx(high, rel=0.1)


def test_a_build_that_does_not_start_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="the process of a build ended"):
        two_builds.Build("/bin/false", quick=True)
