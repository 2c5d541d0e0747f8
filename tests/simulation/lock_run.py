"""Runs with faults of clients that update counters and lock keys; every result is checked for linearizability.

    python -m tests.simulation.lock_run --seeds 0..200 [--takeovers]

Updaters increment one counter with `kv_update`. Lockers lock some keys, read the counter under each of them, wait, and
put the incremented counter with the token of the lock. A client may be killed, frozen or separated at any moment, and
servers are killed and stopped. A counter shows every mistake: an increment that was lost or happened twice leaves two
increments from the same value, or a value that no increment has made.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.simulation.fault_injector import Faults
from tests.simulation.faulty_cluster import FaultyCluster
from tests.simulation.ledger import LedgerError
from tests.simulation.retrying_client import RetryingClient, Script, sleep
from tests.simulation.takeover_cluster import TakeoverCluster
from transfer_queue.client.attachment import UNCERTAIN
from transfer_queue.errors import InvalidArgumentError, LockLostError, TransferQueueError, WaitTimeoutError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call, Operation
from transfer_queue.testing.simulated_client import Task

MIB = 1 << 20
PLACE = "counters"
UPDATED = "updated"
GUARDED = ("x", "y", "z")
SECONDS = 6.0  # of virtual time in which faults happen
PATIENCE = 600.0  # seconds of virtual time until all clients have finished after the faults
KINDS = {
    "break": 6, "slow": 4, "part": 3, "freeze": 6, "tear": 3, "late": 3, "kill_one": 5, "stop": 2, "controller": 6,
    "unit": 2, "both": 1, "system": 1,
}  # fmt: skip

TAKEOVER_KINDS = {**KINDS, "pause": 5, "cut": 2, "claim": 5, "takeover": 10}

Values = dict[str, Any]


@dataclass(eq=False)
class Increment:
    """One increment of a counter as its client saw it.

    began, ended: times. before: the value from which it counted; None before it has read one. token: of the lock.
    acknowledged: it certainly happened. refused: it certainly did not happen. Otherwise it may have happened.
    """

    key: str
    began: float
    before: int | None = None
    token: int = 0
    ended: float = float("inf")
    acknowledged: bool = False
    refused: bool = False


@dataclass
class History:
    """The increments of all counters."""

    increments: list[Increment] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)

    def begin(self, key: str, now: float) -> Increment:
        """Begin an increment."""
        self.increments.append(Increment(key, now))
        return self.increments[-1]

    def check(self, final: dict[str, int]) -> None:
        """Raise LedgerError unless the increments of each counter can have happened one after the other.

        final: The values of the counters at the end.
        """
        for key in {increment.key for increment in self.increments}:
            self._check(key, [each for each in self.increments if each.key == key], final.get(key, 0))

    def _check(self, key: str, increments: list[Increment], final: int) -> None:
        sure = [each for each in increments if each.acknowledged]
        maybe = Counter(each.before for each in increments if not each.acknowledged and not each.refused)
        self.happened.update(increments=len(sure), refused=sum(each.refused for each in increments))
        from_value = Counter(each.before for each in sure)
        twice = [value for value, count in from_value.items() if count > 1]
        if twice:
            raise LedgerError(f"{key}: two acknowledged increments counted from {twice}: one was lost")
        beyond = [value for value in from_value if value is None or not 0 <= value < final]
        if beyond:
            raise LedgerError(f"{key}: acknowledged increments counted from {beyond}, but the counter ends at {final}")
        unexplained = [value for value in range(final) if not from_value[value] and not maybe[value]]
        if unexplained:
            raise LedgerError(f"{key}: no increment counted from {unexplained}, and the counter ends at {final}")
        ordered = sorted(sure, key=lambda each: each.before or 0)
        latest = float("-inf")
        for each in ordered:  # none may end before one that it follows has begun
            if each.ended < latest:
                raise LedgerError(f"{key}: the increment from {each.before} ended before an earlier one began")
            latest = max(latest, each.began)
        tokens = [each.token for each in ordered]
        if tokens != sorted(tokens):
            raise LedgerError(f"{key}: increments under locks happened in another order than the locks: {tokens}")


class LockRun:
    """One run. `fenced`: whether lockers put with the token of their lock; otherwise a run finds mistakes."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        kinds: dict[str, int] | None = None,
        *,
        fenced: bool = True,
        takeovers: bool = False,
    ) -> None:
        self.seed = seed
        self.fenced = fenced
        self.draw = draw = random.Random(seed)
        self.history = History()
        self.cluster = (TakeoverCluster if takeovers else FaultyCluster)(
            folder, seed, arena_bytes=MIB, snapshot_every=draw.choice([20, 60, 200, 100_000])
        )
        all_kinds = TAKEOVER_KINDS if takeovers else KINDS
        self.faults = Faults(self.cluster, draw, kinds or all_kinds, self.kill)
        self.closing = False
        self._running: dict[str, tuple[Script, Task[None]]] = {}
        self._born = 0

    def run(self) -> None:
        """Run it. Raises AssertionError if an expectation is violated."""
        cluster = self.cluster
        for _ in range(self.draw.randint(2, 4)):
            self.role("updater", self._update)
            self.role("locker", self._lock)
        self.faults.carry_out(SECONDS, PATIENCE, self._close, self._done)
        cluster.advance(60.0)  # until the leases of killed clients have ended
        cluster.check()
        self._settle()

    def _settle(self) -> None:
        auditor = self.cluster.client("auditor")
        if auditor.kv_lock_list():
            raise LedgerError(f"locks are left after all clients have ended: {auditor.kv_lock_list()}")
        keys = auditor.kv_list(PLACE).get(PLACE, {})
        final = {key: count_of(auditor.kv_batch_get(key, PLACE)["n"][0]) for key in keys}
        auditor.close()
        self.history.check(final)
        self.history.happened.update(self.faults.happened)
        if isinstance(self.cluster, TakeoverCluster):
            self.history.happened.update(terms=len(self.cluster.hosts) - 1)

    # ------------------------------------------------------------ clients

    def role(self, name: str, script: Script) -> None:
        """Start a client that runs a script and then leaves."""
        self._born += 1
        client = self.cluster.client(f"{name}-{self._born}")
        self._running[client.name] = script, client.start(self._life(client, script))

    def _life(self, client: RetryingClient, script: Script) -> Generator[Call, AnyReply, None]:
        yield from sleep(self.draw.uniform(0, 0.2))
        while not self.closing:
            yield from script(client)
            yield from sleep(self.draw.choice([0.0, self.draw.uniform(0, 0.3)]))
        with contextlib.suppress(TransferQueueError):
            yield from client.leave()

    def kill(self, client: RetryingClient) -> None:
        """Kill a client; another one takes its place."""
        found = self._running.pop(client.name, None)
        if found is not None:
            client.die()
            if not found[1].done:
                self.role(client.name.split("-")[0], found[0])

    def _close(self) -> None:
        self.closing = True

    def _done(self) -> bool:
        for _, task in self._running.values():
            if task.error is not None:
                raise task.error
        return all(task.done for _, task in self._running.values())

    def _update(self, client: RetryingClient) -> Operation[None]:
        """Increment a counter with `kv_update`."""
        increment = self.history.begin(UPDATED, self.cluster.clock.now)

        def more(values: Values) -> Values:
            increment.before = count_of(values["n"])
            return {"n": torch.tensor([increment.before + 1])}

        zero = {"n": torch.tensor([0])}
        with self._outcome_noted(increment):
            yield from client.operations.kv_update(UPDATED, PLACE, "n", more, empty=zero, timeout=20.0)

    def _lock(self, client: RetryingClient) -> Operation[None]:
        """Lock some keys, and increment the counter of each with a get and a put."""
        keys = self.draw.sample(GUARDED, self.draw.randint(1, len(GUARDED)))
        operations = client.operations
        try:
            lease = yield from operations._take_lock(keys, PLACE, self.draw.choice([1.0, 30.0]), 1.0)
        except TransferQueueError:
            return
        for key in keys:
            increment = self.history.begin(key, self.cluster.clock.now)
            increment.token = lease.token
            with self._outcome_noted(increment):
                yield from self._increment(client, increment)
        with contextlib.suppress(TransferQueueError):
            yield from operations._release_lock(lease)

    @contextlib.contextmanager
    def _outcome_noted(self, increment: Increment) -> Iterator[None]:
        """Note whether the increment that the block makes happened. Suppresses the errors of the block."""
        try:
            yield
        except LockLostError:
            increment.refused = True
            self.history.happened["fenced"] += 1
        except WaitTimeoutError as error:
            increment.refused = "other clients changed" in str(error)
        except UNCERTAIN:
            pass
        except TransferQueueError:
            increment.refused = True
        else:
            increment.acknowledged, increment.ended = True, self.cluster.clock.now

    def _increment(self, client: RetryingClient, increment: Increment) -> Operation[None]:
        try:
            data = yield from client.operations.kv_batch_get(increment.key, PLACE)
            before = count_of(data["n"][0])
        except InvalidArgumentError:  # not found: the first increment creates the key
            before = 0
        yield from sleep(self.draw.choice([0.0, self.draw.uniform(0, 0.5)]))
        increment.before = before
        fence = increment.token if self.fenced else None
        yield from client.operations.kv_put(
            increment.key, PLACE, {"n": torch.tensor([increment.before + 1])}, fence=fence
        )


