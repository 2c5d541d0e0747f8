"""What does a get cost whose values are views of the arena, with copy=False, beside one that copies?

288 MiB in 9 dense fields, whose values are summed. Copies and views are measured in turn. A view's first sum maps the
pages; a later one does not, because they stay mapped. The end of a view looks for pages that were written to.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness.machine import clocked
from benchmarks.harness.report import Row, Scale, against
from benchmarks.harness.systems import system
from transfer_queue import interface as tq

QUESTION = "What does a get without a copy cost?"
FIELDS = 9
ROWS, WIDTH = 1024, 8192

Times = dict[str, list[float]]


def run(scale: Scale) -> list[Row]:
    """Measure gets, sums and ends."""
    with system():
        times = _gets(scale.pick(15, 2), scale.pick(ROWS, 64))
    found = {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}
    copied = found["get copy"]
    return [
        Row("get of 288 MiB as copies", copied, "ms"),
        against("get of 288 MiB as views", "ms", found["get view"], copied, "copies", target=0.5),
        against("the end of these views", "ms", found["end view"], copied, "copies"),
        against("get as views, sum and end", "ms", found["all view"], found["all copy"], "copies"),
    ]


def _gets(rounds: int, rows: int) -> Times:
    """Return the seconds of gets in turn as copies and as views; of their ends; and of both with a sum between."""
    client = tq.get_client()
    columns = {f"f{number}": torch.full((rows, WIDTH), number, dtype=torch.int32) for number in range(FIELDS)}
    meta = client.put(TensorDict(columns, batch_size=[rows]), partition_id="p")
    times: Times = {f"{what} {how}": [] for what in ("get", "end", "all") for how in ("copy", "view")}
    for number in range(rounds + 1):
        for how in ("copy", "view"):
            held: list[Any] = []
            got = clocked(lambda: held.append(client.get_data(meta, layout="dense", copy=how == "copy")))  # noqa: B023
            worked = clocked(lambda: [int(column.sum()) for column in held[0].values()])  # noqa: B023
            if int(held[0]["f3"][-1, -1]) != 3:
                raise AssertionError("the values differ from those that were put")
            ended = clocked(held.clear)
            if number:  # the first round maps the pages
                times[f"get {how}"].append(got)
                times[f"end {how}"].append(ended)
                times[f"all {how}"].append(got + worked + ended)
    client.clear_partition("p")
    return times
