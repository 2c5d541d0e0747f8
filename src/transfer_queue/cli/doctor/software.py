"""Checks of the versions of Python, the packages and the kernel, which are found without importing the packages."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.display import count_text
from transfer_queue.utils.installations import (
    PACKAGE,
    REINSTALL,
    advice,
    missing_files,
    other_installations,
    own_folder,
    version_of,
)

PYTHON = (3, 10)
NEEDED = {"numpy": (1, 26), "msgspec": (0, 18), "omegaconf": (2, 3), "tensordict": (0, 10), "torch": (2, 6)}
OPTIONAL = {"ray": (2, 40)}
KERNEL = (5, 14)  # has MADV_POPULATE_WRITE; everything else that is used is older


def kernel() -> tuple[str, str]:
    """Return the name of the operating system and its release."""
    return platform.system(), platform.release()


def check() -> Iterator[Finding]:
    """Compare each version with the lowest one that is supported."""
    own = version_of("transfer_queue")
    yield Finding("transfer_queue", OK, own or "from the source tree", values={"version": own})
    yield _installations()
    yield _compared("Python", platform.python_version(), PYTHON, f"this one is {sys.executable}")
    for package, least in NEEDED.items():
        yield _package(package, least, is_needed=True)
    for package, least in OPTIONAL.items():
        yield _package(package, least, is_needed=False)
    yield _kernel()


def _installations() -> Finding:
    others = other_installations()
    values = {"folder": str(own_folder()), "others": [str(each) for each in others]}
    if others:
        text = f"other distributions have files of the import name {PACKAGE}: {', '.join(map(str, others))}; "
        return Finding("installation", PROBLEM, f"{text}this package is in {own_folder()}", advice(others), values)
    missing = missing_files()
    if missing:
        text = f"{own_folder()} lacks {count_text(len(missing), 'file')} of this package, for example {missing[0]}"
        return Finding("installation", PROBLEM, text, f"run {REINSTALL}", values)
    return Finding("installation", OK, f"{own_folder()}, and no other distribution has files there", values=values)


def _package(package: str, least: tuple[int, ...], is_needed: bool) -> Finding:
    version = version_of(package)
    if version is not None:
        return _compared(package, version, least, f"pip install '{package}>={_dotted(least)}'")
    if is_needed:
        advice = f"pip install '{package}>={_dotted(least)}'"
        return Finding(package, PROBLEM, "not installed", advice, {"version": None})
    return Finding(package, OK, "not installed, and not needed", values={"version": None})


def _compared(name: str, version: str, least: tuple[int, ...], advice: str) -> Finding:
    if numbers(version) >= least:
        return Finding(name, OK, version, values={"version": version})
    return Finding(name, PROBLEM, f"{version}, and {_dotted(least)} is needed", advice, {"version": version})


def _kernel() -> Finding:
    system, release = kernel()
    values = {"system": system, "release": release}
    if system != "Linux":
        return Finding("kernel", PROBLEM, f"{system} {release}", "only Linux is supported", values)
    if numbers(release) < KERNEL:
        advice = (
            f"a kernel of {_dotted(KERNEL)} or later prepares shared memory ahead of need; first puts are slower here"
        )
        return Finding("kernel", WARNING, f"Linux {release}", advice, values)
    return Finding("kernel", OK, f"Linux {release}", values=values)


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: (2, 6, 0) for "2.6.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])[:3]))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
