"""Trainer rank: takes its balanced share of each step off a StreamingDataLoader, and gives the weights back."""

from __future__ import annotations

import time
from typing import Any

import task
import torch
import torch.distributed as dist
from events import work
from model import Transformer, flatten, load
from objective import answer_logprobs, grpo_loss
from settings import ANSWERS, TRAINER_RANKS, WEIGHTS, Settings, train_partition
from tensordict import TensorDict
from torch import Tensor, nn

import transfer_queue as tq

MICRO_BATCH = 4 * ANSWERS
WARM_STEPS = 5
"""Steps over which the learning rate rises."""


def trainer(settings: Settings, name: str, rank: int) -> None:
    """One of the data-parallel ranks, to the end of training."""
    dist.init_process_group(
        "gloo", init_method=settings.rendezvous.as_uri(), rank=rank, world_size=TRAINER_RANKS
    )
    client = tq.get_client()
    model = Transformer(len(task.ALPHABET))
    load(model, tq.kv_batch_get(["policy"], WEIGHTS)["weights"][0])
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    loader = tq.StreamingDataLoader(
        tq.StreamingDataset(
            config=None,
            batch_size=settings.rank_batch,
            micro_batch_size=MICRO_BATCH,
            data_fields=["tokens", "logprobs", "reference_logprobs", "advantage"],
            partition_id=train_partition(0),
            task_name="train",
            dp_rank=rank,
        )
    )
    start = time.time()
    for step in range(settings.steps):
        loader.step(train_partition(step))
        sums = torch.zeros(4)  # tokens, penalty, clipped tokens, time is up
        for data, meta in loader:
            with work("train", name) as event:
                sums[:3] += backward(model, data)
                event |= trained_on(step, data, meta)
        with work("update", name) as event:
            sums[3] = time.time() - start > settings.training_seconds
            all_reduce_gradients(model, sums)
            progress = max(step / settings.steps, (time.time() - start) / settings.training_seconds)
            scale = min(1.0, (step + 1) / WARM_STEPS) * max(0.0, 1.0 - progress)
            update(model, optimizer, settings.learning_rate * scale)
            last = step + 1 == settings.steps or bool(sums[3])
            event |= {"step": step, "samples": 0}
            if rank == 0:
                publish(model, step + 1)
                client.clear_partition(train_partition(step))
                tokens, kl, clipped, _ = sums.tolist()
                event |= {"version": step + 1, "kl": kl / tokens, "clipped": clipped / tokens, "last": last}
        if last:
            break
    dist.destroy_process_group()


def backward(model: Transformer, data: TensorDict) -> Tensor:
    """Add the gradients of a micro-batch, summed over its answer tokens; (tokens, penalty, clipped) of it."""
    old = data["logprobs"]
    answer_lengths = old.offsets().diff()
    new = torch.cat(answer_logprobs(model, data["tokens"].unbind(), answer_lengths.tolist()))
    advantage = data["advantage"].repeat_interleave(answer_lengths)
    loss = grpo_loss(new, old.values(), data["reference_logprobs"].values(), advantage)
    loss.total.backward()
    return torch.tensor([loss.tokens, loss.kl, loss.clipped])


def all_reduce_gradients(model: nn.Module, sums: Tensor) -> None:
    """Sum gradients and counters over the ranks, then make the gradients means over all answer tokens."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients] + [sums])
    dist.all_reduce(flat)
    sums.copy_(flat[-len(sums) :])
    flat /= sums[0]
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """One step of the optimizer on clipped gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def publish(model: nn.Module, version: int) -> None:
    """Give the weights back to the rollout workers, under their version."""
    fields = {"weights": flatten(model), "version": torch.tensor(version)}
    tq.kv_put("policy", WEIGHTS, fields, tag={"version": version})


def trained_on(step: int, data: TensorDict, meta: tq.BatchMeta) -> dict[str, Any]:
    """What the report wants to know of a micro-batch."""
    return {
        "step": step,
        "samples": len(meta),
        "indexes": meta.global_indexes,
        "lengths": [tag["total_lengths"] for tag in meta.custom_meta],
        "staleness": [step - tag["policy_version"] for tag in meta.custom_meta],
    }
