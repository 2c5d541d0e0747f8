"""The controller's memory is moved into huge pages, and its contents stay."""

import re

import pytest

from transfer_queue.node.controller import controller_process
from transfer_queue.node.controller.controller_process import HUGE, SMALLEST, collapse_memory, huge_pages_of

MAPS = f"""\
{HUGE:x}-{4 * HUGE:x} rw-p 00000000 00:00 0
{4 * HUGE + 4096:x}-{7 * HUGE - 4096:x} rw-p 00000000 00:00 0                  [heap]
{8 * HUGE:x}-{9 * HUGE - 4096:x} rw-p 00000000 00:00 0
{10 * HUGE:x}-{12 * HUGE:x} r--p 00000000 00:00 0
{12 * HUGE:x}-{14 * HUGE:x} rw-p 00000000 08:01 123456                     /usr/lib/libc.so.6
{14 * HUGE:x}-{16 * HUGE:x} rw-s 00000000 00:00 0
{16 * HUGE:x}-{18 * HUGE:x} rw-p 00000000 00:00 0                          [stack]
"""


def test_only_whole_huge_pages_of_private_anonymous_memory_are_collapsed() -> None:
    assert [page // HUGE for page in huge_pages_of(MAPS)] == [1, 2, 3, 5]


def test_the_memory_keeps_its_contents() -> None:
    objects = [(number, str(number)) for number in range(300_000)]
    before = _huge_kilobytes()
    if not collapse_memory():
        pytest.skip("this kernel does not collapse memory (MADV_COLLAPSE)")
    assert _huge_kilobytes() >= before
    assert all(text == str(number) for number, text in objects)


def test_a_large_process_is_collapsed_until_the_kernel_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, True, False])
    calls = []

    def collapse(address: int, nbytes: int) -> bool:
        calls.append((address, nbytes))
        return next(answers)

    sizes = iter([SMALLEST - 1, SMALLEST, SMALLEST, SMALLEST])
    monkeypatch.setattr(controller_process, "resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(controller_process, "huge_pages_of", lambda maps: iter([HUGE]))
    monkeypatch.setattr(controller_process, "collapse", collapse)
    controller_process._repeat(0.0)
    assert calls == [(HUGE, HUGE)] * 3  # the process was too small once


def _huge_kilobytes() -> int:
    with open("/proc/self/smaps_rollup") as rollup:
        found = re.search(r"AnonHugePages:\s+(\d+) kB", rollup.read())
    return int(found[1]) if found else 0
