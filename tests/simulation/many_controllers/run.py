"""One run of the workload on several controllers, with faults that its seed determines."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulation import queue_actors
from tests.simulation.chaos import KINDS, MAX_LOSSES, PATIENCE
from tests.simulation.fault_injector import Faults
from tests.simulation.final_check import Settling
from tests.simulation.ledger import Ledger, LedgerError
from tests.simulation.many_controllers import coordinated_checkpoint, partition_moves
from tests.simulation.many_controllers.coordinated_checkpoint import Archive, Saved
from tests.simulation.many_controllers.many_cluster import ManyCluster
from tests.simulation.many_controllers.member import Member
from tests.simulation.many_controllers.member_client import MemberClient
from tests.simulation.retrying_client import RetryingClient, Script
from tests.simulation.run_features import Features, drawn
from tests.simulation.workload import Workload

SECONDS = 5.0  # of virtual time in which faults happen
KEYED = ["keys-0", "keys-1", "keys-2", "keys-3"]  # partitions that are used by key, and moved


class ManyWorkload(Workload):
    """The workload, with more partitions, with moves of them and with checkpoints of all controllers.

    archive: The checkpoints. relocated: How often a partition was moved to another controller.
    """

    hands_over = False  # several controllers are a prototype, in which hand-overs are not exact

    def __init__(self, draw: random.Random, features: Features, ledger: Ledger) -> None:
        super().__init__(draw, features, ledger)
        self.archive = Archive()
        self.relocated = 0
        self._loading: Saved | None = None
        self._loaded = False

    def begin_keyed(self) -> None:
        """Start the clients of the partitions that are used by key, and the one that moves these."""
        for name in KEYED * 2:
            self.role("keys", self._aside(name))
        if len(self.cluster.members) > 1:
            self.role("relocator", partition_moves.relocator(self, KEYED))

    def _archivist(self) -> Script:
        return coordinated_checkpoint.archivist(self)

    def begin_load(self, saved: Saved) -> None:
        """Record that the states of a checkpoint will be loaded into all controllers, which are held."""
        self._loading, self._loaded = saved, False

    def load_began(self) -> bool:
        """Return whether a controller has loaded its state of this checkpoint."""
        return self._loaded

    def on_loaded(self) -> None:
        """Record that a controller has loaded its state; the first one decides what the ledger expects."""
        assert self._loading is not None
        if not self._loaded:
            self._loaded = True
            self.ledger.loaded(self._loading.number)


class ManyFaults(Faults):
    """Faults of several controllers: each happens to one of them, drawn at random. A client fails as a whole."""

    def __init__(
        self,
        many: ManyCluster,
        draw: random.Random,
        kill: Callable[[RetryingClient], None],
        end_rank: Callable[[int], None],
        most_losses: int,
        kinds: dict[str, int] | None = None,
    ) -> None:
        def kill_whole(client: RetryingClient) -> None:
            assert isinstance(client, MemberClient)
            kill(client.whole)

        super().__init__(many.members[0], draw, kinds or KINDS, kill_whole, end_rank, most_losses)
        self._many = many

    def happen(self, kind: str) -> None:
        """See `Faults.happen`."""
        self.cluster = self.draw.choice(self._many.members)
        super().happen(kind)

    def end(self) -> None:
        """See `Faults.end`."""
        for member in self._many.members:
            self.cluster = member
            super().end()


class ManyRun:
    """One run. See `chaos.Run`."""

    def __init__(
        self,
        seed: int,
        controllers: int,
        folder: Path,
        kinds: dict[str, int] | None = None,
        features: Features | None = None,
    ) -> None:
        self.seed = seed
        self.controllers = controllers
        self.draw = draw = random.Random(f"{seed}/{controllers}")
        self.ledger = ledger = Ledger()
        # drains of units are left out: their client knows the units of one controller
        self.features = features = features or replace(drawn(draw), drains=False)
        self.workload = ManyWorkload(draw, features, ledger)

        def others() -> dict[str, Any]:
            return {
                "sampler": features.sampler(), "conf": features.settings(), "arena_bytes": features.arena_bytes,
                "snapshot_every": features.snapshot_every,
            }  # fmt: skip

        self.many = ManyCluster(folder, seed, controllers, others)
        self.many.on_move = self._moved
        for member in self.many.members:
            member.on_loaded = lambda time: self.workload.on_loaded()
        most = (1 if features.replicas > 1 else MAX_LOSSES) if features.loses else 0
        self.faults = ManyFaults(self.many, draw, self.workload.kill, self.workload.end_rank, most, kinds)

    def _moved(self) -> None:
        self.ledger.moves += 1

    def run(self) -> None:
        """Run it. Raises AssertionError if an expectation is violated."""
        many, workload = self.many, self.workload
        workload.begin(many)
        workload.begin_keyed()
        self.faults.carry_out(SECONDS, PATIENCE, workload.close, workload.done)
        many.advance(5.0)
        many.finish_moves()
        many.check()
        lost = sum(member.lost_values for member in many.members)
        if self.features.replicas > 1 and lost:
            raise LedgerError(f"{lost} values were lost with one unit, but each was stored in two")
        settling = Settling(many, self.features, self.ledger)
        if self.features.has_queue:
            queue_actors.drain(settling, workload)
        if self.draw.random() < 0.5:
            if self.features.scenario != "ranks":
                settling.drain()
            elif self.features.leased:
                settling.drain_ranks()
        settling.settle()
        settling.nothing_leaks()

    @property
    def happened(self) -> Counter[str]:
        """Return the number of faults of each kind, and of their consequences."""
        members: list[Member] = self.many.members
        archive = self.workload.archive
        return Counter(self.faults.happened) + Counter(
            saves=archive.saves, loads=archive.loads, refused_saves=archive.refused, relocated=self.workload.relocated,
            merges=self.workload.moved, snapshots=sum(member.snapshots for member in members),
            lost_values=sum(member.lost_values for member in members),
        )  # fmt: skip


def run(seed: int, controllers: int, kinds: dict[str, int] | None = None, features: Features | None = None) -> ManyRun:
    """Run this seed with this number of controllers to its end, and return the run. Raises the error of the run."""
    folder = Path(tempfile.mkdtemp(prefix="tq-many-"))
    try:
        one = ManyRun(seed, controllers, folder, kinds, features)
        try:
            one.run()
        finally:
            one.many.close()
        return one
    finally:
        shutil.rmtree(folder, ignore_errors=True)
