"""A user's sampler that is slow, hangs or dies, in a real system: only claims that use it wait."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import light_sampler
import transfer_queue as tq
from server_processes import started
from transfer_queue.node.system.processes import Process


def put(client: Any, partition: str, rows: int) -> None:
    client.put(TensorDict({"x": torch.arange(rows)}, batch_size=[rows]), partition_id=partition)


def rows(client: Any, partition: str, count: int, task: str = "t", **config: Any) -> list[int]:
    found: list[int] = client.get_meta(["x"], count, partition, task_name=task, sampling_config=config).global_indexes
    return found


@pytest.fixture
def client(request: pytest.FixtureRequest) -> Iterator[Any]:
    with started("gated", controller={"sampler": light_sampler.Gated}, timeouts={"sampler": request.param}):
        yield tq.get_client()


@pytest.mark.parametrize("client", [300], indirect=True)
def test_requests_that_do_not_use_a_slow_sampler_do_not_wait(client: Any, tmp_path: Path) -> None:
    """Puts, key-value calls, status and claims with built-in samplers are answered while it does not return."""
    put(client, "p", 4)
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(rows, client, "p", 2, gate=str(gate))
        while not (tmp_path / "gate is asked for").exists():
            assert not slow.done(), "it waits for the gate"
        put(client, "q", 3)
        assert rows(client, "q", 2, sampler="SequentialSampler") == [4, 5]
        assert rows(client, "p", 1, task="other", sampler="SequentialSampler") == [0]
        tq.kv_put("key", "kv", fields={"x": torch.tensor(1)})
        assert tq.kv_batch_get("key", "kv")["x"].tolist() == [1]
        assert client.get_consumption_status("t", "p")[1].tolist() == [0, 0, 0, 0]
        assert not slow.done()
        gate.touch()
        assert slow.result() == [0, 1]
    (cost,) = client.status().samplers
    assert (cost.name, cost.calls, cost.restarts) == ("Gated", 1, 0)


@pytest.mark.parametrize("client", [2], indirect=True)
def test_a_sampler_that_hangs_or_dies_fails_its_claim_and_is_restarted(client: Any, tmp_path: Path) -> None:
    put(client, "p", 4)
    checkpoint = tmp_path / "checkpoint"
    assert rows(client, "p", 1) == [0]
    tq.save_checkpoint(checkpoint)
    words = r"the sampler Gated did not return from sample within 2 s \(timeouts.sampler\)"
    with pytest.raises(tq.SamplerError, match=words):
        rows(client, "p", 1, gate=str(tmp_path / "never"))
    with pytest.raises(tq.SamplerError, match=r"process of the sampler Gated has ended \(exit status 7\) in sample"):
        rows(client, "p", 1, die=True)
    with pytest.raises(tq.SamplerError, match="2 deals so far") as raised:
        rows(client, "p", 1, deals=True)
    found = re.search(r"in (\d+)", str(raised.value))
    process = Process(int(found[1]), None)
    assert rows(client, "p", 1) == [1], "nothing was dealt by the calls that failed"
    (cost,) = client.status().samplers
    assert cost.restarts == 2
    tq.load_checkpoint(checkpoint)
    with pytest.raises(tq.SamplerError, match="2 deals so far"):
        rows(client, "p", 1, deals=True)
    assert rows(client, "p", 1) == [1]
    tq.close()
    assert process.wait(60), "it ends with its controller"
    process.close()
