"""Trainer rank: warms the model up, then trains on its balanced share of each step and publishes the weights."""

from __future__ import annotations

import time
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

from events import work
from model import Transformer, flatten
from objective import answer_logprobs, grpo_loss
from ranks import all_reduce_gradients, join, leave, update
from settings import ANSWERS, TRAINER_RANKS, WEIGHTS, Settings, train_partition
from warmup import warm_up

MICRO_BATCH = 4 * ANSWERS
WARM_STEPS = 5
"""Steps over which the learning rate rises."""


def trainer(settings: Settings, name: str, rank: int) -> None:
    """Run one of the data-parallel ranks to the end of training."""
    join(settings, rank)
    client = tq.get_client()
    model = warm_up(settings, name, rank)
    if rank == 0:
        tq.kv_put("reference", WEIGHTS, {"weights": flatten(model), "version": torch.tensor(0)})
        publish(model, 0)  # the other processes are started when it is published
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
        sums = torch.zeros(4)  # tokens, penalty, clipped tokens, elapsed share of the time
        for data, meta in loader:
            with work("train", name) as event:
                sums[:3] += backward(model, data)
                event |= trained_on(step, meta)
        with work("update", name) as event:
            sums[3] = (time.time() - start) / (settings.deadline - start)
            all_reduce_gradients(model, sums)
            progress = max((step + 1) / settings.steps, float(sums[3]) / TRAINER_RANKS)
            last = progress >= 1
            scale = min(1.0, (step + 1) / WARM_STEPS) * max(0.0, 1.0 - progress)
            update(model, optimizer, settings.learning_rate * scale)
            event |= {"step": step, "samples": 0}
            if rank == 0:
                publish(model, step + 1)
                client.clear_partition(train_partition(step))
                tokens, kl, clipped, _ = sums.tolist()
                event |= {"version": step + 1, "kl": kl / tokens, "clipped": clipped / tokens, "last": last}
        if last:
            break
    leave()


def backward(model: Transformer, data: TensorDict) -> Tensor:
    """Add the gradients of a micro-batch, summed over its answer tokens; return (tokens, penalty, clipped tokens)."""
    old = data["logprobs"]
    answer_lengths = old.offsets().diff()
    new = torch.cat(answer_logprobs(model, data["tokens"].unbind(), answer_lengths.tolist()))
    advantage = data["advantage"].repeat_interleave(answer_lengths)
    loss = grpo_loss(new, old.values(), data["reference_logprobs"].values(), advantage)
    loss.total.backward()
    return torch.tensor([loss.tokens, loss.kl, loss.clipped])


def publish(model: Transformer, version: int) -> None:
    """Publish the weights with their version for the rollout workers."""
    fields = {"weights": flatten(model), "version": torch.tensor(version)}
    tq.kv_put("policy", WEIGHTS, fields, tag={"version": version})


def trained_on(step: int, meta: tq.BatchMeta) -> dict[str, Any]:
    """Return the values of a micro-batch that the report needs."""
    return {
        "step": step,
        "samples": len(meta),
        "indexes": meta.global_indexes,
        "lengths": [tag["total_lengths"] for tag in meta.custom_meta],
        "staleness": [step - tag["policy_version"] for tag in meta.custom_meta],
    }
