"""Tests of a real GPU, which `make gpu` runs. Without one they are skipped, with one line that says so."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import transfer_queue as tq

GPU = torch.cuda.is_available()
REASON = "no GPU: torch.cuda.is_available() is false in this process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip every test of this folder if there is no GPU."""
    for item in items if not GPU else ():
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def client() -> Iterator[tq.TransferQueueClient]:
    """The client of a local system of this test."""
    tq.init()
    try:
        yield tq.get_client()
    finally:
        tq.close()


@pytest.fixture
def rate(capsys: pytest.CaptureFixture[str]) -> Callable[..., float]:
    """rate(what, nbytes, function): prints and returns the median GB/s of the function, until the device is done."""

    def measure(what: str, nbytes: int, function: Callable[[], object], rounds: int = 10) -> float:
        found = []
        for _ in range(rounds + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            function()
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        gigabytes = nbytes / statistics.median(found[2:]) / 1e9
        with capsys.disabled():
            print(f"\n{what}: {gigabytes:.1f} GB/s", end="", flush=True)
        return gigabytes

    return measure
