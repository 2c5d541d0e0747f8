"""One driver and groups of workers that exchange metadata, as in a collocated trainer.

The driver decides which worker processes which samples, and never has their values: it sends each worker a KVBatchMeta,
and the worker fetches the fields that it needs and puts those that it makes. Each step has 64 prompts x 8 samples.

    python examples/on_ray/collocated.py --steps 12
"""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from policy import LEARNING_RATE, SAMPLES, Policy, advantages, gradient, prompts, reward
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

import transfer_queue as tq
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions

WORKERS = 2


def rows(data: TensorDict, name: str) -> list[Tensor]:
    """Return the rows of a field, one tensor each."""
    return list(data[name].unbind())


def jagged(values: list[Tensor]) -> Tensor:
    """Return rows of different lengths as one column."""
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


class Worker:
    """One process of the worker group, which is rollout, reference and actor in turn."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.policy = Policy.new()
        self.reference = Policy.new()

    def set_weights(self, logits: Tensor) -> None:
        """Use the weights of the update."""
        self.policy = Policy(logits)

    def generate(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        """Generate responses, masks and log-probabilities; the tag `total_lengths` has the length of a sample."""
        data = tq.kv_batch_get_by_meta(meta, ["prompts"])
        asked = rows(data, "prompts")
        answers = [self.policy.sample(prompt) for prompt in asked]
        fields = {
            "responses": jagged(answers),
            "masks": jagged([torch.ones_like(answer, dtype=torch.bool) for answer in answers]),
            "old_log_probs": jagged([self.policy.log_probs(p, r) for p, r in zip(asked, answers, strict=True)]),
        }
        tags = [{"total_lengths": 2 * len(prompt)} for prompt in asked]
        return self._put(meta, fields, tags)

    def score(self, meta: tq.KVBatchMeta) -> tq.KVBatchMeta:
        """Read prompts, responses and masks; put rewards and the log-probabilities of the reference."""
        data = tq.kv_batch_get_by_meta(meta, ["prompts", "responses", "reward_model"])
        pairs = list(zip(rows(data, "prompts"), rows(data, "responses"), strict=True))
        assert {info["style"] for info in data.get("reward_model").tolist()} == {"rule"}
        fields = {
            "ref_log_probs": jagged([self.reference.log_probs(p, r) for p, r in pairs]),
            "rewards": torch.tensor([reward(p, r) for p, r in pairs]),
        }
        return self._put(meta, fields)

    def update(self, meta: tq.KVBatchMeta) -> Tensor:
        """Return the gradient of these samples."""
        data = tq.kv_batch_get_by_meta(meta, ["prompts", "responses", "advantages"])
        batch = list(
            zip(rows(data, "prompts"), rows(data, "responses"), data["advantages"].tolist(), strict=True)
        )  # fmt: skip
        return gradient(self.policy, batch)

    def _put(
        self, meta: tq.KVBatchMeta, fields: dict[str, Any], tags: list[dict[str, Any]] | None = None
    ) -> tq.KVBatchMeta:
        assert meta.partition_id is not None
        return tq.kv_batch_put(meta.keys, meta.partition_id, TensorDict(fields, batch_size=[len(meta)]), tags)


class Group:
    """The driver's interface to the workers: calls a method of all workers, each with its share of the samples."""

    def __init__(self, size: int) -> None:
        made: Any = ray.remote(num_cpus=0)(Worker)
        self.workers = [made.remote() for _ in range(size)]

    def run(self, method: str, shares: list[tq.KVBatchMeta]) -> list[Any]:
        """Return the results of the workers, in their order."""
        return ray.get([getattr(w, method).remote(share) for w, share in zip(self.workers, shares, strict=True)])

    def tell(self, logits: Tensor) -> None:
        """Send the weights of the update to all workers."""
        ray.get([worker.set_weights.remote(logits) for worker in self.workers])


def balanced(meta: tq.KVBatchMeta, size: int) -> list[tq.KVBatchMeta]:
    """Return shares with equal numbers of samples, and with numbers of tokens that are as equal as possible."""
    lengths = [int(tag["total_lengths"]) for tag in meta.tags]
    shares = get_seqlen_balanced_partitions(lengths, size, equal_size=True)
    return [meta.select_keys([meta.keys[at] for at in share]) for share in shares]


def step(number: int, group: Group, weights: Tensor, told: Callable[[str], None]) -> tuple[Tensor, float]:
    """Make one step of training; return the new weights and the mean reward."""
    partition = f"step_{number}"
    asked = prompts(number)
    keys = [f"{at}_{sample}" for at in range(len(asked)) for sample in range(SAMPLES)]
    uids = [str(uuid.uuid4()) for _ in asked]
    fields = {
        "prompts": jagged([prompt for prompt in asked for _ in range(SAMPLES)]),
        "uid": NonTensorStack(*[uid for uid in uids for _ in range(SAMPLES)]),
        "reward_model": NonTensorStack(*[{"style": "rule", "at": at} for at in range(len(keys))]),
    }
    size = len(group.workers)
    meta = tq.kv_batch_put(keys, partition, TensorDict(fields, batch_size=[len(keys)]))
    meta = tq.KVBatchMeta.concat(group.run("generate", meta.chunk(size)))
    meta = tq.KVBatchMeta.concat(group.run("score", meta.chunk(size)))

    # advantages need complete groups and one number for each sample: the driver fetches only these
    data = tq.kv_batch_get(keys, partition, ["rewards", "uid"])
    groups = np.array(data.get("uid").tolist()).reshape(-1, SAMPLES)
    assert (groups == groups[:, :1]).all()
    rewards = data["rewards"].view(-1, SAMPLES)
    values = TensorDict({"advantages": advantages(rewards).flatten()}, batch_size=[len(keys)])
    meta = tq.kv_batch_put(keys, partition, values)

    weights = weights + LEARNING_RATE / len(asked) * sum(group.run("update", balanced(meta, size)), torch.zeros(10, 10))
    group.tell(weights)
    told(f"step {number}: reward {rewards.mean():.3f}, {len(meta)} samples of {len(meta.fields or [])} fields")
    tq.kv_clear(keys, partition)
    return weights, float(rewards.mean())


def main() -> None:
    """The driver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    tq.init()
    try:
        group, weights, rewards = Group(WORKERS), torch.zeros(10, 10), []
        for number in range(options.steps):
            weights, mean = step(number, group, weights, print)
            rewards.append(mean)
        print(f"reward: {rewards[0]:.3f} -> {rewards[-1]:.3f}")
    finally:
        tq.close()


if __name__ == "__main__":
    main()
