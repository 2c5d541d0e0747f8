"""The command line of tools that generate files: they are written, or compared with what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_or_check(wanted: Mapping[Path, str | None]) -> None:
    """Write the files that differ from what is wanted; with --check, name them, and exit with 1 if there are any.

    Args:
        wanted: The text of each file; None for a file that must not exist.
    """
    parser = argparse.ArgumentParser(description="Write the files that this tool generates.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not up to date")
    is_check = parser.parse_args().check
    stale = {path: text for path, text in wanted.items() if text != _text_of(path)}
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        if is_check:
            print(f"{name} is not up to date; run `make generate`", file=sys.stderr)
        elif text is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
            print(f"wrote {name}")
    if is_check and stale:
        sys.exit(1)


def _text_of(path: Path) -> str | None:
    return path.read_text("utf-8") if path.exists() else None
