"""Write what is made of the results in benchmarks/measured.

That is the tables in README.md and docs/performance.md, between their markers, the figure of that page, and for each
machine a page with all its results.

python tools/make_figures.py           writes them
python tools/make_figures.py --check   exits with 1 if one is not what it would write
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from generated_files import ROOT, write_or_check

sys.path.insert(0, str(ROOT))

from benchmarks.harness.kept_results import MEASURED, Results, factors, read, row_of
from benchmarks.harness.plots import comparison
from benchmarks.harness.raw_tables import cells, page_of
from benchmarks.harness.report import RATES, number

README = ROOT / "README.md"
PAGE = ROOT / "docs" / "performance.md"
FIGURE = ROOT / "docs" / "diagrams" / "peers.svg"
BLOCK = re.compile(r"(?<=<!-- figures: )(?P<name>[\w/. ]+) -->\n.*?(?=<!-- end of figures -->)", re.DOTALL)

RAY, ARRAYS, OLD = "Ray", "Ray, NumPy arrays", "TransferQueue 0.1.11"
HEAD = ("", "TransferQueue", RAY, OLD)
NEAR = 1.5
"""Results with a peer that takes less than this multiple of our time are shown as not clearly faster."""

Place = tuple[str, str]  # a benchmark, and the beginning of a row

README_ROWS: dict[Place, str] = {
    ("kv", "put 1024 rows x 9 x 8192"): "put 288 MiB",
    ("kv", "get 1024 rows x 9 x 8192"): "get 288 MiB as a copy",
    ("kv", "view 1024 rows x 9 x 8192"): "get 288 MiB without a copy",
    ("kv", "get 8192 rows x 5 x 128"): "get 20 MiB in 8,192 rows",
    ("wakeup", "call of a put to yield"): "from a put to the waiting trainer",
}
PAGE_ROWS: dict[Place, str] = README_ROWS | {
    ("kv", "get 1 rows x 3 x 64"): "get one row",
    ("kv", "get 1024 rows, objects"): "get 1,024 rows of Python objects",
    ("small_operations", "single-row puts, 8 clients"): "put single rows, 8 clients",
}
"""The results of the page, and what it calls them."""
WORDS: dict[Place, str] = PAGE_ROWS | {
    ("kv", "read of a byte"): "first read of 288 MiB that were not copied",
    ("kv", "put 1 rows x 3 x 64"): "put one row",
    ("kv", "put 64 rows x 3 x 64"): "put 64 rows",
    ("kv", "get 64 rows x 3 x 64"): "get 64 rows",
    ("kv", "put 1024 rows, objects"): "put 1,024 rows of Python objects",
    ("kv", "get 1024 rows, jagged"): "get 35 MiB in 1,024 rows of different lengths",
    ("kv", "put 8192 rows x 5 x 128"): "put 20 MiB in 8,192 rows",
    ("kv", "put 1024 rows, jagged"): "put 35 MiB in 1,024 rows of different lengths",
    ("kv", "put 512 rows, mixed"): "put 26 MiB in 512 rows of tensors and text",
    ("kv", "get 512 rows, mixed"): "get 26 MiB in 512 rows of tensors and text",
}
GROWTH: tuple[tuple[str, str, Sequence[tuple[str, str, str]]], ...] = (
    ("put", "bytes", (
        ("20 MiB", "kv", "put 8192 rows x 5 x 128"), ("288 MiB", "kv", "put 1024 rows x 9 x 8192"),
        ("2 GiB", "kv", "put 1024 rows x 16 x 32768"),
    )),
    ("get as a copy", "bytes", (
        ("20 MiB", "kv", "get 8192 rows x 5 x 128"), ("288 MiB", "kv", "get 1024 rows x 9 x 8192"),
        ("2 GiB", "kv", "get 1024 rows x 16 x 32768"),
    )),
    ("first get of a process", "bytes", (
        ("one row", "kv", "first get 1 rows x 3 x 64"), ("20 MiB", "kv", "first get 8192 rows x 5 x 128"),
        ("288 MiB", "kv", "first get 1024 rows x 9 x 8192"),
    )),
    ("claim of 32 samples", "samples", (
        ("1,000", "claims", "claim of 32 of 1,000 rows by"), ("131,072", "claims", "claim of 32 of 131,072 rows by"),
        ("10,000,000", "claims", "claim of 32 of 10,000,000 rows by"),
    )),
    ("its share in the controller, with your own sampler that reads a list", "samples", (
        ("1,000", "claims", "claim of 32 of 1,000 tagged rows in the core, a user's"),
        ("1,000,000", "claims", "claim of 32 of 1,000,000 tagged rows in the core, a user's"),
    )),
    ("single-row puts, all clients together", "clients", (
        ("1", "small_operations", "single-row puts, 1 client"), ("8", "small_operations", "single-row puts, 8 "),
        ("64", "small_operations", "single-row puts, 64 "), ("512", "small_operations", "single-row puts, 512 "),
    )),
    ("asynchronous puts of one client", "puts in flight", (
        ("1", "small_operations", "async puts of one client, 1 in"),
        ("64", "small_operations", "async puts of one client, 64 in"),
        ("4,000", "small_operations", "async puts of one client, 4000 in"),
    )),
    ("from a put to the last waiting rank", "ranks", (
        ("1", "wakeup", "call of a put to yield"), ("1,024", "wakeup", "1,024 waiting ranks, all woken"),
    )),
    ("single-row puts, one client", "durability", (
        ("none", "durability", "single-row puts, journal none"),
        ("async", "durability", "single-row puts, journal async"),
        ("sync", "durability", "single-row puts, journal sync"),
        ("values on disk, sync", "durability", "single-row puts, values machine, sync"),
    )),
    ("memory of the controller for a sample", "content", (
        ("3 fields", "memory", "controller state of a row in blocks of 1000, 3 fields"),
        ("with a key and two tags", "memory", "controller state of a row in blocks of 1000, 3 fields with key"),
    )),
    ("requests of one kind that one controller serves", "kind", (
        ("puts of a row", "controller_limits", "requests, only of the kind 'put of a row'"),
        ("puts of 64 rows", "controller_limits", "requests, only of the kind 'put of 64 rows'"),
        ("claims", "controller_limits", "requests, only of the kind 'claim'"),
    )),
)  # fmt: skip
"""An operation, what its cost is shown for, and the results, each with its name and place."""
GPU_ROWS = {
    "cudaMemcpy to the GPU, registered small pages": "`cudaMemcpy` from pinned memory",
    "get to the GPU": "get to the GPU",
    "get to the host, then to the GPU": "get as a copy, then to the GPU",
    "put from the GPU": "put from the GPU",
}


# ---------------------------------------------------------------- tables


def compared(results: Results, rows: dict[Place, str]) -> str:
    """Return a table of results beside those of the peers; the best of each row is bold."""
    return table(*(line_of(row_of(results, *place), words) for place, words in rows.items()))


def line_of(row: dict[str, Any], words: str) -> tuple[str, ...]:
    """Return the line of a result in a table with HEAD."""
    known = {HEAD[1]: row["ours"], **row["peers"]}
    best = (max if row["unit"] in RATES else min)(known.values())

    def cell(name: str) -> str:
        text = shown(known[name], row["unit"])
        return f"**{text}**" if known[name] == best else text

    arrays = [f"NumPy arrays: {cell(ARRAYS)}"] if ARRAYS in known else []
    ray = [cell(RAY)] if RAY in known else []
    return (words, cell(HEAD[1]), ", ".join([*ray, *arrays]) or "-", cell(OLD) if OLD in known else "-")


def table(*lines: tuple[str, ...], head: tuple[str, ...] = HEAD) -> str:
    """Return a table."""
    return "\n".join([cells(*head), "|" + "---|" * len(head), *(cells(*line) for line in lines)])


def shown(value: float, unit: str) -> str:
    """Return a figure with its unit; microseconds as milliseconds."""
    if unit == "us":
        value, unit = value / 1e3, "ms"
    return f"{value:.2f} {unit}" if abs(value - 1) < 0.01 else f"{number(value)} {unit}"


def near(results: Results) -> str:
    """Return a table of the results of which a peer takes less than NEAR times our time, the worst first.

    Of the cases of balancing that differ only in the distribution of lengths, it has the worst.
    """
    found: dict[str, tuple[float, tuple[str, ...]]] = {}
    for benchmark, document in results.items():
        for row in document["rows"]:
            factor = min(factors(row).values(), default=NEAR)
            words = words_of(benchmark, row["what"])
            if factor < NEAR and factor < found.get(words, (NEAR,))[0]:
                found[words] = factor, line_of(row, words)
    return table(*(line for _, line in sorted(found.values())))


def words_of(benchmark: str, what: str) -> str:
    """Return what the page calls a row."""
    case = re.match(r"balance (?P<samples>[\d,]+) x (?P<ranks>\d+), \w+, \S+, (?P<counts>\w+) counts", what)
    if case:
        return f"divide {case['samples']} samples among {int(case['ranks']):,} ranks, {case['counts']} counts"
    return next((words for (name, begin), words in WORDS.items() if name == benchmark and what.startswith(begin)), what)


def growth(results: Results) -> str:
    """Return the table of how costs grow."""
    lines = []
    for operation, by, places in GROWTH:
        found = []
        for words, benchmark, begin in places:
            row = row_of(results, benchmark, begin)
            found.append(f"{words}: {shown(row['ours'], row['unit'])}")
        lines.append((operation, by, "; ".join(found)))
    return table(*lines, head=("operation", "grows with", "measured"))


def step(results: Results) -> str:
    """Return a sentence about a training step."""
    row = row_of(results, "pipeline", "a step of 64 prompts x 8")
    ours, ideal, ray = (number(each) for each in (row["ours"], row["reference"], row["peers"][RAY]))
    return (
        f"A training step of 64 prompts x 8 answers takes {ours} {row['unit']}. With ideal overlap it would take "
        f"{ideal}; with a Ray driver that calls stage after stage it takes {ray}."
    )


def gpu(results: Results) -> str:
    """Return the table of copies between the store and a GPU."""
    lines = []
    for begin, words in GPU_ROWS.items():
        row = row_of(results, "gpu", begin)
        lines.append((words, shown(row["ours"], row["unit"]), shown(row["more"]["GB/s"], "GB/s")))
    return table(*lines, head=("256 MiB", "time", "rate"))


def by_machine(kept: dict[str, Results], shared: dict[Place, str] = PAGE_ROWS) -> str:
    """Return the table of some results on each machine that has them."""
    known = {name: results for name, results in kept.items() if "kv" in results}
    if len(known) == 1:
        return f"Only `{next(iter(known))}` has the results of the first table so far."
    lines = []
    for (benchmark, begin), words in shared.items():
        rows = [row_of(results, benchmark, begin) if benchmark in results else None for results in known.values()]
        lines.append((words, *("-" if row is None else shown(row["ours"], row["unit"]) for row in rows)))
    return table(*lines, head=("TransferQueue", *(f"`{name}`" for name in known)))


def trainings(kept: dict[str, Results]) -> str:
    """Return the table of the replays of trainings on each machine."""
    lines = []
    for machine, results in kept.items():
        rows = {row["what"]: row for row in results["trainings"]["rows"]} if "trainings" in results else {}
        for name in dict.fromkeys(what.rpartition(": ")[0] for what in rows):
            p50, p99, controller, moved = (
                rows[f"{name}: {what}"]
                for what in ("put to yield, p50", "put to yield, p99", "controller", "bytes of puts and gets")
            )
            ours = f"{number(p50['ours'])}, {number(p99['ours'])}"
            ray = f"{number(p50['peers'][RAY])}, {number(p99['peers'][RAY])}" if RAY in p50["peers"] else "-"
            rate = number(controller["more"]["samples_a_second"])
            shares = f"{number(controller['ours'])} %, {number(100 * moved['ratio'])} %"
            lines.append((name.rpartition(", ")[0].rpartition(", ")[0], f"`{machine}`", rate, ours, ray, shares))
    return table(*lines, head=("training", "machine", "samples/s", "p50, p99", "Ray", "controller, memory"))


def machine_of(document: dict[str, Any]) -> str:
    """Return the machine of a benchmark without its software, and the date."""
    return f"{document['machine'].split(', Linux')[0]} ({document['date']})"


def machines(kept: dict[str, Results]) -> str:
    """Return the list of machines with their software."""
    lines = []
    for name, results in kept.items():
        document = results.get("kv") or next(iter(results.values()))
        dates = sorted({each["date"] for each in results.values()})
        uses = {"the GPU": "gpu" in results, "the tables with several machines": "kv" in results}
        what = " and ".join(use for use, holds in uses.items() if holds) if lines else "everything else"
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        lines.append(f"- `{name}`, for {what}: {document['machine']}; {when}")
    return "\n".join(lines)


# ---------------------------------------------------------------- files


def blocks(kept: dict[str, Results]) -> dict[str, Callable[[], str]]:
    """Return by name how to make each block."""
    results = next(iter(kept.values()))
    on_gpu = next((each for each in kept.values() if "gpu" in each), {})
    where = f"Measured side by side on a machine with {machine_of(results['kv'])}."
    return {
        "tools/make_figures.py": lambda: (
            f"{compared(results, README_ROWS)}\n\nRay's object store holds a TensorDict, or NumPy arrays where the "
            f"table says so. {step(results)} {where} [More results](docs/performance.md)."
        ),
        "results": lambda: f"{compared(results, PAGE_ROWS)}\n\n{step(results)} {where}",
        "near": lambda: near(results),
        "growth": lambda: growth(results),
        "gpu": lambda: gpu(on_gpu),
        "by machine": lambda: by_machine(kept),
        "trainings": lambda: trainings(kept),
        "machines": lambda: machines(kept),
    }


def figure(results: Results) -> str:
    """Return the figure of the page."""
    rows = [(words, factors(row_of(results, *place))) for place, words in PAGE_ROWS.items()]
    return comparison("How many times as long others take", rows, (RAY, ARRAYS, OLD))


def files(kept: dict[str, Results]) -> dict[Path, str]:
    """Return the text of each file."""
    made = blocks(kept)

    def block(match: re.Match[str]) -> str:
        return f"{match['name']} -->\n{made[match['name']]()}\n"

    wanted = {path: BLOCK.sub(block, path.read_text("utf-8")) for path in (README, PAGE)}
    wanted[FIGURE] = figure(next(iter(kept.values())))
    return wanted | {MEASURED / name / "README.md": page_of(name, results) for name, results in kept.items()}


if __name__ == "__main__":
    write_or_check(files(read()))
