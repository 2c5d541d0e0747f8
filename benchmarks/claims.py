"""What the controller's core costs: claims in large partitions, publishes beside ready sets, a thousand waiting ranks.

    python benchmarks/claims.py [--rows 1000 100000 1000000] [--rounds 5]

Prints a table in microseconds for one `Controller.handle`, and one line of JSON. No process, no socket.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from itertools import count, product

import numpy as np

from transfer_queue.core.controller import Controller
from transfer_queue.core.effects import Effect
from transfer_queue.core.records import Dealt
from transfer_queue.messages import AnyRequest, Claim, Envelope, FieldSpec, NewBlock, Publish, RegisterUnit
from transfer_queue.sampler import BaseSampler, RankAwareSampler, SequentialSampler

BATCH = 32
TASKS = [f"task{number}" for number in range(5)]
FIELD_SETS = [("x",), ("y",), ("x", "y"), ("x", "y", "z")]
SCHEMA = [FieldSpec(name, "tensor", "float32", 1, False) for name in ("x", "y", "z")]
DIMS = np.array([128, 128, 1], "<i8").tobytes()
RANKS = 1024


class System:
    """A controller with one unit and a client; `timed` gives what one request took."""

    def __init__(self, sampler: BaseSampler) -> None:
        self.controller = Controller(sampler)
        self.sequence = 0
        self.offset = 0
        self.send(RegisterUnit("unit", "arena"), "unit")

    def send(self, request: AnyRequest, client: str = "client") -> tuple[float, list[Effect]]:
        """Seconds, and effects."""
        self.sequence += 1
        envelope = Envelope(self.sequence, self.sequence - 1, request)
        began = time.perf_counter()
        effects = self.controller.handle(client, 1, envelope, 0.0)
        took = time.perf_counter() - began
        self.controller.take_records()
        return took, effects

    def publish(self, rows: int) -> tuple[float, list[Effect]]:
        """A put of new rows with all fields."""
        self.offset += 64
        block = NewBlock(0, self.offset, self.offset, 1, 1028 * rows, rows, SCHEMA, DIMS)
        return self.send(Publish("p", rows, block=block, pre_allocate=0))

    def claim(self, task: str = TASKS[0], fields: tuple[str, ...] = ("x", "y", "z"), **more: object) -> Claim:
        return Claim("p", task, list(fields), BATCH, **more)  # type: ignore[arg-type]

    def ready_sets(self, number: int) -> None:
        """Has so many ready sets built, for five tasks, by claims that get nothing."""
        for task, fields in list(product(TASKS, FIELD_SETS))[:number]:
            self.controller.state.partitions["p"].ready_set(task, fields)

    def consume(self, rows: np.ndarray) -> None:
        """The first task has consumed these rows."""
        for part in np.array_split(rows, max(1, len(rows) // 100_000)):
            self.controller.state.apply(Dealt("p", TASKS[0], None, BATCH, [], part.astype("<i8").tobytes()))


def patterns(rows: int) -> Iterator[tuple[str, np.ndarray]]:
    """Name, and what is consumed: every other row; and all but every other of the last 512."""
    every = np.arange(rows)
    yield "every other row consumed", every[::2]
    yield "ready rows at the far end", every[(every % 2 == 0) | (every < rows - 512)]


def claims(rows: int, rounds: int) -> dict[str, float]:
    """Pattern -> microseconds for a claim of 32 rows beside 20 ready sets."""
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, consumed in patterns(rows):
            system = System(SequentialSampler())
            system.publish(rows)
            system.consume(consumed)
            system.ready_sets(20)
            took = [system.send(system.claim())[0] for _ in range(7)]
            found.setdefault(name, []).extend(took[1:])
    return {name: statistics.median(took) * 1e6 for name, took in found.items()}


def publishes(ready_sets: int) -> float:
    """Microseconds for a put of one row."""
    system = System(SequentialSampler())
    system.publish(1000)
    system.ready_sets(ready_sets)
    return statistics.median(system.publish(1)[0] for _ in range(2000)) * 1e6


def parked() -> System:
    """A thousand ranks wait, each for its own batch."""
    system = System(RankAwareSampler())
    system.publish(1)
    for rank in range(RANKS):
        sampling = {"dp_rank": rank, "batch_index": 0}
        system.send(system.claim(sampling=sampling, wait=60.0), f"rank{rank}")
    assert len(system.controller.state.waiting.by_waiter) == RANKS
    return system


def wakes() -> dict[str, float]:
    """Microseconds: a put that completes nobody's batch, one that completes one, all at once by one (a rank)."""
    system = parked()
    idle = statistics.median(system.publish(1)[0] for _ in range(BATCH - 2)) * 1e6
    own = []
    for number in count():
        took, effects = system.publish(BATCH)
        assert len(effects) == 2, effects
        own.append(took)
        if number == RANKS // 2:
            break
    system = parked()
    took, effects = system.publish(RANKS * BATCH)
    assert len(effects) == RANKS + 1
    return {"put that wakes nobody": idle, "put that wakes one": statistics.median(own) * 1e6,
            "put that wakes all, a rank": took / RANKS * 1e6}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gc.disable()
    claims(options.rows[0], 1)  # warms up
    by_rows = {rows: claims(rows, options.rounds) for rows in options.rows}
    base = by_rows[options.rows[0]]
    print(f"{f'claim of {BATCH} rows, 20 ready sets':38}{'rows':>10}{'us':>9}{'ratio':>8}")
    for name in base:
        for rows, found in by_rows.items():
            print(f"{name:38}{rows:>10}{found[name]:>9.1f}{found[name] / base[name]:>8.2f}")
    puts = {number: publishes(number) for number in (0, 20)}
    for number, took in puts.items():
        print(f"{f'put of one row, {number} ready sets':48}{took:>9.1f}")
    woken = wakes()
    for name, took in woken.items():
        print(f"{f'{RANKS} ranks wait: {name}':48}{took:>9.1f}")
    figures = {"claims": by_rows, "puts": puts, "wakes": woken}
    print(json.dumps({"benchmark": "claims", "unit": "us", **figures}, default=float))


if __name__ == "__main__":
    main()
