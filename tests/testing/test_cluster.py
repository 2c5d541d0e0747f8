"""The simulated cluster: deterministic by its seed, with a clock of its own and a network that loses what it must."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from simulated import Start, numbers, table
from transfer_queue.errors import DeadlockError, WaitTimeoutError
from transfer_queue.messages.puts import Publish
from transfer_queue.testing import Client, Cluster, Network, VirtualClock


class Recorder(random.Random):
    """Notes what was picked."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.picked: list[Any] = []

    def choice(self, seq: Any) -> Any:
        self.picked.append(super().choice(seq))
        return self.picked[-1]


def race(folder: Path, seed: int) -> tuple[list[Any], list[list[int]], list[dict[str, object]]]:
    """Producers and consumers all at once: the order of deliveries, who got what, and the state in the end."""
    with Cluster(folder, seed=seed) as cluster:
        cluster.network.random = recorder = Recorder(seed)
        producers = [cluster.client(f"producer{i}") for i in range(3)]
        consumers = [cluster.client(f"consumer{i}") for i in range(3)]
        tasks = [c.start(c.operations.get_meta(["x"], 4, "p", task_name="t", timeout=9)) for c in consumers]
        for turn in range(4):
            for client in producers:
                client.start(client.operations.put(numbers(1, turn), partition_id="p"))
        cluster.run()
        cluster.advance(9)
        cluster.check()
        got = [task.result().global_indexes for task in tasks]
        return recorder.picked, got, [cluster.controller.state.snapshot()]


class TestDeterminism:
    def test_a_seed_replays(self, tmp_path: Path) -> None:
        assert race(tmp_path / "one", 7)[:2] == race(tmp_path / "two", 7)[:2]
        one, two = (race(tmp_path / f"again{i}", 7)[2][0] for i in range(2))
        for snapshot in (one, two):
            del snapshot["units"]  # their folders differ
        assert one == two

    def test_seeds_differ(self, tmp_path: Path) -> None:
        runs = [race(tmp_path / str(seed), seed) for seed in range(6)]
        assert len({tuple(map(str, picked)) for picked, _, _ in runs}) == 6
        assert len({str(got) for _, got, _ in runs}) > 1

    def test_every_order_gives_every_row_once(self, tmp_path: Path) -> None:
        for seed in range(6):
            rows = [row for got in race(tmp_path / str(seed), seed)[1] for row in got]
            assert sorted(rows) == list(range(12))


class TestTime:
    def test_stands_still_while_messages_are_delivered(self, a: Client, b: Client, cluster: Cluster) -> None:
        task = b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=5))
        cluster.run()
        a.put(numbers(1), partition_id="p")
        cluster.run()
        assert task.result().global_indexes == [0]
        assert cluster.clock.now == 0

    def test_advance_meets_deadlines_in_order(self, b: Client, cluster: Cluster) -> None:
        ended = []
        waits = {5.0: 3, 1.0: 1, 3.0: 2}
        tasks = {
            seconds: b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=seconds)) for seconds in waits
        }
        for moment in (0.5, 2.5, 4.5, 6.5):
            cluster.later(moment, lambda: ended.append((cluster.clock.now, [s for s, t in tasks.items() if t.done])))
        cluster.advance(10)
        assert ended == [(0.5, []), (2.5, [1]), (4.5, [1, 3]), (6.5, [5, 1, 3])]
        assert cluster.clock.now == 10
        for seconds, task in tasks.items():
            with pytest.raises(WaitTimeoutError, match=f"waited {seconds:g} s"):
                task.result()

    def test_a_deadline_at_the_very_end_counts(self, b: Client, cluster: Cluster) -> None:
        task = b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=0.1))
        for _ in range(3):
            cluster.advance(0.1 / 3)
        cluster.advance(1e-9)
        assert task.done

    def test_what_is_on_its_way_arrives_before_time_passes(self, b: Client, cluster: Cluster) -> None:
        task = b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=5))
        cluster.advance(5)
        assert task.done

    def test_later(self, a: Client, b: Client, cluster: Cluster) -> None:
        cluster.later(2, lambda: a.put(numbers(1), partition_id="p"))
        cluster.later(1, lambda: cluster.later(0.5, lambda: seen.append(cluster.clock.now)))
        seen: list[float] = []
        meta = b.get_meta(["x"], 1, "p", task_name="t", timeout=60)
        assert (meta.global_indexes, cluster.clock.now, seen) == ([0], 2, [1.5])

    def test_a_call_that_could_never_end_is_told(self, b: Client, cluster: Cluster) -> None:
        b.get_partition_list()
        b.hold()
        with pytest.raises(AssertionError, match="cannot happen"):
            b.get_partition_list()
        b.release()

    def test_a_call_with_time_standing_still_must_not_wait(self, b: Client, cluster: Cluster) -> None:
        with pytest.raises(AssertionError, match="has not ended"):
            b.call(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=5))
        cluster.advance(5)

    def test_clock(self) -> None:
        clock = VirtualClock()
        clock.move_to(2.5)
        with pytest.raises(ValueError, match="must not go back"):
            clock.move_to(2.4)
        assert clock.now == 2.5


