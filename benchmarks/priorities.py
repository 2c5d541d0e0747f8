"""What a claim of 32 rows costs by priority and freshness, among a thousand to a million ready rows.

    python benchmarks/priorities.py [--rows 1000 100000 1000000] [--rounds 30]

Prints a table in microseconds for one `Controller.handle` (median over the rounds), beside it what a put of 4096
tagged rows costs, and one line of JSON. No process, no socket.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import numpy as np
from claims import DIMS, SCHEMA, System

from transfer_queue.messages import NewBlock, Publish
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    SequentialSampler,
)

CHUNK = 4096
# name -> (sampler, how many priorities there are; 0: as many as rows)
CASES: dict[str, tuple[Callable[[], BaseSampler], int]] = {
    "in order": (SequentialSampler, 0),
    "by priority, all different": (PrioritySampler, 0),
    "by priority, 3 levels": (PrioritySampler, 3),
    "groups of 8": (lambda: GRPOGroupNSampler(8), 0),
    "groups by priority": (lambda: PrioritySampler(inner=GRPOGroupNSampler(8)), 0),
    "fresh groups by priority": (lambda: FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler(8)), 2), 0),
}


def run(sampler: BaseSampler, levels: int, rows: int, rounds: int) -> tuple[float, float, float]:
    """Microseconds of the first claim, of a later one, and of a put."""
    system = System(sampler)
    generator = np.random.default_rng(0)
    puts, claims = [], []
    for first in range(0, rows, CHUNK):
        count = min(CHUNK, rows - first)
        values = generator.integers(0, levels, count) if levels else generator.random(count)
        tags = [{"priority": value, "policy_version": 1} for value in values.tolist()]
        system.offset += 64
        block = NewBlock(0, system.offset, system.offset, 1, 1028 * count, count, SCHEMA, DIMS)
        puts.append(system.send(Publish("p", count, block=block, tags=tags, pre_allocate=0))[0])
    for _ in range(min(rounds, rows // 32 - 1) + 1):
        took, effects = system.send(system.claim())
        assert len(effects[0].reply.rows) == 32 * 8  # type: ignore[union-attr]
        claims.append(took)
    return claims[0] * 1e6, statistics.median(claims[1:]) * 1e6, statistics.median(puts) * 1e6


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, nargs="*", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    results = {}
    print(f"{'':28} {'ready':>9} {'first us':>10} {'claim us':>10} {'put us':>10}")
    for name, (make, levels) in CASES.items():
        for rows in arguments.rows:
            first, claim, put = run(make(), levels, rows, arguments.rounds)
            results[f"{name} {rows}"] = [round(first), round(claim), round(put)]
            print(f"{name:28} {rows:9} {first:10.0f} {claim:10.0f} {put:10.0f}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
