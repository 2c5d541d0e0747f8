"""An asynchronous GRPO training on the CPU that passes all its data through transfer_queue.

python examples/grpo/run.py            a supervised warm-up, then GRPO: three to four minutes on two cores
python examples/grpo/run.py --control  the same with shuffled advantages, which must not learn
python examples/grpo/run.py --smoke    a short run of all parts, in less than 40 seconds
python examples/grpo/run.py --runtime ray   any of these with the roles as Ray actors; RAY_ADDRESS names a cluster
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import transfer_queue as tq
from omegaconf import OmegaConf

import task
from events import drain
from figures import Figures
from model import Transformer, load
from processes import Processes, Roles, WorkerError
from prompts import PromptSource
from rollout import rollout
from sampling import accuracy
from scoring import reference, reward
from settings import ANSWERS, PROMPTS, ROLLOUT_WORKERS, TRAINER_RANKS, WEIGHTS, Settings
from trainer import trainer
from warmup import held_out

try:
    from rich.console import Console

    import report
    from view import View
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install '.[demo]' in the repository") from None

TICK = 0.05
"""Seconds between two checks of the events and the processes."""
LONGEST, LONGEST_SMOKE = 218.0, 24.0
"""Seconds from the start after which training ends, also on a slow machine."""
RAY_SECONDS = 15.0
"""The same for Ray, where every actor imports torch by itself. The time in which Ray starts does not count."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training. Return 0 if it succeeded, 1 if a process failed, 130 after Ctrl-C."""
    settings = parse(argv)
    if settings.runtime == "ray":
        begin = time.time()
        start_ray()
        settings = replace(settings, deadline=settings.deadline + time.time() - begin)
    console = Console()
    settings.out.mkdir(parents=True, exist_ok=True)
    settings.rendezvous.unlink(missing_ok=True)  # left by a run that was killed
    try:
        train(settings, console)
    except WorkerError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes have ended")
        return 130
    finally:
        settings.rendezvous.unlink(missing_ok=True)
    return 0


def parse(argv: Sequence[str] | None) -> Settings:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--control", action="store_true", help="shuffle the advantages: the model should not learn")
    parser.add_argument("--smoke", action="store_true", help="a short run of all parts, in less than 40 seconds")
    parser.add_argument("--runtime", choices=("local", "ray"), default="local", help="processes, or Ray actors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the report (default: runs/grpo-<time>)")
    given = parser.parse_args(argv)
    out = given.out or Path("runs") / time.strftime("grpo-%Y%m%d-%H%M%S")
    begin = time.time() + (RAY_SECONDS if given.runtime == "ray" else 0.0)
    settings = Settings(
        system=f"grpo-{os.getpid()}", out=out, deadline=begin + LONGEST, runtime=given.runtime, seed=given.seed,
        control=given.control,
    )  # fmt: skip
    if given.smoke:
        deadline = begin + LONGEST_SMOKE
        settings = replace(settings, deadline=deadline, steps=20, prompts=16, warmup_seconds=6.0, held_out=100)
    return settings


def start_ray() -> None:
    """Connect to the Ray cluster of RAY_ADDRESS, or start Ray here; workers find the modules of this folder."""
    try:
        import ray
    except ModuleNotFoundError:
        raise SystemExit("--runtime ray needs Ray: pip install '.[demo,ray]' in the repository") from None
    address = os.environ.get("RAY_ADDRESS", "local")
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def roles(settings: Settings) -> Roles:
    """Return the object that runs the roles, as processes or as Ray actors."""
    if settings.runtime == "ray":
        from actors import Actors

        return Actors(settings)
    return Processes(settings)


def train(settings: Settings, console: Console) -> None:
    """Run the training, from the first weights to the report."""
    begin = time.time()
    title = f"GRPO on running sums{', control with shuffled advantages' if settings.control else ''}"
    figures, prompts = Figures(settings), PromptSource(settings)
    with System(settings), roles(settings) as processes, View(console, title) as view:
        for rank in range(TRAINER_RANKS):
            processes.start(f"trainer {rank}", trainer, rank)
        warmed_up = False
        while not warmed_up:
            processes.watch(TICK, expendable="rollout")
            warmed_up = "policy" in tq.kv_list(WEIGHTS).get(WEIGHTS, {})
            figures.add(drain())
            view.warming(figures)
        warm = time.time()
        view.note(f"supervised warm-up, {figures.warmup_steps} steps: held-out accuracy {figures.warmup_accuracy:.1%}")
        for number in range(ROLLOUT_WORKERS):
            processes.start(f"rollout {number}", rollout)
        processes.start("reference", reference)
        processes.start("reward", reward)
        view.note("processes: " + ", ".join(f"{name} ({pid})" for name, pid in processes.alive.items()))
        follow(figures, prompts, processes, view)
        trained = time.time()
        after = accuracy(newest(), held_out(settings))
        view.note(f"GRPO, {figures.version} steps: held-out accuracy {after:.1%}")
    seconds = {"warm_up": warm - begin, "training": trained - warm, "total": time.time() - begin}
    figures_summary = report.summary(figures, after, seconds, processes.killed, prompts.again)
    report.write(figures, figures_summary)
    accuracies, balance = figures_summary["held_out_accuracy"], figures_summary["token_imbalance"]
    console.print(
        f"held-out accuracy {accuracies['before']:.1%} -> {after:.1%} ({accuracies['gain_points']:+.1f} points) "
        f"in {time.time() - begin:.0f} s; token imbalance of the ranks {balance['balanced']:.1%}, "
        f"dealt in order {balance['in_order']:.1%}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report: {settings.out}", highlight=False, soft_wrap=True)


def follow(figures: Figures, prompts: PromptSource, processes: Roles, view: View) -> None:
    """Release prompts and watch until the last update."""
    next_redo = 0.0
    while not figures.finished:
        prompts.release(figures.version)
        killed = len(processes.killed)
        processes.watch(TICK, expendable="rollout")
        for name in processes.killed[killed:]:
            view.note(f"{name} was killed; the other workers answer its prompts")
        figures.add(drain())
        if processes.killed and time.time() > next_redo:
            prompts.redo(set(processes.alive), figures.version)
            next_redo = time.time() + 1.0
        view.training(figures, processes.alive)
    tq.get_client().seal(PROMPTS)


def newest() -> Transformer:
    """Return the policy with the newest weights in the system."""
    model = Transformer(len(task.ALPHABET))
    load(model, tq.kv_batch_get(["policy"], WEIGHTS)["weights"][0])
    return model


class System:
    """A separate transfer_queue system for the run, whose sampler deals balanced batches to the trainer ranks."""

    def __init__(self, settings: Settings) -> None:
        self._name, self._runtime = settings.system, settings.runtime

    def __enter__(self) -> None:
        os.environ["TQ_SYSTEM"] = self._name  # every process of the run finds the system by this name
        os.environ.pop("TQ_ADDRESS", None)  # otherwise they could find a running system with another sampler
        sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=ANSWERS, dp_size=TRAINER_RANKS)
        conf = {"runtime": self._runtime, "controller": {"sampler": sampler, "polling_mode": False}}
        tq.init(OmegaConf.create(conf, flags={"allow_objects": True}))

    def __exit__(self, *_: object) -> None:
        tq.close()


if __name__ == "__main__":
    sys.exit(main())
