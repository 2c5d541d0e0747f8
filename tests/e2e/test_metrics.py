"""The metrics of a real system with two units: whatever happens is told, in text that Prometheus reads."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import transfer_queue as tq
from light_sampler import FirstOnes
from prometheus_text import Values, read, value
from transfer_queue.current import CURRENT
from transfer_queue.metrics.families import FAMILIES

ODD = 'odd "name"\\\n'
SECONDS = 60


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(4 * count).reshape(count, 4)}, batch_size=[count])


def test_a_port_in_use_is_said_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tq.StartError, match=rf"port {port} of 127.0.0.1 \(metrics.port, metrics.host\)"):
            tq.init({"metrics": {"enabled": True, "port": port}, "system": {"name": "taken"}})


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Of a system of two units, which the tests here use one after the other."""
    conf = {
        "metrics": {"enabled": True},
        "system": {"name": "metered"},
        "controller": {"sampler": FirstOnes()},
        "backend": {"SimpleStorage": {"num_data_storage_units": 2}},
    }
    tq.init(OmegaConf.create(conf, flags={"allow_objects": True}))
    try:
        found = tq.get_metrics_endpoint()
        assert found is not None
        yield found
    finally:
        tq.close()


def until(endpoint: str, true: Callable[[dict[str, Values]], bool]) -> dict[str, Values]:
    """Looks again until something is told."""
    limit = time.monotonic() + SECONDS
    while True:
        found = read(endpoint)
        if true(found):
            return found
        assert time.monotonic() < limit, found
        time.sleep(0.02)


def process_of(server: str) -> int:
    """Its process, as its log says."""
    system = CURRENT.system
    assert system is not None
    return int(re.findall(r"up, process (\d+)", (system.logs / f"{server}.log").read_text())[-1])


def up(found: dict[str, Values]) -> dict[str, float]:
    return {dict(labels).get("unit", "controller"): told for labels, told in found["tq_server_up"].items()}


def test_everything_is_told_of_a_system_in_which_everything_happened(endpoint: str) -> None:
    client = tq.get_client()
    client.create_partition(ODD, max_deliveries=1)
    meta = client.put(rows(8), partition_id=ODD)
    claimed = client.get_meta(["x"], 4, ODD, task_name="train", lease=600)
    assert client.ack(claimed.select_samples([0]))
    assert client.nack(claimed.select_samples([1]))
    client.drop(ODD, metadata=meta.select_samples([6, 7]), reason="stale")
    with pytest.raises(tq.UnknownPartitionError):
        client.declare_rank_gone("nowhere", "train", 0)

    waiter = threading.Thread(target=lambda: client.await_batch(["x", "y"], 1, ODD, "train", timeout=SECONDS))
    waiter.start()
    its: dict[str, str] = {"partition": ODD, "task": "train"}
    key = tuple(sorted(its.items()))
    waiting = until(endpoint, lambda found: found["tq_waiting_claims"].get(key) == 1)
    client.put(TensorDict({"y": torch.zeros(1)}, batch_size=[1]), meta.select_samples([4]))
    waiter.join()
    assert value(waiting, "tq_longest_wait_seconds", **its) > 0

    found = read(endpoint)
    told = {name for name in FAMILIES if name in found or f"{name}_count" in found}
    assert told == set(FAMILIES)
    assert up(found) == {"controller": 1, "0": 1, "1": 1}
    assert value(found, "tq_partitions") == 1
    assert value(found, "tq_rows", partition=ODD) == 6
    assert value(found, "tq_bytes", partition=ODD) > 0
    assert value(found, "tq_produced_rows", partition=ODD, field="x") == 6
    assert value(found, "tq_field_produced_total", partition=ODD, field="x") == 8
    assert value(found, "tq_produced_rows", partition=ODD, field="y") == 1
    assert value(found, "tq_claimed_rows", **its) == 2
    assert value(found, "tq_waiting_claims", **its) == 0
    assert value(found, "tq_passed_over_rows", **its, reason="poison") == 1
    assert value(found, "tq_dropped_rows", partition=ODD, reason="stale") == 2
    assert value(found, "tq_leases", **its) == 1
    assert value(found, "tq_leases_granted_total", task="train") == 1
    assert value(found, "tq_acknowledged_rows_total", task="train") == 1
    assert value(found, "tq_redelivered_rows_total", task="train", reason="nacked") == 1
    assert value(found, "tq_wait_seconds_count", server="controller", type="Claim", task="train") == 1
    assert value(found, "tq_requests_total", server="controller", type="Publish") == 2
    assert value(found, "tq_request_seconds_sum", server="controller", type="Publish") > 0
    assert value(found, "tq_failures_total", server="controller", error="UnknownPartitionError") == 1
    assert value(found, "tq_published_rows_total") == 9
    assert value(found, "tq_dealt_rows_total") == 5
    assert value(found, "tq_sampler_asked_total", sampler="FirstOnes") >= 2
    assert sum(found["tq_arena_live_bytes"].values()) > 0
    for unit in ("0", "1"):
        held, leased, free, largest = (
            value(found, f"tq_arena_{name}_bytes", unit=unit, tier="memory")
            for name in ("held", "leased", "free", "largest_free")
        )
        assert held == leased + free >= largest > 0
        assert value(found, "tq_arena_capacity_bytes", unit=unit, tier="memory") >= held
    assert sum(found["tq_arena_leased_bytes"].values()) >= sum(found["tq_arena_live_bytes"].values())
    assert value(found, "tq_journal_lag_records") > 0
    assert value(found, "tq_journal_commit_seconds_count") > 0
    assert value(found, "tq_process_cpu_seconds_total", server="unit", unit="1") > 0


