"""`python -m transfer_queue.testing.chaos --seed N`: runs with faults, each drawn by its seed and replayed by it.

A run has producers, consumers, ranks, readers and a cleaner in virtual time, over the production's code, while
connections break, clients freeze and die, and servers are stopped and killed. In the end faults cease, everybody
finishes, and the ledger is settled. The first run that fails ends it all with the command that replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from transfer_queue.core.records import ExtentsLost, UnitLost
from transfer_queue.testing.faults import Faults
from transfer_queue.testing.faulty import FaultyCluster
from transfer_queue.testing.ledger import FIELDS, Ledger, LedgerError
from transfer_queue.testing.workload import MAIN, SCENARIOS, TASKS, Workload, fields_of

SECONDS = 3.0  # of virtual time in which faults happen
PART = 50  # seeds that a process takes at a time
PATIENCE = 400.0  # until everybody has finished after them
MIB = 1 << 20
KINDS = {
    "break": 6, "slow": 4, "part": 2, "freeze": 3, "tear": 4, "late": 4, "kill_one": 3, "stop": 2, "unlink": 1,
    "controller": 6, "unit": 2, "both": 1,
}  # fmt: skip


class Run:
    """One run. `happened` counts its faults, `ledger` what it has read."""

    def __init__(
        self, seed: int, folder: Path, kinds: dict[str, int] | None = None, scenario: str | None = None
    ) -> None:
        self.seed = seed
        self.draw = draw = random.Random(seed)
        self.ledger = Ledger()
        self.workload = Workload(draw, scenario or draw.choice(SCENARIOS), self.ledger)
        arena = draw.choice([1, 2, 4]) * MIB
        self.cluster = FaultyCluster(folder, seed, self.workload.sampler(), arena_bytes=arena)
        self.faults = Faults(self.cluster, draw, kinds or KINDS, self.workload.kill)

    def run(self) -> None:
        """Raises AssertionError where something does not hold."""
        cluster, workload = self.cluster, self.workload
        workload.begin(cluster)
        self.faults.plan(self.draw.randint(0, 24), SECONDS)
        cluster.advance(SECONDS)
        self.faults.end()
        workload.closing = True
        limit = cluster.clock.now + PATIENCE
        while not workload.done():
            cluster.advance(1.0)
            if cluster.clock.now > limit:
                raise LedgerError("somebody waits for ever")
        cluster.advance(5.0)
        cluster.check()
        if workload.scenario != "ranks" and self.draw.random() < 0.5:
            self._drain()
        self._settle()
        self._nothing_leaks()

    def _drain(self) -> None:
        """Whatever nobody has acknowledged is handed out now, but for what has not all its fields or its group."""
        client, group = self.cluster.client("drainer"), self.workload.group
        partition = self.cluster.controller.state.partitions[MAIN]
        size = group if self.workload.scenario == "groups" else 1
        for task in TASKS:
            fields = fields_of(task)
            while True:
                meta, _ = client.await_batch(fields, size, MAIN, task, lease=5.0, timeout=0.0)
                if not len(meta):
                    break
                numbers = self.ledger.seen(meta.global_indexes, client.get_data(meta, layout="dense"))
                self.ledger.maybe_acked(task, numbers)
                if not client.ack(meta):
                    raise LedgerError(f"an ack in time of {numbers} did not count")
                self.ledger.acked(task, numbers)
            positions = np.setdiff1d(partition.rows.live_positions(), partition.waiting)
            whole = np.all([partition.blocks_of(field, positions)[0] != 0 for field in fields], axis=0)
            left = positions[whole & (partition.consumed(task, positions) == 0)]
            if len(left) and size == 1:
                raise LedgerError(f"{partition.rows.indexes_of(left).tolist()} are handed to nobody for {task!r}")
        client.close()

    def _settle(self) -> None:
        """The ledger against what the system says, read by a client of its own."""
        cluster, ledger = self.cluster, self.ledger
        if any(isinstance(record, (ExtentsLost, UnitLost)) for record in cluster.records):
            raise LedgerError("needed extents were free at their unit, and no arena was lost")
        client = cluster.client("auditor")
        there: dict[str, set[int]] = {}
        consumed: dict[tuple[str, str], set[int]] = {}
        for name, partition in cluster.controller.state.partitions.items():
            positions = np.setdiff1d(partition.rows.live_positions(), partition.waiting)
            if not len(positions):
                continue
            indexes = partition.rows.indexes_of(positions)
            numbers: list[int] = []
            for field in FIELDS:
                has = partition.blocks_of(field, positions)[0] != 0
                if field == "x" and not has.all():
                    raise LedgerError(f"rows {indexes[~has].tolist()} of {name} have no value, and were put with one")
                if has.any():
                    all_of_it = client.get_meta([field], None, name, mode="force_fetch")
                    meta = all_of_it.select_samples(np.flatnonzero(np.isin(all_of_it.global_indexes, indexes[has])))
                    read = ledger.seen(meta.global_indexes, client.get_data(meta, layout="dense"))
                    numbers = numbers or read
            there[name] = set(numbers)
            for task in partition.tasks:
                rows = partition.consumed(task, positions)
                consumed[name, task] = {n for n, done in zip(numbers, rows.tolist(), strict=True) if done}
        if self.workload.scenario != "ranks":
            ledger.settle(there, consumed)
        else:
            ledger.settle(there, {})
        client.close()

    def _nothing_leaks(self) -> None:
        """No extent is leased but those in which needed blocks lie; and when all is cleared none is."""
        cluster = self.cluster
        cluster.advance(5.0)
        needed = set(cluster.controller.state.blocks.extents)
        leased = {(unit.number, extent) for unit in cluster.units for extent in unit.table._extents}
        if leased != needed:
            raise LedgerError(f"extents {sorted(leased - needed)} are leased and nobody needs them")
        last = cluster.client("last")
        for name in list(cluster.controller.state.partitions):
            last.clear_partition(name)
        last.close()
        cluster.advance(5.0)
        cluster.check()
        left = sum(unit.table.leased for unit in cluster.units)
        if left:
            raise LedgerError(f"{left} bytes are leased when all is cleared and all have gone")


def run(seed: int, kinds: dict[str, int] | None = None, scenario: str | None = None) -> Run:
    """The run of this seed, through. Raises what it raised."""
    folder = Path(tempfile.mkdtemp(prefix="tq-chaos-"))
    try:
        one = Run(seed, folder / "arena", kinds, scenario)
        try:
            one.run()
        finally:
            one.cluster.close()
        return one
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay(seed: int) -> str:
    """The command that runs a seed again."""
    return f"python -m transfer_queue.testing.chaos --seed {seed}"


def run_all(seeds: Iterable[int]) -> tuple[int, int, Counter[str]] | int:
    """(runs, values read, faults) of these seeds; or the first that failed, which has been told."""
    happened: Counter[str] = Counter()
    runs = reads = 0
    for seed in seeds:
        try:
            one = run(seed)
        except Exception:
            print(f"{traceback.format_exc()}seed {seed} failed; to replay it:\n    {replay(seed)}", flush=True)
            return seed
        happened.update(one.faults.happened)
        runs += 1
        reads += one.ledger.reads
    return runs, reads, happened


def main() -> int:
    """The exit code: 1 where a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", default="0..200", help="runs from the first to before the second")
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("..")
    seeds = range(int(first), int(last)) if given.seed is None else range(given.seed, given.seed + 1)
    torch.set_num_threads(1)
    parts = [seeds[at : at + PART] for at in range(0, len(seeds), PART)]
    runs, reads, happened = 0, 0, Counter[str]()
    with multiprocessing.get_context("spawn").Pool(given.processes) if given.processes > 1 else nullcontext() as pool:
        for outcome in map(run_all, parts) if pool is None else pool.imap_unordered(run_all, parts):
            if isinstance(outcome, int):
                return 1
            runs, reads = runs + outcome[0], reads + outcome[1]
            happened += outcome[2]
    print(f"{runs} seeds held; {reads} values read; faults: {dict(sorted(happened.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
