"""A GRPO pipeline whose stages only sleep: threads of this process put and claim small samples through a real system.

Pictures of the live views are made with it. Its reward stage is the bottleneck, and two of its ranks die.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from transfer_queue import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import TransferQueueError
from transfer_queue.node.system.launcher import RunningSystem, start_local

BATCH = 8  # samples of one put or claim
STEPS = 3  # partitions that are kept after they are trained
CLAIM_SECONDS = 5.0  # timeout of one claim
ROWS = 256  # samples of one partition
GROUP = 4  # answers to one prompt
LEAD = 12  # partitions that the rollouts may be ahead of the training; then they pause
SENTENCES = 40  # of one answer
WORDS = ("What", "is", "plus", "?", ".", *map(str, range(1000)))
"""The vocabulary of the prompts and answers, by token id."""


class RankFailure(Exception):
    """A rank fails. A client that an exception closes counts as gone, and not as closed in order."""


@dataclass(frozen=True)
class SimulatedStage:
    """A stage whose ranks all do the same: claim, sleep, put."""

    name: str
    """The name of the task."""
    ranks: int
    """The number of its ranks."""
    takes: tuple[str, ...]
    """The fields that it claims; empty for a stage that makes samples."""
    puts: tuple[str, ...]
    """The fields that it puts."""
    seconds: float
    """How long it sleeps for one batch."""
    dies: tuple[int, ...] = ()
    """The ranks that end after `SimulatedPipeline.dying`."""


STAGES = (
    SimulatedStage("rollout", 6, (), ("prompt", "response"), 1.2),
    SimulatedStage("reference", 2, ("prompt", "response"), ("ref_log_prob",), 0.3),
    SimulatedStage("reward", 4, ("response",), ("advantage",), 1.1, dies=(1, 3)),
    SimulatedStage("train", 2, ("response", "ref_log_prob", "advantage"), (), 0.35),
)


def prompt_of(sample: int) -> torch.Tensor:
    """Return the token ids of a prompt, such as "What is 17 plus 25 ?"."""
    group = sample // GROUP
    return ids_of(f"What is {group % 97} plus {group % 89} ?")


def response_of(sample: int) -> torch.Tensor:
    """Return the token ids of an answer, which goes on adding."""
    first, second, text = sample // GROUP % 97, sample // GROUP % 89, ""
    for number in range(SENTENCES):
        total = (first + second + number) % 1000
        text += f"{first} plus {second} is {total} . "
        first, second = second, total
    return ids_of(text)


def ids_of(text: str) -> torch.Tensor:
    """Return the token ids of a text of `WORDS`."""
    return torch.tensor([IDS[word] for word in text.split()])


IDS = {word: number for number, word in enumerate(WORDS)}
TEXTS = {"prompt": prompt_of, "response": response_of}
"""Field of a rollout -> the value of a sample."""


def write_tokenizer(folder: Path) -> Path:
    """Write the tokenizer of the prompts and answers into a folder, and return its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@contextlib.contextmanager
def new_system(name: str) -> Iterator[RunningSystem]:
    """Start a system that ends with the block."""
    system = start_local(name, {"settings": Settings.from_config(None).to_json()})
    try:
        yield system
    finally:
        system.stop()


class SimulatedPipeline:
    """Runs the stages until it is closed.

    Args:
        system: The system to run them in.
        dying: The seconds after which some ranks of reward end.
    """

    def __init__(self, system: RunningSystem, dying: float = 30.0) -> None:
        self.dying = dying
        self._system = system
        self._begun = time.monotonic()
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(stage, rank), daemon=True)
            for stage in STAGES
            for rank in range(stage.ranks)
        ]
        self._failing: set[str] = set()
        self._trained = 0
        self._made = 0
        self._put: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> SimulatedPipeline:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fail(self, stage: str) -> None:
        """Let every rank of a stage fail."""
        self._failing.add(stage)

    def close(self) -> None:
        """End the stages."""
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _work(self, stage: SimulatedStage, rank: int) -> None:
        dice = random.Random(rank)
        with contextlib.suppress(RankFailure), TransferQueueClient(self._system, task=stage.name, rank=rank) as client:
            step = 0
            while not self._ends.is_set():
                late = time.monotonic() - self._begun > self.dying
                if (rank in stage.dies and late) or stage.name in self._failing:
                    raise RankFailure
                seconds = stage.seconds * (0.7 + 0.6 * dice.random())
                with contextlib.suppress(TransferQueueError):
                    if stage.takes:
                        step = self._take(client, stage, step, seconds)
                    else:
                        self._ends.wait(seconds)
                        if self._made // ROWS - self._trained > LEAD:
                            continue
                        self._make(client, stage, rank)

    def _make(self, client: TransferQueueClient, stage: SimulatedStage, rank: int) -> None:
        """Put new samples, and seal a partition that has all of its samples."""
        with self._lock:
            first = self._made
            self._made += BATCH
        step = first // ROWS
        numbers = range(first, first + BATCH)
        client.kv_batch_put(
            [f"prompt-{number // GROUP}-answer-{number % GROUP}" for number in numbers],
            f"step_{step}",
            {name: torch.stack([TEXTS[name](number) for number in numbers]) for name in stage.puts},
            tags=[{"prompt": number // GROUP, "worker": f"{stage.name}-{rank}"} for number in numbers],
            group_ids=[f"prompt-{number // GROUP}" for number in numbers],
        )
        with self._lock:
            self._put[step] += BATCH
            full = self._put[step] == ROWS
        if full:
            client.seal(f"step_{step}")

    def _take(self, client: TransferQueueClient, stage: SimulatedStage, step: int, seconds: float) -> int:
        """Claim samples and put the stage's fields. Returns the step whose samples are next."""
        meta = client.get_meta(list(stage.takes), BATCH, f"step_{step}", task_name=stage.name, timeout=CLAIM_SECONDS)
        if not meta.size:
            if not stage.puts:
                self._trained = max(self._trained, step + 1)
            if not stage.puts and step >= STEPS:
                client.clear_partition(f"step_{step - STEPS}")
            return step + 1
        self._ends.wait(seconds)
        if stage.puts:
            client.put({name: torch.zeros(meta.size, 16) for name in stage.puts}, meta)
        return step