class TestConnections:
    def test_disconnecting_cancels_what_is_parked(self, a: Client, b: Client, cluster: Cluster) -> None:
        claim = b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=60))
        cluster.run()
        a.put(table(x=torch.zeros(1, 60 << 20, dtype=torch.uint8)), partition_id="q")
        lease = b.start(
            b.operations.put(table(x=torch.zeros(1, 30 << 20, dtype=torch.uint8)), timeout=60, partition_id="q")
        )
        cluster.run()
        assert None not in (cluster.controller.next_deadline(), cluster.unit.next_deadline())
        b.disconnect()
        assert cluster.controller.state.waiting.next_deadline() is None
        assert cluster.unit._parked == {}
        a.put(numbers(1), partition_id="p")
        cluster.run()
        assert (claim.done, lease.done) == (False, False)
        assert a.get_meta(["x"], 1, "p", task_name="t").global_indexes == [1]

    def test_messages_on_cut_connections_are_lost(self, a: Client, b: Client, cluster: Cluster) -> None:
        b.put(numbers(1), partition_id="p")
        task = b.start(b.operations.put(numbers(1), partition_id="p"))
        assert task.call is not None
        assert isinstance(task.call.body, Publish)
        b.disconnect()
        cluster.run()
        assert not task.done
        assert a.get_meta(["x"], None, "p", mode="force_fetch").size == 1

    def test_held_replies_keep_their_order(self, a: Client, cluster: Cluster) -> None:
        a.get_partition_list()
        a.hold()
        tasks = [a.start(a.operations.create_partition(name)) for name in ("one", "two", "one")]
        cluster.run()
        assert [task.done for task in tasks] == [False] * 3
        a.release()
        cluster.run()
        assert [task.result() for task in tasks] == [True, True, False]

    def test_network(self) -> None:
        network = Network(0)
        got: list[tuple[str, bytes]] = []
        one = network.connect(lambda frame: got.append(("up", frame)), lambda frame: got.append(("down", frame)))
        for frame in (b"1", b"2"):
            network.send(one, "up", frame)
        network.hold(one, "up")
        assert network.deliver() is False
        network.send(one, "down", b"3")
        assert network.deliver() is True
        network.release(one, "up")
        while network.deliver():
            pass
        assert got == [("down", b"3"), ("up", b"1"), ("up", b"2")]
        network.send(one, "up", b"4")
        network.cut(one)
        network.send(one, "down", b"5")
        assert network.deliver() is False
        assert network.delivered == 3


def add_one(counted: Any, name: str) -> None:
    setattr(counted, name, getattr(counted, name) + 1)


class TestCheck:
    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            (lambda cluster: add_one(cluster.controller.state.blocks, "live_bytes"), None),
            (lambda cluster: add_one(cluster.controller.state, "next_index"), "replaying"),
            (lambda cluster: cluster.unit.free([1]), "extent 1 of unit 0"),
        ],
        ids=["a miscount", "a change without a record", "an extent lost by the unit"],
    )
    def test_damage_is_found(self, tmp_path: Path, damage: Any, words: str | None) -> None:
        with Cluster(tmp_path / "arena") as cluster:
            cluster.client("c").put(numbers(2), partition_id="p")
            cluster.check()
            damage(cluster)
            with pytest.raises(AssertionError, match=words):
                cluster.check()

    def test_configuration(self, start: Start) -> None:
        conf = {"backend": {"SimpleStorage": {"total_storage_size": 7}}, "controller": {"polling_mode": True}}
        client = start(conf=conf).client("c")
        client.get_meta(["x"], 1, "p", task_name="t")
        assert (client.state.settings.polling_mode, client.state.settings.total_storage_size) == (True, 7)


def test_async_methods(a: Client) -> None:
    """The awaitable surface runs over the cluster, too."""
    coroutine = a.async_put(numbers(2), partition_id="p")
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value.global_indexes == [0, 1]


def test_an_arena_that_is_full_while_everybody_waits_is_a_deadlock(tmp_path):
    """The put is refused at once, not after its timeout."""
    with Cluster(tmp_path, arena_bytes=1 << 20) as cluster:
        producer, trainer = cluster.client("producer"), cluster.client("trainer")
        batch = TensorDict({"x": torch.zeros(4, 1 << 16, dtype=torch.uint8)}, batch_size=[4])
        for _ in range(3):
            producer.put(batch, partition_id="p")
        claim = trainer.start(trainer.operations.get_meta(["x"], 100, "p", task_name="train", timeout=1000.0))
        put = producer.start(producer.operations.put(batch.repeat(2), partition_id="p", timeout=500.0))
        cluster.advance(0.0)  # first it is looked for space that moves could make
        assert put.done
        assert isinstance(put.error, DeadlockError)
        assert "waits for bytes of storage unit 0" in str(put.error)
        assert not claim.done
        cluster.check()
