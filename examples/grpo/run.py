"""A GRPO training on the CPU, twice: stage after stage through one driver, then streamed through transfer_queue.

python examples/grpo/run.py            a supervised warm-up, then both: less than five minutes on two cores
python examples/grpo/run.py --sandbox 0  the same with rewards that do not wait for a sandbox
python examples/grpo/run.py --control  the same with shuffled advantages, which must not learn
python examples/grpo/run.py --smoke    a short run of all parts, in about a minute
python examples/grpo/run.py --keep     leaves the system up at the end, to look at
python examples/grpo/run.py --runtime ray   only the streamed training, with the roles as Ray actors; RAY_ADDRESS names
                                       a cluster
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf

import task
from driver import Driver
from events import drain
from figures import Figures, counted
from model import Transformer, load
from processes import Processes, Roles, WorkerError, stop_forkserver
from prompts import PromptSource
from rollout import rollout
from sampling import accuracy
from scoring import reference, reward
from settings import ANSWERS, PROMPTS, ROLLOUT_WORKERS, TRAINER_RANKS, WEIGHTS, Settings, kept_key
from trainer import trainer
from warmup import held_out, warm_up

try:
    from rich.console import Console

    import report
    from view import View
except ModuleNotFoundError as missing:
    raise SystemExit(f"this example needs {missing.name}: pip install '.[demo]' in the repository") from None

TICK = 0.1
"""Seconds between two checks of the events and the processes."""
LOG_EVERY = 5
"""Steps between two entries of the TensorBoard files."""
LIMITS = 90.0, 90.0, 90.0
"""Seconds after which the warm-up and each run end on a slow machine, even if steps are left."""
SMOKE = 5.0, 8.0, 20.0
"""The same for --smoke."""
START_SECONDS = 120
"""Seconds in which the servers of the queue have to start; on busy cores Ray needs more than the default."""
RAY_SECONDS = 15.0
"""The time that is added for Ray, where every actor imports torch separately."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training. Return 0 if it succeeded, 1 if a process failed, 130 after Ctrl-C."""
    settings, limits = parse(argv)
    if settings.runtime == "ray":
        start_ray()
    torch.set_num_threads(1)  # more of them cost more than they save on models this small
    console = Console()
    settings.out.mkdir(parents=True, exist_ok=True)
    try:
        train(settings, limits, console)
    except WorkerError as error:
        console.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes have ended")
        return 130
    finally:
        settings.rendezvous.unlink(missing_ok=True)
        stop_forkserver()
    return 0


def parse(argv: Sequence[str] | None) -> tuple[Settings, tuple[float, float, float]]:
    """Return the settings of the command line, and the seconds for each part of the run."""
    parser = argparse.ArgumentParser(prog="run.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--control", action="store_true", help="shuffle the advantages: the model should not learn")
    parser.add_argument("--smoke", action="store_true", help="a short run of all parts, in about a minute")
    parser.add_argument("--keep", action="store_true", help="leave the system up at the end, until Ctrl-C")
    parser.add_argument(
        "--sandbox", type=float, default=Settings.sandbox, metavar="SECONDS",
        help="mean wait of a reward for its sandbox (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--runtime", choices=("local", "ray"), default="local", help="processes, or Ray actors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR",
        help="multiply all time limits, so that a slow or busy machine completes all steps",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for the report (default: runs/grpo-<time>)")
    given = parser.parse_args(argv)
    if not 0 <= given.sandbox <= 10:
        parser.error(f"--sandbox must be from 0 to 10 seconds, got {given.sandbox:g}")
    if given.patience <= 0:
        parser.error(f"--patience must be positive, got {given.patience:g}")
    settings = Settings(
        system=f"grpo-{os.getpid()}", out=given.out or Path("runs") / time.strftime("grpo-%Y%m%d-%H%M%S"),
        deadline=0.0, runtime=given.runtime, seed=given.seed, control=given.control, keep=given.keep,
        sandbox=given.sandbox,
    )  # fmt: skip
    if given.smoke:
        settings = replace(settings, steps=20, held_out=100)
    supervised, driver, queue = SMOKE if given.smoke else LIMITS
    return settings, (supervised * given.patience, driver * given.patience, queue * given.patience)


def start_ray() -> None:
    """Connect to the Ray cluster of RAY_ADDRESS, or start Ray here; workers find the modules of this folder."""
    try:
        import ray
    except ModuleNotFoundError:
        raise SystemExit("--runtime ray needs Ray: pip install '.[demo,ray]' in the repository") from None
    address = os.environ.get("RAY_ADDRESS", "local")
    ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)


