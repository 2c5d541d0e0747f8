"""Large copies that several threads share, in real processes: readers see whole puts only, also of killed writers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import transfer_queue as tq
import warm

ROWS, WIDTH = 32, 1 << 17  # 32 MiB: enough for eight threads
KEYS = [str(row) for row in range(ROWS)]
PUTS, KILLS = 3, 3


@pytest.fixture(params=[2, 4, 8])
def system(request: pytest.FixtureRequest) -> Iterator[Any]:
    tq.init({"system": {"name": "copies"}, "client": {"copy_threads": request.param}})
    yield tq
    tq.close()


def write(first: int, told: Connection[Any, Any]) -> None:
    """Put one value into all elements of all rows, then the next one, and so on."""
    tq.init(attach="require")
    for value in count(first):
        tq.kv_batch_put(KEYS, "p", {"x": torch.full((ROWS, WIDTH), value)})
        told.send(value)


def read() -> int:
    """Return the value of all elements of all rows."""
    (value,) = torch.cat(list(tq.kv_batch_get(KEYS, "p")["x"].unbind())).unique().tolist()
    return int(value)


def test_readers_see_whole_puts_of_writers_that_are_killed(system: Any) -> None:
    seen = 0
    for _ in range(KILLS):
        writer, here = warm.reporting(write, seen + 1)
        for _ in range(PUTS):
            put = here.recv()
            assert read() >= put
        writer.kill()  # while it copies
        writer.join()
        seen = read()
        assert seen >= put
        assert read() == seen
