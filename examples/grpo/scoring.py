"""Reference worker and reward worker: each adds one column to the samples of the rollout workers.

The answers to a prompt are tested in a sandbox, as those of a coding task are: `score` waits for it and does not
compute then. How long it takes is drawn by step and prompt, so that it is the same in every run with this seed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor

import task
from events import claims, work
from model import Transformer, load
from objective import advantages, answer_logprobs, jagged
from settings import ANSWERS, SANDBOXES, WEIGHTS, Settings, train_partition

BATCH = 4 * ANSWERS
"""Samples that the reference worker scores together."""
SPREAD = 1.0
"""Standard deviation of the logarithm of the seconds in a sandbox: one group in a hundred takes six times the mean."""


@torch.no_grad()
def reference(settings: Settings, name: str) -> None:
    """Add "reference_logprobs", the log-probabilities of each answer's tokens under the model before GRPO."""
    client = tq.get_client()
    model = Transformer(len(task.ALPHABET)).eval()
    load(model, tq.kv_batch_get(["reference"], WEIGHTS)["weights"][0])
    for step in range(settings.steps):
        for data, meta in claims(["tokens", "logprobs"], BATCH, train_partition(step), "reference", settings.samples):
            with work("reference", name) as event:
                answer_lengths = [len(row) for row in data["logprobs"].unbind()]
                logprobs = answer_logprobs(model, data["tokens"].unbind(), answer_lengths)
                client.put(TensorDict({"reference_logprobs": jagged(logprobs)}, batch_size=len(meta)), meta)
                event |= {"step": step, "samples": len(meta)}


def reward(settings: Settings, name: str) -> None:
    """Add "advantage": how much better each answer is than the other answers to its prompt.

    The worker claims complete groups, and has one in each sandbox. It seals the partition when it has claimed all
    groups of the step, so that the loaders end.
    """
    client = tq.get_client()
    groups = {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": ANSWERS}
    free = threading.Semaphore(SANDBOXES)

    def score_group(step: int, data: TensorDict, meta: tq.BatchMeta) -> None:
        with work("reward", name) as event:
            advantage = score(settings, step, data["prompt"].tolist(), data["answer"].tolist(), event)
            client.put(TensorDict({"advantage": advantage}, batch_size=len(meta)), meta)

    scoring: list[Future[None]] = []
    with ThreadPoolExecutor(SANDBOXES) as sandboxes:
        for step in range(settings.steps):
            partition = train_partition(step)
            for data, meta in claims(["prompt", "answer"], ANSWERS, partition, "reward", settings.samples, **groups):
                free.acquire()
                scoring.append(sandboxes.submit(score_group, step, data, meta))
                scoring[-1].add_done_callback(lambda _: free.release())
                scoring = [future for future in scoring if not future.done() or future.result()]  # raises its error
            client.seal(partition)
    for future in scoring:
        future.result()


def score(
    settings: Settings, step: int, prompts: Sequence[str], answers: Sequence[str], event: dict[str, Any]
) -> Tensor:
    """Return the advantages of the answers of a group, after the wait for its sandbox; add its results to the event."""
    rng = random.Random(f"{settings.seed} {step} {prompts[0]}")
    start = time.time()
    time.sleep(settings.sandbox * math.exp(rng.gauss(-(SPREAD**2) / 2, SPREAD)))
    waited = time.time() - start
    pairs = list(zip(prompts, answers, strict=True))
    rewards = torch.tensor([task.reward(prompt, answer) for prompt, answer in pairs])
    advantage = advantages(rewards.view(-1, ANSWERS)).flatten()
    if settings.control:
        advantage = advantage[rng.sample(range(len(pairs)), len(pairs))]
    event |= {
        "step": step,
        "samples": len(pairs),
        "sandbox": waited,
        "reward": rewards.tolist(),
        "correct": [task.correct(prompt, answer) for prompt, answer in pairs],
        "answer_lengths": [len(answer) for _, answer in pairs],
    }
    return advantage
