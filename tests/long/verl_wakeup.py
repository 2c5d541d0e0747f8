"""How long is it from the last `finished` tag to the return of `sample`, in verl's replay buffer and in this package's?

    python tests/long/verl_wakeup.py [--steps 50] [--stock-steps 5] [--other-keys 20000]

Runs in the environment `.verl` (`make verl-wakeup`). A second process puts the trajectories and tags of the prompts of
each step, as verl's agent loops do. It puts the last tag when the replay buffer waits already, after a random part of
the interval of verl's polling. The two processes share one clock (CLOCK_MONOTONIC). Other partitions contain
`--other-keys` keys, because verl's replay buffer lists all partitions.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
import warnings
from typing import Any

import transfer_queue as tq

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

    from transfer_queue.integrations.verl import EventDrivenReplayBuffer, EventDrivenReplayBufferAsync

PROMPTS, SAMPLES = 64, 8
POLL_SECONDS = 2.0  # of verl's replay buffer
CONF = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
KINDS: list[tuple[str, type]] = [
    ("sync", EventDrivenReplayBuffer), ("colocate_async", EventDrivenReplayBufferAsync),
    ("sync", ReplayBuffer), ("colocate_async", ReplayBufferAsync),
]  # fmt: skip


def produce(connection: Any) -> None:
    """For each list of prompts that arrives: put their trajectories and tags, and send the time of the last tag."""
    tq.init()
    for prompts, pause in iter(connection.recv, None):
        for prompt in prompts:
            keys = [f"{prompt}_{session}_0" for session in range(SAMPLES)]
            tags = [{"status": "success", "seq_len": 100, "global_steps": 1}] * SAMPLES
            tq.kv_batch_put(keys, "train", tags=tags)
            if prompt == prompts[-1]:
                time.sleep(pause)  # not to wait for anything: the moment in the interval of the polling is random
            tq.kv_put(prompt, "train", tag={"status": "finished"})
        connection.send(time.monotonic())
    tq.close()


def waits(mode: str, kind: type, steps: int, producer: Any, rng: random.Random) -> list[float]:
    """Return the milliseconds from the return of the last put to that of `sample`, for each step."""
    buffer = kind(
        trainer_mode=mode, trainer_config={}, max_off_policy_threshold=8, max_off_policy_strategy="drop",
        sampler_kwargs={}, poll_interval=POLL_SECONDS,
    )  # fmt: skip
    found = []
    for step in range(steps + 1):
        prompts = [f"{kind.__name__}.{step}.{number}" for number in range(PROMPTS)]
        tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in prompts]
        tq.kv_batch_put(prompts, "train", tags=tags)
        producer.send((prompts, rng.uniform(0.05, POLL_SECONDS)))
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=PROMPTS)
        returned = time.monotonic()
        if len(batch.keys) != PROMPTS * SAMPLES:
            raise AssertionError(f"sample returned {len(batch.keys)} trajectories")
        found.append((returned - producer.recv()) * 1e3)
        tq.kv_clear(batch.keys, "train")
    return found[1:]  # the first call also loads code


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--stock-steps", type=int, default=5, help="with verl's own replay buffers")
    parser.add_argument("--other-keys", type=int, default=20_000)
    options = parser.parse_args()
    tq.init(CONF)
    try:
        for first in range(0, options.other_keys, 5000):
            names = [f"k{number}_0_0" for number in range(first, min(first + 5000, options.other_keys))]
            tq.kv_batch_put(
                names, "other", tags=[{"status": "success", "seq_len": 100, "global_steps": 1}] * len(names)
            )
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=produce, args=(there,), daemon=True)
        process.start()
        print(f"{PROMPTS} prompts of {SAMPLES} trajectories a step, {options.other_keys:,} keys in another partition\n")
        print("replay buffer                  median ms    best ms   worst ms   steps")
        for mode, kind in KINDS:
            steps = options.steps if kind.__name__.startswith("Event") else options.stock_steps
            took = waits(mode, kind, steps, here, random.Random(0))
            print(
                f"{kind.__name__:30}{statistics.median(took):10.2f}{min(took):11.2f}{max(took):11.2f}{len(took):8}",
                flush=True,
            )
        here.send(None)
        process.join()
    finally:
        tq.close()


if __name__ == "__main__":
    main()
