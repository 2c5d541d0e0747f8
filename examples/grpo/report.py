"""Writes the results of a run: report.json with all figures, report.png with reward and timeline."""

from __future__ import annotations

import json
import os
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from figures import Figures

STAGES = {"rollout": "#4477aa", "reference": "#ccbb44", "reward": "#aa3377", "train": "#228833", "update": "#66ccee"}


def summary(
    figures: Figures, after: float, seconds: dict[str, float], killed: list[str], redone: int
) -> dict[str, Any]:
    """Return all figures of a run, as JSON values."""
    settings, wall, busy, cpu = figures.settings, figures.wall(), figures.seconds("busy"), figures.seconds("cpu")
    before, lengths = figures.warmup_accuracy, figures.answer_lengths
    updates = [event for event in figures.events if event["stage"] == "update" and "kl" in event]
    return {
        "held_out_accuracy": {"before": before, "after": after, "gain_points": 100 * (after - before)},
        "settings": {
            name: value if isinstance(value, (int, float, bool)) else str(value)
            for name, value in vars(settings).items()
        },
        "cores": os.cpu_count(),
        "seconds": seconds,
        "warmup_steps": figures.warmup_steps,
        "steps": figures.version,
        "samples_trained_on": figures.trained,
        "samples_per_second": figures.trained / wall if wall else 0.0,
        "busy_seconds": busy,
        "cpu_seconds": cpu,
        "busy_over_wall": sum(busy.values()) / wall if wall else 0.0,
        "cpu_over_wall": sum(cpu.values()) / wall if wall else 0.0,
        "staleness_histogram": {str(lag): figures.staleness[lag] for lag in sorted(figures.staleness)},
        "token_imbalance": figures.imbalance(),
        "answer_lengths": {str(length): lengths[length] for length in sorted(lengths)},
        "answer_length_ratio": max(lengths) / min(lengths) if lengths else 0.0,
        "killed_workers": killed,
        "prompts_put_again": redone,
        "reward_by_step": figures.by_step(figures.rewards),
        "sampled_right_by_step": figures.by_step(figures.correct),
        "divergence_from_reference_by_step": [event["kl"] for event in updates],
        "clipped_share_by_step": [event["clipped"] for event in updates],
    }


def write(figures: Figures, figures_summary: dict[str, Any]) -> None:
    """Write report.json and report.png into the folder of the run."""
    out = figures.settings.out
    (out / "report.json").write_text(json.dumps(figures_summary, indent=2) + "\n")
    draw(figures, figures_summary)


def draw(figures: Figures, figures_summary: dict[str, Any]) -> None:
    """Draw the reward curve, the timeline of the whole run, and a few seconds of it in detail."""
    accuracy = figures_summary["held_out_accuracy"]
    canvas = Figure(figsize=(11, 10), layout="constrained")
    curve, whole, close = canvas.subplots(3, 1, height_ratios=[3, 2, 2])
    steps = range(1, len(figures_summary["reward_by_step"]) + 1)
    curve.plot(steps, figures_summary["reward_by_step"], label="reward (share of right running sums)", color="#4477aa")
    curve.plot(steps, figures_summary["sampled_right_by_step"], label="sampled answers all right", color="#ee6677")
    curve.set(xlabel="step", ylim=(0, 1))
    curve.set_title(
        f"Held-out accuracy {accuracy['before']:.1%} before, {accuracy['after']:.1%} after GRPO", loc="left"
    )
    curve.legend(loc="upper left", frameon=False)
    curve.xaxis.get_major_locator().set_params(integer=True)
    curve.grid(alpha=0.3)
    start, wall = min((event["start"] for event in figures.events), default=0.0), figures.wall()
    middle = min(wall / 2, max(wall - 3.0, 0.0))
    for axes, (left, right) in ((whole, (0.0, wall)), (close, (middle, min(middle + 3.0, wall)))):
        timeline(axes, figures, start, left, right)
    whole.set_title(f"Processes at work: {figures_summary['busy_over_wall']:.1f} on average", loc="left")
    close.set_title("Three seconds of it", loc="left")
    patches = [Patch(color=colour, label=stage) for stage, colour in STAGES.items()]
    close.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(STAGES), frameon=False)
    canvas.savefig(figures.settings.out / "report.png", dpi=110)


def timeline(axes: Any, figures: Figures, start: float, left: float, right: float) -> None:
    """Draw a row for each process, with a bar for each piece of its work between two times (seconds after `start`)."""
    workers = sorted({event["worker"] for event in figures.events}, reverse=True)
    for row, worker in enumerate(workers):
        for stage, colour in STAGES.items():
            bars = [
                (event["start"] - start, event["end"] - event["start"])
                for event in figures.events
                if event["worker"] == worker
                and event["stage"] == stage
                and event["end"] - start > left
                and event["start"] - start < right
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), color=colour, linewidth=0)
    axes.set(yticks=range(len(workers)), yticklabels=workers, xlim=(left, right), xlabel="seconds")
