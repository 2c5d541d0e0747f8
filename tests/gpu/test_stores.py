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
