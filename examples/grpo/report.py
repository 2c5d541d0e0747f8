"""Writes report.json with all figures, draws report.png with both timelines, and prints the last lines of a run."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table

from figures import WORKERS, Figures, counted
from settings import SANDBOXES
from view import cells, timelines

STAGES = {
    "rollout": "#3b6fb6", "sandbox": "#d9b8dd", "reward": "#8a2f8f", "reference": "#e0a92e", "train": "#2f8f57",
    "update": "#7cc7a1",
}  # fmt: skip
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
        "held_out_accuracy": [
            {"step": step, "seconds": seconds, "accuracy": share} for step, seconds, share in run.measured()
        ],
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
        "gain in points": [f"{100 * (run.accuracy - before):+.1f}" for run in runs],
        "mean staleness": [f"{run.mean_staleness():.2f}" for run in runs],
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
        console.print(gains(runs, before), style="bold green", highlight=False)
        console.print(HONEST, style="dim", highlight=False)


def headline(found: dict[str, Any]) -> str:
    """Return the result in one line."""
    idle = found["idle_share"]
    faster = found["times_faster"]
    speed = f"{faster:.1f} times faster" if faster >= 1 else f"{1 / faster:.1f} times slower"
    return f"{speed}, idle {idle['driver']:.0%} -> {idle['queue']:.0%}"


def gains(runs: list[Figures], before: float) -> str:
    """Return the accuracy of both runs in one line, and after how many steps it was measured."""
    accuracies = " and ".join(f"{run.accuracy:.1%}" for run in runs)
    steps = [counted(run.version) for run in runs]
    after = f"the same {steps[0]}" if len(set(steps)) == 1 else " and ".join(steps)
    return f"held-out accuracy after {after}: {accuracies}, from {before:.1%}"


def write(runs: list[Figures], found: dict[str, Any]) -> None:
    """Write report.json and report.png into the folder of the run."""
    out = runs[-1].settings.out
    (out / "report.json").write_text(json.dumps(found, indent=2) + "\n")
    draw(runs, found).savefig(out / "report.png", dpi=200)


def draw(runs: list[Figures], found: dict[str, Any]) -> Figure:
    """Draw some steps of both runs below each other, and beside them the held-out accuracy over the time of each run.

    The figure is readable at a width of 820 pixels, and its background is white also on a dark page.
    """
    with rc_context({"font.size": 9, "axes.titlesize": 9, "axes.linewidth": 0.6}):
        canvas = Figure(figsize=(8.2, 1.6 + 1.45 * len(runs)), layout="constrained", facecolor="white")
        halves: Any = canvas.subfigures(1, 2, width_ratios=[1.75, 1])
        left, right = halves
        both_timelines(left.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0], runs)
        names = {stage: f"{SANDBOXES} sandboxes" if stage == "sandbox" else stage for stage in STAGES}
        patches = [Patch(color=colour, label=names[stage]) for stage, colour in STAGES.items()]
        patches.append(Patch(color=WAITING, label="idle"))
        canvas.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, handlelength=1.2,
            columnspacing=1.4,
        )  # fmt: skip
        title = headline(found) if len(runs) > 1 else f"workers idle {runs[0].idle():.0%}"
        canvas.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        learning(right.subplots(), runs)
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


def learning(axes: Axes, runs: list[Figures]) -> None:
    """Draw the held-out accuracy over the time of each run."""
    for run, colour in zip(runs, ("#777777", "#2f8f57")[-len(runs) :], strict=True):
        _, seconds, shares = zip(*run.measured(), strict=True)
        percent = [100 * share for share in shares]
        axes.plot(seconds, percent, color=colour, linewidth=2, marker="o", markersize=3.5)
        label = f"{run.title.split(',')[0]}: {percent[0]:.0f}% -> {percent[-1]:.0f}%"
        axes.plot([], [], color=colour, linewidth=2, label=label)
    highest = 100 * max(share for run in runs for share in run.accuracies.values())
    axes.set(xlabel="seconds of training", ylim=(0, min(100, highest + 15)), xlim=(0, None))
    axes.yaxis.set_major_formatter("{x:.0f}%")
    steps = " and ".join(dict.fromkeys(counted(run.version) for run in runs))
    axes.set_title(f"Held-out accuracy over {steps}", loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
