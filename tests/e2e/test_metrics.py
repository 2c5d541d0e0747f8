"""The metrics of a real system with two units and a disk: whatever happens is told, in text that Prometheus reads."""

from __future__ import annotations

import contextlib
import json
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
from promql import evaluate
from server_processes import server_process, unit_status
from transfer_queue.attachment import CURRENT
from transfer_queue.cli.dashboard import FILE
from transfer_queue.metrics.families import FAMILIES

ODD = 'odd "name"\\\n'
SECONDS = 60
MIB = 1 << 20
TIERS = {"0": "memory", "1": "memory", "2": "disk"}  # of the units
EVERYBODY = {"controller": 1.0, "0": 1.0, "1": 1.0, "2": 1.0}


def rows(count: int) -> TensorDict:
    return TensorDict({"x": torch.arange(4 * count).reshape(count, 4)}, batch_size=[count])


def test_a_port_in_use_is_said_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(tq.StartError, match=rf"port {port} of 127.0.0.1 \(metrics.port, metrics.host\)"):
            tq.init({"metrics": {"enabled": True, "port": port}, "system": {"name": "taken"}})


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a system of two units and a disk, which the tests here use one after the other."""
    conf = {
        "metrics": {"enabled": True},
        "system": {"name": "metered"},
        "controller": {"sampler": FirstOnes()},
        "backend": {
            "SimpleStorage": {
                "num_data_storage_units": 2,
                "arena_bytes": 16 * MIB,
                "offload": {"enabled": True, "path": str(tmp_path_factory.mktemp("disk"))},
            }
        },
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


def up(found: dict[str, Values]) -> dict[str, float]:
    return {dict(labels).get("unit", "controller"): told for labels, told in found["tq_server_up"].items()}


def test_everything_is_told_of_a_system_in_which_everything_happened(endpoint: str) -> None:
    client = tq.get_client()
    client.create_partition(ODD, max_deliveries=1)
    meta = client.put(rows(8), partition_id=ODD)
    client.set_policy_version(ODD, 2)
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
    waiting = until(endpoint, lambda found: found["tq_longest_wait_seconds"].get(key, 0.0) > 0)
    assert value(waiting, "tq_waiting_claims", **its) == 1
    client.put(TensorDict({"y": torch.zeros(1)}, batch_size=[1]), meta.select_samples([4]))
    waiter.join()
    assert value(waiting, "tq_task_wait_seconds_total", task="train", reason="samples") > 0, "it has not ended"

    for number in map(int, TIERS):
        unit_status(number)
    found = read(endpoint)
    told = {name for name in FAMILIES if name in found or f"{name}_count" in found}
    # tests/e2e/test_mirror.py has those of a mirror, tests/e2e/backends/test_killed_store_servers.py those of stores
    assert told == {name for name in FAMILIES if not name.startswith(("tq_mirror_", "tq_store_server_"))}
    assert up(found) == EVERYBODY
    assert value(found, "tq_partitions") == 1
    assert value(found, "tq_rows", partition=ODD) == 6
    assert value(found, "tq_bytes", partition=ODD) > 0
    assert value(found, "tq_stored_bytes", partition=ODD, tier="memory") == value(found, "tq_bytes", partition=ODD)
    assert value(found, "tq_stored_values", partition=ODD, tier="memory") == 6 + 1
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
    # the claim that waited for a sample, and the one before it, which waited for the sampler in its process
    assert value(found, "tq_wait_seconds_count", server="controller", type="Claim", task="train") == 2
    assert value(found, "tq_requests_total", server="controller", type="Publish") == 2
    assert value(found, "tq_wait_seconds_bucket", server="controller", type="Claim", task="train", le="+Inf") == 2
    assert value(found, "tq_request_seconds_sum", server="controller", type="Publish") > 0
    assert value(found, "tq_rejected_total", server="controller", reason="malformed") == 0
    assert value(found, "tq_failures_total", server="controller", error="UnknownPartitionError") == 1
    assert value(found, "tq_published_rows_total") == 9
    assert value(found, "tq_dealt_rows_total") == 5
    assert value(found, "tq_sampler_asked_total", sampler="FirstOnes") >= 2
    assert value(found, "tq_sampler_seconds_total", sampler="FirstOnes") > 0
    assert value(found, "tq_queue_seconds_count", task="train") == 2
    assert value(found, "tq_staleness_versions_sum", task="train") == 2 * 2
    assert value(found, "tq_task_clients", task="train") == 1
    assert value(found, "tq_ready_rows", **its) == 0
    assert value(found, "tq_cleared_rows_total") == 2
    waits = {"task": "train", "reason": "samples"}
    before = value(waiting, "tq_task_wait_seconds_total", **waits)
    assert value(found, "tq_task_wait_seconds_total", **waits) >= before
    panels = json.loads(FILE.read_text())["panels"]
    (share,) = (panel["targets"][0]["expr"] for panel in panels if panel["title"] == "Waiting share of each task")
    (series,) = evaluate(re.sub(r'\w+=~"\$\w+"', "", share), [(0.0, waiting), (1.0, found)])
    assert dict(series) == waits
    assert sum(found["tq_arena_live_bytes"].values()) > 0
    for unit, tier in TIERS.items():
        server = {"server": "unit", "unit": unit}
        assert value(found, "tq_requests_total", **server, type="UnitStatus") == 1
        assert value(found, "tq_request_seconds_bucket", **server, type="UnitStatus", le="+Inf") == 1
        assert value(found, "tq_rejected_total", **server, reason="malformed") == 0
        held, leased, free, largest = (
            value(found, f"tq_arena_{name}_bytes", unit=unit, tier=tier)
            for name in ("held", "leased", "free", "largest_free")
        )
        assert held == leased + free
        assert held >= largest or tier == "disk"
        assert value(found, "tq_arena_capacity_bytes", unit=unit, tier=tier) >= held
    assert sum(found["tq_arena_leased_bytes"].values()) >= sum(found["tq_arena_live_bytes"].values())
    assert value(found, "tq_journal_lag_records") > 0
    assert value(found, "tq_journal_lag_bytes") > 0
    assert value(found, "tq_journal_commit_seconds_count") > 0
    assert value(found, "tq_process_cpu_seconds_total", server="unit", unit="1") > 0


def test_bytes_and_values_by_partition_and_tier_while_blocks_move(endpoint: str) -> None:
    """48 MiB through 32 of memory: each byte is in one tier; what is cleared is in none."""
    content = torch.arange(MIB // 4, dtype=torch.int32)
    for number in range(48):
        tq.kv_put(str(number), "large", {"x": content + number})

    def told(found: dict[str, Values], name: str, **its: str) -> float:
        return sum(number for labels, number in found.get(name, {}).items() if its.items() <= dict(labels).items())

    def settled(found: dict[str, Values]) -> bool:
        """A scrape is of some milliseconds, in which blocks may move."""
        tiers = [told(found, "tq_stored_bytes", tier=tier) for tier in ("memory", "disk")]
        values = told(found, "tq_stored_values", partition="large")
        return values == 48 and tiers == [told(found, "tq_arena_live_bytes", tier=tier) for tier in ("memory", "disk")]

    found = until(endpoint, settled)
    assert told(found, "tq_stored_bytes", partition="large") == told(found, "tq_bytes", partition="large") >= 48 * MIB
    assert told(found, "tq_stored_bytes", partition="large", tier="disk") >= 16 * MIB
    assert told(found, "tq_stored_values", partition="large", tier="disk") >= 16
    for number in range(48):
        assert torch.equal(tq.kv_batch_get([str(number)], "large")["x"][0], content + number)
    tq.kv_clear([str(number) for number in range(48)], "large")
    found = read(endpoint)
    assert not told(found, "tq_stored_bytes", partition="large") + told(found, "tq_stored_values", partition="large")


def test_what_is_not_served_is_counted_by_reason(endpoint: str) -> None:
    system = CURRENT.system
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
    pid = server_process("unit-1").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert up(read(endpoint)) == {**EVERYBODY, "1": 0}
        begun = time.monotonic()
        found = read(endpoint)
        assert up(found) == {**EVERYBODY, "1": 0}
        assert time.monotonic() - begun < SECONDS
        assert value(found, "tq_rows", partition="p") == 1
    finally:
        os.kill(pid, signal.SIGCONT)
    until(endpoint, lambda found: up(found) == EVERYBODY)


def test_after_a_restart_of_the_controller_everybody_is_told_again(endpoint: str) -> None:
    tq.kv_put("a", "p", {"x": torch.arange(3)})
    pid = server_process("controller").pid
    before = value(read(endpoint), "tq_process_start_time_seconds", server="controller")
    os.kill(pid, signal.SIGKILL)
    tq.kv_put("b", "p", {"x": torch.arange(3)})
    assert tq.get_metrics_endpoint() == endpoint
    found = until(endpoint, lambda found: up(found) == EVERYBODY)
    assert value(found, "tq_rows", partition="p") == 2
    assert value(found, "tq_requests_total", server="controller", type="Publish") == 1, "counters begin anew"
    assert value(found, "tq_process_start_time_seconds", server="controller") > before


def test_nothing_lies_elsewhere(endpoint: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://{endpoint}/elsewhere", timeout=SECONDS)
