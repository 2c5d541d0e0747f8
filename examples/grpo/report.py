"""Writes report.json with all figures and report.png with both timelines, and prints the last lines of a run."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from figures import WORKERS, Figures, counted, mean
from settings import SANDBOXES, TRAINER_RANKS
from view import cells, timelines

STAGES = {
    "rollout": "#3b6fb6", "sandbox": "#d9b8dd", "reward": "#8a2f8f", "reference": "#e0a92e", "train": "#2f8f57",
    "update": "#7cc7a1",
}  # fmt: skip
SMOOTH = 10
"""Steps over which the reward is averaged."""
WAITING = "#eeeeee"
DETAIL = 8.0
"""The seconds of the first run whose timelines the report shows; at least one step."""
RUNS = ("driver", "queue")
HONEST = (
    "No computation became faster: the queue fills the time in which a worker had to wait for another stage or for a "
    "sandbox, so the gain depends on how much of that there is (none may be left with --sandbox 0) and on free cores."
)


def summary(runs: list[Figures], before: float, seconds: float) -> dict[str, Any]:
    """Return all figures of both runs, as JSON values; with Ray there is only the second one."""
    by_name = dict(zip(RUNS[-len(runs) :], runs, strict=True))
    settings = runs[-1].settings
    found: dict[str, Any] = {
        "held_out_accuracy": {"before": before} | {name: run.accuracy for name, run in by_name.items()},
        "idle_share": {name: run.idle() for name, run in by_name.items()},
        "token_imbalance": runs[-1].imbalance(),
        "settings": {
            name: value if isinstance(value, (int, float, bool)) else str(value)
            for name, value in vars(settings).items()
        },
        "cores": os.cpu_count(),
        "seconds": seconds,
    }
    if len(runs) > 1:
        found["times_faster"] = runs[0].seconds_per_step() / runs[1].seconds_per_step()
    return found | {name: of_run(run) for name, run in by_name.items()}


def of_run(run: Figures) -> dict[str, Any]:
    """Return the figures of one run."""
    wall, busy, cpu, lengths = run.wall(), run.seconds("busy"), run.seconds("cpu"), run.answer_lengths
    updates = [event for event in run.events if event["stage"] == "update" and "kl" in event]
    return {
        "steps": run.version,
        "seconds": wall,
        "samples_trained_on": run.trained,
        "samples_per_second": run.trained / wall if wall else 0.0,
        "tokens_generated": run.tokens(),
        "busy_seconds": busy,
        "cpu_seconds": cpu,
        "busy_over_wall": sum(busy.values()) / wall if wall else 0.0,
        "cpu_over_wall": sum(cpu.values()) / wall if wall else 0.0,
        "staleness_histogram": {str(lag): run.staleness[lag] for lag in sorted(run.staleness)},
        "answer_lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "killed_workers": run.killed,
        "prompts_put_again": run.put_again,
        "reward_by_step": run.by_step(run.rewards),
        "sampled_right_by_step": run.by_step(run.correct),
        "divergence_from_reference_by_step": [event["kl"] for event in updates],
        "clipped_share_by_step": [event["clipped"] for event in updates],
    }


def show(runs: list[Figures], found: dict[str, Any], console: Console) -> None:
    """Print both runs side by side, and the difference."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column("")
    for run in runs:
        table.add_column(run.title.split(",")[0], justify="right")
    first, steps = typical_steps(runs)
    longest = max(run.moment(first + steps) - run.moment(first) for run in runs)
    for run in runs:
        start, end = run.moment(first), run.moment(first + steps)
        console.print(f"\n{run.title}: {counted(steps)} in {end - start:.1f} s", style="bold", highlight=False)
        console.print(timelines(run, start, end, max(1, round(cells(console) * (end - start) / longest))))
    console.print()
    before = found["held_out_accuracy"]["before"]
    rows = {
        "training": [f"{counted(run.version)} in {run.wall():.1f} s" for run in runs],
        "tokens generated": [f"{run.tokens():,}" for run in runs],
        "held-out accuracy": [f"{before:.1%} -> {run.accuracy:.1%}" for run in runs],
        "workers idle": [f"{run.idle():.0%}" for run in runs],
        "cores that the workers use": [f"{sum(run.seconds('cpu').values()) / run.wall():.2f}" for run in runs],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    console.print(table)
    imbalance = found["token_imbalance"]
    console.print(
        f"tokens of the fuller trainer rank above the mean: {imbalance['in_order']:.1%} dealt in order, "
        f"{imbalance['balanced']:.1%} balanced by the queue",
        highlight=False,
    )
    if len(runs) > 1:
        console.print(headline(found), style="bold green", highlight=False)
        console.print(HONEST, style="dim", highlight=False)


def headline(found: dict[str, Any]) -> str:
    """Return the result in one line."""
    idle = found["idle_share"]
    faster = found["times_faster"]
    speed = f"{faster:.1f} times faster" if faster >= 1 else f"{1 / faster:.1f} times slower"
    return f"{speed}, idle {idle['driver']:.0%} -> {idle['queue']:.0%}"


def write(runs: list[Figures], found: dict[str, Any]) -> None:
    """Write report.json and report.png into the folder of the run."""
    out = runs[-1].settings.out
    (out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(runs, found).savefig(out / "report.png", dpi=110)


def draw(runs: list[Figures], found: dict[str, Any]) -> Figure:
    """Draw some steps of both runs below each other, the reward over time, and the tokens of the trainer ranks."""
    canvas = Figure(figsize=(12, 4 + 2.6 * len(runs)), layout="constrained")
    rows: Any = canvas.subfigures(2, 1, height_ratios=[2.6 * len(runs) + 0.6, 3.2])
    both_timelines(rows[0].subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0], runs)
    names = {stage: f"{SANDBOXES} sandboxes" if stage == "sandbox" else stage for stage in STAGES}
    patches = [Patch(color=colour, label=names[stage]) for stage, colour in STAGES.items()]
    patches.append(Patch(color=WAITING, label="waiting"))
    rows[0].legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    title = headline(found) if len(runs) > 1 else f"workers idle {runs[0].idle():.0%}"
    rows[0].suptitle(title, x=0.01, ha="left", fontsize=20, fontweight="bold")
    left, right = rows[1].subplots(1, 2)
    learning(left, runs, found)
    tokens(right, runs[-1])
    return canvas


def both_timelines(all_axes: Any, runs: list[Figures]) -> None:
    """Draw the same steps of each run: a row for each worker, with its work and its waiting."""
    first, steps = typical_steps(runs)
    longest = 0.0
    for axes, run in zip(all_axes, runs, strict=True):
        start, end = run.moment(first), run.moment(first + steps)
        longest = max(longest, end - start)
        lanes(axes, run, start, end)
        axes.set_title(f"{run.title}: {counted(steps)} in {end - start:.1f} s", loc="left")
    all_axes[-1].set(xlim=(0, longest), xlabel=f"seconds since update {first} of {runs[-1].version}")


def typical_steps(runs: list[Figures]) -> tuple[int, int]:
    """Return the first step to show, and the number of steps: those with times nearest to the means of both runs."""
    count = min(run.version for run in runs)
    steps = max(1, min(count - 1, round(DETAIL / runs[0].seconds_per_step())))

    def deviation(first: int) -> float:
        seconds = [(run.moment(first + steps) - run.moment(first)) / steps for run in runs]
        return sum(abs(math.log(each / run.seconds_per_step())) for each, run in zip(seconds, runs, strict=True))

    return min(range(count - steps + 1), key=deviation), steps


def lanes(axes: Axes, run: Figures, start: float, end: float) -> None:
    """Draw the work of each worker between two moments."""
    pieces = [piece.within(start, end) for piece in run.pieces(start) if piece.start < end]
    for row, worker in enumerate(WORKERS):
        axes.broken_barh([(0, end - start)], (row - 0.4, 0.8), color=WAITING, linewidth=0)
        for stage, colour in STAGES.items():
            bars = [(p.start - start, p.end - p.start) for p in pieces if p.worker == worker and p.stage == stage]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axes.set_yticks(range(len(WORKERS)), WORKERS)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)


