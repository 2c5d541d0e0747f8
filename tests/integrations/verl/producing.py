"""What verl's trainer and agent loops write: prompts with a status, and trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq

ARGUMENTS: dict[str, Any] = {
    "trainer_config": {}, "sampler_kwargs": {}, "max_off_policy_threshold": 8, "max_off_policy_strategy": "drop",
}  # fmt: skip


def submit(prompts: Sequence[str], step: int = 1, partition: str = "train") -> None:
    """Put prompts, as the trainer does before it sends them to the agent loops."""
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in prompts]
    tq.kv_batch_put(list(prompts), partition, tags=tags)


def set_status(prompt: str, status: str, partition: str = "train") -> None:
    """Change the status of a prompt, as the agent loop that works on it does."""
    tq.kv_put(prompt, partition, tag={"status": status})


def put_trajectories(
    prompt: str, count: int, step: int = 1, partition: str = "train", rewards: Sequence[float] = (0.0,)
) -> None:
    """Put the trajectories of a prompt; the rewards are repeated."""
    keys = [f"{prompt}_{session}_0" for session in range(count)]
    tags = [{"status": "success", "seq_len": 3 + session, "global_steps": step} for session in range(count)]
    rows = [torch.tensor([0.0, rewards[session % len(rewards)]]) for session in range(count)]
    scores = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    tq.kv_batch_put(keys, partition, TensorDict({"rm_scores": scores}, batch_size=[count]), tags)


def finish(
    prompt: str, count: int = 2, step: int = 1, partition: str = "train", rewards: Sequence[float] = (0.0,)
) -> None:
    """Put the trajectories of a prompt, then its last status."""
    put_trajectories(prompt, count, step, partition, rewards)
    set_status(prompt, "finished", partition)
