"""Claims and events, which every process of the example uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

from settings import EVENTS

WAIT = 10.0
"""Seconds that one claim waits before it is asked again."""


def claims(
    fields: list[str], batch_size: int, partition: str, task: str, samples: int, **sampling: Any
) -> Iterator[tuple[TensorDict, tq.BatchMeta]]:
    """Yield the data and metadata of batches as they become ready, until `samples` samples were claimed.

    `sampling` selects the sampler of these claims; the sampler of the system is for the trainers.
    """
    client = tq.get_client()
    config = sampling or {"sampler": "SequentialSampler"}
    while samples > 0:
        wanted = min(batch_size, samples)
        meta, _ = client.await_batch(fields, wanted, partition, task, config, timeout=WAIT)
        if len(meta):
            samples -= len(meta)
            yield client.get_data(meta), meta


def put_event(event: dict[str, Any]) -> None:
    """Put an event into its partition, from which `drain` takes it."""
    tq.get_client().put(TensorDict({"event": NonTensorStack(event)}, batch_size=1), partition_id=EVENTS)


Publish = Callable[[dict[str, Any]], None]


@contextmanager
def work(stage: str, worker: str, publish: Publish = put_event) -> Iterator[dict[str, Any]]:
    """Measure a piece of work and publish it as an event, with the entries that the body adds to the dict.

    Both wall time and CPU time are recorded, because all processes share the cores.
    """
    event: dict[str, Any] = {"stage": stage, "worker": worker, "start": time.time()}
    cpu = time.thread_time()
    yield event
    publish(event | {"end": time.time(), "cpu": time.thread_time() - cpu})


def drain() -> list[dict[str, Any]]:
    """Return all events since the last call, oldest first, and remove them from the system."""
    client = tq.get_client()
    indexes, _ = client.get_production_status(["event"], EVENTS)
    if indexes is None or not len(indexes):
        return []
    config = {"sampler": "SequentialSampler"}
    meta = client.get_meta(["event"], len(indexes), EVENTS, task_name="view", sampling_config=config)
    events = client.get_data(meta).get("event").tolist()
    client.clear_samples(meta)
    return events
