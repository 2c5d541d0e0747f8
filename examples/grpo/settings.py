"""What a run is made of, and the names under which its processes meet in the system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ANSWERS = 8
"""Answers to each prompt: a group."""
ROLLOUT_WORKERS = 2
TRAINER_RANKS = 2

PROMPTS = "prompts"
"""Partition: a sample is a prompt that is still to be answered. Rollout workers claim them."""
WEIGHTS = "weights"
"""Partition: two keys, the policy (its tag says which version) and the reference."""
EVENTS = "events"
"""Partition: a sample is one piece of work that a process has done, for the view and the report."""


def train_partition(step: int) -> str:
    """The partition with the samples of one training step."""
    return f"train_{step}"


@dataclass(frozen=True)
class Settings:
    """One run."""

    system: str
    """Name of the system that all processes attach to."""
    out: Path
    deadline: float
    """Seconds since the epoch at which training ends, whatever the steps."""
    runtime: str = "local"
    """Where the roles run: in processes of this machine, or as actors of "ray"."""
    seed: int = 0
    control: bool = False
    """Shuffle the advantages within each group, which takes all meaning from the rewards."""
    steps: int = 450
    prompts: int = 32
    """Prompts of a step; each is answered `ANSWERS` times."""
    staleness: int = 2
    """Most versions that a sample may be behind when it is trained on: prompts are released so far ahead."""
    learning_rate: float = 3e-4
    """At first; it falls to zero by the last step."""
    warmup_accuracy: float = 0.33
    """The supervised warm-up stops once held-out accuracy reaches this ..."""
    warmup_seconds: float = 70.0
    """... or after so long."""
    held_out: int = 400
    """Held-out problems on which accuracy is measured."""

    @property
    def rendezvous(self) -> Path:
        """The file through which the trainer ranks find each other."""
        return self.out.absolute() / "rendezvous"

    @property
    def samples(self) -> int:
        """Samples of a step."""
        return self.prompts * ANSWERS

    @property
    def rank_batch(self) -> int:
        """The number of samples that one trainer rank is dealt: half of its share of a step, to start early."""
        return self.samples // TRAINER_RANKS // 2
