"""What the simulated faults are: a frozen process, a lost arena, a snapshot that its controller does not survive."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated import numbers
from tests.simulation import expected_losses
from tests.simulation.faulty_cluster import FaultyCluster
from transfer_queue.client.checkpoint.checkpoint_folder import STATE
from transfer_queue.net.calls import CONTROLLER


def test_a_frozen_client_renews_no_lease(tmp_path: Path) -> None:
    """Its rows are another's when its lease is over, and its ack counts for nothing when it goes on."""
    cluster = FaultyCluster(tmp_path)
    frozen, other = cluster.client("frozen"), cluster.client("other")
    frozen.put(numbers(1), partition_id="p")
    held = frozen.get_meta(["x"], 1, "p", task_name="t", lease=3.0)
    cluster.advance(10.0)
    assert not len(other.await_batch(["x"], 1, "p", "t", lease=3.0, timeout=0.0)[0])
    frozen.freeze()
    assert other.get_meta(["x"], 1, "p", task_name="t", lease=30.0, timeout=5.0).global_indexes == [0]
    frozen.thaw()
    assert not frozen.ack(held)
    cluster.check()
    cluster.close()


def test_a_lost_arena_takes_what_lay_in_it_alone(tmp_path: Path) -> None:
    """A unit with a new arena comes under a new number; of another loss the count of values would tell."""
    cluster = FaultyCluster(tmp_path)
    client = cluster.client("a")
    client.put(numbers(3), partition_id="p")
    state = cluster.controller.state
    before, told = expected_losses.values(state), expected_losses.lost(state)
    assert set(before.values()) == {frozenset({0})}
    cluster.lose(("unit", 0), 0.5)
    cluster.advance(1.0)
    assert (cluster.lost_values, cluster.places[0].number) == (3, 1)
    assert expected_losses.check(before, told, state, {0}) == 3
    with pytest.raises(AssertionError, match="took other values"):
        expected_losses.check(before, told, state, set())
    with pytest.raises(AssertionError, match="not reported as lost"):
        expected_losses.check(before, expected_losses.lost(state), state, {0})
    client.put(numbers(2), partition_id="p")
    assert set(expected_losses.values(state).values()) == {frozenset({1})}
    cluster.check()
    cluster.close()


@pytest.mark.parametrize("survives", [True, False])
def test_a_crash_replays_a_snapshot_and_what_came_after(tmp_path: Path, survives: bool) -> None:
    """Also where the controller is killed while the snapshot is being written."""
    cluster = FaultyCluster(tmp_path, snapshot_every=10)
    client = cluster.client("a")
    while not cluster.snapshots:
        client.put(numbers(1), partition_id="p")
    if survives:
        cluster.advance(1.0)
    client.put(numbers(5), partition_id="p")
    before = cluster.controller.state.snapshot()["partitions"]
    cluster.crash(CONTROLLER, 0.5)
    cluster.advance(1.0)
    assert cluster.controller.state.snapshot()["partitions"] == before
    if survives:
        folder = tmp_path / "journal"
        assert not (folder / "segment-000000000001").exists()
        assert list(folder.glob("state-*"))
    cluster.check()
    cluster.close()


def test_a_crash_at_any_moment_of_a_load_loads_it_once(tmp_path: Path) -> None:
    """Before the journal has its copy, between that and the record, and after it; a copy stays if a record names it."""
    seen = set()
    for number in range(40):
        cluster = FaultyCluster(tmp_path / str(number), seed=number)
        client = cluster.client("a")
        client.put(numbers(2), partition_id="p")
        cut = client.begin_checkpoint()
        client.save_storage_checkpoint(tmp_path / f"ck-{number}", cut=cut)
        client.save_controller_checkpoint(tmp_path / f"ck-{number}" / STATE, cut=cut)
        assert client.end_checkpoint(cut)
        client.put(numbers(3), partition_id="p")
        client.load_storage_checkpoint(tmp_path / f"ck-{number}")
        loaded: list[float] = []
        cluster.on_loaded = loaded.append
        folder = cluster.folder / "journal"

        def crash(cluster: FaultyCluster = cluster, folder: Path = folder, loaded: list[float] = loaded) -> None:
            seen.add((len(list(folder.glob("load-*"))), len(loaded)))
            cluster.crash(CONTROLLER, 0.1)

        cluster.later(cluster.network.random.uniform(0, 0.05), crash)
        client.load_controller_checkpoint(tmp_path / f"ck-{number}" / STATE)
        assert cluster.controller.state.partitions["p"].row_count == 2
        cluster.advance(1.0)
        assert (len(loaded), cluster.controller.state.epoch) == (1, 1)
        assert len(list(folder.glob("load-*"))) == 1
        cluster.check()
        cluster.close()
    assert seen == {(0, 0), (1, 0), (1, 1)}
