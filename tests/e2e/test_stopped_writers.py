"""Writers that are stopped for long, in the middle of a copy and between two puts, while others fill the arena."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from server_processes import started, unit_status
from transfer_queue.errors import CapacityError
from transfer_queue.interface import CURRENT
from transfer_queue.wire.blocks.encode import EncodedBlock

CAPACITY = 8 << 20
BIG, LARGE, SMALL, OWN = 3 << 20, 256 << 10, 12_000, 32_000  # bytes of rows
WAIT = 0.6  # seconds: longer than any pause after which the unit looks again at its writers


@pytest.fixture
def system() -> Iterator[Any]:
    with started("stopped", backend={"SimpleStorage": {"num_data_storage_units": 1, "arena_bytes": CAPACITY}}):
        yield CURRENT.system


def rows(fill: int, nbytes: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1, nbytes), fill, dtype=torch.uint8)}


def stop_in_the_middle() -> None:
    """Copies of this process stop it when they are half done."""
    whole = EncodedBlock.write_into

    def halved(block: EncodedBlock, memory: Any) -> None:
        EncodedBlock.write_into = whole  # type: ignore[method-assign]
        copy = np.empty(block.nbytes, np.uint8)
        whole(block, copy)
        half = block.nbytes // 2
        memory[:half] = copy[:half]
        os.kill(os.getpid(), signal.SIGSTOP)
        memory[half : block.nbytes] = copy[half:]

    EncodedBlock.write_into = halved  # type: ignore[method-assign]


def write(middle: bool) -> None:
    """Puts 20 small rows and is stopped; then, or meanwhile, a big one, and 20 small ones."""
    for row in range(20):
        tq.kv_put(f"small-{row}", "stopped", {"x": torch.full((OWN,), row, dtype=torch.uint8)})
    if middle:
        stop_in_the_middle()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    tq.kv_batch_put(["big"], "stopped", rows(99, BIG), timeout=60)
    for row in range(20, 40):
        tq.kv_put(f"small-{row}", "stopped", {"x": torch.full((OWN,), row, dtype=torch.uint8)}, timeout=60)


@contextlib.contextmanager
def stopped(middle: bool) -> Iterator[int]:
    """A forked client, once it is stopped."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            write(middle)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        _, state = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(state), "the writer failed"
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fill(partition: str) -> dict[str, int]:
    """Puts until there is no space, though each put waits for it; the size of each row."""
    there: dict[str, int] = {}
    for nbytes, wait in ((LARGE, None), (SMALL, None), (SMALL, WAIT)):
        with contextlib.suppress(CapacityError):
            while True:
                key = f"{partition}-{len(there)}"
                tq.kv_batch_put([key], partition, rows(100 + len(there) % 150, nbytes), timeout=wait)
                there[key] = nbytes
    return there


def clear(there: dict[str, int], partition: str, nbytes: int) -> None:
    """Clears rows of so many bytes, the large ones first."""
    for key, size in list(there.items()):
        if nbytes > 0:
            tq.kv_clear([key], partition)
            del there[key]
            nbytes -= size


def check(partition: str, there: dict[str, int]) -> None:
    values = tq.kv_batch_get(list(there), partition)["x"].unbind()
    for (key, nbytes), value in zip(there.items(), values, strict=True):
        full_of = 100 + int(key.rpartition("-")[2]) % 150
        assert len(value) == nbytes
        assert (value == full_of).all(), f"{key} has bytes that are not its own"


@pytest.mark.parametrize("middle", [True, False], ids=["in a copy", "between puts"])
def test_changes_no_byte_that_is_not_its_own(system: Any, middle: bool) -> None:
    with stopped(middle) as pid:
        for partition in ("first", "second"):  # space is used, cleared, and used again, while it is stopped
            there = fill(partition)
            assert unit_status().free < 64 * 1024, "all that is not the writer's is in use"
            left = CAPACITY - sum(there.values())
            if middle:
                assert left > BIG, "it keeps what it is writing to"
            else:
                assert left < 20 * OWN + 2 * 64 * 1024, "what it did not use is in use"
            check(partition, there)
            if partition == "first":
                clear(there, partition, CAPACITY)
        if not middle:  # it needs space to go on, and waits for it
            clear(there, "second", BIG + LARGE)
        os.kill(pid, signal.SIGCONT)
        clear(there, "second", 5 * LARGE)
        _, ended = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(ended) == 0
        check("second", there)
        values = tq.kv_batch_get([f"small-{row}" for row in range(40)], "stopped")["x"].unbind()
        assert all((value == row).all() for row, value in enumerate(values))
        assert (tq.kv_batch_get(["big"], "stopped")["x"] == 99).all()
