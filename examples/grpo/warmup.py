"""Supervised warm-up: trains the model until it solves enough problems for GRPO to continue."""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection

import torch

import task
from model import Transformer, flatten
from objective import supervised_loss
from ranks import all_reduce_gradients, join, leave, mean, update
from sampling import accuracy
from settings import TRAINER_RANKS, Settings

BATCH, LEARNING_RATE, WARM_STEPS = 32, 1e-3, 50
MEASURE_EVERY = 25


def held_out(settings: Settings) -> list[task.Problem]:
    """Return the problems on which accuracy is measured: always the same, and none of them is used for training."""
    rng = random.Random(0)
    return [task.draw(rng, held_out=True) for _ in range(settings.held_out)]


def warm_up(settings: Settings, name: str, rank: int, pipe: Connection) -> None:
    """Train on correct answers, data-parallel, until held-out accuracy is `settings.warmup_accuracy`.

    Rank 0 sends (steps, accuracy) through the pipe after each measurement, and the weights at the end.
    """
    join(settings, rank)
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed * TRAINER_RANKS + rank)
    problems = held_out(settings)[rank::TRAINER_RANKS]
    model = Transformer(len(task.ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    step, ended = 0, False
    while not ended:
        for _ in range(MEASURE_EVERY):
            supervised_loss(model, [task.draw(rng) for _ in range(BATCH // TRAINER_RANKS)]).backward()
            all_reduce_gradients(model, torch.ones(1))
            update(model, optimizer, LEARNING_RATE * min(1.0, (step + 1) / WARM_STEPS))
            step += 1
        right, late = mean([accuracy(model, problems), time.time() > settings.deadline])
        ended = right >= settings.warmup_accuracy or late > 0
        if rank == 0:
            pipe.send((step, right))
    if rank == 0:
        pipe.send(flatten(model).numpy())
    leave()
