"""Trainer rank: trains on its balanced share of each step and publishes the weights."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from tensordict import TensorDict

import task
from events import work
from model import Transformer, flatten, load
from objective import answer_logprobs, grpo_loss
from ranks import all_reduce_gradients, join, leave, meet, update
from settings import ANSWERS, WEIGHTS, Settings, kept_key, train_partition

MICRO_BATCH = 4 * ANSWERS
WARM_STEPS = 5
"""Steps over which the learning rate rises."""


def trainer(settings: Settings, name: str, rank: int, weights: np.ndarray) -> None:
    """Run one of the data-parallel ranks to the end of training."""
    client = tq.get_client()
    learner = Learner(settings, rank, weights)
    if rank == 0:
        tq.kv_put("reference", WEIGHTS, {"weights": flatten(learner.model), "version": torch.tensor(0)})
        publish(learner.model, 0)  # the other processes are started when it is published
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
    for step in range(settings.steps):
        loader.step(train_partition(step))
        for data, meta in loader:
            with work("train", name) as event:
                learner.add(data)
                event |= trained_on(step, meta)
        meet()
        with work("update", name) as event:
            event |= learner.update(step)
            if rank == 0:
                publish(learner.model, step + 1)
                if (step + 1) % settings.measure_every == 0:
                    keep(learner.model, step + 1)
                if not (settings.keep and event["last"]):
                    client.clear_partition(train_partition(step))
        if event["last"]:
            break
    leave()


class Learner:
    """One of the data-parallel ranks: its model, and the gradients of the current step."""

    def __init__(self, settings: Settings, rank: int, weights: np.ndarray) -> None:
        join(settings, rank)
        self.model = Transformer(len(task.ALPHABET))
        load(self.model, torch.from_numpy(weights.copy()))
        self._settings, self._rank = settings, rank
        self._optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
        self._sums = torch.zeros(4)  # tokens, penalty, clipped tokens, ranks for which it is late

    def add(self, data: TensorDict | dict[str, Any]) -> None:
        """Add the gradients of a micro-batch, summed over its answer tokens."""
        old = data["logprobs"]
        answer_lengths = old.offsets().diff()
        new = torch.cat(answer_logprobs(self.model, data["tokens"].unbind(), answer_lengths.tolist()))
        advantage = data["advantage"].repeat_interleave(answer_lengths)
        loss = grpo_loss(new, old.values(), data["reference_logprobs"].values(), advantage)
        loss.total.backward()
        self._sums[:3] += torch.tensor([loss.tokens, loss.kl, loss.clipped])

    def update(self, step: int) -> dict[str, Any]:
        """Update the weights with the gradients of all ranks. Return the entries of the event; rank 0 has more."""
        self._sums[3] = time.time() > self._settings.deadline
        all_reduce_gradients(self.model, self._sums)
        tokens, kl, clipped, late = self._sums.tolist()
        self._sums.zero_()
        update(self.model, self._optimizer, learning_rate(self._settings, step))
        event: dict[str, Any] = {"step": step, "samples": 0}
        event["last"] = step + 1 == self._settings.steps or late > 0
        if self._rank == 0:
            event |= {"version": step + 1, "kl": kl / tokens, "clipped": clipped / tokens}
        return event


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step: it rises over the first steps, and falls linearly."""
    return settings.learning_rate * min(1.0, (step + 1) / WARM_STEPS) * (1 - step / settings.decay_steps)


def publish(model: Transformer, version: int) -> None:
    """Publish the weights with their version for the rollout workers."""
    fields = {"weights": flatten(model), "version": torch.tensor(version)}
    tq.kv_put("policy", WEIGHTS, fields, tag={"version": version})


def keep(model: Transformer, version: int) -> None:
    """Keep the weights of a version, so that `run.py` can measure their accuracy after the run."""
    tq.kv_put(kept_key(version), WEIGHTS, {"weights": flatten(model), "version": torch.tensor(version)})


def trained_on(step: int, meta: tq.BatchMeta) -> dict[str, Any]:
    """Return the values of a micro-batch that the report needs."""
    return {
        "step": step,
        "samples": len(meta),
        "indexes": meta.global_indexes,
        "lengths": [tag["total_lengths"] for tag in meta.custom_meta],
        "staleness": [step - tag["policy_version"] for tag in meta.custom_meta],
    }
