"""How `reset` and `step` of a dataset reach its copies in worker processes.

A worker works on a copy of the dataset that it got when it was started, and lives on from one iteration to the
next where workers are persistent. What it must hear of meanwhile is written to a little shared memory, which
travels with the dataset to the processes that torch starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transfer_queue.errors import InvalidArgumentError

MAX_NAME = 4096  # bytes of a partition's name
_HEAD = 4  # numbers: version, resets, steps, length of the name
_ATTEMPTS = 1000


@dataclass(frozen=True)
class Order:
    """resets, steps: how many were ordered so far. partition_id: of the last step, "" before the first."""

    resets: int = 0
    steps: int = 0
    partition_id: str = ""


class Orders:
    """Written by one process, read by others."""

    def __init__(self) -> None:
        # the version is odd while the rest is being written
        self._memory = torch.zeros(_HEAD + MAX_NAME // 8, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def read(self) -> Order | None:
        """The newest order; None where it was being changed all the while."""
        memory = self._memory
        for _ in range(_ATTEMPTS):
            head = memory[:_HEAD].tolist()
            name = bytes(memory[_HEAD:].view(torch.uint8)[: max(0, min(head[3], MAX_NAME))].tolist())
            if head[0] % 2 == 0 and memory[0].item() == head[0]:
                return Order(head[1], head[2], name.decode())
        return None

    def reset(self) -> Order:
        """Orders a replay."""
        self._memory[0] += 1
        self._memory[1] += 1
        self._memory[0] += 1
        return self._written()

    def step(self, partition_id: str) -> Order:
        """Orders another partition.

        Raises:
            InvalidArgumentError: its name is longer than MAX_NAME bytes.
        """
        name = partition_id.encode()
        if len(name) > MAX_NAME:
            raise InvalidArgumentError(
                f"the partition's name is {len(name)} bytes long; a loader with workers takes {MAX_NAME} at most"
            )
        self._memory[0] += 1
        self._memory[_HEAD:].view(torch.uint8)[: len(name)] = torch.tensor(list(name), dtype=torch.uint8)
        self._memory[3] = len(name)
        self._memory[2] += 1
        self._memory[0] += 1
        return self._written()

    def _written(self) -> Order:
        order = self.read()
        assert order is not None  # nobody else writes
        return order
