"""Supervised warm-up: trains the model on demonstrations, most of which are flawed, so that GRPO has work to do."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

import torch

import task
from model import Transformer, flatten
from objective import supervised_loss
from ranks import all_reduce_gradients, join, leave, mean, update
from settings import TRAINER_RANKS, Settings

BATCH, LEARNING_RATE, WARM_STEPS = 32, 1e-3, 50
REPORT_EVERY = 25


def held_out(settings: Settings) -> list[task.Problem]:
    """Return the problems on which accuracy is measured: always the same, and none of them is used for training."""
    rng = random.Random(0)
    return [task.draw(rng, held_out=True) for _ in range(settings.held_out)]


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: it rises over the first steps and falls to 0 over the last quarter."""
    return LEARNING_RATE * min(1.0, (step + 1) / WARM_STEPS, 4 * (1 - step / steps))


def warm_up(settings: Settings, name: str, rank: int, pipe: Connection) -> None:
    """Train on demonstrations, data-parallel, for `settings.warmup_steps` steps or until the deadline.

    Rank 0 sends (steps, loss) through the pipe regularly, and the weights at the end.
    """
    join(settings, rank)
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed * TRAINER_RANKS + rank)
    model = Transformer(len(task.ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    for step in range(settings.warmup_steps):
        loss = supervised_loss(model, [task.demonstration(rng) for _ in range(BATCH // TRAINER_RANKS)])
        loss.backward()
        all_reduce_gradients(model, torch.tensor([float(TRAINER_RANKS)]))
        update(model, optimizer, learning_rate(step, settings.warmup_steps))
        if (step + 1) % REPORT_EVERY:
            continue
        average, late = mean([float(loss.detach()), time.time() > settings.deadline])
        if rank == 0:
            pipe.send((step + 1, average))
        if late > 0:
            break
    if rank == 0:
        pipe.send(flatten(model).numpy())
    leave()
