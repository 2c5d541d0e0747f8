"""Samples that are too old for a partition: claims skip them, which makes space for others."""

from __future__ import annotations

import pytest
import torch
from test_checkpoints import load, save

from simulated import Start, numbers
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, write_json
from transfer_queue.errors import StalenessError
from transfer_queue.testing import Client, Cluster

POLLING = {"controller": {"polling_mode": True}}


def counted(cluster: Cluster) -> int:
    """How many samples count for the limit."""
    return cluster.controller.state.partitions["p"].window.counted


def put(client: Client, versions: list[int | None]) -> None:
    tags = [{} if version is None else {"policy_version": version} for version in versions]
    client.put(numbers(len(versions)), partition_id="p", tags=tags)


@pytest.fixture
def bounded(start: Start) -> Cluster:
    """A cluster with a partition whose samples may be one version old."""
    cluster = start(seed=1, conf=POLLING)
    cluster.client("a").create_partition("p", max_staleness=1, rows_per_version=4, trained_by="train")
    return cluster


def test_each_task_skips_old_samples_and_says_why(bounded: Cluster):
    client = bounded.client("b")
    put(client, [0, 1, 2, None])
    client.set_policy_version("p", 2)
    for task in ("train", "log"):
        meta = client.get_meta("x", 3, "p", task_name=task)
        assert client.get_data(meta)["x"].tolist() == [1, 2, 3]
        (progress,) = client.status().partitions
        assert "stale: more than 1 policy versions behind" in str(progress)


def test_a_skipped_sample_frees_space_for_another_one(bounded: Cluster):
    """It does not count, whatever number of tasks skip it, and however it is removed."""
    client = bounded.client("b")
    put(client, [0] * 8)
    client.set_policy_version("p", 2)
    assert counted(bounded) == 8
    waiting = bounded.client("w")
    task = waiting.start(waiting.operations.put(numbers(8), partition_id="p", timeout=100))
    bounded.run()
    assert not task.done
    client.get_meta("x", 8, "p", task_name="train")
    bounded.run()
    assert task.done
    client.get_meta("x", 8, "p", task_name="log")
    assert counted(bounded) == 8
    client.reset_consumption("p", "train")
    assert counted(bounded) == 8, "the log has skipped the old ones"
    client.reset_consumption("p", "log")
    assert counted(bounded) == 16, "every sample may be trained on again"
    client.get_meta("x", 8, "p", task_name="log")
    stale = client.get_meta("x", None, "p", mode="force_fetch").select_samples(list(range(8)))
    client.drop("p", metadata=stale, reason="filtered")
    assert counted(bounded) == 8


def test_a_loaded_checkpoint_has_the_same_space(start: Start, tmp_path):
    """So has a new partition after the load, at the version of the checkpoint."""
    cluster = start(seed=1, conf=POLLING)
    client = cluster.client("a")
    client.create_partition("p", max_staleness=1, rows_per_version=4, trained_by="train", policy_version=7)
    put(client, [7] * 8)
    client.get_meta("x", 4, "p", task_name="train")
    client.set_policy_version("p", 8)
    put(client, [8] * 2)
    client.get_meta("x", 2, "p", task_name="train")
    saved = tmp_path / "saved"
    saved.mkdir()
    save(client, saved)
    write_json(saved / METADATA, {"storage_saved": True, "user_metadata": {}, "partitions": ["p"]})
    client.set_policy_version("p", 9)
    put(client, [9] * 4)
    for some in (None, "p"):
        client.clear_partition("p")
        if some is None:
            load(client, saved)
        else:
            client.load_samples(saved, some)
        assert client.get_policy_version("p") == 8
        window = cluster.controller.state.partitions["p"].window
        assert (window.unfinished, window.finished) == (4, 2)
        put(client, [8] * 2)
        with pytest.raises(StalenessError):
            put(client, [8])
    client.create_partition("q", max_staleness=1, rows_per_version=4, policy_version=8)
    client.put(numbers(8), partition_id="q")
    with pytest.raises(StalenessError):
        client.put(numbers(1), partition_id="q")


def test_the_timeline_shows_the_oldest_sample_of_a_batch(bounded: Cluster):
    """So its staleness is never above the limit that the page shows beside it."""
    client = bounded.client("b")
    put(client, [1, 2, 2])
    client.set_policy_version("p", 2)
    client.get_meta("x", 3, "p", task_name="train")
    stats = client.stats()
    assert stats["tq/train/staleness_max"] == 1, stats


def test_a_batch_that_was_dealt_before_stays(start: Start):
    """A late replica of a rank gets the batch of its step."""
    cluster = start(seed=1, conf={"controller": {"polling_mode": True, "sampler": "RankAwareSampler"}})
    client = cluster.client("a")
    client.create_partition("p", max_staleness=0, rows_per_version=2)
    put(client, [0, 0])
    config = {"sampler": "RankAwareSampler", "dp_rank": 0, "batch_index": 0}
    first = client.get_meta("x", 2, "p", task_name="t", sampling_config=config)
    client.set_policy_version("p", 1)
    again = client.get_meta("x", 2, "p", task_name="t", sampling_config=config)
    assert first.global_indexes == again.global_indexes
    assert torch.equal(client.get_data(again)["x"], torch.arange(2))
