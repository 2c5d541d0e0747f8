"""Copies from arenas to a device, with a stand-in for the driver: the device is the host."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from device_driver import Driver
from test_lost_units import lose, restart

import transfer_queue as tq
from simulated import ragged, reply_on_its_way, rows_of, same, table
from transfer_queue.client import writer
from transfer_queue.client.data import device_copies
from transfer_queue.client.data.device_copies import CudaDriver
from transfer_queue.errors import StorageKeyNotFoundError
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks import gather_into
from transfer_queue.wire.blocks.device_memory import pieces
from transfer_queue.wire.buffers import copies

ROWS = 64


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(device_copies, "driver_of", lambda device: made)
    return made


@pytest.fixture
def meta(a: Client) -> tq.BatchMeta:
    """Metadata of rows full of 3 in partition p."""
    return a.put(value(3), partition_id="p")


def value(fill: int, rows: int = ROWS, width: int = 8192) -> Any:
    return table(x=torch.full((rows, width), fill), small=torch.arange(rows))


def viewed(cluster: Cluster) -> int:
    return sum(unit.pool.status().viewed for unit in cluster.units)


@pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
def test_what_a_device_copies(b: Client, driver: Driver, layout: str, meta: tq.BatchMeta) -> None:
    got, host = b.get_data(meta, layout=layout, device="cpu"), b.get_data(meta, layout=layout)
    assert all(map(same, rows_of(got["x"]), rows_of(host["x"])))
    assert got["small"].tolist() == list(range(ROWS))
    assert len(driver.events) == 1
    assert driver.gathered == [ROWS * 8], "small fields are gathered on the host"
    assert sum(driver.registered.values()) >= ROWS * 8192 * 8
    before = dict(driver.registered)
    b.get_data(meta, layout=layout, device="cpu")
    assert driver.registered == before, "pages are registered once"


def test_ragged_rows(a: Client, b: Client, driver: Driver) -> None:
    meta = a.put(table(x=ragged(20_000, 3, 40_000)), partition_id="p")
    got = b.get_data(meta, device="cpu")["x"]
    assert len(driver.events) == 1
    assert all(map(same, rows_of(got), rows_of(b.get_data(meta)["x"])))


@pytest.mark.parametrize("layout", ["jagged", "padded", "list"])
@pytest.mark.parametrize("width", [200, 20_000])
def test_rows_of_several_puts(a: Client, b: Client, driver: Driver, layout: str, width: int) -> None:
    """Long pieces are copied one at a time, short ones are gathered on the host first. Objects stay there."""
    parts = [a.put(table(x=ragged(width, width + row), o=[{"a": row}, row]), partition_id="p") for row in range(6)]
    meta = tq.BatchMeta.concat(parts).select_samples([7, 0, 5, 11, 2, 2, 3])
    got, host = b.get_data(meta, layout=layout, device="cpu"), b.get_data(meta, layout=layout)
    assert all(map(same, rows_of(got["x"]), rows_of(host["x"])))
    assert got["o"].tolist() == host["o"].tolist()
    assert (len(driver.events), len(driver.gathered)) == ((1, 0) if width > 10_000 else (0, 1))


def test_the_space_of_a_put_from_a_device_is_registered(
    a: Client, b: Client, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "KIND", "cpu")
    small, large = a.put(value(3, width=8), partition_id="p"), a.put(value(4), partition_id="p")
    assert ROWS * 8192 * 8 <= sum(driver.registered.values()) < 2 * ROWS * 8192 * 8
    before = dict(driver.registered)
    a.clear_samples(large)
    again = a.put(value(5), partition_id="p")
    assert driver.registered == before, "space that is used again is registered once"
    assert b.get_data(again, layout="dense")["x"].eq(5).all()
    assert b.get_data(small, layout="dense")["x"].eq(3).all()


def test_tensors_of_the_caller_on_a_device_are_filled_in_divided_copies(
    a: Client, b: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver refuses a copy over pages of which a part is registered. The device "meta" has no values."""
    found: list[tuple[str, int, bool, bool]] = []

    def note(into: torch.Tensor, memory: Any, wait: bool = False) -> None:
        found.append((into.device.type, len(into), bool((memory.view(int) == 3).all()), wait))

    monkeypatch.setattr(gather_into, "host_to_device", note)
    meta = a.put(value(3), partition_id="p")
    b.get_data(meta, out={"x": torch.empty(ROWS, 8192, dtype=torch.int64, device="meta")})
    assert found == [("meta", ROWS * 8192 * 8, True, True)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("layout", ["jagged", "dense"])
def test_shuffled_short_rows_are_gathered_in_parts(
    a: Client, b: Client, driver: Driver, monkeypatch: pytest.MonkeyPatch, threads: int, layout: str
) -> None:
    monkeypatch.setattr(copies, "_most", threads)
    monkeypatch.setattr(copies, "PARALLEL", 1 << 16)
    monkeypatch.setattr(copies, "PER_THREAD", 1 << 14)
    monkeypatch.setattr(copies, "MIN_PART", 1 << 12)
    monkeypatch.setattr(device_copies, "STAGED", 100_000)
    rows = torch.arange(ROWS * 1024).reshape(ROWS, 1024)
    parts = [a.put(table(x=rows[at::2].clone()), partition_id="p") for at in range(2)]
    meta = tq.BatchMeta.concat(parts).select_samples([at * 27 % ROWS for at in range(ROWS)])
    got, host = b.get_data(meta, layout=layout, device="cpu")["x"], b.get_data(meta, layout=layout)["x"]
    assert all(map(same, rows_of(got), rows_of(host)))
    assert driver.gathered == [12 * 8192] * 5 + [4 * 8192]


def test_a_row_longer_than_a_part_is_a_part_of_its_own(
    a: Client, b: Client, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "STAGED", 1000)
    meta = a.put(table(x=ragged(100, 5000, 0, 150, 0)), partition_id="p").select_samples([3, 1, 4, 0, 2])
    got, host = b.get_data(meta, device="cpu")["x"], b.get_data(meta)["x"]
    assert all(map(same, rows_of(got), rows_of(host)))
    assert driver.gathered == [600, 20_000, 400]


def test_rows_that_are_replaced_while_they_are_gathered_are_read_again(
    a: Client, b: Client, cluster: Cluster, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "STAGED", 8192)
    a.kv_batch_put(["a", "b"], "p", {"x": torch.full((2, 1024), 1)})
    allocate = driver.allocate

    def replace(nbytes: int) -> torch.Tensor:
        if len(driver.gathered) == 1:
            for fill in range(2, 6):
                a.kv_batch_put(["a", "b"], "p", {"x": torch.full((2, 1024), fill)})
                cluster.advance(1)
        return allocate(nbytes)

    monkeypatch.setattr(driver, "allocate", replace)
    assert b.kv_batch_get(["b", "a"], "p", layout="dense", device="cpu")["x"].eq(5).all()
    assert len(driver.gathered) == 4


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_unit_that_ends_while_rows_are_gathered(
    a: Client, b: Client, cluster: Cluster, driver: Driver, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """The arena stays mapped, so a get that has begun ends as it does without a device."""
    monkeypatch.setattr(device_copies, "STAGED", 8192)
    keys, rows = ["a", "b", "c"], torch.arange(3 * 1024).reshape(3, 1024)
    a.kv_batch_put(keys, "p", {"x": rows})
    allocate = driver.allocate

    def end_the_unit(nbytes: int) -> torch.Tensor:
        if len(driver.gathered) == 1:
            (lose if is_lost else restart)(cluster)
        return allocate(nbytes)

    monkeypatch.setattr(driver, "allocate", end_the_unit)
    assert b.kv_batch_get(keys[::-1], "p", layout="dense", device="cpu")["x"].equal(rows.flip(0))
    assert driver.gathered == [8192] * 3
    for device in ("cpu", None) if is_lost else ():
        with pytest.raises(StorageKeyNotFoundError, match="lost with storage unit 0"):
            b.kv_batch_get(keys, "p", device=device)


def test_the_stream_of_the_consumer_waits_for_tensors_of_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch does not use their memory again before this stream is done with it."""
    streams = {number: Mock(name=f"stream {number}") for number in range(2)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    tensors, event = [Mock(device=torch.device("cuda", number)) for number in (0, 1, 0)], object()
    CudaDriver().adopt(event, iter(tensors))
    for tensor in tensors:
        stream = streams[tensor.device.index]
        tensor.record_stream.assert_called_once_with(stream)
        stream.wait_event.assert_called_with(event)


def test_batches_ahead_of_a_device_have_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch has freed on a stream is used again on this stream only."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: [index])
    driver = CudaDriver()
    asides = [driver.aside(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:0", "cuda")]
    assert asides == [[1], [1], [0], [1]]
    assert asides[0] is asides[1] is asides[3]


def test_neighbouring_pages_are_registered_with_one_call(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    backwards = meta.select_samples(list(range(ROWS))[::-1])
    assert b.get_data(backwards, layout="dense", device="cpu")["small"].tolist() == list(range(ROWS))[::-1]
    assert len(driver.events) == len(driver.registered) == 1


def test_nothing_is_registered_after_the_close(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    """A thread of a loader may still get a batch."""
    b.get_data(meta, device="cpu")
    b.state.devices.close()
    assert b.get_data(meta, layout="dense", device="cpu")["x"].eq(3).all()
    assert driver.registered == {}


def test_devices_of_one_driver_share_what_is_registered(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    """A driver refuses to register pages twice."""
    for device in ("cpu:0", "cpu", torch.device("cpu")):
        assert b.get_data(meta, layout="dense", device=device)["x"].eq(3).all()
    assert len(driver.registered) == 1
    assert len(b.state.devices._copies) == 1


def test_bytes_are_held_until_the_device_has_copied_them(
    a: Client, b: Client, cluster: Cluster, driver: Driver, meta: tq.BatchMeta
) -> None:
    b.get_data(meta, device="cpu")
    a.clear_samples(meta)
    cluster.advance(1)
    assert viewed(cluster) > 0
    driver.events[0].over = True
    again = a.put(value(4), partition_id="p")
    b.get_data(again, device="cpu")
    cluster.advance(1)
    assert viewed(cluster) == 0


def test_a_driver_that_refuses(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    driver.accepts = False
    assert b.get_data(meta, layout="dense", device="cpu")["x"].eq(3).all()
    assert driver.registered == {}


def test_a_copy_is_divided_where_registered_ranges_meet(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    parts = [meta.select_samples(list(range(first, first + 16))) for first in (0, 24, 48)]
    for part in parts:
        assert b.get_data(part, layout="dense", device="cpu")["x"].eq(3).all()
    assert len(driver.registered) == 3
    assert b.get_data(meta, layout="dense", device="cpu")["x"].eq(3).all()
    ends = sorted((start, start + n) for start, n in driver.registered.items())
    assert all(left[1] <= right[0] for left, right in pairwise(ends))
    assert all(n % GRANULE == 0 for n in driver.registered.values())


def test_a_client_that_closes_waits_and_unregisters(b: Client, driver: Driver, meta: tq.BatchMeta) -> None:
    b.get_data(meta, device="cpu")
    b.close()
    assert all(event.over for event in driver.events)
    assert driver.registered == {}


def test_the_arena_of_a_lost_unit_is_unregistered(a: Client, b: Client, cluster: Cluster, driver: Driver) -> None:
    """Otherwise its memory would stay until the client closes."""
    b.get_data(a.put(value(3), partition_id="p"), device="cpu")
    before = set(driver.registered)
    lose(cluster)
    cluster.run()
    assert b.get_data(a.put(value(4), partition_id="q"), layout="dense", device="cpu")["x"].eq(4).all()
    assert driver.events[0].over
    assert driver.registered
    assert not before & set(driver.registered)


def test_errors_of_the_device_reach_the_caller_as_they_are(
    a: Client, b: Client, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = a.put(value(3, width=8), partition_id="p")

    def allocate(nbytes: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("the device has no memory")

    monkeypatch.setattr(driver, "allocate", allocate)
    with pytest.raises(torch.OutOfMemoryError, match="the device has no memory"):
        b.get_data(meta, device="cpu")


def test_values_that_are_gone(a: Client, b: Client, cluster: Cluster, driver: Driver, meta: tq.BatchMeta) -> None:
    """Nothing is registered of a block that was freed after the lookup."""
    with reply_on_its_way(cluster, b, b.operations.get_data(meta, device="cpu")) as task:
        a.clear_samples(meta)
    with pytest.raises(StorageKeyNotFoundError):
        task.result()
    assert driver.registered == {}


def test_devices_without_such_a_driver(b: Client, meta: tq.BatchMeta) -> None:
    got = b.get_data(meta, layout="dense", device="cpu", copy=False)["x"]
    assert got.eq(3).all()
    assert not tq.is_view(got)


def test_a_cluster_that_ends_leaves_no_memory_registered(driver: Driver, tmp_path: Path) -> None:
    """Other memory of the process may get the same addresses."""
    with Cluster(tmp_path) as cluster:
        client = cluster.client("a")
        meta = client.put(value(3), partition_id="p")
        assert client.get_data(meta, layout="dense", device="cpu")["x"].eq(3).all()
        ((address, nbytes),) = driver.registered.items()
        assert len(pieces(address - 1, nbytes + 2)) == 3
    assert driver.registered == {}
    assert len(pieces(address - 1, nbytes + 2)) == 1
