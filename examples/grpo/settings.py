"""The settings of a run, and the names of its partitions and keys in the system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ANSWERS = 8
"""Answers to each prompt: a group."""
ROLLOUT_WORKERS = 2
TRAINER_RANKS = 2
SANDBOXES = 16
"""Groups whose answers the reward worker has in sandboxes at the same time."""

PROMPTS = "prompts"
"""Partition: a sample is a prompt that is still to be answered. Rollout workers claim them."""
WEIGHTS = "weights"
"""Partition: the keys are the policy (its tag has the version), the reference, and the policies to be measured."""
EVENTS = "events"
"""Partition: a sample is one piece of work that a process has done, for the view and the report."""


def train_partition(step: int) -> str:
    """Return the name of the partition with the samples of one training step."""
    return f"train_{step}"


def kept_key(version: int) -> str:
    """Return the key of the weights of a version that is measured after the run."""
    return f"policy_{version}"


@dataclass(frozen=True)
class Settings:
    """One run."""

    system: str
    """Name of the system that all processes attach to."""
    out: Path
    deadline: float
    """The time at which this part of the run ends, in seconds since the epoch, even if not all steps are done."""
    runtime: str = "local"
    """Where the roles run: "local", in processes of this machine, or "ray", as Ray actors."""
    seed: int = 0
    control: bool = False
    """Shuffle the advantages within each group, so that the rewards have no meaning."""
    keep: bool = False
    """Leave the system, and the samples of the last step, until Ctrl-C."""
    steps: int = 80
    """Training steps of each run; the second run makes as many as the first one has made."""
    prompts: int = 16
    """Prompts of a step; each is answered `ANSWERS` times."""
    staleness: int = 2
    """The maximum number of versions that a sample may be behind in training; limits how early prompts are put."""
    sandbox: float = 0.1
    """Mean seconds for which the reward of a group waits for a sandbox that runs its tests; 0: it does not wait."""
    learning_rate: float = 4e-5
    """The highest learning rate, after the first few steps."""
    decay_steps: int = 80
    """The learning rate falls linearly and would be 0 at this step. With a constant one, accuracy varies by several
    points from step to step."""
    warmup_steps: int = 700
    """Steps of the supervised warm-up, if the time allows."""
    held_out: int = 1000
    """Held-out problems on which accuracy is measured."""
    measure_every: int = 5
    """Steps between two policies whose held-out accuracy is measured."""

    @property
    def rendezvous(self) -> Path:
        """Return the file through which the trainer ranks find each other."""
        return self.out.absolute() / "rendezvous"

    @property
    def samples(self) -> int:
        """Return the number of samples of a step."""
        return self.prompts * ANSWERS

    @property
    def rank_batch(self) -> int:
        """Return the number of samples in a batch of a trainer rank: half of its share of a step, to start early."""
        return self.samples // TRAINER_RANKS // 2
