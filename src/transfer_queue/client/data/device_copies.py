"""Copies between the arenas of this node and a device, without a buffer in between where that is possible.

The pages of an arena are registered with the driver of the device at their first use, and stay registered until the
client closes. The device then reads and writes them by itself. A get returns before its copies have ended, in the order
of the device's current stream; the bytes are held until then (`storage.arena.arena_views`). Short pieces, and bytes
that came from other nodes, are first gathered in memory that the driver has registered itself, part by part: while the
device copies a part, threads of this process gather the next one.

Only granules of blocks that are being read or written are registered: registering a granule that the unit has returned
to the file system would allocate it. Neighbours are registered with one call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from transfer_queue.client.units import Units
from transfer_queue.messages.queries import LookupReply
from transfer_queue.storage.arena.arena import Arena, stretches
from transfer_queue.storage.arena.arena_views import ArenaViews, join_granules
from transfer_queue.storage.arena.extent_table import GRANULE
from transfer_queue.wire.blocks.device_memory import DeviceArena, add_range, host_to_device, remove_range
from transfer_queue.wire.blocks.remote_ranges import HERE
from transfer_queue.wire.blocks.row_addressing import Memory, Place, gather
from transfer_queue.wire.buffers.copies import U8, address_of

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]

KIND = "cuda"
"""The type of device, as torch names it, whose driver can access the memory of this process by itself."""
MIN_DIRECT = 64 * 1024
"""The mean length in bytes from which pieces are copied one at a time, directly out of the arena."""
STAGED = 32 << 20
"""The bytes that are gathered before their copy begins. At most eight threads share this (`copies.PER_THREAD`)."""
MIN_REGISTERED = 1 << 20
"""The bytes of a block from which its space is registered for a put."""
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process


class DeviceDriver(Protocol):
    """What a device's driver does for copies between it and the memory of this process."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register memory, so that the device accesses it by itself. Returns whether the driver accepts it."""

    def unregister(self, address: int) -> None:
        """End the registration that began at this address."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return registered memory of the host, uint8 [nbytes]. Copies out of it end before it is used again."""

    def mark(self, device: torch.device) -> Any:
        """Return an event at the end of what was given to the device's current stream: `query()`, `synchronize()`."""

    def aside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which a thread works on a stream of its own on this device. Any thread may enter it."""

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """Let the current stream use tensors that another stream makes, which has this event after them."""


class CudaDriver:
    """The driver of CUDA devices."""

    _module: Any = torch.cuda  # parts of it are not typed

    def __init__(self) -> None:
        self._streams: dict[int, Any] = {}
        """Device -> the stream of `aside`. Memory that is freed on a stream is used again on it only."""

    def register(self, address: int, nbytes: int) -> bool:
        """See `DeviceDriver.register`."""
        return int(self._runtime().cudaHostRegister(address, nbytes, _PORTABLE)) == 0

    def unregister(self, address: int) -> None:
        """See `DeviceDriver.unregister`."""
        self._runtime().cudaHostUnregister(address)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `DeviceDriver.allocate`. torch keeps what is freed for later calls."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def mark(self, device: torch.device) -> Any:
        """See `DeviceDriver.mark`."""
        event: Any = self._module.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def aside(self, device: torch.device) -> AbstractContextManager[Any]:
        """See `DeviceDriver.aside`. The current device is that of the thread that calls this."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self._streams:
            self._streams[index] = self._module.Stream(index)
        return torch.cuda.stream(self._streams[index])

    def adopt(self, event: Any, tensors: Iterable[torch.Tensor]) -> None:
        """See `DeviceDriver.adopt`. torch does not use the memory again before this stream is done with it."""
        for tensor in tensors:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(event)
            tensor.record_stream(stream)

    def _runtime(self) -> Any:
        return self._module.cudart()