def train(settings: Settings, limits: tuple[float, float, float], console: Console) -> None:
    """Warm the model up, train it through the driver and through the queue, and write the report."""
    begin = time.time()
    with contextlib.ExitStack() as stack:
        with View(console) as view:
            control = ", with shuffled advantages" if settings.control else ""
            view.begin("supervised warm-up")
            weights, before = warmed_up(begun(settings, limits[0]), view)
            runs: list[Figures] = []
            if settings.runtime == "local":
                view.begin(f"1. GRPO stage after stage, through one driver{control}")
                runs.append(through_driver(begun(settings, limits[1]), weights, before, view))
                settings = replace(settings, steps=runs[0].version)  # the second run has as many steps
            stack.enter_context(System(settings))
            view.begin(f"2. GRPO streamed, through the queue{control}")
            for place in places_to_look(settings):
                view.note(f"watch it: {place}")
            limit = limits[2] + (RAY_SECONDS if settings.runtime == "ray" else 0.0)
            runs.append(through_queue(begun(settings, limit), weights, before, view))
        found = report.summary(runs, before, time.time() - begin)
        report.write(runs, found)
        report.show(runs, found, console)
        console.print(f"report: {settings.out}   {time.time() - begin:.0f} s", highlight=False, soft_wrap=True)
        if settings.keep:
            console.print(
                "the system is up until Ctrl-C:", *places_to_look(settings), sep="\n", highlight=False, soft_wrap=True
            )
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()


def begun(settings: Settings, seconds: float) -> Settings:
    """Return the settings of a part of the run that begins now."""
    settings.rendezvous.unlink(missing_ok=True)  # left by the previous part, or by a run that was killed
    return replace(settings, deadline=time.time() + seconds)


def places_to_look(settings: Settings) -> tuple[str, str]:
    """Return the ways to watch the run: the address of the live page, and the command for the terminal."""
    command = os.path.relpath(Path(sys.executable).with_name("tq"))  # `make demo` does not activate its environment
    name = settings.system
    return tq.get_live_address() or f"{command} live --name {name}", f"{command} top --name {name}"


def warmed_up(settings: Settings, view: View) -> tuple[np.ndarray, float]:
    """Return the weights after the supervised warm-up, with which both runs begin, and their held-out accuracy."""
    results, end = Pipe(duplex=False)
    step, loss = 0, 0.0
    with Processes(settings) as processes:
        for rank in range(TRAINER_RANKS):
            processes.start(f"trainer {rank}", warm_up, rank, end)
        while True:
            processes.watch(0.0, expendable="none")
            view.warming(step, loss)
            if results.poll(TICK):
                found = results.recv()
                if isinstance(found, np.ndarray):
                    break
                step, loss = found
    right = held_out_accuracy(settings, torch.from_numpy(found))
    view.note(f"{step} steps, held-out accuracy {right:.1%}")
    return found, right


def names(processes: Roles) -> str:
    """Return the names and process ids of the workers."""
    return "processes: " + ", ".join(f"{name} ({pid})" for name, pid in processes.alive.items())


def through_driver(settings: Settings, weights: np.ndarray, before: float, view: View) -> Figures:
    """Train stage after stage."""
    figures = Figures(settings, "stage after stage, through one driver", accuracies={0: before})
    kept: dict[int, torch.Tensor] = {}
    with Processes(settings) as processes:

        def wait() -> None:
            processes.watch(0.0, expendable="none")
            view.training(figures)

        driver = Driver(settings, processes, weights, wait)
        view.note(names(processes))
        while not figures.finished:
            driver.step(figures.version)
            figures.add(driver.events)
            if figures.finished or figures.version % settings.measure_every == 0:
                kept[figures.version] = driver.weights
    return evaluated(figures, kept, view)


