"""How old samples are when a trainer gets them: producers of random speed, and a trainer that sends weights first."""

from __future__ import annotations

import random

import pytest
import torch
from test_checkpoints import load, save

from simulated import Start, numbers
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, write_json
from transfer_queue.core.claims import deal
from transfer_queue.errors import StalenessError
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, SequentialSampler
from transfer_queue.testing import Client, Cluster

ROWS = 4
POLLING = {"controller": {"polling_mode": True}}


class Producer:
    """Generates `ROWS / 2` samples at a time, with the weights that it read when it began, and puts them."""

    def __init__(self, client: Client, draw: random.Random, slow: float) -> None:
        self._client = client
        self._draw = draw
        self._slow = slow
        self.version = -1
        """The version of the weights of the samples that it generates; -1 while it generates none."""
        self._left = 0.0

    def step(self, weights: int) -> bool:
        """Do the work of a unit of time. Returns whether samples were put."""
        if self.version < 0:
            self.version, self._left = weights, self._draw.expovariate(1.0 / self._slow)
        self._left -= 1.0
        if self._left > 0:
            return False
        try:
            group = f"{self._client.name}-{self._draw.random()}"
            tags = [{"policy_version": self.version}] * (ROWS // 2)
            self._client.put(numbers(ROWS // 2), partition_id="p", tags=tags, group_ids=[group] * (ROWS // 2))
        except StalenessError:
            return False  # it puts them as soon as they are admitted
        self.version = -1
        return True


def counted(cluster: Cluster) -> int:
    """How many samples count for the limit."""
    return cluster.controller.state.partitions["p"].window.counted


def train(cluster: Cluster, k: int, seed: int, steps: int = 12) -> tuple[list[int], int]:
    """Train for some steps. Returns the age of the oldest sample of each batch, and how many samples were ahead.

    As TRL does, the trainer sends the weights of the next version before its version rises.
    """
    draw = random.Random(seed)
    trainer = cluster.client("trainer")
    trainer.create_partition("p", max_staleness=k, rows_per_version=ROWS)
    producers = [Producer(cluster.client(f"p{n}"), draw, slow) for n, slow in enumerate((0.5, 1.0, 3.0, 9.0))]
    ages: list[int] = []
    weights = version = ahead = busy = 0
    for _ in range(3000):
        for producer in producers:
            producer.step(weights)
        ahead = max(ahead, counted(cluster))
        if busy:
            busy -= 1
            if busy == 1:
                weights = version + 1  # sent, but the version has not risen yet
            elif not busy:
                version += 1
                trainer.set_policy_version("p", version)
            continue
        meta = trainer.get_meta("x", ROWS, "p", task_name="train")
        if meta.size:
            ages.append(version - min(tag["policy_version"] for tag in meta.custom_meta))
            trainer.clear_samples(meta)
            busy = draw.randint(2, 6)
        if len(ages) == steps:
            return ages, ahead
    raise AssertionError(f"the training stands still after {len(ages)} steps")


@pytest.mark.parametrize("sampler", [SequentialSampler(), GRPOGroupNSampler(2)], ids=["rows", "groups"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_claim_returns_a_sample_that_is_more_than_k_versions_old(start: Start, k: int, sampler: BaseSampler):
    """Producers may still be k versions ahead, and the training never stands still, however many are skipped."""
    runs = [train(start(seed=seed, sampler=sampler, conf=POLLING), k, seed) for seed in range(6)]
    assert max(max(ages) for ages, _ in runs) <= k
    assert max(ahead for _, ahead in runs) == (k + 1) * ROWS
    assert k == 0 or max(max(ages) for ages, _ in runs) == k, "a smaller limit would do as well"


def test_the_limit_at_the_put_alone_lets_older_samples_through(start: Start, monkeypatch):
    """It counts the version at the put, which is younger than the one that generated the sample."""
    monkeypatch.setattr(deal, "stale_rows", lambda *_: {})
    runs = [train(start(seed=seed, conf=POLLING), 1, seed) for seed in range(6)]
    assert max(max(ages) for ages, _ in runs) > 1


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
