"""The scenario of the samplers: for each kind a checkpoint of a simulated system that has dealt a few batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from golden_description import batch, described
from golden_observations import outcome
from golden_sampler import Alternating
from golden_systems import load, rows, save, working_in

from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue.testing import Cluster

SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "Sequential": SequentialSampler,
    "RankAware": lambda: RankAwareSampler(2),
    "RankAware of unknown ranks": RankAwareSampler,
    "GRPOGroupN": lambda: GRPOGroupNSampler(2, 2),
    "SeqlenBalanced": lambda: SeqlenBalancedSampler(2, 2),
    "TokenBudget": lambda: TokenBudgetSampler(60, dp_size=2),
    "Priority": lambda: PrioritySampler(aging=0.5),
    "Freshness": lambda: FreshnessSampler(SequentialSampler(), 2),
    "of a user": Alternating,
}
REPLICAS = {"backend": {"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2}}}
RANKS = 2
COUNT = 24


def _rows(start: int, count: int) -> Any:
    return rows(x=torch.arange(start, start + count))


def _tags(start: int, count: int) -> list[dict[str, Any]]:
    return [
        {"total_lengths": 3 + 7 * n % 11, "priority": (5 * n) % 7 / 2, "policy_version": n % 5}
        for n in range(start, start + count)
    ]


def make_files(name: str, folder: Path) -> None:
    """Save a checkpoint of a system with this sampler and two copies of every value. Makes the folder."""
    with working_in(folder), Cluster(Path("system"), sampler=SAMPLERS[name](), conf=REPLICAS) as cluster:
        a = cluster.client("a")
        for partition, count in (("open", COUNT), ("sealed", 10)):
            a.create_partition(partition, group_size=2)
            groups = [f"group {n // 2}" for n in range(count)]
            a.put(_rows(0, count), partition_id=partition, group_ids=groups, tags=_tags(0, count))
            a.set_policy_version(partition, 4)
            for _ in _claims(a, partition, range(1)):
                pass
        a.seal("sealed")
        cluster.check()
        save(a, Path("checkpoint"))


def observe(name: str, checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Describe another system that has loaded the checkpoint, and the batches that it deals."""
    with Cluster(folder, sampler=SAMPLERS[name]()) as cluster:
        a = cluster.client("a")
        load(a, checkpoint)
        found: dict[str, Any] = {"now": described(a), "claims": {}}
        for partition in ("open", "sealed"):
            found["claims"][partition] = list(_claims(a, partition, range(4)))
        a.put(_rows(100, 4), partition_id="open", group_ids=["c", "d", "c", "d"], tags=_tags(100, 4))
        found["claims"]["more"] = list(_claims(a, "open", range(4, 6)))
        found["then"] = described(a)
        cluster.check()
        return found


def _claims(client: Any, partition: str, numbers: range) -> Iterator[Any]:
    """Let every rank claim these batches, number 1 under a lease."""
    for number in numbers:
        for rank in range(RANKS):
            config = {"dp_rank": rank, "batch_index": number}
            lease = 1000.0 if number == 1 else None
            yield outcome(
                lambda config=config, lease=lease: batch(  # type: ignore[misc]
                    client.await_batch(["x"], 4, partition, "train", config, lease=lease, timeout=0)
                )
            )
