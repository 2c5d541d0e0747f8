"""Capacity in rows and in bytes: refused at once, or waited for, when the put says how long, in order of arrival."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import Start, numbers, table
from transfer_queue.client.space import FREEING_SECONDS
from transfer_queue.errors import CapacityError
from transfer_queue.testing import Client, Cluster

MIB = 1 << 20


def mib(count: float, fill: int = 1) -> Any:
    """One row of so many MiB."""
    return table(x=torch.full((1, int(count * MIB)), fill, dtype=torch.uint8))


class TestBytes:
    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=5, arena_bytes=4 * MIB)

    def test_refused_soon(self, a: Client, cluster: Cluster) -> None:
        """Only the news that space is free is waited for."""
        a.put(mib(3), partition_id="p")
        leased = cluster.unit.table.leased
        with pytest.raises(CapacityError, match="capacity"):
            a.put(mib(2), partition_id="q")
        assert cluster.clock.now == FREEING_SECONDS
        assert (a.get_partition_list(), cluster.unit.table.leased) == (["p"], leased)

    def test_never_fits(self, a: Client, cluster: Cluster) -> None:
        task = a.start(a.operations.put(mib(5), partition_id="q", timeout=60))
        cluster.run()
        with pytest.raises(CapacityError, match="smaller batches"):
            task.result()

    def test_waits_for_space(self, a: Client, b: Client, cluster: Cluster) -> None:
        meta = a.put(mib(3), partition_id="p")
        task = b.start(b.operations.put(mib(2, 7), partition_id="q", timeout=9))
        cluster.advance(5)
        assert not task.done
        a.clear_samples(meta)
        cluster.run()
        assert task.result().global_indexes == [1]
        assert int(a.get_data(task.result())["x"].values().min()) == 7

    def test_waits_no_longer_than_it_said(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(mib(3), partition_id="p")
        task = b.start(b.operations.kv_put("k", "q", {"x": torch.zeros(2 * MIB, dtype=torch.uint8)}, timeout=9))
        cluster.advance(8.9)
        assert not task.done
        cluster.advance(0.1)
        with pytest.raises(CapacityError, match="after 9"):
            task.result()
        assert a.get_partition_list() == ["p"]

    def test_what_was_cleared_can_be_used_by_its_writer(self, a: Client, cluster: Cluster) -> None:
        """The extents that a client holds open do not stand in the way of its own next put."""
        for i in range(40):
            a.kv_put(f"k{i}", "p", {"x": torch.zeros(50_000, dtype=torch.uint8)})
        assert cluster.unit.table.leased > 1 * MIB
        a.clear_partition("p")
        meta = a.put(mib(4), partition_id="p")
        assert a.get_data(meta)["x"].values().numel() == 4 * MIB

    def test_small_live_values_are_kept_when_space_is_handed_back(self, a: Client, cluster: Cluster) -> None:
        keys = [f"k{i}" for i in range(40)]
        for i, key in enumerate(keys):
            a.kv_put(key, "p", {"x": torch.full((50_000,), i, dtype=torch.uint8)})
        with pytest.raises(CapacityError):
            a.put(mib(4), partition_id="q")
        assert cluster.clock.now <= 1  # it may look once more, after it handed back what it had not filled
        rows = a.kv_batch_get(keys, "p")["x"].unbind()
        assert [int(row.float().mean()) for row in rows] == list(range(40))
        a.kv_put("more", "p", {"x": torch.zeros(10, dtype=torch.uint8)})


class TestAdvice:
    """A refusal names the timeout that would help: any for a put that has none, a longer one for a put that has one."""

    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=4, conf={"backend": {"SimpleStorage": {"total_storage_size": 6}}})

    @pytest.fixture(params=["rows of the system", "rows of the partition", "staleness"])
    def partition(self, request: pytest.FixtureRequest, a: Client) -> str:
        """A partition that admits no more samples, for one of three reasons."""
        options: dict[str, dict[str, Any]] = {
            "rows of the system": {},
            "rows of the partition": {"max_rows": 2},
            "staleness": {"max_staleness": 0, "rows_per_version": 2},
        }
        a.create_partition("p", **options[request.param])
        a.put(numbers(2 if options[request.param] else 6), partition_id="p")
        return "p"

    @pytest.mark.parametrize("kind", ["put", "keys", "reservation"])
    @pytest.mark.parametrize(
        ("timeout", "advice"), [(None, "Pass timeout="), (0, "longer"), (9, "It waited 9 s; pass a longer")]
    )
    def test_no_put_is_told_to_pass_what_it_has_passed(
        self, a: Client, cluster: Cluster, partition: str, kind: str, timeout: float | None, advice: str
    ) -> None:
        operations = a.operations
        operation = {
            "put": lambda: operations.put(numbers(1), partition_id=partition, timeout=timeout),
            "keys": lambda: operations.kv_batch_put(["k"], partition, numbers(1), timeout=timeout),
            "reservation": lambda: operations.get_meta(["x"], 1, partition, mode="insert", timeout=timeout),
        }[kind]()
        task = a.start(operation)
        cluster.advance(9.0)
        with pytest.raises(CapacityError, match=advice) as error:
            task.result()
        assert ("Pass timeout=" in str(error.value)) == (timeout is None)
