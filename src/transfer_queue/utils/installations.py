"""Distributions that have files of the import name `transfer_queue`: two of them overwrite or hide each other.

The PyPI package `TransferQueue` is another distribution with the same import name. A distribution of that name without
files (`tools/make_compat_wheel`) is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from transfer_queue.utils.logging_utils import get_logger

_logger = get_logger(__name__)

PACKAGE = "transfer_queue"
THEIRS = "TransferQueue"


@dataclass(frozen=True)
class Installation:
    """The files of the package that one distribution has installed."""

    name: str
    """Name of the distribution."""
    version: str
    """Version of the distribution."""
    folder: Path
    """Folder of its files of the package."""
    files: int
    """Number of these files. An editable installation and the compatibility distribution have none."""

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.files} files in {self.folder})"


def own_folder() -> Path:
    """Return the folder of the package that is imported."""
    return Path(__file__).resolve().parent


def overlaid() -> list[Installation]:
    """Return the installations of the PyPI package that have files of the import name; takes a millisecond."""
    return list(_with_files(metadata.distributions(name=THEIRS)))


def all_installations() -> list[Installation]:
    """Return every distribution that has files of the import name. Reads the metadata of all distributions."""
    return list(_with_files(metadata.distributions()))


def advice(found: Iterable[Installation]) -> str:
    """Return what to do about foreign installations.

    Args:
        found: Installations of other distributions that have files of the import name.
    """
    listed = list(dict.fromkeys(each.name for each in found))
    again = ""
    if any(each.folder == own_folder() for each in found):
        again = ", then install this package again (`pip install --force-reinstall --no-deps`): both had files there"
    return (
        f"run `pip uninstall {' '.join(listed)}`{again}. If another package requires the distribution {THEIRS} by "
        f"name, install the one that `make compat` builds, which has no files (docs/migrate.md)"
    )


def warn_of_other_installations() -> None:
    """Log a warning if another distribution has files of the package."""
    others = overlaid()
    if others:
        _logger.warning(
            "two distributions have the import name transfer_queue: %s, and this one in %s. Modules of one may have "
            "replaced modules of the other: %s",
            ", ".join(map(str, others)),
            own_folder(),
            advice(others),
        )


def _with_files(distributions: Iterable[metadata.Distribution]) -> Iterator[Installation]:
    for each in distributions:
        record = each.read_text("RECORD") or ""
        count = record.startswith(f"{PACKAGE}/") + record.count(f"\n{PACKAGE}/")
        if count:
            folder = Path(str(each.locate_file(PACKAGE))).resolve()
            yield Installation(each.metadata["Name"], each.version, folder, count)
