"""Allocates the space into which a client writes: extents leased from storage units, and places for blocks in them.

Small blocks are placed in open extents by a bump pointer, so that most puts lease nothing. A block of 1 MiB or more
gets an extent of its own. Blocks go to units on disk only with `reserve_anywhere`. The allocator is thread-safe. Its
only input and output is to lock its slot files (`storage.arena.writer_locks`), and it has no lock across a yield. It
does not interpret blocks.

The states of an extent:

    open      takes blocks while they fit
    retired   takes no more blocks; waits for the end of its reservations in flight
    over      has no reservations in flight: it is queued to be closed at the controller if a block in it was
              published, otherwise to be returned to its unit. If it is unknown whether a block was published, the
              controller is asked (`CloseExtents`)

While an open extent has no reservation in flight, it is *offered* (`storage.arena.writer_locks`): if space is short,
its unit may recall the unused rest. The next reservation detects this, and the extent is then over. An extent is not
offered any more when it is unknown whether a Publish of a block in it was carried out.

A put reserves, writes, and sends Publish with `take_closes(reserved)`. If it succeeded, or if its outcome is unknown,
it calls `mark_published(reserved)`. If it certainly failed, it calls `restore_closes` with the result of `take_closes`,
then `abandon(reserved)`, and runs `return_extents`. If its extents may have been refused, it calls `mark_refused`.

If a put is interrupted while it leases an extent, the lease is cancelled with the next request to a unit. Extents of a
lost unit are forgotten, because nothing can be written, closed or returned there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from transfer_queue.errors import (
    CapacityError,
    ConnectionLostError,
    InvalidArgumentError,
    ProtocolError,
    UnitLostError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.puts import CloseExtents
from transfer_queue.messages.storage import ExtentLeaseReply, LeaseExtent, OpenSlot, ReturnExtent, SlotReply
from transfer_queue.net.calls import CONTROLLER, NOT_MADE, Call, Request
from transfer_queue.storage.arena.writer_locks import PLACES, HeldSlot, NoLock, hold_slot
from transfer_queue.storage.protocols import Allocator, Reserved

ALIGNMENT = 64
SMALLEST_EXTENT = 64 * 1024
LARGEST_EXTENT = 4 * 1024 * 1024
DEDICATED = 1024 * 1024
"""Blocks of this many bytes or more get an extent of their own."""
OPEN_EXTENTS = 4
"""The number of extents that may be open at once. Threads that run out of space together each lease one."""

REPLY_SECONDS = 3.0
"""Seconds in which a unit on another node must reply to a request that another unit can serve as well."""
_SLOT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class _WriterSlot:
    """The slot of this writer in one unit."""

    number: int
    lock: HeldSlot
    session: str = ""
    """The name under which a slot on another node was opened; "" on this node."""


@dataclass(slots=True, eq=False)
class _OpenExtent:
    unit: int
    number: int
    offset: int
    length: int
    generation: int
    lease: tuple[int, int]
    """See `Reserved`."""
    slot: _WriterSlot
    """The slot under which it was leased."""
    used: int = 0
    """The bump pointer: bytes from the extent's offset, a multiple of ALIGNMENT."""
    open: bool = True
    published: bool = False
    """Whether the controller may have a block in it."""
    lost: bool = False
    """Whether its unit will not return."""
    certain: bool = True
    """False if a Publish of a block in it may be carried out later."""
    place: int = -1
    """The place at which it is offered; -1 if it never is."""
    offered: bool = False
    closing: bool = False
    """Whether `take_closes` has returned it together with its last reservation."""
    flights: set[int] = field(default_factory=set)
    """The offsets of the reservations that have not ended."""

    @property
    def name(self) -> tuple[int, int]:
        return self.unit, self.number


