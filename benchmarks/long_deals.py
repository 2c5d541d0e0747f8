"""How long a big balanced deal holds up the controller's loop, with and without work off the loop.

    python benchmarks/long_deals.py [--groups 8192] [--ranks 128] [--size 1 8]

Prints for each group size the longest event of the core in milliseconds: with the deal in the loop, and with the deal
as work; and how long the work itself took, all in CPU time. Publishing the rows is not among the events measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time

import numpy as np

from transfer_queue.core import claims
from transfer_queue.core.controller import Controller
from transfer_queue.core.effects import Effect, Work
from transfer_queue.messages import AnyRequest, Claim, Envelope, FieldSpec, NewBlock, Publish, RegisterUnit
from transfer_queue.sampler import SeqlenBalancedSampler

PUT = 4096
SCHEMA = [FieldSpec("x", "tensor", "float32", 1, False)]
DIMS = np.array([128], "<i8").tobytes()


class System:
    """A controller full of tagged rows. longest: of its events since the last put, in seconds; work: of the work."""

    def __init__(self, rows: int, size: int, ranks: int) -> None:
        self.controller = Controller(SeqlenBalancedSampler(size, ranks))
        self.sequence = 0
        self.longest = self.work = 0.0
        self.ask(RegisterUnit("unit", "/arena"))
        draw = random.Random(0)
        for start in range(0, rows, PUT):
            count = min(PUT, rows - start)
            tags = [{"total_lengths": draw.randint(100, 8000)} for _ in range(count)]
            block = NewBlock(0, 1, start * 512, 1, count * 512, count, SCHEMA, DIMS)
            self.ask(Publish("p", count, block=block, tags=tags, pre_allocate=0))
        gc.collect()
        self.longest = 0.0

    def ask(self, request: AnyRequest) -> None:
        """One request, and the work that comes of it."""
        self.sequence += 1
        envelope = Envelope(self.sequence, self.sequence - 1, request)
        begin = time.thread_time()
        effects = self.controller.handle("client", 1, envelope, 0.0)
        self.took(begin)
        self.carry_out(effects)

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Work):
                begin = time.thread_time()
                outcome = effect.run()
                self.work = time.thread_time() - begin
                begin = time.thread_time()
                more = self.controller.worked(effect.number, outcome, 0.0)
                self.took(begin)
                self.carry_out(more)

    def took(self, begin: float) -> None:
        self.longest = max(self.longest, time.thread_time() - begin)


def measure(groups: int, ranks: int, size: int, long: int) -> tuple[float, float]:
    """(the longest event, the work) in milliseconds of a deal of all groups; best of three."""
    claims.LONG = long
    best = (float("inf"), 0.0)
    for _ in range(3):
        system = System(groups * size, size, ranks)
        sampling = {"dp_rank": 0, "batch_index": 0}
        partition = system.controller.state.partitions["p"]
        partition.ready_set("t", ("x",)).whole_groups(size, partition.groups)  # as by earlier claims
        system.longest = 0.0
        system.ask(Claim("p", "t", ["x"], groups * size // ranks, sampling, 10.0))
        best = min(best, (system.longest * 1e3, system.work * 1e3))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--size", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    normal = claims.LONG
    figures = {}
    for size in options.size:
        inside, _ = measure(options.groups, options.ranks, size, 1 << 60)
        longest, work = measure(options.groups, options.ranks, size, normal)
        figures[size] = {"in the loop": inside, "as work": longest, "the work": work}
        print(f"groups of {size}: in the loop {inside:.1f} ms; as work {longest:.1f} ms, the work {work:.1f} ms")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
