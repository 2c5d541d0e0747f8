"""A running system for the tests with verl, which run in the environment `.verl` (`make verl`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

with warnings.catch_warnings():  # verl warns of each training engine that is not installed
    warnings.simplefilter("ignore")

    import transfer_queue.integrations.verl

import transfer_queue as tq

CONF = {"system": {"name": "verl"}, "backend": {"SimpleStorage": {"num_data_storage_units": 1}}}


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    """The client of a system of the module."""
    tq.init(CONF)
    yield tq.get_client()
    tq.close()


@pytest.fixture
def client(system: Any) -> Iterator[Any]:
    """The client of a system whose partitions are removed after the test."""
    yield system
    for partition in system.get_partition_list():
        system.clear_partition(partition)
