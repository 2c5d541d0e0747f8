"""A real system with a page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import transfer_queue as tq
from tests.live.live_system import Page, rows, served


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    """A client of a system in which 32 samples of 4 groups were put, and 8 trained."""
    tq.init({"system": {"name": "live-test"}}, task="rollout", rank=0)
    found = tq.get_client()
    group_ids = [f"q{number // 8}" for number in range(32)]
    tags = [{"policy_version": 1, "secret": "tag-value"}] * 32
    meta = found.put(rows(32, "tokens", "logprobs"), partition_id="train_0", group_ids=group_ids, tags=tags)
    found.put(rows(16, "reward"), meta[:16])
    dealt = found.get_meta(["tokens", "reward"], 8, "train_0", task_name="train")
    found.get_data(dealt)
    yield found
    tq.close()


@pytest.fixture(scope="module")
def page(client: tq.TransferQueueClient) -> Iterator[Page]:
    """The page of this system."""
    with served() as found:
        yield found
