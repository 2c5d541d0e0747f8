"""The conformance suite on Ray's object store, on a cluster of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from transfer_queue.on_ray.keepers import end_keeper, start_keeper
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.testing.conformance import StoreConformance

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def kept() -> Iterator[None]:
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    _, options = start_keeper(ray, "keeper", "tests", False, 60.0)
    TestRay.where = StoreAddress("RayStore", options)
    yield
    end_keeper(ray, options)
    end_keeper(ray, options)
    ray.shutdown()


@pytest.mark.usefixtures("kept")
class TestRay(StoreConformance):
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where
