"""Reference worker and reward worker: each adds one column to the samples of the rollout workers."""

from __future__ import annotations

import itertools
import random

import torch
import transfer_queue as tq
from tensordict import TensorDict

import task
from events import claims, work
from model import Transformer, load
from objective import advantages, answer_logprobs, jagged
from settings import ANSWERS, WEIGHTS, Settings, train_partition

BATCH = 4 * ANSWERS
"""Samples that the reference worker scores together."""


@torch.no_grad()
def reference(settings: Settings, name: str) -> None:
    """Add "reference_logprobs", the log-probabilities of each answer's tokens under the model before GRPO."""
    client = tq.get_client()
    model = Transformer(len(task.ALPHABET)).eval()
    load(model, tq.kv_batch_get(["reference"], WEIGHTS)["weights"][0])
    for step in itertools.count():
        for data, meta in claims(["tokens", "logprobs"], BATCH, train_partition(step), "reference", settings.samples):
            with work("reference", name) as event:
                answer_lengths = [len(row) for row in data["logprobs"].unbind()]
                logprobs = answer_logprobs(model, data["tokens"].unbind(), answer_lengths)
                client.put(TensorDict({"reference_logprobs": jagged(logprobs)}, batch_size=len(meta)), meta)
                event |= {"step": step, "samples": len(meta)}


def reward(settings: Settings, name: str) -> None:
    """Add "advantage": how much better each answer is than the other answers to its prompt.

    The worker claims complete groups, and seals the partition when it has scored all groups, so that the loaders end.
    """
    client = tq.get_client()
    rng = random.Random(settings.seed)
    groups = {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": ANSWERS}
    for step in itertools.count():
        seen = 0
        for data, meta in claims(
            ["prompt", "answer"], ANSWERS, train_partition(step), "reward", settings.samples, **groups
        ):
            with work("reward", name) as event:
                pairs = list(zip(data["prompt"].tolist(), data["answer"].tolist(), strict=True))
                rewards = torch.tensor([task.reward(prompt, answer) for prompt, answer in pairs])
                advantage = advantages(rewards.view(-1, ANSWERS)).flatten()
                if settings.control:
                    advantage = advantage[rng.sample(range(len(meta)), len(meta))]
                seen += len(meta)
                if seen == settings.samples:
                    client.seal(train_partition(step))
                client.put(TensorDict({"advantage": advantage}, batch_size=len(meta)), meta)
                event |= {
                    "step": step,
                    "samples": len(meta),
                    "reward": rewards.tolist(),
                    "correct": [task.correct(prompt, answer) for prompt, answer in pairs],
                    "answer_lengths": [len(answer) for _, answer in pairs],
                }