class ExtentAllocator(Allocator[Call]):
    """The space of one client in storage units.

    Units of the client's own node are preferred, and then the first ones. If there are other nodes, copies are written
    to another node than the first copy.

    Args:
        writer: The name of the client.
        units: The units in memory.
        hold: Locks a slot file for the life of the client.
        replicas: The number of units to which each block is written.
        disks: The units on disk, which are not among `units`.
        nodes: Unit -> its node.
        node: The client's node.
        alone: Whether each block gets an extent of its own, also a small one.
        unreachable: The units on other nodes that did not reply the last time. They are used if no other unit can be.
    """

    def __init__(
        self,
        writer: str,
        units: Sequence[int],
        hold: Callable[[Path], HeldSlot] = hold_slot,
        replicas: int = 1,
        disks: Sequence[int] = (),
        nodes: Mapping[int, str] | None = None,
        node: str = "",
        alone: bool = False,
        unreachable: set[int] | None = None,
    ) -> None:
        if len(units) < replicas:
            raise InvalidArgumentError(
                f"a client needs at least {replicas} storage units for {replicas} replicas, got {len(units)}"
            )
        self.replicas = replicas
        self._alone = alone
        self._unreachable = set() if unreachable is None else unreachable
        self.writer = writer
        self.node = node
        self._nodes = dict(nodes or {})
        self.units = self._nearest(units)
        self.disks = self._nearest(disks)
        self._hold = hold
        self._mutex = threading.Lock()
        self._sessions: dict[int, str] = {}
        """Unit on another node -> the name under which the slot there was opened, until the slot ends."""
        self._session_numbers = itertools.count(1)
        self._slots: dict[int, _WriterSlot] = {}
        """Unit -> this writer's slot there, for exactly the units from which it has leased."""
        self._extents: dict[tuple[int, int], _OpenExtent] = {}
        """(unit, extent) -> exactly the extents that are open or have reservations in flight."""
        self._open: list[_OpenExtent] = []
        """The open extents, oldest first; at most OPEN_EXTENTS for each replica."""
        self._places: set[tuple[int, int]] = set()
        """(unit, place) of the extents that have a place."""
        self._closes: dict[tuple[int, int], None] = {}
        """Extents that are over and must be closed at the controller. None of them is in `_returns`."""
        self._doubtful: dict[tuple[int, int], None] = {}
        """Others, in which the controller may know no block. It must be asked with `CloseExtents` alone."""
        self._returns: dict[tuple[int, int], None] = {}
        """Extents that are over and contain no published block."""
        self._orphans: list[tuple[int, int]] = []
        """(unit, sequence) of leases that may have been granted although their put was interrupted."""
        self._next_length = SMALLEST_EXTENT

    # ------------------------------------------------------------ one block

    def pack(self, nbytes: int) -> Reserved | None:
        """Reserve space without any call, in an extent that is open; None if `reserve` must do it."""
        size = aligned(nbytes)
        if self._alone or self.replicas > 1 or size >= DEDICATED:
            return None
        with self._mutex:
            return self._pack(self.units, nbytes, size)

    def reserve(self, nbytes: int, wait: float | None = None) -> Generator[Call, AnyReply, Reserved]:
        """See `Allocator.reserve`. With replicas, space is reserved in that many units or in none."""
        return self._reserve((self.units,), nbytes, wait, self.replicas)

    def reserve_anywhere(self, nbytes: int) -> Generator[Call, AnyReply, Reserved]:
        """Reserve space without a wait, on disk if there is none in memory."""
        return self._reserve((self.units, self.disks), nbytes, None, self.replicas)

    def _reserve(
        self, tiers: Sequence[Sequence[int]], nbytes: int, wait: float | None, replicas: int
    ) -> Generator[Call, AnyReply, Reserved]:
        """Reserve space in one unit, or with 2 replicas in two or in none, each time in the first tier that has some.

        The `CapacityError` has the reasons of all tiers.
        """
        reasons: list[str] = []
        for units in tiers:
            try:
                if units:
                    reserved = yield from self._reserve_in(units, nbytes, wait)
                    break
            except CapacityError as error:
                if len(tiers) == 1:
                    raise
                reasons.append(str(error))
        else:
            text = "; ".join(reasons)
            raise CapacityError(text or "the system has no storage unit to write to; tq status shows its units")
        if replicas == 1:
            return reserved
        try:
            others = [self._copy_targets(reserved.unit, units) for units in tiers]
            copy = yield from self._reserve(others, nbytes, wait, 1)
        except BaseException:
            self.abandon(reserved)
            raise
        return msgspec.structs.replace(reserved, copies=(copy,))

    def _reserve_in(self, units: Sequence[int], nbytes: int, wait: float | None) -> Generator[Call, AnyReply, Reserved]:
        """Reserve space in one of these units."""
        if nbytes < 0:
            raise InvalidArgumentError(f"the length of a block must not be negative, got {nbytes}")
        size = aligned(nbytes)
        dedicated = self._alone or size >= DEDICATED
        extent = None
        while extent is None:
            if not dedicated:
                with self._mutex:
                    reserved = self._pack(units, nbytes, size)
                if reserved is not None:
                    return reserved
            want = size if dedicated else max(size, self._next_length)
            # many tasks that find the open extents full at once need one new extent, not one each
            extent = yield from self._lease(units, size, want, wait, shared=not dedicated and wait is None)
        with self._mutex:
            self._extents[extent.name] = extent
            if dedicated:
                extent.open = False
                return self._place(extent, nbytes, size)
            self._next_length = min(LARGEST_EXTENT, max(SMALLEST_EXTENT, 2 * extent.length))
            self._allot(extent)
            # its own block first, so that the lease is used even if other threads have leased extents, too
            reserved = self._place(extent, nbytes, size)
            for full in [
                old for old in self._open if old.unit == extent.unit and old.length - old.used < old.length // 4
            ]:
                self._retire(full)  # only a closed extent can be emptied and freed
            if extent.open:
                self._open.append(extent)
                if len(self._open) > OPEN_EXTENTS * self.replicas:
                    self._retire(min(self._open, key=lambda open_: open_.length - open_.used))
            return reserved

    def mark_published(self, reserved: Reserved, certain: bool = True) -> None:
        """See `Allocator.mark_published`."""
        with self._mutex:
            for place in reserved.places:
                extent = self._find(place)
                extent.flights.remove(place.offset)
                extent.published = True
                extent.certain &= certain
                self._settle(extent)

    def mark_refused(self, reserved: Reserved) -> None:
        """Report that the controller has refused the place of the block: nothing more is put into its extent."""
        with self._mutex:
            for place in reserved.places:
                extent = self._find(place)
                extent.flights.remove(place.offset)
                extent.published, extent.certain, extent.closing = True, False, False
                self._retire(extent)

    def abandon(self, reserved: Reserved) -> None:
        """See `Allocator.abandon`. The bytes are used again if no block was placed after them."""
        size = aligned(reserved.nbytes)
        with self._mutex:
            for place in reserved.places:
                extent = self._find(place)
                extent.flights.remove(place.offset)
                extent.closing = False
                if not extent.flights and not extent.published:
                    extent.used = 0
                elif place.offset + size == extent.offset + extent.used:
                    extent.used -= size
                self._settle(extent)

    # ------------------------------------------------------------ extents that are over

    def take_closes(self, current: Reserved | None = None) -> list[tuple[int, int]]:
        """See `Allocator.take_closes`. Put the result into the next Publish.

        Args:
            current: The reservation of this Publish. Its extent is in the result if it gets no more blocks, so that a
                writer which then stops does not keep the space. None: there is no Publish, and the result is for
                `CloseExtents`, with the extents whose blocks may be unknown there.
        """
        with self._mutex:
            taken = list(self._closes)
            self._closes.clear()
            if current is None:
                taken += self._doubtful
                self._doubtful.clear()
            for place in () if current is None else current.places:
                extent = self._find(place)
                if not extent.open and len(extent.flights) == 1:
                    extent.closing = True
                    taken.append(extent.name)
            return taken

    def restore_closes(self, closes: Iterable[tuple[int, int]], certain: bool = True) -> None:
        """Take back the result of `take_closes`, because the Publish failed.

        `certain` is False if the controller may have refused the Publish because of them.
        """
        with self._mutex:
            for name in closes:
                extent = self._extents.get(name)
                if extent is not None:
                    extent.closing = False
                elif name not in self._returns and name[0] in self._slots:
                    (self._closes if certain else self._doubtful)[name] = None

    def take_returns(self) -> list[tuple[int, int]]:
        """Return, and forget, the (unit, extent) without published blocks, for their units."""
        with self._mutex:
            taken = list(self._returns)
            self._returns.clear()
            return taken

    def return_extents(self) -> Generator[Call, AnyReply, None]:
        """Return the extents of `take_returns` to their units.

        If a call fails, or the unit did not reply the last time, they stay queued.
        """
        yield from self._cancel_orphans()
        pending = self.take_returns()
        try:
            for unit in dict.fromkeys(unit for unit, _ in pending):
                numbers = [number for of, number in pending if of == unit]
                with self._mutex:
                    slot = self._slots.get(unit)
                if unit in self._unreachable:
                    continue
                if slot is not None:  # otherwise the unit was lost meanwhile
                    with contextlib.suppress(ProtocolError):  # a unit that refuses once would refuse again
                        yield Request(("unit", unit), ReturnExtent(slot.number, numbers, unit))
                pending = [name for name in pending if name[0] != unit]
        finally:
            with self._mutex:
                self._returns.update(dict.fromkeys(name for name in pending if name[0] in self._slots))

    def close_extents(self) -> Generator[Call, AnyReply, None]:
        """Report the extents of `take_closes` to the controller, and return those in which it knows no block."""
        closes = self.take_closes()
        if not closes:
            return
        try:
            reply = yield Request(CONTROLLER, CloseExtents(closes))
        except ProtocolError:  # it would be refused again; when this client ends, the units free the extents
            return
        except BaseException:
            self.restore_closes(closes, certain=False)
            raise
        if not isinstance(reply, Done):
            raise ProtocolError(f"the controller replied to CloseExtents with {type(reply).__name__}")
        with self._mutex:
            self._returns.update(dict.fromkeys((unit, number) for unit, number in reply.value if unit in self._slots))
        yield from self.return_extents()

    def drain(self) -> None:
        """Retire every open extent, so that `take_closes` and `take_returns` name all leased extents.

        Extents with reservations in flight follow when these end.
        """
        with self._mutex:
            for extent in list(self._open):
                self._retire(extent)

    def release(self) -> None:
        """Release the slots, so that the units consider this writer dead. A client does this last."""
        with self._mutex:
            for slot in self._slots.values():
                slot.lock.release()
            self._slots.clear()

    def set_units(
        self, units: Sequence[int], disks: Sequence[int] = (), nodes: Mapping[int, str] | None = None
    ) -> None:
        """Set the present units and their nodes. Units that are missing are lost."""
        with self._mutex:
            self._nodes = dict(nodes or {})
            removed = {*self.units, *self.disks} - {*units, *disks}
            kept = [unit for unit in self.units if unit not in removed]
            self.units = self._nearest([*kept, *(unit for unit in units if unit not in kept)])
            self.disks = self._nearest(disks)
            self._forget(removed)

    def forget_remote_units(self, reserved: Reserved) -> None:
        """Forget the extents of a reservation's units on other nodes, because these may have taken them back."""
        with self._mutex:
            self._forget({place.unit for place in reserved.places if place.session})

    def can_replace(self, reserved: Reserved) -> bool:
        """Whether a block can be written without the units on other nodes of its reservation."""
        used = {place.unit for place in reserved.places if place.session}
        return len({*self.units} - used - self._unreachable) >= self.replicas

    def is_elsewhere(self, unit: int) -> bool:
        """Whether a unit is on another node, so that it writes for this client."""
        return self._nodes.get(unit, self.node) != self.node

    def _nearest(self, units: Sequence[int]) -> tuple[int, ...]:
        """Return the units, those of this node first."""
        return tuple(sorted(units, key=self.is_elsewhere))

    def _copy_targets(self, first: int, units: Sequence[int]) -> list[int]:
        """Return the units for a copy, those on other nodes than the first copy first."""
        node = self._nodes.get(first, "")
        others = [unit for unit in units if unit != first]
        return sorted(others, key=lambda unit: self._nodes.get(unit, "") == node)

    def _forget(self, removed: Collection[int]) -> None:
        """Forget all space in these units."""
        for unit in removed:
            self._sessions.pop(unit, None)
            if unit in self._slots:
                self._slots.pop(unit).lock.release()
        for extent in list(self._extents.values()):
            if extent.unit in removed:
                extent.lost = True
                self._retire(extent)
        self._closes = {name: None for name in self._closes if name[0] not in removed}
        self._doubtful = {name: None for name in self._doubtful if name[0] not in removed}
        self._returns = {name: None for name in self._returns if name[0] not in removed}
        self._orphans = [orphan for orphan in self._orphans if orphan[0] not in removed]

    # ------------------------------------------------------------ slots and leases

    def _claim_slot(self, unit: int, within: float | None) -> Generator[Call, AnyReply, _WriterSlot]:
        with self._mutex:
            known = self._slots.get(unit)
            session = ""
            if known is None and self.is_elsewhere(unit):
                session = self._sessions.setdefault(unit, f"{self.writer}/{next(self._session_numbers)}")
        if known is not None:
            return known
        for attempt in range(_SLOT_ATTEMPTS):
            reply = yield Request(("unit", unit), OpenSlot(session or self.writer, unit, bool(session)), within=within)
            if not isinstance(reply, SlotReply):
                raise ProtocolError(f"storage unit {unit} replied to OpenSlot with {type(reply).__name__}")
            with self._mutex:
                # Another thread may have opened the slot meanwhile. Opening the file twice would lose the lock.
                if unit not in self._slots:
                    try:
                        lock = NoLock() if session else self._hold(Path(reply.lock_path))
                        self._slots[unit] = _WriterSlot(reply.slot, lock, session)
                    except ProtocolError:  # withdrawn, because a connection ended in between
                        if attempt == _SLOT_ATTEMPTS - 1:
                            raise
                        continue
                return self._slots[unit]
        raise AssertionError("unreachable")

    def _lease(
        self, units: Sequence[int], nbytes: int, want: int, wait: float | None, shared: bool
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        """Lease an extent from the first of these units that has space; if none has, wait for the first unit.

        If a unit on another node does not reply in REPLY_SECONDS, because its processes are stopped for example, the
        next unit is asked. If `shared`, all tasks of an event loop that need an extent now share one. The result is
        None if another task has leased it.
        """
        units = sorted(units, key=self._unreachable.__contains__)
        for unit in units if len(units) > 1 else ():
            is_last = unit == units[-1]
            within = None if is_last or not self.is_elsewhere(unit) else REPLY_SECONDS
            try:
                return (yield from self._lease_of(unit, nbytes, want, None, shared, within))
            except CapacityError:
                if is_last and not wait:
                    raise
            except ConnectionLostError:
                if is_last or not self.is_elsewhere(unit):
                    raise
            except WaitTimeoutError:
                if within is None:
                    raise
                self._unreachable.add(unit)
        units.sort(key=self._unreachable.__contains__)
        return (yield from self._lease_of(units[0], nbytes, want, wait, shared))

    def _lease_of(
        self, unit: int, nbytes: int, want: int, wait: float | None, shared: bool, within: float | None = None
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        try:
            return (yield from self._lease_once(unit, nbytes, want, wait, shared, within))
        except ProtocolError:
            if not self.is_elsewhere(unit):
                raise
        with self._mutex:
            self._forget({unit})  # its slot has ended, because all connections to the unit had ended
        return (yield from self._lease_once(unit, nbytes, want, wait, shared, within))

    def _lease_once(
        self, unit: int, nbytes: int, want: int, wait: float | None, shared: bool, within: float | None
    ) -> Generator[Call, AnyReply, _OpenExtent | None]:
        yield from self._cancel_orphans()
        if self._doubtful:
            yield from self.close_extents()
        slot = yield from self._claim_slot(unit, within)
        turn = ("lease", unit) if shared else None
        call = Request(("unit", unit), LeaseExtent(slot.number, nbytes, want, wait, unit), wait, within, turn=turn)
        try:
            reply = yield call
        except BaseException as error:
            if call.sequence and not isinstance(error, (CapacityError, UnitLostError)):
                with self._mutex:
                    self._orphans.append((unit, call.sequence))
            raise
        self._unreachable.discard(unit)
        if reply is NOT_MADE:
            return None
        if not isinstance(reply, ExtentLeaseReply) or reply.length < nbytes or reply.offset % ALIGNMENT:
            raise ProtocolError(f"storage unit {unit} replied to a lease of {nbytes} bytes with {reply}")
        return _OpenExtent(
            unit, reply.extent, reply.offset, reply.length, reply.generation, (reply.offset, reply.proof), slot
        )

    def _cancel_orphans(self) -> Generator[Call, AnyReply, None]:
        while self._orphans:
            with self._mutex:
                orphan = next((each for each in self._orphans if each[0] not in self._unreachable), None)
                if orphan is None:  # the others are cancelled when their units reply again
                    return
                self._orphans.remove(orphan)
            try:
                yield Request(("unit", orphan[0]), Cancel(orphan[1]))
            except UnitLostError:
                continue
            except BaseException:
                with self._mutex:
                    self._orphans.append(orphan)
                raise

    # ------------------------------------------------------------ with the mutex held

    def _pack(self, units: Sequence[int], nbytes: int, size: int) -> Reserved | None:
        """Place a block into the first open extent in these units that has space for it."""
        for extent in list(self._open):
            if extent.length - extent.used >= size and extent.unit in units and extent.unit not in self._unreachable:
                if not extent.offered or extent.slot.lock.take(extent.place):
                    extent.offered = False
                    return self._place(extent, nbytes, size)
                self._retire(extent)  # it was offered, and its unit has recalled it
        return None

    def _allot(self, extent: _OpenExtent) -> None:
        """Find a place at which the extent can be offered."""
        place = next((p for p in range(PLACES) if (extent.unit, p) not in self._places), None)
        if place is not None and extent.slot.lock.begin(place):
            extent.place = place
            self._places.add((extent.unit, place))

    def _place(self, extent: _OpenExtent, nbytes: int, size: int) -> Reserved:
        slot, start = extent.slot, extent.offset + extent.used
        extent.flights.add(start)
        extent.used += size
        if extent.open and extent.used == extent.length:
            self._retire(extent)
        return Reserved(
            extent.unit, extent.number, start, extent.generation, nbytes, extent.length, (), slot.session, slot.number,
            extent.lease,
        )  # fmt: skip

    def _find(self, reserved: Reserved) -> _OpenExtent:
        extent = self._extents.get((reserved.unit, reserved.extent))
        if extent is None or reserved.offset not in extent.flights:
            raise InvalidArgumentError(
                f"{reserved} is not in flight: it was published or abandoned, or is a reservation of another client"
            )
        return extent

    def _retire(self, extent: _OpenExtent) -> None:
        extent.open = False
        if extent in self._open:
            self._open.remove(extent)
        self._settle(extent)

    def _settle(self, extent: _OpenExtent) -> None:
        """Offer an open extent without reservations in flight; queue an extent that is over."""
        if extent.flights:
            return
        if extent.open:
            if extent.place >= 0 and extent.certain:
                extent.offered = True
                extent.slot.lock.leave(extent.place, extent.number, extent.used)
            return
        if extent.place >= 0:
            self._places.discard((extent.unit, extent.place))
            extent.slot.lock.leave(extent.place)
        del self._extents[extent.name]
        if extent.lost:
            return
        if not extent.published:
            self._returns[extent.name] = None
        elif not extent.certain:
            self._doubtful[extent.name] = None
        elif not extent.closing:
            self._closes[extent.name] = None


def aligned(nbytes: int) -> int:
    """Return the space of a block in an extent; at least ALIGNMENT, so that no two blocks have the same offset."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
