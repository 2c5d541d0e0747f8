"""Subscriptions between real processes: who follows has in the end what a list says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import transfer_queue as tq
import warm

SECONDS = 120


@pytest.fixture(scope="module")
def system() -> Iterator[Any]:
    tq.init({"system": {"name": "subscriptions"}})
    yield tq
    tq.close()


def follow(partition: str, pipe: Any) -> None:
    """Keeps a copy of the tags; sends it when told that the last key is there."""
    tags: dict[str, Any] = {}
    for event in tq.get_client().subscribe(partition):
        if event.kind == "cleared":
            tags.pop(str(event.key), None)
        else:
            tags[str(event.key)] = event.tag
        if event.key == "last":
            pipe.send(tags)
            return


def test_many_writers_and_followers(system: Any) -> None:
    """Whoever follows has in the end what a list says."""
    partition = "many"
    followers = [warm.reporting(follow, partition) for _ in range(3)]

    def write(who: int) -> None:
        for i in range(40):
            tq.kv_put(f"{who}-{i % 10}", partition, tag={"n": i})
            if i % 7 == 0:
                tq.kv_clear(f"{who}-{i % 10}", partition)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    tq.kv_put("last", partition, tag={})
    listed = tq.kv_list(partition)[partition]
    for follower, pipe in followers:
        assert pipe.poll(SECONDS)
        assert pipe.recv() == listed
        follower.join(SECONDS)
