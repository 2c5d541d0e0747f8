"""What does the journal cost small puts, and what does it cost that values outlive all processes, or the machine?

Systems of each level run at the same time and are measured in turn, so that other load of the machine affects all of
them equally. The levels of the journal are measured with small puts only.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.stages import Step
from benchmarks.harness.systems import Worker, own_folder, start_system
from benchmarks.suite.pipeline import measure_step
from transfer_queue import interface as tq

QUESTION = "What does each level of durability cost a put and a step of the pipeline?"
LEVELS = {
    "journal none": ("none", "none", "async"),
    "journal async": ("async", "none", "async"),
    "journal sync": ("sync", "none", "async"),
    "values none": ("async", "none", "async"),
    "values processes": ("async", "processes", "async"),
    "values machine, async": ("async", "machine", "async"),
    "values machine, sync": ("async", "machine", "sync"),
}
"""Level -> `controller.journal.durability`, `durability.values` and `durability.mode`."""
STEP = Step(prompts=16, group=8, micro_batches=4, ranks=1, rollout=2e-5, reward=1e-5, reference=1e-8, update=1e-8)
QUICK = Step(prompts=4, group=4, micro_batches=2, ranks=1, tokens=50, rollout=1e-5, reward=1e-5, update=1e-8)
STAGES = 4  # processes of a step: rollout, reward, reference and one rank
PAYLOAD = 64 << 20  # bytes of a large put


def puts(until: float) -> int:
    """Put until a point in time; return the number of puts. The last values are compared."""
    torch.set_num_threads(1)
    client = tq.get_client()
    mine = client.client_id
    count = 0
    while time.monotonic() < until:
        tq.kv_put(str(count), mine, {"x": torch.arange(4.0) + count}, tag={"n": count})
        count += 1
    if count and not torch.equal(tq.kv_batch_get(str(count - 1), mine)["x"].values(), torch.arange(4.0) + count - 1):
        raise AssertionError("the values of the get differ from those of the put")
    client.clear_partition(mine)
    return count


def put_large(nbytes: int) -> float:
    """Put a batch of 64 rows of this size in all, once; return the seconds. The values are compared."""
    torch.set_num_threads(1)
    client, rows = tq.get_client(), 64
    data = torch.arange(nbytes // 8).reshape(rows, -1)
    began = time.perf_counter()
    meta = client.put(TensorDict({"x": data}, [rows]), partition_id="large")
    took = time.perf_counter() - began
    if not torch.equal(client.get_data(meta, layout="dense")["x"], data):
        raise AssertionError("the values of the get differ from those of the put")
    client.clear_partition("large")
    return took


def clear(partition: str) -> None:
    """Clear a partition."""
    tq.get_client().clear_partition(partition)


def run(scale: Scale) -> list[Row]:
    """Measure small puts, large puts and steps in each round."""
    seconds, rounds, step, nbytes = scale.pick((0.4, 9, STEP, PAYLOAD), (0.1, 1, QUICK, 1 << 20))
    names = {
        "small": ("single-row puts", "a second"),
        "large": (f"a put of {nbytes >> 20} MiB", "ms"),
        "step": (f"a step of {step.prompts} prompts x {step.group}", "ms"),
    }
    found: dict[tuple[str, str], list[float]] = {}
    with own_folder() as folder, contextlib.ExitStack() as stack:
        levels = scale.pick(list(LEVELS), ["journal none", "values none", "values machine, sync"])
        teams = {level: _team(stack, level, Path(folder)) for level in levels}
        for round_ in range(rounds + 1):
            for level, team in teams.items():
                figures = {"small": team[0].do(puts, time.monotonic() + seconds) / seconds}
                if len(team) == STAGES:
                    figures["large"] = team[0].do(put_large, nbytes) * 1e3
                    figures["step"] = measure_step(step, round_, team) * 1e3
                    team[0].do(clear, f"step-{round_}")
                if round_:
                    for what, figure in figures.items():
                        found.setdefault((what, level), []).append(figure)
    rows = []
    for (what, level), ours in sorted(found.items()):
        (name, unit), reference = names[what], f"{level.split()[0]} none"
        rows.append(compared(f"{name}, {level}", unit, ours, found[what, reference], reference))
    return rows


def _team(stack: contextlib.ExitStack, level: str, folder: Path) -> list[Any]:
    """Start a system of this level; return the workers that are attached to it, one if it has only small puts."""
    journal, values, mode = LEVELS[level]
    name = level.replace(" ", "-").replace(",", "")
    conf = {
        "durability": {"values": values, "mode": mode, "folder": str(folder / f"kept-{name}")},
        "controller": {"sampler": "RankAwareSampler", "journal": {"durability": journal}},
    }
    running = start_system(name, conf)
    stack.callback(running.discard)
    stack.callback(running.stop)
    count = STAGES if level.startswith("values") else 1
    return [stack.enter_context(Worker(str(running.folder))) for _ in range(count)]