def test_what_is_not_served_is_counted_by_reason(endpoint: str) -> None:
    system = CURRENT.system
    assert system is not None
    for path, labels in (
        (system.folder / "controller.sock", {"server": "controller"}),
        (system.folder / "unit-1.sock", {"server": "unit", "unit": "1"}),
    ):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
            sock.connect(str(path))
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            while sock.recv(1 << 16):
                pass
        key = tuple(sorted({**labels, "reason": "unauthenticated"}.items()))
        until(endpoint, lambda found, key=key: found["tq_rejected_total"][key] == 1)  # type: ignore[misc]


def test_a_unit_that_is_stopped_is_told_as_not_up_and_holds_up_nobody(endpoint: str) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    pid = process_of("unit-1")
    os.kill(pid, signal.SIGSTOP)
    try:
        assert up(read(endpoint)) == {"controller": 1, "0": 1, "1": 0}
        begun = time.monotonic()
        found = read(endpoint)
        assert up(found) == {"controller": 1, "0": 1, "1": 0}
        assert time.monotonic() - begun < SECONDS
        assert value(found, "tq_rows", partition="p") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    until(endpoint, lambda found: up(found) == {"controller": 1, "0": 1, "1": 1})


def test_after_a_restart_of_the_controller_everybody_is_told_again(endpoint: str) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    pid = process_of("controller")
    before = value(read(endpoint), "tq_process_start_time_seconds", server="controller")
    os.kill(pid, signal.SIGKILL)
    tq.kv_put("b", "p", {"x": torch.arange(3)})
    assert tq.get_metrics_endpoint() == endpoint
    found = until(endpoint, lambda found: set(up(found).values()) == {1} and len(up(found)) == 3)
    assert value(found, "tq_rows", partition="p") == 2
    assert value(found, "tq_requests_total", server="controller", type="Publish") == 1, "counters begin anew"
    assert value(found, "tq_process_start_time_seconds", server="controller") > before


def test_nothing_lies_elsewhere(endpoint: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{endpoint}/elsewhere", timeout=SECONDS)