def through_queue(settings: Settings, weights: np.ndarray, before: float, view: View) -> Figures:
    """Train as many steps with all stages at the same time."""
    figures = Figures(settings, "streamed, through the queue", accuracies={0: before})
    prompts = PromptSource(settings)
    with roles(settings) as processes:
        for rank in range(TRAINER_RANKS):
            processes.start(f"trainer {rank}", trainer, rank, weights)
        while "policy" not in tq.kv_list(WEIGHTS).get(WEIGHTS, {}):
            processes.watch(TICK, expendable="rollout")
        for number in range(ROLLOUT_WORKERS):
            processes.start(f"rollout {number}", rollout)
        processes.start("reference", reference)
        processes.start("reward", reward)
        view.note(names(processes))
        with summary_log(settings) as log:
            follow(figures, prompts, processes, view, log)
        figures.killed, figures.put_again = processes.killed, prompts.again
    keys = {version: kept_key(version) for version in range(1, figures.version)}
    keys = {version: key for version, key in keys.items() if version % settings.measure_every == 0}
    keys[figures.version] = "policy"
    return evaluated(figures, {version: read_weights(key) for version, key in keys.items()}, view)


def read_weights(key: str) -> torch.Tensor:
    """Return the weights that are stored under a key."""
    weights: torch.Tensor = tq.kv_batch_get([key], WEIGHTS)["weights"][0]
    return weights


def held_out_accuracy(settings: Settings, weights: torch.Tensor) -> float:
    """Return the held-out accuracy of the weights."""
    model = Transformer(len(task.ALPHABET))
    load(model, weights)
    return accuracy(model, held_out(settings))


def evaluated(figures: Figures, kept: dict[int, torch.Tensor], view: View) -> Figures:
    """Measure the held-out accuracy of the weights of some versions. The time of the run does not include this."""
    for version, weights in kept.items():
        figures.accuracies[version] = held_out_accuracy(figures.settings, weights)
    view.note(
        f"{counted(figures.version)} in {figures.wall():.1f} s, workers idle {figures.idle():.0%}, "
        f"held-out accuracy {figures.accuracy:.1%}"
    )
    return figures


def roles(settings: Settings) -> Roles:
    """Return the object that runs the roles, as processes or as Ray actors."""
    if settings.runtime == "ray":
        from actors import Actors

        return Actors(settings)
    return Processes(settings)


@contextlib.contextmanager
def summary_log(settings: Settings) -> Iterator[Callable[[int], object]]:
    """Yield a function that writes at a step where the queue waits, as TensorBoard files if that is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        yield lambda step: None
        return
    with tq.SummaryLogger(log_dir=settings.out / "tensorboard") as logger:
        yield logger.log


def follow(figures: Figures, prompts: PromptSource, processes: Roles, view: View, log: Callable[[int], object]) -> None:
    """Release prompts and watch until the last update."""
    next_redo, logged = 0.0, 0
    while not figures.finished:
        prompts.release(figures.version)
        killed = len(processes.killed)
        processes.watch(TICK, expendable="rollout")
        for name in processes.killed[killed:]:
            view.note(f"{name} was killed; the other workers answer its prompts")
        figures.add(drain())
        if figures.version >= logged + LOG_EVERY or figures.finished:
            logged = figures.version
            log(logged)
        if processes.killed and time.time() > next_redo:
            prompts.redo(set(processes.alive), figures.version)
            next_redo = time.time() + 1.0
        view.training(figures, queue=True)
    tq.get_client().seal(PROMPTS)


class System:
    """A separate transfer_queue system for the run, whose sampler deals balanced batches to the trainer ranks."""

    def __init__(self, settings: Settings) -> None:
        self._name, self._runtime = settings.system, settings.runtime

    def __enter__(self) -> None:
        os.environ["TQ_SYSTEM"] = self._name  # every process of the run finds the system by this name
        os.environ.pop("TQ_ADDRESS", None)  # otherwise they could find a running system with another sampler
        sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=ANSWERS, dp_size=TRAINER_RANKS)
        conf = {
            "runtime": self._runtime,
            "controller": {"sampler": sampler, "polling_mode": False},
            "timeouts": {"start": START_SECONDS},
            "live": {"enabled": importlib.util.find_spec("uvicorn") is not None},
        }
        tq.init(OmegaConf.create(conf, flags={"allow_objects": True}), task="prompts")

    def __exit__(self, *_: object) -> None:
        tq.close()


if __name__ == "__main__":
    sys.exit(main())
