"""Supervised warm-up: trains the model until it solves enough problems for GRPO to continue."""

from __future__ import annotations

import random
import time

import torch

import task
from events import work
from model import Transformer
from objective import supervised_loss
from ranks import all_reduce_gradients, mean, update
from sampling import accuracy
from settings import TRAINER_RANKS, Settings

BATCH, LEARNING_RATE, WARM_STEPS = 32, 1e-3, 50
MEASURE_EVERY = 25


def held_out(settings: Settings) -> list[task.Problem]:
    """Return the problems on which accuracy is measured: always the same, and none of them is used for training."""
    rng = random.Random(0)
    return [task.draw(rng, held_out=True) for _ in range(settings.held_out)]


def warm_up(settings: Settings, name: str, rank: int) -> Transformer:
    """Train on correct answers, data-parallel, until held-out accuracy is `settings.warmup_accuracy`.

    All ranks return the same model; each draws its own share of every batch.
    """
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed * TRAINER_RANKS + rank)
    problems = held_out(settings)[rank::TRAINER_RANKS]
    model = Transformer(len(task.ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    start = time.time()
    step, ended = 0, False
    while not ended:
        with work("warm-up", name) as event:
            for _ in range(MEASURE_EVERY):
                supervised_loss(model, [task.draw(rng) for _ in range(BATCH // TRAINER_RANKS)]).backward()
                all_reduce_gradients(model, torch.ones(1))
                update(model, optimizer, LEARNING_RATE * min(1.0, (step + 1) / WARM_STEPS))
                step += 1
            late = time.time() - start > settings.warmup_seconds
            right, late = mean([accuracy(model, problems), late])
            ended = right >= settings.warmup_accuracy or late > 0
            event |= {"step": step, "samples": 0, "accuracy": right}
    return model
