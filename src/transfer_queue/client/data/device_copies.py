"""Copies from the arenas of this node to a device, out of the arena's own pages, without a buffer in between.

The pages are registered with the driver of the device at their first use, and stay registered until the client closes.
The device then reads them by itself while this process goes on: a get returns before the copies have ended, in the
order of the device's current stream. The bytes are held until then (`storage.arena.arena_views`).

Only granules of blocks that are being read are registered: registering a granule that the unit has returned to the file
system would allocate it. A copy is divided where registered ranges meet, because the driver accepts no other.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch

from transfer_queue.client.data.client_context import ClientContext
from transfer_queue.messages.queries import LookupReply
from transfer_queue.storage.arena.arena import stretches
from transfer_queue.storage.arena.arena_views import ArenaViews, granules_of
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.wire.blocks.gather import Place, View
from transfer_queue.wire.buffers.copies import U8

LEAST_DIRECT = 64 * 1024
"""Bytes of a field from which it is copied in this way. Smaller fields are copied together with others on the host."""


class DeviceDriver(Protocol):
    """What a device's driver does for copies out of memory of this process."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory, so that the device reads it by itself. Returns whether the driver accepts it."""

    def unregister(self, address: int) -> None:
        """End the registration that began at this address."""

    def mark(self, device: torch.device) -> Any:
        """Return an event at the end of what was given to the device's current stream: `query()`, `synchronize()`."""


class CudaDriver:
    """The driver of CUDA devices."""

    _module: Any = torch.cuda  # parts of it are not typed

    def register(self, address: int, nbytes: int) -> bool:
        """See `DeviceDriver.register`."""
        return int(self._runtime().cudaHostRegister(address, nbytes, 0)) == 0

    def unregister(self, address: int) -> None:
        """See `DeviceDriver.unregister`."""
        self._runtime().cudaHostUnregister(address)

    def mark(self, device: torch.device) -> Any:
        """See `DeviceDriver.mark`."""
        event: Any = self._module.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def _runtime(self) -> Any:
        return self._module.cudart()


def copies_to(
    known: dict[torch.device, DeviceCopies], state: ClientContext, device: torch.device
) -> DeviceCopies | None:
    """Return the copies of a client to a device, and add them to `known`.

    Returns None if the driver of the device cannot read the memory of this process.
    """
    found = known.get(device)
    if found is None or found.state is not state:  # in a forked child the client has a new state
        driver = driver_of(device)
        if driver is None:
            return None
        found = known[device] = DeviceCopies(state, device, driver)
        state.on_close.append(found.close)
    return found


def driver_of(device: torch.device) -> DeviceDriver | None:
    """Return the driver of a device; None if it cannot read the memory of this process by itself."""
    return CudaDriver() if device.type == "cuda" else None


class RegisteredArena:
    """The registered granules of one arena. `memory` is the mapping of the client, which is kept until `close`."""

    def __init__(self, driver: DeviceDriver, views: ArenaViews, memory: U8) -> None:
        self.views = views
        self._driver = driver
        self._memory = memory
        self._address = int(memory.__array_interface__["data"][0])
        self._known = np.zeros(len(memory) // GRANULE, bool)
        self._starts: list[int] = []
        """The first granule of each registered range, ascending."""
        self._counts: dict[int, int] = {}
        """First granule -> the number of granules."""
        self.refused = False
        """Whether the driver has refused a range. Copies then pass through its own buffers."""

    def register(self, start: int, nbytes: int) -> None:
        """Register the granules of these bytes, which the process holds, unless they are registered."""
        part = granules_of(start, start + nbytes)
        for first, end in stretches(np.flatnonzero(~self._known[part]) + part.start) if not self.refused else ():
            if not self.views.keep_pages(first, end - first):
                return
            if not self._driver.register(self._address + first * GRANULE, (end - first) * GRANULE):
                self.views.drop_pages(first, end - first)
                self.refused = True
                return
            self._known[first:end] = True
            self._starts.insert(bisect_right(self._starts, first), first)
            self._counts[first] = end - first

    def pieces(self, start: int, nbytes: int) -> list[tuple[int, int]]:
        """Return these bytes as (start, end) of pieces that are each in one registered range, or in none."""
        end = start + nbytes
        edges = {start, end}
        for first in self._starts[max(0, bisect_right(self._starts, start // GRANULE) - 1) :]:
            if first * GRANULE >= end:
                break
            edges.update(at for at in (first * GRANULE, (first + self._counts[first]) * GRANULE) if start < at < end)
        ordered = sorted(edges)
        return list(pairwise(ordered))

    def close(self) -> None:
        """Unregister everything."""
        for first in self._starts:
            self._driver.unregister(self._address + first * GRANULE)
            self.views.drop_pages(first, self._counts[first])
        self._starts.clear()
        self._known[:] = False


class DeviceCopies:
    """The copies of one client from arenas to one device."""

    def __init__(self, state: ClientContext, device: torch.device, driver: DeviceDriver) -> None:
        self.state = state
        """The state of the client."""
        self._device = device
        self._driver = driver
        self._lock = threading.Lock()
        self._arenas: dict[str, RegisteredArena] = {}
        self._flying: deque[tuple[Any, U8]] = deque()
        """The event at the end of each copy, and the held bytes, in the order of the stream."""

    def begin_all(self, reply: LookupReply, places: list[Place]) -> list[View]:
        """Begin to copy bytes of a lookup. Returns flat tensors on the device; None where the host gathers them.

        With `reply` bound it is a `wire.blocks.gather.Views`. The caller must compare the generations afterwards.
        """
        return [self._begin(reply, *place) for place in places]

    def _begin(self, reply: LookupReply, unit: int, start: int, nbytes: int) -> torch.Tensor | None:
        """See `begin_all`."""
        views = self.state.views_of(unit)
        if nbytes < LEAST_DIRECT or views is None:
            return None
        arena = self.state.arena(unit)
        held = views.hold(arena, self.state.client_id, start, nbytes)
        if held is None or not self.state.is_unchanged(reply):  # only what is in use may be registered
            return None
        with self._lock:
            registered = self._arenas.get(arena.boot_id)
            if registered is None:
                registered = self._arenas[arena.boot_id] = RegisteredArena(self._driver, views, arena.memory)
            registered.register(start, nbytes)
            made = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            source = torch.from_numpy(held)
            for first, end in registered.pieces(start, nbytes):
                part = slice(first - start, end - start)
                made[part].copy_(source[part], non_blocking=True)
            self._flying.append((self._driver.mark(self._device), held))
            self._forget_ended()
        return made

    def _forget_ended(self) -> None:
        """End the holds of copies that have ended."""
        while self._flying and self._flying[0][0].query():
            self._flying.popleft()

    def close(self) -> None:
        """Wait for all copies, and unregister the arenas."""
        with self._lock:
            for event, _ in self._flying:
                event.synchronize()
            self._flying.clear()
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()
