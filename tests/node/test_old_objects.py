"""Servers free their objects by reference counts: a collection of all objects is not needed and is not done."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.node.hosting.child_process import spare_old_objects

sys.path.append(str(Path(__file__).parent.parent / "core"))
from harness import Harness


@pytest.fixture
def as_in_a_server() -> Iterator[None]:
    before = gc.get_threshold()
    gc.collect()
    spare_old_objects()
    yield
    gc.set_threshold(*before)


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of the garbage collections during the test."""
    found: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            found.append(about["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def used(h: Harness, name: str) -> None:
    """Make a partition whose rows are dealt, leased, waited for and cleared."""
    h.put(4, partition=name)
    h.dealt(1, partition=name)
    h.lease(1, partition=name)
    h.claim(9, partition=name, wait=100.0)


@pytest.mark.usefixtures("as_in_a_server")
def test_a_dropped_partition_is_freed_at_once() -> None:
    h = Harness()
    for number in range(20):
        used(h, f"p{number}")
    alive = [weakref.ref(partition) for partition in h.state.partitions.values()]
    gc.disable()
    try:
        for number in range(20):
            assert h.ask(ClearPartition(f"p{number}")) == Done()
        assert not [each for each in alive if each() is not None]
    finally:
        gc.enable()


@pytest.mark.usefixtures("as_in_a_server")
def test_no_collection_examines_all_objects(collections: list[int]) -> None:
    kept = [[[] for _ in range(100)] for _ in range(10_000)]
    assert 1 in collections
    assert 2 not in collections
    assert len(kept) == 10_000
