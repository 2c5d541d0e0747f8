"""A stand-in for the driver of a device: the device is the host."""

from __future__ import annotations

from typing import Any

import torch

from transfer_queue.client.data.device_copies import DeviceDriver


class Event:
    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over = True


class Driver(DeviceDriver):
    """Notes what it is asked. accepts: whether it registers memory."""

    def __init__(self) -> None:
        self.accepts = True
        self.registered: dict[int, int] = {}
        self.events: list[Event] = []
        self.gathered: list[int] = []

    def register(self, address: int, nbytes: int) -> bool:
        assert all(not (start < address + nbytes and address < start + n) for start, n in self.registered.items())
        if self.accepts:
            self.registered[address] = nbytes
        return self.accepts

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.gathered.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def mark(self, device: torch.device) -> Any:
        self.events.append(Event())
        return self.events[-1]
