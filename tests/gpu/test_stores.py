"""The ways of external stores past the memory of the host, with their real libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue.errors import StartError

DEVICE = torch.device("cuda")
SECONDS = 120.0
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "MooncakeStore": (
        "mooncake",
        {"MooncakeStore": {"master_server_address": "127.0.0.1:0", "global_segment_size": 256 << 20}},
    ),
    "RayStore": ("ray", {"RayStore": {"capacity": 256 << 20, "direct_transport": "nixl"}}),
}


@pytest.fixture(params=list(BACKENDS))
def client(request: pytest.FixtureRequest) -> Iterator[tq.TransferQueueClient]:
    """The client of a system with this backend."""
    module, conf = BACKENDS[request.param]
    pytest.importorskip(module)
    with contextlib.ExitStack() as stack:
        if module == "ray":
            import ray

            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
            stack.callback(ray.shutdown)
        runtime = "ray" if module == "ray" else "local"
        try:
            tq.init({"backend": {"storage_backend": request.param, **conf}, "runtime": runtime})
        except StartError as error:
            pytest.skip(f"{request.param} cannot be started here: {error}")
        stack.callback(tq.close)
        yield tq.get_client()


def test_tensors_of_the_device_go_round(client: tq.TransferQueueClient) -> None:
    value = torch.arange(1 << 22, device=DEVICE).view(64, -1)
    meta = client.put(TensorDict({"x": value}, batch_size=64), partition_id="p")
    got = client.get_data(meta, layout="dense", device=DEVICE)["x"]
    assert got.is_cuda
    assert torch.equal(got, value)


def test_actors_of_ray_that_transfer_directly() -> None:
    """An actor puts from the GPU, and another gets to it, each with blocks that go directly to and from the store."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("nixl")

    class Task:
        def put(self) -> Any:
            value = torch.arange(1 << 22, device="cuda").view(64, -1)
            return tq.get_client().put(TensorDict({"x": value}, batch_size=64), partition_id="p")

        def is_right(self, meta: Any) -> bool:
            got = tq.get_client().get_data(meta, layout="dense", device="cuda")["x"]
            return bool(got.is_cuda and torch.equal(got, torch.arange(1 << 22, device="cuda").view(64, -1)))

    kind = ray.remote(num_cpus=0, num_gpus=0.4, enable_tensor_transport=True)(Task)
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        store = {"storage_backend": "RayStore", "RayStore": {"capacity": 256 << 20, "direct_transport": "nixl"}}
        tq.init({"runtime": "ray", "backend": store})
        writer, reader = kind.remote(), kind.remote()
        meta = ray.get(writer.put.remote(), timeout=SECONDS)
        assert ray.get(reader.is_right.remote(meta), timeout=SECONDS)
        names = [found["name"] for found in ray.util.list_named_actors(all_namespaces=True)]
        (name,) = [name for name in names if name.startswith("TransferQueueKeeper")]
        keeper = ray.get_actor(name, namespace="transfer_queue")
        went = keeper.__ray_call__.remote(lambda self: self._transport is not None)
        assert ray.get(went, timeout=SECONDS), "the blocks went by calls, not directly"
    finally:
        tq.close()
        ray.shutdown()