def count_of(value: torch.Tensor) -> int:
    """The number in a value."""
    return int(value.reshape(-1)[0])


def run(seed: int, kinds: dict[str, int] | None = None, *, fenced: bool = True, takeovers: bool = False) -> LockRun:
    """Run this seed to its end, and return the run. Raises the error of the run."""
    folder = Path(tempfile.mkdtemp(prefix="tq-locks-"))
    try:
        one = LockRun(seed, folder / "arena", kinds, fenced=fenced, takeovers=takeovers)
        try:
            one.run()
        finally:
            one.cluster.close()
        return one
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replay(seed: int, takeovers: bool = False) -> str:
    """Return the command that runs a seed again."""
    return f"python -m tests.simulation.lock_run{' --takeovers' if takeovers else ''} --seed {seed}"


def main() -> int:
    """Run the seeds of the command line. Return the exit code: 1 if a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="one run")
    parser.add_argument("--seeds", default="0..200", help="runs from the first to before the second")
    parser.add_argument("--takeovers", action="store_true", help="runs in which other nodes take the controller over")
    given = parser.parse_args()
    first, _, last = given.seeds.partition("..")
    seeds = range(int(first), int(last)) if given.seed is None else range(given.seed, given.seed + 1)
    if not seeds:
        parser.error(f"--seeds {given.seeds} contains no seed; the first must be less than the second")
    torch.set_num_threads(1)
    happened: Counter[str] = Counter()
    for seed in seeds:
        try:
            happened += run(seed, takeovers=given.takeovers).history.happened
        except Exception:
            print(f"to replay it:\n    {replay(seed, given.takeovers)}", flush=True)
            raise
    print(f"{len(seeds)} seeds passed; {dict(sorted(happened.items()))}")
    return 0


if __name__ == "__main__":
    logging.getLogger("transfer_queue.node").setLevel(logging.CRITICAL)  # controllers report the end of their term
    sys.exit(main())
