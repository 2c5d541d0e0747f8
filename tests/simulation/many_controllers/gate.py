"""Gate: what a controller of several decides about a request before its core sees it.

It knows which partitions the controller owns. A name has a home, which a hash determines. A partition that was moved
leaves a *ticket* at each former owner: who owns it now, and the number of the move. The next owner accepts it from any
client that shows the ticket, so a move is decided by one durable step of the former owner.

    freeze    the owner refuses all requests for a partition for some seconds, and numbers the move
    prepare   the next owner drops an unfinished copy of an earlier move, and expects the samples
    give      the former owner gives the partition away, if it was frozen all the time, and drops it
    adopt     the next owner owns the partition

For a checkpoint all controllers are *held*: each handles only requests of the client that makes the checkpoint. The
others wait and change nothing. `release` says whether the hold lasted until then. The hold of a save ends by itself,
and with the controller's process; that of a load lasts until it is released.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from tests.simulation.faulty_cluster import STOPPED_SECONDS
from transfer_queue.core.jobs import Jobs
from transfer_queue.messages.base import Failure
from transfer_queue.messages.checkpoints import LoadState
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope

if TYPE_CHECKING:
    from tests.simulation.many_controllers.member import Member

REFUSED = "refused by the gate: "  # the beginning of the message of a refusal
NEVER = 1 << 62  # a sequence that no request reaches
MOVES = ("freeze", "prepare", "give", "adopt")  # the orders that wait while the controller is held
UNIT = "unit-"  # the beginning of the names of units


def home_of(name: str, controllers: int, salt: int) -> int:
    """Return the controller of a partition that was never moved, by rendezvous hashing."""

    def weight(number: int) -> bytes:
        return hashlib.blake2b(f"{salt}/{number}/{name}".encode(), digest_size=8).digest()

    return max(range(controllers), key=weight)


class Ticket(msgspec.Struct, frozen=True):
    """Who owns a partition that was given away, and the number of the move."""

    owner: int
    move: int


class Ownership(msgspec.Struct):
    """The durable part of a gate; a part of the controller's journal in a real system.

    adopted: The partitions that were moved here, with the numbers of the moves.
    given: The partitions that were given away.
    incoming: The partitions of which a copy may be here, with the numbers of the moves.
    """

    adopted: dict[str, int] = {}
    given: dict[str, Ticket] = {}
    incoming: dict[str, int] = {}


@dataclass
class Hold:
    """All others than `client` wait. until: When it ends; None: when it is released. back: What waits, in
    order."""

    cut: str
    client: str
    until: float | None
    back: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class Freeze:
    """A partition that is about to move. move: The number of the move."""

    move: int
    until: float


def refusal_of(error: Exception) -> dict[str, Any] | None:
    """Return what a refusal says; None if this is another error."""
    words = str(error)
    return msgspec.json.decode(words[words.index(REFUSED) + len(REFUSED) :]) if REFUSED in words else None


def names_in(request: AnyRequest) -> list[str]:
    """Return the partitions that a request names."""
    name = getattr(request, "partition", None)
    return [name] if isinstance(name, str) else list(getattr(request, "partitions", None) or ())


class Gate:
    """See the module. highest: The highest number of a move that was seen; it never falls, also not by a load."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.ownership = Ownership()
        self.highest = 0
        self._seen: dict[str, int] = {}
        self.hold: Hold | None = None
        self._frozen: dict[str, Freeze] = {}
        self._floors: dict[str, int] = {}  # client -> its loads of earlier sequences come too late

    @property
    def _now(self) -> float:
        return self._member.clock.now

    # ------------------------------------------------------------ requests

    def is_held(self) -> bool:
        """Whether the controller is held now."""
        hold = self.hold
        return hold is not None and (hold.until is None or self._now <= hold.until)

    def must_wait(self, name: str) -> bool:
        """Return whether what comes from this client, unit or part of the controller waits for the end of a hold."""
        if self.hold is not None and not self.is_held():
            self._end_hold()
        hold = self.hold
        if hold is None or name == hold.client:
            return False
        return hold.until is not None or not name.startswith(UNIT)

    def owns(self, name: str) -> bool:
        """Return whether the controller owns a partition."""
        here = self._member.many.home_of(name) == self._member.number
        return name in self.ownership.adopted or (here and name not in self.ownership.given)

    def refusal(self, client: str, envelope: RequestEnvelope) -> Failure | None:
        """Return the reply to a request that the core must not see; None if it may see it."""
        kept = self._member.controller.state.clients.get(client)
        if kept is not None and envelope.sequence in kept.replies:
            return None  # it was carried out before, so it gets its reply again
        if isinstance(envelope.body, LoadState) and envelope.sequence < self._floors.get(client, 0):
            return Failure("CheckpointError", "this move was replaced by another one")
        for name in names_in(envelope.body):
            words = self._why_not(name)
            if words is not None:
                return Failure("TransferQueueError", REFUSED + msgspec.json.encode(words).decode())
        return None

    def _why_not(self, name: str) -> dict[str, Any] | None:
        frozen = self._frozen.get(name)
        if frozen is not None and self._now <= frozen.until:
            return {"why": "moving"}
        if self.owns(name):
            return None
        ticket = self.ownership.given.get(name)
        return {"why": "unknown"} if ticket is None else {"why": "moved", "owner": ticket.owner, "move": ticket.move}

    # ------------------------------------------------------------ orders of clients

    def carry_out(self, client: str, order: list[Any]) -> Any:
        """Carry out an order of a client, which may come twice, and return the reply."""
        return getattr(self, f"_{order[0]}")(client, *order[1:])

    def _hold(self, client: str, cut: str, seconds: float | None) -> bool:
        """Hold the controller. A client that loads takes over the hold of another one that loads."""
        hold = self.hold
        if hold is not None and self.is_held() and hold.cut != cut:
            if seconds is not None or hold.until is not None:
                return False
            self.hold = Hold(cut, client, None, hold.back)
            return True
        if hold is None or hold.cut != cut:
            self.hold = Hold(cut, client, None if seconds is None else self._now + seconds)
            if seconds is not None:
                self._member.later(seconds, lambda: self._end_late(cut))
        return self.is_held()

    def _end_late(self, cut: str) -> None:
        if self.hold is None or self.hold.cut != cut:
            return
        if self._member.is_running():
            self._end_hold()
        else:
            self._member.later(STOPPED_SECONDS, lambda: self._end_late(cut))

    def _release(self, client: str, cut: str) -> bool:
        """End a hold. Return whether it has lasted until now."""
        held = self.hold is not None and self.hold.cut == cut and self.is_held()
        if self.hold is not None and self.hold.cut == cut:
            self._end_hold()
        return held

    def _end_hold(self) -> None:
        hold, self.hold = self.hold, None
        assert hold is not None
        for each in hold.back:
            each()  # asks the gate again

    def _freeze(self, client: str, name: str, seconds: float) -> int | None:
        """Refuse requests for a partition. Return the number of the move, None if the partition is not here."""
        if not self.owns(name) or name not in self._member.controller.state.partitions:
            return None
        self.highest += 1
        self._frozen[name] = Freeze(self.highest, self._now + seconds)
        return self.highest

    def _prepare(self, client: str, name: str, move: int, sequence: int) -> bool:
        """Expect a partition. sequence: The first number of the client's requests for this move."""
        if self.owns(name) or move <= max(self.ownership.incoming.get(name, 0), self._seen.get(name, 0)):
            return self.ownership.incoming.get(name) == move
        if self._member.controller.context.services[Jobs]:
            return False  # an earlier load may still add samples
        self._void_loads()
        self._floors[client] = sequence
        self.ownership.incoming[name] = self._seen[name] = move
        self._member.drop(name)
        return True

    def _void_loads(self) -> None:
        self._floors = dict.fromkeys(self._floors, NEVER)

    def _give(self, client: str, name: str, move: int, owner: int) -> bool:
        """Give a partition away, if it was frozen for this move until now."""
        ticket, frozen = Ticket(owner, move), self._frozen.get(name)
        if self.ownership.given.get(name) == ticket:
            return True
        if frozen is None or frozen.move != move or self._now > frozen.until or not self.owns(name):
            return False
        del self._frozen[name]
        self.ownership.adopted.pop(name, None)
        self.ownership.given[name] = ticket
        self._member.many.on_move()
        self._member.drop(name)
        return True

    def _adopt(self, client: str, name: str, move: int) -> bool:
        """Own a partition, which its former owner has given away."""
        if self.ownership.adopted.get(name) == move:
            return True
        if self.ownership.incoming.get(name) != move or self.owns(name):
            return False
        del self.ownership.incoming[name]
        self.ownership.given.pop(name, None)
        self.ownership.adopted[name] = move
        self.highest = max(self.highest, move)
        return True

    # ------------------------------------------------------------ checkpoints, crashes

    def _describe(self, client: str) -> tuple[Ownership, int]:
        """Return what a checkpoint contains of the gate, and the highest number of a move."""
        return msgspec.convert(msgspec.to_builtins(self.ownership), Ownership), self.highest

    def _restore(self, client: str, ownership: Any, highest: int) -> bool:
        """Own what the controller owned in a checkpoint. No order or load of an earlier move has an effect any more."""
        self.ownership = msgspec.convert(ownership, Ownership)
        self.highest = max(self.highest, highest)
        for name in {*self._seen, *self.ownership.incoming}:
            if name not in self.ownership.incoming:
                self._seen[name] = self.highest
        self._frozen.clear()
        self._void_loads()
        return True

    def forget_volatile(self) -> None:
        """Forget what the controller's process alone knew."""
        self._frozen.clear()
        if self.hold is not None:
            self.hold = Hold(self.hold.cut, self.hold.client, None) if self.hold.until is None else None
