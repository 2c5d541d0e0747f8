"""Clients that close, die, lose their connection and come back; operations of one client at the same time."""

from __future__ import annotations

import pytest
import torch
from test_capacity import MIB, mib

from simulated import numbers, table
from transfer_queue.errors import NotInitializedError
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.storage.unit.storage_unit import PROBE_INTERVAL
from transfer_queue.testing import Client, Cluster


class TestClose:
    def test_hands_every_extent_back(self, a: Client, b: Client, cluster: Cluster) -> None:
        for i in range(30):
            a.kv_put(f"k{i}", "p", {"x": torch.zeros(40_000)})
        a.put(mib(2), partition_id="q")
        a.close()
        assert cluster.unit.table.leased > 0
        b.clear_partition("p")
        b.clear_partition("q")
        assert cluster.unit.table.leased == 0
        assert cluster.held == set()

    def test_what_it_put_stays(self, a: Client, b: Client) -> None:
        meta = a.put(numbers(3), partition_id="p")
        a.close()
        assert b.get_data(meta)["x"].tolist() == [0, 1, 2]

    def test_of_a_client_that_did_nothing(self, a: Client, cluster: Cluster) -> None:
        a.close()
        assert cluster.network.delivered == 0

    def test_after_clearing(self, a: Client, cluster: Cluster) -> None:
        a.put(numbers(3), partition_id="p")
        a.clear_partition("p")
        assert cluster.unit.table.leased > 0  # an open extent, for the next put
        a.close()
        assert cluster.unit.table.leased == 0

    def test_later_calls(self, a: Client) -> None:
        a.put(numbers(3), partition_id="p")
        a.close()
        with pytest.raises(NotInitializedError, match="closed"):
            a.get_partition_list()


class TestDeath:
    def test_its_extents_come_back_when_nothing_lives_in_them(self, a: Client, b: Client, cluster: Cluster) -> None:
        meta = a.put(mib(2), partition_id="p")
        a.put(numbers(4), partition_id="q")
        a.die()
        cluster.advance(2 * PROBE_INTERVAL)
        assert b.get_data(meta)["x"].values().numel() == 2 * MIB
        b.clear_partition("p")
        b.clear_partition("q")
        assert cluster.unit.table.leased == 0

    def test_while_it_wrote(self, a: Client, b: Client, cluster: Cluster) -> None:
        """It died between its lease and its publish."""
        task = a.start(a.operations.put(mib(2), partition_id="p"))
        cluster.run(lambda: task.call is not None and isinstance(task.call.body, Publish))
        assert cluster.unit.table.leased == 2 * MIB
        a.die()
        cluster.advance(2 * PROBE_INTERVAL)
        assert cluster.unit.table.leased == 0
        assert b.get_partition_list() == []

    def test_its_publish_comes_too_late(self, a: Client, b: Client, cluster: Cluster) -> None:
        """What a dead writer's connection still carries is refused once its space was taken back."""
        a.put(numbers(1), partition_id="p")
        task = a.start(a.operations.put(mib(2), partition_id="p"))
        cluster.run(lambda: task.call is not None and isinstance(task.call.body, Publish))
        assert task.call is not None
        request = task.call.body
        a.die()
        cluster.advance(2 * PROBE_INTERVAL)
        b.clear_partition("p")
        [effect] = cluster.controller.handle("a", 10**6, RequestEnvelope(10**6, 0, request), cluster.clock.now)
        assert "proven dead" in repr(effect)
        assert b.get_partition_list() == []

    def test_the_waiting_are_served(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(mib(50), partition_id="p")
        task = b.start(b.operations.put(mib(60), partition_id="q", timeout=60))
        cluster.run()
        a.die()
        cluster.advance(1)
        assert not task.done  # its values live
        cluster.client("c").clear_partition("p")
        cluster.run()
        assert task.result().global_indexes == [1]


class TestReconnect:
    def test_a_lease_whose_answer_was_lost(self, a: Client, cluster: Cluster) -> None:
        """Asked for again it gives the same extent; nothing leaks."""
        a.put(mib(1), partition_id="p")
        a.hold()
        task = a.start(a.operations.put(mib(2), partition_id="p"))
        cluster.run()
        assert cluster.unit.table.leased == 3 * MIB
        a.reconnect()
        cluster.run()
        assert task.done
        assert cluster.unit.table.leased == 3 * MIB
        a.clear_partition("p")
        a.close()
        assert cluster.unit.table.leased == 0


class TestOneClientManyThreads:
    def test_operations_interleave(self, a: Client, cluster: Cluster) -> None:
        """As threads of one process do: many operations of one client at once, in any order of replies."""
        puts = [
            a.start(a.operations.put(table(x=torch.full((2, 9000), i)), partition_id=f"p{i % 3}")) for i in range(20)
        ]
        cluster.run()
        for i, task in enumerate(puts):
            rows = a.get_data(task.result())["x"].unbind()
            assert [(int(row.min()), int(row.max())) for row in rows] == [(i, i)] * 2
