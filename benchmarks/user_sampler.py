"""Measures a small claim with a built-in sampler, a user's sampler in the controller, and one in its own process.

    python benchmarks/user_sampler.py

Measures the three in turn, five times, each time in a new system. The figure of a system is the first quartile of its
claims, because the machine may have other work. See docs/decisions/0015.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq

CLAIMS = 600
ROUNDS = 5


class FirstOnes(tq.BaseSampler):
    """Deals the first ready samples."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        """Return the first ready rows."""
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


def milliseconds(sampler: object, isolation: str) -> float:
    """Return the time of a claim of one sample, in milliseconds."""
    controller = {"sampler": sampler, "sampler_isolation": isolation}
    tq.init({"system": {"name": "user-sampler-bench"}, "controller": controller})
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(CLAIMS)}, batch_size=[CLAIMS]), partition_id="p")
    times = []
    for _ in range(CLAIMS):
        began = time.perf_counter()
        client.get_meta(["x"], 1, "p", task_name="t")
        times.append(time.perf_counter() - began)
    tq.close()
    return sorted(times)[CLAIMS // 4] * 1000


def main() -> None:
    """Measure the three samplers and print the times."""
    kinds = {
        "built in": ("SequentialSampler", "process"),
        "a user's, inline": (FirstOnes, "inline"),
        "a user's, in its process": (FirstOnes, "process"),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(ROUNDS):
        for name, (sampler, isolation) in kinds.items():
            found[name].append(milliseconds(sampler, isolation))
    for name, times in found.items():
        print(f"{name}: {min(times):.2f} ms per claim ({', '.join(f'{each:.2f}' for each in times)})")


if __name__ == "__main__":
    main()
