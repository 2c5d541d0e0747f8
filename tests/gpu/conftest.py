"""Tests of a real GPU, which `make gpu` runs. Without one they are skipped, with one line that says so."""

from __future__ import annotations

from collections.abc import Iterator

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
