"""The kernel's search for pages that were written to has the same result as reading the state of each page."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from transfer_queue.storage.arena import private_pages as module
from transfer_queue.storage.arena.private_pages import private_pages

PAGE = mmap.PAGESIZE
PAGES = 1024


@pytest.fixture
def mapping() -> Iterator[mmap.mmap]:
    """A private mapping of a file in shared memory, of which every page was read."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.truncate(file.fileno(), PAGES * PAGE)
        found = mmap.mmap(file.fileno(), PAGES * PAGE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        np.frombuffer(found, np.uint8)[::PAGE].sum()
        yield found


def address_in(mapping: mmap.mmap, page: int) -> int:
    address: int = np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    return address + page * PAGE


def pages_of(mapping: mmap.mmap, first: int = 0, end: int = PAGES) -> list[int]:
    """Return the numbers of the private pages in this part of the mapping."""
    found = private_pages(address_in(mapping, first), address_in(mapping, end))
    return [first + page for low, high in found for page in range(low // PAGE, high // PAGE)]


@pytest.fixture(params=["scan", "read"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the pages are found. Kernels that cannot search take the second way in both cases."""
    if request.param == "read":
        monkeypatch.setattr(module, "_can_scan", False)


@pytest.mark.parametrize(
    "written",
    [
        [],
        [0],
        [PAGES - 1],
        [5, 6, 7, 900],
        list(range(0, PAGES, 2)),  # more stretches than one call of the kernel reports
        list(range(PAGES)),
    ],
)
def test_exactly_the_pages_that_were_written_to_are_private(mapping: mmap.mmap, written: list[int]) -> None:
    for page in written:
        mapping[page * PAGE + 7] = 1
    assert pages_of(mapping) == written


def test_only_pages_of_the_range_are_returned(mapping: mmap.mmap) -> None:
    for page in (3, 4, 5, 6):
        mapping[page * PAGE] = 1
    assert pages_of(mapping, 4, 6) == [4, 5]
    # a range that begins and ends inside pages contains them
    assert private_pages(address_in(mapping, 4) + 5, address_in(mapping, 4) + 6) == [(0, PAGE)]


def test_a_page_that_was_dropped_is_not_private_any_more(mapping: mmap.mmap) -> None:
    mapping[0] = 1
    mapping.madvise(mmap.MADV_DONTNEED, 0, PAGE)
    assert pages_of(mapping) == []


def test_a_kernel_that_does_not_know_the_search_is_asked_once(
    mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(file: int, request: int, argument: bytearray) -> int:
        asked.append(request)
        raise OSError(errno.ENOTTY, "not known")

    monkeypatch.setattr(module, "_can_scan", True)
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    mapping[9 * PAGE] = 1
    assert pages_of(mapping) == pages_of(mapping) == [9]
    assert len(asked) == 1


def test_without_the_file_an_error_is_raised(mapping: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGEMAP", "/proc/self/none")
    with pytest.raises(OSError, match="none"):
        pages_of(mapping)
