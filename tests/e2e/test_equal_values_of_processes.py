"""Real processes put values of which many are equal; every reader gets its own bytes, and the bytes are freed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import transfer_queue as tq
import warm

SMALL = 4 << 14  # bytes of a value of the writers
PROMPTS, ANSWERS = 8, 16


def write(name: str) -> None:
    """Put values of which many are equal, and read them. Runs in a process of its own."""
    tq.init()
    client = tq.get_client()
    for turn in range(4):
        numbers = [(turn + at // 16) % 8 for at in range(128)]
        pixels = [torch.full((1 << 14,), float(number)) for number in numbers]
        keys = [f"{name}-{at}" for at in range(128)]
        client.kv_batch_put(keys, "images", {"pixels": pixels, "number": torch.tensor(numbers)})
        data = client.kv_batch_get(keys, "images", shared=bool(turn % 2), layout="dense")
        rows = data["pixels"].tolist() if turn % 2 else data["pixels"].unbind(0)
        assert [int(row[0]) for row in rows] == [int(row[-1]) for row in rows] == numbers == data["number"].tolist()
        client.kv_clear(keys[: 32 * turn], "images")
    tq.close()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    tq.close()


def test_processes_that_put_equal_values_at_once() -> None:
    tq.init({"dedup": {"fields": ["pixels"]}})
    client = tq.get_client()
    writers = [warm.process(write, name) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0, 0]
    (partition,) = client.status().partitions
    assert partition.rows == 2 * 32
    # a value may be written twice, by each process that did not know of the other
    assert partition.nbytes <= 2 * PROMPTS * SMALL + SMALL
    keys = list(client.kv_list("images")["images"])
    got = client.kv_batch_get(keys, "images", layout="dense")
    assert (got["pixels"] == got["number"][:, None]).all()
    client.kv_clear(keys, "images")
    assert client.status().partitions[0].nbytes == 0
