"""The features of a run with faults, which its seed determines. A run has few features, so that it stays short."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tests.simulation.simulated_store import KIND
from transfer_queue.config.settings import Settings
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler

MIB = 1 << 20
MAIN, SIDE = "main", "side"  # partitions: samples of the first must not be lost, samples of the second are overwritten
EQUAL = "equal"  # a partition of values of which many are equal, in runs with dedup
MOVED = "moved"  # the beginning of the names of partitions that a client saves, drops and loads again
TASKS = ("train", "judge")
SCENARIOS = ("rows", "groups", "ranks")
RANKS, REPLICAS = 2, 2
LITTLE = {"bytes": 4096, "seconds": 0.5}  # so that puts often wait for the disk, if there is a mirror
OFTEN = {"high_watermark": 0.2, "low_watermark": 0.05}  # so that many blocks move to disk, if there is a disk tier


def fields_of(task: str) -> list[str]:
    """Return the fields that a task fetches."""
    return ["x"] if task == "judge" else ["x", "y"]


@dataclass(frozen=True)
class Features:
    """The features of a run.

    scenario: How samples are dealt.
    group: The number of samples in a group, or in a batch of a rank.
    leased: Ranks fetch under leases.
    acks: The number of replicas that must acknowledge a sample.
    units: The number of storage units.
    replicas: The number of units in which each block is stored.
    arena_bytes: The size of the arena of each unit.
    loses: Arenas are lost.
    checkpoints: Checkpoints are saved and loaded.
    drains: Units are drained.
    snapshot_every: The number of records between two snapshots of the journal.
    disk: There are units on disk, too.
    mirror: A mirror has a copy of every block: "async" or "sync", or "" if there is none.
    dedup: Values are hashed, and some clients put equal ones.
    wide: Some puts have many fields.
    store: An external store has the fields "y" ("some") or all fields ("all"); "" if there is none.
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
    mirror: str = ""
    dedup: bool = False
    store: str = ""
    wide: bool = False

    @property
    def has_queue(self) -> bool:
        """Whether the run has a queue, too."""
        return self.scenario != "groups"

    def sampler(self) -> BaseSampler:
        """Return the sampler of the controller."""
        if self.scenario == "groups":
            return GRPOGroupNSampler(self.group)
        return RankAwareSampler(RANKS) if self.scenario == "ranks" else SequentialSampler()

    def settings(self) -> Settings:
        """Return the settings of the system."""
        return _settings(self.units, self.replicas, self.disk, self.mirror, self.dedup, self.store)


@cache
def _settings(units: int, replicas: int, disk: bool, mirror: str, dedup: bool, store: str) -> Settings:
    offload = {"enabled": disk, "path": "/disk", "capacity": 32 * MIB, **OFTEN}
    storage = {"num_data_storage_units": units, "replicas": replicas, "offload": offload}
    durability = {"values": "machine", "folder": "/durable", "mode": mirror, "max_lag": LITTLE} if mirror else {}
    fields = ["x", "y"] if dedup else []
    backend: dict[str, Any] = {"SimpleStorage": storage}
    if store:
        backend |= {"fields": {"y": KIND}} if store == "some" else {"storage_backend": KIND}
    return Settings.from_config({"backend": backend, "durability": durability, "dedup": {"fields": fields}})


def drawn(draw: random.Random) -> Features:
    """Return the features of a run."""
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
        mirror=draw.choice(["", "async", "sync"]) if replicas == 1 else "",
        dedup=draw.random() < 0.3,
    )


def drawn_with_takeovers(draw: random.Random) -> Features:
    """Return the features of a run in which other nodes take the controller over, which have no values on disk."""
    features = drawn(draw)
    replicas = draw.choice([features.replicas, 2]) if features.units == 2 else 1
    return replace(
        features, mirror="", replicas=replicas, drains=features.drains and features.units > replicas,
        wide=draw.random() < 0.15,
    )  # fmt: skip


def drawn_with_store(draw: random.Random) -> Features:
    """Return the features of a run with an external store, whose servers die."""
    return replace(
        drawn(draw), store=draw.choice(["some", "all"]), loses=True, units=1, replicas=1, disk=False, mirror="",
        checkpoints=False, drains=False,
    )  # fmt: skip
