"""The golden files of a release: archives of files that it wrote, and what must be found in them."""

from __future__ import annotations

import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def releases() -> list[str]:
    """The releases of which there are golden files."""
    return sorted(path.name for path in HERE.iterdir() if (path / "expected.json").exists())


def expected(release: str) -> dict[str, Any]:
    """What must be found in the files of a release."""
    found: dict[str, Any] = json.loads((HERE / release / "expected.json").read_text())
    return found


def unpack(release: str, story: str, folder: Path) -> Path:
    """The files of a story, in a folder of theirs."""
    with tarfile.open(HERE / release / f"{story}.tar.gz") as archive:
        archive.extractall(folder / story, filter="data")
    return folder / story


def pack(release: Path, story: str, parts: dict[str, Path]) -> None:
    """An archive of these files and folders, under these names; equal files give equal archives."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with (
        open(release / f"{story}.tar.gz", "wb") as file,
        gzip.GzipFile("", "wb", 9, file, 0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, path in sorted(parts.items()):
            archive.add(path, name, filter=plain)


def write_expected(release: Path, found: dict[str, Any]) -> None:
    """In lines that a person can compare: an entry of the inner levels each."""
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
