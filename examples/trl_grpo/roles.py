"""The processes beside the trainer: generators, and one that computes rewards. Each could run on another machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import transfer_queue as tq
from transfer_queue.integrations.trl import TransformersEngine, generate_rollouts, score_rollouts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import task

LEASE = 3.0
"""Seconds after which the prompts of a killed generator are answered by another one."""


def generate(folder: Path, seed: int) -> None:
    """Answer prompts until the training stops."""
    prepare("generate")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate_rollouts(TransformersEngine(model, tokenizer, max_new_tokens=task.ANSWER), lease=LEASE)
    tq.close()


def score() -> None:
    """Compute rewards and advantages until the training stops."""
    prepare("score")
    score_rollouts(task.reward, lease=LEASE)
    tq.close()


def prepare(name: str) -> None:
    """Attach to the system of the trainer, which TQ_SYSTEM or TQ_ADDRESS names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the trainer, which ends this process
    disable_progress_bar()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    tq.init(attach="require", task=name)
