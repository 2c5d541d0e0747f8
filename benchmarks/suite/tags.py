"""What do keys and tags add to a put, and what do updates, reads and searches of tags cost?

Each round does all of them in turn, with new keys. `client.put` of the same values is the reference of the puts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness.machine import clocked
from benchmarks.harness.report import Row, Scale, against, compared
from benchmarks.harness.systems import System, system
from transfer_queue import interface as tq

QUESTION = "What do keys and tags add to a put, and what do updates and reads of tags cost?"
NOTE = """Every row gets a number and one of few texts. The dicts of tags are made before the clock starts."""
GOALS = {"put with keys and two tags": 8.0, "update of two tags": 4.0}  # ms, for 8,192 rows
PUT = "client.put"


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    rows = []
    with system() as queue:
        for count, fields, width, rounds in scale.pick(
            [(8192, 5, 128, 15), (64, 3, 16, 200), (1, 3, 16, 500)], [(64, 3, 16, 2), (1, 3, 16, 2)]
        ):
            measured = _Measured(queue, count, fields, width)
            for number in range(rounds):
                measured.round(number)
            rows += measured.rows()
    return rows


class _Measured:
    """The durations of operations of one size."""

    def __init__(self, queue: System, count: int, fields: int, width: int) -> None:
        self.queue, self.count, self.what = queue, count, f"{count:,} row{'s' * (count > 1)} x {fields} x {width}"
        self.values = {f"f{i}": torch.zeros(count, width) for i in range(fields)}
        self.took: dict[str, list[float]] = {}
        self.served: dict[str, list[float]] = {}

    def round(self, number: int) -> None:
        """Do each operation once, with other values."""
        client, names = tq.get_client(), range(self.count)
        values = TensorDict({name: column + number for name, column in self.values.items()}, batch_size=self.count)
        keys = [f"sample-{number}-{i}" for i in names]
        first, then = ([{"n": i, "status": status} for i in names] for status in ("running", "done"))
        self._do(PUT, client.put, values, partition_id="put")
        self._do("put with keys", client.kv_batch_put, keys, "keys", values)
        self._do("put with keys and empty tags", client.kv_batch_put, keys, "empty", values, [{} for _ in names])
        self._do("put with keys and two tags", client.kv_batch_put, keys, "tags", values, first)
        updated = self._do("update of two tags", client.kv_batch_put, keys, "tags", tags=then)
        if updated.tags != then or client.kv_list("tags")["tags"] != dict(zip(keys, then, strict=True)):
            raise AssertionError("the tags of a get differ from those of the put")
        self._do("metadata by keys", client.kv_retrieve_meta, keys, "tags")
        self._do("kv_list", client.kv_list, "tags")
        listed = self._do("kv_list of the one with a tag", client.kv_list, "tags", where={"n": 0})
        if listed != {"tags": {keys[0]: then[0]}}:
            raise AssertionError(f"kv_list of the one with a tag returned {str(listed)[:100]}")
        for partition in ("put", "keys", "empty", "tags"):
            client.clear_partition(partition)

    def _do(self, what: str, act: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        served, results = self.queue.cpu(), []
        self.took.setdefault(what, []).append(clocked(lambda: results.append(act(*arguments, **named))) * 1e3)
        self.served.setdefault(what, []).append((self.queue.cpu() - served) * 1e3)
        return results[0]

    def rows(self) -> list[Row]:
        """Return the rows of the report."""
        rows = []
        for what, took in self.took.items():
            more = {"best_ms": min(took), "servers_cpu_ms": statistics.fmean(self.served[what])}
            name, target = f"{what}, {self.what}", GOALS.get(what) if self.count == 8192 else None
            if what == PUT:
                rows.append(against(name, "ms", statistics.median(took), statistics.median(took), PUT, more=more))
            else:
                rows.append(compared(name, "ms", took, self.took[PUT], PUT, more=more, target=target))
        return rows
