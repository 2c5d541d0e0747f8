"""Supervised warm-up: teaches the model enough of the task for GRPO to take up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import task
import torch
from model import Transformer
from objective import supervised_loss
from sampling import accuracy
from settings import Settings
from torch import nn

BATCH, LEARNING_RATE, WARM_STEPS = 32, 1e-3, 50
MEASURE_EVERY = 25


def held_out(settings: Settings) -> list[task.Problem]:
    """The problems that accuracy is measured on: always the same, and none of them trained on."""
    rng = random.Random(0)
    return [task.draw(rng, held_out=True) for _ in range(settings.held_out)]


def warm_up(settings: Settings, progress: Callable[[int, float], None]) -> tuple[Transformer, float]:
    """(model, its held-out accuracy), trained on right answers until `settings.warmup_accuracy`.

    `progress` is called with (step, held-out accuracy) at each measurement.
    """
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    problems = held_out(settings)
    model = Transformer(len(task.ALPHABET))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    start = time.time()
    step, measured = 0, 0.0
    while measured < settings.warmup_accuracy and time.time() - start < settings.warmup_seconds:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_STEPS)
        loss = supervised_loss(model, [task.draw(rng) for _ in range(BATCH)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % MEASURE_EVERY == 0:
            measured = accuracy(model, problems)
            progress(step, measured)
    return model, accuracy(model, problems)
