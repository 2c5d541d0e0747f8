"""The golden files of a release: archives of the files that it wrote, and a description of what it found in them."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def releases() -> list[str]:
    """The releases that have golden files."""
    return sorted(path.name for path in HERE.iterdir() if (path / "expected.json").exists())


def read_expected(release: str) -> dict[str, Any]:
    """The description of what a release found in its files."""
    found: dict[str, Any] = json.loads((HERE / release / "expected.json").read_text())
    return found


def unpack(release: str, scenario: str, folder: Path) -> Path:
    """Extract the files of a scenario into a new folder; returns the folder."""
    with tarfile.open(HERE / release / f"{scenario}.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(folder / scenario)
    return folder / scenario


def pack(release: Path, scenario: str, parts: dict[str, Path]) -> None:
    """Write an archive of these files and folders, by the names that they get in it."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with (
        open(release / f"{scenario}.tar.gz", "wb") as file,
        gzip.GzipFile("", "wb", 9, file, 0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, path in sorted(parts.items()):
            archive.add(path, name, filter=plain)


def write_expected(release: Path, found: dict[str, Any]) -> None:
    """Write the description, with a line for each entry of the upper levels, so that a diff is readable."""
    (release / "expected.json").write_text(_lines(found, 0) + "\n")


def _lines(value: Any, depth: int) -> str:
    if depth == 6 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    gap = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_lines(entry, depth + 1)}" for key, entry in value.items()]
    else:
        parts = [json.dumps(entry) for entry in value]
    begin, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return begin + gap + f",{gap}".join(parts) + gap[:-1] + end
