"""Distributions that have files of the import name `transfer_queue`: two of them overwrite or hide each other.

The PyPI package `TransferQueue` is another distribution with the same import name. A distribution of that name without
files (`tools/make_compat_wheel`) is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from transfer_queue.utils.logging_utils import get_logger

PACKAGE = "transfer_queue"
REINSTALL = "`pip install --force-reinstall --no-deps .` in a clone of the repository of this package"
"""What installs all files of this package again."""


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


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def own_folder() -> Path:
    """Return the folder of the package that is imported."""
    return Path(__file__).resolve().parents[1]


def other_installations() -> list[Installation]:
    """Return the other distributions that have files of the import name; takes some milliseconds."""
    return [each for each in _with_files(metadata.distributions()) if canonical(each.name) != canonical(PACKAGE)]


def missing_files() -> list[str]:
    """Return the files of this package that were installed and are gone; takes some milliseconds."""
    try:
        own = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:  # the source tree is used
        return []
    installed = [path for path in own.files or () if path.parts[0] == PACKAGE and path.suffix != ".pyc"]
    return [str(path) for path in installed if not Path(str(own.locate_file(path))).exists()]


def canonical(name: str) -> str:
    """Return the name of a distribution in the form in which package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def advice(others: Iterable[Installation]) -> str:
    """Return what to do about other installations.

    Args:
        others: What `other_installations` has returned.
    """
    names = list(dict.fromkeys(each.name for each in others))
    again = ""
    if any(each.folder == own_folder() for each in others):
        again = f", which also deletes files of this package, then {REINSTALL}"
    return (
        f"run `pip uninstall {' '.join(names)}`{again}. If another package requires the distribution TransferQueue, "
        f"install the one that `make compat` builds, which has no files (docs/migrate.md)"
    )


def warn_of_other_installations() -> None:
    """Log a warning if another distribution has files of the package."""
    others = other_installations()
    if others:
        get_logger(__name__).warning(
            "other distributions have files of the import name %s: %s; this package is in %s, and modules of one may "
            "have replaced modules of the other: %s",
            PACKAGE,
            ", ".join(map(str, others)),
            own_folder(),
            advice(others),
        )


def _with_files(distributions: Iterable[metadata.Distribution]) -> Iterator[Installation]:
    for each in distributions:
        folder = Path(str(each.locate_file(PACKAGE)))
        record = (each.read_text("RECORD") or "") if folder.is_dir() else ""
        count = record.startswith(f"{PACKAGE}/") + record.count(f"\n{PACKAGE}/")
        if count:
            yield Installation(each.metadata["Name"], each.version, folder.resolve(), count)
