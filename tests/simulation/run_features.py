"""What a run with faults has in it, drawn by its seed: not every run has everything, so that each stays short."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from transfer_queue.config.settings import Settings
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler

MIB = 1 << 20
MAIN, SIDE = "main", "side"  # partitions: one in which nothing may be lost, one in which anything is overwritten
TASKS = ("train", "judge")
SCENARIOS = ("rows", "groups", "ranks")
RANKS, REPLICAS = 2, 2
OFTEN = {"high_watermark": 0.2, "low_watermark": 0.05}  # so that much is moved to disk, where there is one


def fields_of(task: str) -> list[str]:
    """What a task wants of a sample."""
    return ["x"] if task == "judge" else ["x", "y"]


@dataclass(frozen=True)
class Features:
    """scenario: how samples are dealt. group: samples in a group, or in a batch of a rank. leased: ranks fetch under
    leases; acks: of so many replicas make a sample consumed.

    units, replicas: storage units, and in how many of them each block lies. arena_bytes: of each unit. loses: arenas
    are lost; checkpoints: they are saved and loaded; drains: units are drained. snapshot_every: records between two
    snapshots of the journal. disk: there are units on disk, too.
    """

    scenario: str
    group: int
    leased: bool
    acks: int
    units: int
    replicas: int
    arena_bytes: int
    loses: bool
    checkpoints: bool
    drains: bool
    snapshot_every: int
    disk: bool = False

    def sampler(self) -> BaseSampler:
        """Of the controller."""
        if self.scenario == "groups":
            return GRPOGroupNSampler(self.group)
        return RankAwareSampler(RANKS) if self.scenario == "ranks" else SequentialSampler()

    def settings(self) -> Settings:
        """Of the system."""
        return _settings(self.units, self.replicas, self.disk)


@cache
def _settings(units: int, replicas: int, disk: bool) -> Settings:
    offload = {"enabled": disk, "path": "/disk", "capacity": 32 * MIB, **OFTEN}
    storage = {"num_data_storage_units": units, "replicas": replicas, "offload": offload}
    return Settings.from_config({"backend": {"SimpleStorage": storage}})


def drawn(draw: random.Random) -> Features:
    """The features of a run."""
    units = draw.choice([1, 2, 2])
    replicas = draw.choice([1, 1, 2]) if units == 2 else 1
    checkpoints = draw.random() < 0.3
    return Features(
        scenario=draw.choice(SCENARIOS),
        group=draw.randint(2, 3),
        leased=draw.random() < 0.7,
        acks=draw.randint(1, REPLICAS),
        units=units,
        replicas=replicas,
        arena_bytes=draw.choice([4, 8] if checkpoints else [1, 2, 4]) * MIB,
        loses=draw.random() < 0.4,
        checkpoints=checkpoints,
        drains=units > replicas and draw.random() < 0.4,
        snapshot_every=draw.choice([20, 60, 200, 100_000]),
        disk=draw.random() < 0.35,
    )