class Devices:
    """The copies of one client to and from devices.

    Args:
        units: The units.
        client_id: The id of the client.
    """

    def __init__(self, units: Units, client_id: str) -> None:
        self._units = units
        self._client_id = client_id
        self._copies: dict[str, DeviceCopies] = {}
        """Kind of device -> the copies."""

    def copies_to(self, device: torch.device) -> DeviceCopies | None:
        """Return the copies to and from devices of this kind; None if their driver cannot access host memory itself."""
        copies = self._copies.get(device.type)
        if copies is None and (driver := driver_of(device)) is not None:
            copies = self._copies[device.type] = DeviceCopies(self._units, self._client_id, driver)
        return copies

    def close(self) -> None:
        """Wait for all copies, and unregister the arenas."""
        for copies in self._copies.values():
            copies.close()


def driver_of(device: torch.device) -> DeviceDriver | None:
    """Return the driver of a device; None if it cannot access the memory of this process by itself."""
    return CudaDriver() if device.type == KIND else None


class RegisteredArena:
    """The registered granules of one arena, which stays mapped until `close`."""

    def __init__(self, driver: DeviceDriver, views: ArenaViews, arena: Arena) -> None:
        self.arena = arena
        """The arena."""
        self._views = views
        self._driver = driver
        self._address = address_of(arena.memory)
        self._known = np.zeros(len(arena.memory) // GRANULE, bool)
        self._ranges: list[tuple[int, int]] = []
        """The first granule of each registered range, and the number of granules."""
        self.refused = False
        """Whether the driver has refused a range. Copies then pass through its own buffers."""

    def register(self, part: slice) -> None:
        """Register these granules, unless they are registered. The process holds or has leased them."""
        if self.refused or self._known[part].all():
            return
        for first, end in stretches(np.flatnonzero(~self._known[part]) + part.start):
            if not self._views.keep_pages(first, end - first):
                return
            address, length = self._address + first * GRANULE, (end - first) * GRANULE
            if not self._driver.register(address, length):
                self._views.drop_pages(first, end - first)
                self.refused = True
                return
            add_range(address, length)
            self._known[first:end] = True
            self._ranges.append((first, end - first))

    def close(self) -> None:
        """Unregister everything."""
        for first, count in self._ranges:
            address = self._address + first * GRANULE
            remove_range(address)
            self._driver.unregister(address)
            self._views.drop_pages(first, count)
        self._ranges.clear()
        self._known[:] = False


class DeviceCopies:
    """The copies of one client between arenas and the devices of one driver, for all of which memory is registered."""

    def __init__(self, units: Units, client_id: str, driver: DeviceDriver) -> None:
        self._units = units
        self._client_id = client_id
        self.driver = driver
        """The driver."""
        self._lock = threading.Lock()
        self._arenas: dict[int, RegisteredArena] = {}
        """Unit -> its arena."""
        self._flying: list[tuple[Any, list[U8]]] = []
        """The event at the end of each copy, and the held bytes."""
        self._closed = False

    def register_space(self, unit: int, offset: int, nbytes: int) -> None:
        """Register leased space of a unit of this node, into which a put is about to copy from the device."""
        with self._lock:
            self._register([(unit, offset, nbytes)])

    def copy_held(self, reply: LookupReply, runs: Sequence[Place], into: torch.Tensor) -> bool:
        """Begin to copy bytes of arenas, one after the other, to memory of the device.

        The caller must compare the generations afterwards. Returns False if not all of the bytes can be held.
        """
        held = self._hold(runs)
        if held is None or not self._units.is_unchanged(reply):  # only what is in use may be registered
            return False
        at = 0
        with self._lock:
            self._register(runs)
            for (_, _, nbytes), array in zip(runs, held, strict=True):
                host_to_device(into[at : at + nbytes], array)
                at += nbytes
            self._flying.append((self.driver.mark(into.device), held))
            self._flying = [each for each in self._flying if not each[0].query()]  # what has ended is held no longer
        return True

    def copy_gathered(self, memory: Memory, units: I4, starts: I8, lengths: I8, into: torch.Tensor) -> None:
        """Copy bytes of arenas, one after the other, to memory of the device, after they were gathered on the host.

        The driver allocates a part again when its copy has ended, so usually two are in use.
        """
        ends = np.cumsum(lengths)
        at = begin = 0
        while at < len(ends):
            stop = max(at + 1, int(np.searchsorted(ends, begin + STAGED, "right")))
            end = int(ends[stop - 1])
            staged = self.driver.allocate(end - begin)
            gather(memory, units[at:stop], starts[at:stop], lengths[at:stop], into=staged.numpy())
            into[begin:end].copy_(staged, non_blocking=True)
            at, begin = stop, end

    def _register(self, places: Sequence[Place]) -> None:
        """Register bytes of units of this node. The caller has the lock."""
        for unit in () if self._closed else {unit for unit, _, _ in places}:
            arena, views = self._units.arena(unit), self._units.views_of(unit)
            if views is not None:
                registered = self._arenas.get(unit)
                if registered is None or registered.arena is not arena:
                    self._forget_lost()
                    registered = self._arenas[unit] = RegisteredArena(self.driver, views, arena)
                for part in join_granules([place[1:] for place in places if place[0] == unit]):
                    registered.register(part)

    def _forget_lost(self) -> None:
        """Unregister the arenas of units that were lost, so that their memory is freed. The caller has the lock."""
        for unit, each in list(self._arenas.items()):
            if not self._units.is_in_use(unit, each.arena):
                self._end_copies()
                del self._arenas[unit]
                each.close()

    def _hold(self, runs: Sequence[Place]) -> list[U8] | None:
        """Return the bytes of runs, held until nothing refers to them; None if not all of them can be held."""
        held: dict[int, U8] = {}
        for unit in {unit for unit, _, _ in runs}:
            views = None if unit == HERE else self._units.views_of(unit)
            if views is None:
                return None
            chosen = [at for at, run in enumerate(runs) if run[0] == unit]
            arrays = views.hold_all(self._units.arena(unit), self._client_id, [runs[at][1:] for at in chosen])
            if arrays is None:
                return None
            held.update(zip(chosen, arrays, strict=True))
        return [held[at] for at in range(len(runs))]

    def close(self) -> None:
        """Wait for all copies, unregister the arenas, and register nothing any more."""
        with self._lock:
            self._closed = True  # a thread that still gets a batch registers nothing more
            self._end_copies()
            for arena in self._arenas.values():
                arena.close()
            self._arenas.clear()

    def _end_copies(self) -> None:
        """Wait for all copies. The caller has the lock."""
        for event, _ in self._flying:
            event.synchronize()
        self._flying.clear()


class HostArenas(DeviceArena):
    """The arenas of a lookup on this host, out of which tensors are made on a device."""

    def __init__(self, copies: DeviceCopies, device: torch.device, reply: LookupReply, memory: Memory) -> None:
        self.device = device
        self._copies = copies
        self._reply = reply
        self._memory = memory

    def __call__(self, unit: int) -> U8:
        """See `DeviceArena`: the arena itself."""
        return self._memory(unit)

    def gather_bytes(self, units: I4, starts: I8, lengths: I8) -> torch.Tensor:
        """See `DeviceArena.gather_bytes`. Long runs are copied directly, see the module."""
        total = int(lengths.sum())
        made = torch.empty(total, dtype=torch.uint8, device=self.device)
        if total:
            runs = _join(units, starts, lengths)
            if total < MIN_DIRECT * len(runs) or not self._copies.copy_held(self._reply, runs, made):
                self._copies.copy_gathered(self._memory, units, starts, lengths, made)
        return made


def _join(units: I4, starts: I8, lengths: I8) -> list[Place]:
    """Join consecutive pieces that are neighbours in the arena of one unit. Empty pieces are left out."""
    some = lengths > 0
    units, starts, lengths = units[some], starts[some], lengths[some]
    first = np.ones(len(starts), np.bool_)
    first[1:] = (starts[1:] != starts[:-1] + lengths[:-1]) | (units[1:] != units[:-1])
    begins = np.flatnonzero(first)
    sizes = np.add.reduceat(lengths, begins)
    return list(zip(units[begins].tolist(), starts[begins].tolist(), sizes.tolist(), strict=True))
