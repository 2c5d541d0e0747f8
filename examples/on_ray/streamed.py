"""Four independent services with a stream between them, as in a disaggregated trainer.

Rollout, reward, reference and two ranks of the actor are Ray actors, each at its own pace. A sample goes to the next
service as soon as its fields exist, in micro-batches; the actor's ranks get equal numbers of complete groups.

    python examples/on_ray/streamed.py --steps 6
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import ray
import torch
from collocated import jagged, rows
from policy import LEARNING_RATE, PROMPTS, SAMPLES, Policy, advantages, gradient, prompts, reward
from tensordict import TensorDict
from torch import Tensor

import transfer_queue as tq

RANKS = 2
BATCH = 8 * SAMPLES  # samples that a service takes at once
MICRO = 2 * SAMPLES


def stream(step: int, task: str, fields: list[str], rank: int = 0) -> Iterator[tuple[TensorDict, tq.BatchMeta]]:
    """Return the micro-batches of a step that have these fields, until all samples are dealt."""
    dataset = tq.StreamingDataset(
        config=None,
        batch_size=BATCH,
        micro_batch_size=MICRO,
        data_fields=fields,
        partition_id=f"step_{step}",
        task_name=task,
        dp_rank=rank,
    )
    yield from tq.StreamingDataLoader(dataset)


class Rollout:
    """Puts the samples of a step, one group at a time."""

    def run(self, step: int, logits: Tensor) -> None:
        """Generate the samples of a step with the weights of the previous step."""
        torch.set_num_threads(1)
        policy, client = Policy(logits), tq.get_client()
        for prompt in prompts(step):
            answers = [policy.sample(prompt) for _ in range(SAMPLES)]
            fields = {"prompts": jagged([prompt] * SAMPLES), "responses": jagged(answers)}
            client.put(TensorDict(fields, batch_size=[SAMPLES]), partition_id=f"step_{step}")
        client.seal(f"step_{step}")


class Reward:
    """Adds rewards and advantages, group by group."""

    def run(self, step: int) -> float:
        """Score the samples of a step; return the mean reward."""
        torch.set_num_threads(1)
        client, found = tq.get_client(), []
        for data, meta in stream(step, "reward", ["prompts", "responses"]):
            pairs = zip(rows(data, "prompts"), rows(data, "responses"), strict=True)
            rewards = torch.tensor([reward(prompt, response) for prompt, response in pairs])
            found.append(rewards)
            fields = {"rewards": rewards, "advantages": advantages(rewards.view(-1, SAMPLES)).flatten()}
            client.put(TensorDict(fields, batch_size=[len(meta)]), metadata=meta)
        return float(torch.cat(found).mean())


class Reference:
    """Adds the log-probabilities of the initial policy."""

    def run(self, step: int) -> int:
        """Process the samples of a step; return their number."""
        torch.set_num_threads(1)
        client, policy, count = tq.get_client(), Policy.new(), 0
        for data, meta in stream(step, "reference", ["prompts", "responses"]):
            pairs = zip(rows(data, "prompts"), rows(data, "responses"), strict=True)
            fields = {"ref_log_probs": jagged([policy.log_probs(p, r) for p, r in pairs])}
            client.put(TensorDict(fields, batch_size=[len(meta)]), metadata=meta)
            count += len(meta)
        return count


class Actor:
    """A rank of the training: sums the gradients of micro-batches as they arrive."""

    def run(self, step: int, rank: int, logits: Tensor) -> tuple[Tensor, int]:
        """Return the gradient of the rank's samples, and their number."""
        torch.set_num_threads(1)
        policy, total, count = Policy(logits), torch.zeros(10, 10), 0
        for data, meta in stream(step, "actor", ["prompts", "responses", "advantages", "ref_log_probs"], rank):
            shares = zip(rows(data, "prompts"), rows(data, "responses"), data["advantages"].tolist(), strict=True)
            total += gradient(policy, list(shares))
            count += len(meta)
        return total, count


def main() -> None:
    """Start the services and pass weights between steps. Samples do not pass through this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    sampler = {"sampler": "GRPOGroupNSampler", "sampler_args": {"n_samples_per_prompt": SAMPLES}}
    tq.init({"controller": sampler})
    try:
        remote: Any = ray.remote(num_cpus=0)
        rollout, scorer, reference = (remote(kind).remote() for kind in (Rollout, Reward, Reference))
        actors = [remote(Actor).remote() for _ in range(RANKS)]
        logits = torch.zeros(10, 10)
        means: list[float] = []
        for step in range(options.steps):
            tq.get_client().create_partition(f"step_{step}", group_size=SAMPLES)
            made = rollout.run.remote(step, logits)
            scored, compared = scorer.run.remote(step), reference.run.remote(step)
            trained = [actor.run.remote(step, rank, logits) for rank, actor in enumerate(actors)]
            shares: list[tuple[Tensor, int]] = ray.get(trained)
            ray.get(made)
            means.append(ray.get(scored))
            counts = [count for _, count in shares]
            assert sum(counts) == PROMPTS * SAMPLES == ray.get(compared)
            logits = logits + LEARNING_RATE / PROMPTS * sum((total for total, _ in shares), torch.zeros(10, 10))
            tq.get_client().clear_partition(f"step_{step}")
            print(f"step {step}: reward {means[-1]:.3f}, samples by rank {counts}")
        print(f"reward: {means[0]:.3f} -> {means[-1]:.3f}")
    finally:
        tq.close()


if __name__ == "__main__":
    main()
