"""Write the table of figures in README.md from the results in benchmarks/measured.

python tools/make_figures.py           writes it
python tools/make_figures.py --check   exits with 1 if it is not what it would write
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.harness.report import number  # noqa: E402
from benchmarks.performance import MEASURED, Results, read  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- figures: tools/make_figures.py -->\n", "<!-- end of figures -->"
PEERS = {"Ray": "Ray's object store", "TransferQueue 0.1.11": "PyPI package TransferQueue 0.1.11"}
ROWS = (
    ("kv", "put 1024 rows x 9 x 8192", "put of 288 MiB, 9 fields of 1,024 rows"),
    ("kv", "get 1024 rows x 9 x 8192", "get of 288 MiB"),
    ("kv", "get 8192 rows x 5 x 128 f32, 20 MiB", "get of 20 MiB, 5 fields of 8,192 rows"),
    ("pipeline", "a step of 64 prompts x 8", "a training step of 64 prompts x 8"),
)
"""Benchmark, the beginning of the row, and what the table calls it."""


def row_of(results: Results, benchmark: str, begin: str) -> dict[str, Any]:
    """Return the row of a benchmark that begins with these words."""
    return next(row for row in results[benchmark]["rows"] if row["what"].startswith(begin))


def short(document: dict[str, Any]) -> str:
    """Return the machine of a benchmark without its software, and the date."""
    return f"{document['machine'].split(', Linux')[0]} ({document['date']})"


def table(machines: dict[str, Results]) -> str:
    """Return the table of the first machine, and where the figures of all come from."""
    results, *others = machines.values()
    lines = [f"| time, all measured in one run | TransferQueue | {' | '.join(PEERS.values())} |", "|---|---|---|---|"]
    for benchmark, begin, words in ROWS:
        row = row_of(results, benchmark, begin)
        if row["against"] == "ideal overlap":
            words += f" (ideal overlap: {number(row['reference'])} {row['unit']})"
        peers = [f"{number(row['peers'][peer])} {row['unit']}" if peer in row["peers"] else "" for peer in PEERS]
        lines.append(f"| {words} | **{number(row['ours'])} {row['unit']}** | {' | '.join(peers)} |")
    words = f"Measured on a machine with {short(results['kv'])}."
    for found in others:
        if "gpu" in found:
            row = row_of(found, "gpu", "get to the GPU")
            words += (
                f" On a machine with {short(found['gpu'])}, a get to the GPU takes {number(row['ratio'])} times as "
                f"long as cudaMemcpy."
            )
    return "\n".join([*lines, "", f"{words} [All figures](docs/performance.md).", ""])


def main() -> int:
    """Write or check the table. Return the exit code."""
    text = README.read_text("utf-8")
    wanted = re.sub(
        f"(?<={re.escape(BEGIN)}).*(?={re.escape(END)})", lambda match: table(read(MEASURED)), text, flags=re.DOTALL
    )
    if "--check" in sys.argv[1:]:
        if wanted != text:
            print("README.md does not have the figures of benchmarks/measured; run `make generate`", file=sys.stderr)
        return int(wanted != text)
    README.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