def learning(axes: Axes, runs: list[Figures], found: dict[str, Any]) -> None:
    """Draw the reward of the sampled answers over the time of the training, averaged over some steps."""
    before = found["held_out_accuracy"]["before"]
    for run, colour in zip(runs, ("#999999", "#2f8f57")[-len(runs) :], strict=True):
        start = min(event["start"] for event in run.events)
        ends = [run.moment(step + 1) - start for step in range(run.version)]
        rewards = run.by_step(run.rewards)[: len(ends)]
        smooth = [mean(rewards[max(0, step - SMOOTH) : step + 1]) for step in range(len(rewards))]
        label = f"{run.title}: held-out accuracy {before:.0%} -> {run.accuracy:.0%}"
        axes.plot(ends[: len(rewards)], smooth, color=colour, linewidth=2, label=label)
    axes.set(xlabel="seconds", ylim=(0, 1))
    axes.set_title("Reward: the share of right running sums", loc="left")
    axes.legend(loc="upper left", frameon=False, fontsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def tokens(axes: Any, run: Figures) -> None:
    """Draw by how much the rank with most tokens exceeds the mean in each step, dealt in order and balanced."""
    imbalance = run.imbalance()
    for dealt, colour, words in (("in_order", "#999999", "in order"), ("balanced", "#2f8f57", "balanced by the queue")):
        share = [100 * (max(ranks) * len(ranks) / sum(ranks) - 1) for ranks in run.rank_tokens()[dealt]]
        label = f"{words}: {imbalance[dealt]:.1%} on average"
        axes.plot(range(1, len(share) + 1), share, color=colour, marker=".", label=label)
    axes.set(xlabel="step", ylabel="%", ylim=(0, 1.3 * axes.get_ylim()[1]))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"Tokens of the fuller of {TRAINER_RANKS} trainer ranks above the mean", loc="left")
    axes.legend(loc="upper right", frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
