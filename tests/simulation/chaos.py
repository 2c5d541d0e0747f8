"""`python -m tests.simulation.chaos --seed N`: runs with faults; a seed determines a run and replays it.

A run has producers, consumers, ranks, readers and a cleaner in virtual time, which use the production code, while
connections break, clients freeze and die, and servers are stopped and killed. Then the faults stop, all clients finish,
and the ledger is compared with the system. The first run that fails ends the program with the command that replays it.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from tests.simulation import queue_actors
from tests.simulation.fault_injector import Faults
from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.final_check import Settling
from tests.simulation.ledger import Ledger, LedgerError
from tests.simulation.run_features import Features, drawn, drawn_with_store, drawn_with_takeovers
from tests.simulation.simulated_store import StoreWorld
from tests.simulation.takeover_cluster import TakeoverCluster
from tests.simulation.workload import Workload
from transfer_queue.core.absent_clients import ABSENCE_SECONDS
from transfer_queue.core.events.records import BlocksMoved, RankLeft
from transfer_queue.messages.descriptors import DISK

SECONDS = 3.0  # of virtual time in which faults happen
PART = 50  # seeds that a process takes at a time
PATIENCE = 400.0  # seconds of virtual time until all clients have finished after the faults
MAX_LOSSES = 3  # of arenas
KINDS = {
    "break": 6, "slow": 4, "part": 2, "freeze": 3, "tear": 4, "late": 4, "kill_one": 3, "stop": 2, "unlink": 1,
    "controller": 6, "unit": 2, "both": 1, "system": 2, "lose": 3, "reboot": 2, "rank": 2,
}  # fmt: skip
STORE_KINDS = {**KINDS, "server": 4, "put": 5, "get": 5, "outage": 1, "evict": 2}
TAKEOVER_KINDS = {**KINDS, "reboot": 0, "pause": 4, "cut": 2, "claim": 4, "takeover": 8}
VARIANTS = {
    "": (drawn, KINDS),
    "stores": (drawn_with_store, STORE_KINDS),
    "takeovers": (drawn_with_takeovers, TAKEOVER_KINDS),
}
"""How the features of a run are drawn, and the kinds of its faults, by variant."""


class Run:
    """One run. `happened` counts its faults and their consequences; `ledger` counts the values that were read."""

    def __init__(
        self, seed: int, folder: Path, kinds: dict[str, int] | None = None, features: Features | None = None,
        variant: str = "",
    ) -> None:  # fmt: skip
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.ledger = ledger = Ledger()
        draw_features, all_kinds = VARIANTS[variant]
        self.features = features = features or draw_features(draw)
        self.workload = Workload(draw, features, ledger)
        self.world = StoreWorld(str(folder), random.Random(seed)) if features.store else None
        self.cluster = (TakeoverCluster if variant == "takeovers" else FaultyCluster)(
            folder, seed, features.sampler(), conf=features.settings(), arena_bytes=features.arena_bytes,
            snapshot_every=features.snapshot_every, world=self.world,
        )  # fmt: skip
        self.cluster.on_cut, self.cluster.on_loaded = self._note_cut, self._note_loaded
        # of two copies one may be lost, once: if both units are lost, nothing is guaranteed
        most = (1 if features.replicas > 1 else MAX_LOSSES) if features.loses else 0
        self.faults = Faults(self.cluster, draw, kinds or all_kinds, self.workload.kill, self.workload.end_rank, most)

    def _note_cut(self, time: float) -> None:
        self.ledger.cut(time)
        self.workload.hand_overs.cut(time)

    def _note_loaded(self, time: float) -> None:
        self.ledger.loaded(time)
        self.workload.hand_overs.loaded(time)

    def run(self) -> None:
        """Run it. Raises AssertionError if an expectation is violated."""
        cluster, workload = self.cluster, self.workload
        workload.begin(cluster)
        self.faults.carry_out(SECONDS, PATIENCE, workload.close, workload.done)
        cluster.advance(ABSENCE_SECONDS + 5.0)
        cluster.check()
        workload.hand_overs.settle(cluster)
        if cluster.missing_blocks():
            raise LedgerError(f"{cluster.missing_blocks()} are not in the store, and were not reported as lost")
        if self.features.replicas > 1 and cluster.lost_values:
            raise LedgerError(f"{cluster.lost_values} values were lost with one unit, but each was stored in two")
        settling = Settling(cluster, self.features, self.ledger)
        if self.features.has_queue:
            queue_actors.drain(settling, workload)
        if self.draw.random() < 0.5:
            if self.features.scenario != "ranks":
                settling.drain()
            elif self.features.leased:
                settling.drain_ranks()
        settling.settle()
        settling.nothing_leaks()

    def close(self) -> None:
        """Close the cluster and its external store."""
        self.cluster.close()
        if self.world is not None:
            self.world.close()

    @property
    def happened(self) -> Counter[str]:
        """Return the number of faults of each kind, and of their consequences."""
        cluster = self.cluster
        moved = sum(isinstance(record, BlocksMoved) for record in cluster.records)
        on_disk = {
            place.number for place in cluster.places if place.arena is not None and place.arena.tier == DISK
        } | cluster.lost
        offloads = sum(isinstance(record, BlocksMoved) and record.unit in on_disk for record in cluster.records)
        takeovers: dict[str, int] = {}
        if isinstance(cluster, TakeoverCluster):
            takeovers = {f"frozen_{point}": times for point, times in cluster.froze.items()}
            takeovers |= {"terms": len(cluster.hosts) - 1, "terms_ended": cluster.late}
        gone = sum(isinstance(record, RankLeft) for record in cluster.records)
        return Counter(self.faults.happened) + Counter(
            loads=self.ledger.epoch, saves=len(self.workload.saved), merges=self.workload.moved,
            wide_puts=self.workload.wide, snapshots=cluster.snapshots, moves=moved,
            offloads=offloads, lost_units=len(cluster.lost), lost_values=cluster.lost_values, ranks_gone=gone,
            **self.workload.hand_overs.counts, **takeovers,
        )  # fmt: skip


def run(seed: int, kinds: dict[str, int] | None = None, features: Features | None = None, variant: str = "") -> Run:
    """Run this seed to its end, and return the run. variant: One of `VARIANTS`. Raises the error of the run."""
    folder = Path(tempfile.mkdtemp(prefix="tq-chaos-"))
    try:
        one = Run(seed, folder / "arena", kinds, features, variant)
        try:
            one.run()
        finally:
            one.close()
        return one
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay(seed: int, variant: str = "") -> str:
    """Return the command that runs a seed again."""
    return f"python -m tests.simulation.chaos{f' --{variant}' if variant else ''} --seed {seed}"


def run_part(seeds: Iterable[int], variant: str = "") -> tuple[int, Counter[str]]:
    """Run seeds for a test; return the values read and the faults. An error says how to run its seed again."""
    happened: Counter[str] = Counter()
    reads = 0
    for seed in seeds:
        try:
            one = run(seed, variant=variant)
        except Exception as error:
            raise AssertionError(f"to replay it: {replay(seed, variant)}") from error
        reads += one.ledger.reads
        happened += one.happened
    return reads, happened


def hide_ends() -> None:
    """Hide the log lines in which controllers report the end of their term, in this process."""
    logging.getLogger("transfer_queue.node").setLevel(logging.CRITICAL)


def run_all(seeds: Iterable[int], variant: str = "") -> tuple[int, int, Counter[str]] | int:
    """Run these seeds; return (runs, values read, faults), or the first seed that failed, whose error was printed."""
    happened: Counter[str] = Counter()
    runs = reads = 0
    for seed in seeds:
        try:
            one = run(seed, variant=variant)
        except Exception:
            print(f"{traceback.format_exc()}seed {seed} failed; to replay it:\n    {replay(seed, variant)}", flush=True)
            return seed
        happened += one.happened
        runs += 1
        reads += one.ledger.reads
    return runs, reads, happened


def main() -> int:
    """Run the seeds of the command line. Return the exit code: 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", default="0..200", help="runs from the first to before the second")
    for variant, words in (
        ("stores", "runs with an external store whose servers die"),
        ("takeovers", "runs in which other nodes take the controller over"),
    ):
        parser.add_argument(f"--{variant}", action="store_const", dest="variant", const=variant, default="", help=words)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("..")
    seeds = range(int(first), int(last)) if given.seed is None else range(given.seed, given.seed + 1)
    if not seeds:
        parser.error(f"--seeds {given.seeds} contains no seed; the first must be less than the second")
    torch.set_num_threads(1)
    parts = [seeds[at : at + PART] for at in range(0, len(seeds), PART)]
    runs, reads, happened = 0, 0, Counter[str]()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(given.processes, hide_ends) if given.processes > 1 else nullcontext() as pool:
        each = partial(run_all, variant=given.variant)
        for outcome in map(each, parts) if pool is None else pool.imap_unordered(each, parts):
            if isinstance(outcome, int):
                return 1
            runs, reads = runs + outcome[0], reads + outcome[1]
            happened += outcome[2]
    print(f"{runs} seeds passed; {reads} values read; faults: {dict(sorted(happened.items()))}")
    return 0


if __name__ == "__main__":
    hide_ends()
    sys.exit(main())
