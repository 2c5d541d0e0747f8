"""Clients that close, die, lose their connection and come back; threads of one client."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from test_capacity import MIB, mib

from simulated import numbers, table
from transfer_queue.core.events.effects import Send
from transfer_queue.errors import NotInitializedError
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.storage.unit.storage_unit import PROBE_INTERVAL
from transfer_queue.storage.unit.unit_effects import SendReply
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

    @pytest.mark.parametrize("seed", range(8))
    def test_connections_that_break_all_the_time(self, start: Any, seed: int) -> None:
        """Every request has the effect of once, wherever its connection broke."""
        cluster = start(seed=seed)
        clients = [cluster.client(name) for name in "ab"]
        tasks = []
        for i in range(12):
            client = clients[i % 2]
            tasks.append(client.start(client.operations.put(numbers(3, 3 * i), partition_id="p")))
            for _ in range(seed + 1):
                cluster.network.deliver()
            clients[(i + seed) % 2].reconnect()
        while not all(task.done for task in tasks):
            cluster.run()
            for client in clients:
                client.reconnect()
        indexes = sorted(index for task in tasks for index in task.result().global_indexes)
        assert indexes == list(range(36))
        shown = clients[0].get_meta(["x"], None, "p", mode="force_fetch")
        assert sorted(clients[1].get_data(shown)["x"].tolist()) == list(range(36))


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

    def test_threads_put_while_others_read(self, a: Client, cluster: Cluster) -> None:
        """Real threads, with the cluster under a lock as a server is under its loop; space is theirs in common."""
        lock = threading.Lock()
        errors: list[BaseException] = []

        def step(operation: Any) -> Any:
            call = next(operation)
            while True:
                with lock:
                    sequence, _ = a.state.session.begin_request(call.body)
                    reply = self._serve(cluster, call, sequence)
                try:
                    call = operation.send(reply)
                except StopIteration as stop:
                    return stop.value

        def work(number: int) -> None:
            try:
                for turn in range(15):
                    fill = number * 100 + turn
                    meta = step(a.operations.put(table(x=torch.full((3, 700 * (turn + 1)), fill)), partition_id="p"))
                    values = step(a.operations.get_data(meta))["x"].values()
                    assert (int(values.min()), int(values.max())) == (fill, fill)
                    if turn % 2:
                        step(a.operations.clear_samples(meta))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert len(a.get_meta(["x"], None, "p", mode="force_fetch")) == 4 * 8 * 3

    @staticmethod
    def _serve(cluster: Cluster, call: Any, sequence: int) -> Any:
        if call.target[0] == "unit":
            [answer] = cluster.unit.handle("a", 10**6, sequence, call.body, 0.0)
            assert isinstance(answer, SendReply)
            return answer.reply
        first, *others = cluster.controller.handle("a", 10**6, RequestEnvelope(sequence, 0, call.body), 0.0)
        cluster._run_core_effects(others)
        assert isinstance(first, Send)
        return first.reply
