"""A stand-in for the driver of a device: the device is the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
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
    """Notes what it is asked. accepts: whether it registers memory. adopted: the memory of adopted tensors."""

    def __init__(self) -> None:
        self.accepts = True
        self.registered: dict[int, int] = {}
        self.events: list[Event] = []
        self.gathered: list[int] = []
        self.adopted: list[Any] = []
        self._aside = threading.local()

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

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        assert not self.is_aside
        self._aside.is_it = True
        try:
            yield
        finally:
            self._aside.is_it = False

    @property
    def is_aside(self) -> bool:
        """Whether this thread works on a stream of its own."""
        return getattr(self._aside, "is_it", False)

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        assert not self.is_aside
        assert event in self.events
        self.adopted += [tensor.untyped_storage().data_ptr() for tensor in tensors]
