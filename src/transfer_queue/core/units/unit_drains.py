"""Draining a storage unit, which means to move all blocks off it, and the requests that wait until it is empty."""

from __future__ import annotations

from typing import NamedTuple

from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.core.units.location_checks import no_unit_text
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Drain


class DrainWait(NamedTuple):
    """One request that waits."""

    peer: int
    unit: int
    deadline: float
    """On the controller's clock."""


class UnitDrains(CoreService):
    """The requests that wait until a unit is empty. None of it is part of the state."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._state = context.state
        self._waits: dict[RequestKey, DrainWait] = {}

    def wait(self, waiter: RequestKey, peer: int, unit: int, deadline: float) -> None:
        """Let a request wait until the unit is empty, at most until the deadline."""
        self._waits[waiter] = DrainWait(peer, unit, deadline)

    def on_connection_ended(self, client: str, peer: int) -> None:
        """See `CoreService.on_connection_ended`."""
        self._waits = {w: wait for w, wait in self._waits.items() if wait.peer != peer or w[0] != client}

    def describe(self, waiter: RequestKey) -> str:
        """Return what a request waits for; "" if it does not wait."""
        wait = self._waits.get(waiter)
        if wait is None:
            return ""
        blocks = remaining_blocks(self._state, wait.unit)
        return f"A drain waits until storage unit {wait.unit} is empty; it still holds {blocks} blocks."

    def next_due(self) -> float | None:
        """See `CoreService.next_due`."""
        return min(wait.deadline for wait in self._waits.values()) if self._waits else None

    def on_due(self) -> list[Effect]:
        """Reply to the requests whose deadline has come; `after_event` does it."""
        return []

    def after_event(self) -> list[Effect]:
        """Reply to the requests whose unit is empty, or whose deadline has come."""
        effects: list[Effect] = []
        for waiter, (peer, unit, deadline) in list(self._waits.items()):
            blocks = remaining_blocks(self._state, unit)
            if not blocks or self.context.now >= deadline:
                del self._waits[waiter]
                effects.append(Send(peer, waiter[1], _reply(unit, blocks)))
        return effects


def remaining_blocks(state: State, unit: int) -> int:
    """Return how many blocks a unit still holds."""
    return sum(extent.blocks for (number, _), extent in state.blocks.extents.items() if number == unit)


def _reply(unit: int, blocks: int) -> AnyReply:
    if not blocks:
        return Done(0)
    return Failure(
        "WaitTimeoutError",
        f"storage unit {unit} still holds {blocks} blocks; the drain continues, call it again to wait for its end",
    )


def decide(state: State, replicas: int, request: Drain) -> r.UnitDraining | None:
    """Return the record of the request; None if it changes nothing.

    Raises:
        InvalidArgumentError: The unit is unknown, or too few other units would be left for new blocks.
    """
    if request.unit not in state.units:
        raise InvalidArgumentError(f"{no_unit_text(request.unit, state.units)}; pass the number of one that exists")
    if request.unit in state.stores:
        raise InvalidArgumentError(
            f"storage unit {request.unit} has its blocks in an external store, which are not moved; to empty it, clear "
            f"their samples"
        )
    if request.unit in state.mirrors:
        raise InvalidArgumentError(
            f"storage unit {request.unit} has the copies on disk (durability.values: machine) and cannot be drained; "
            f"drain a unit in memory"
        )
    others = state.units_of(MEMORY) - state.draining - {request.unit}
    if not request.undo and len(others) < replicas:
        raise InvalidArgumentError(
            f"storage unit {request.unit} cannot be drained: writers need {replicas} other units in memory "
            f"(backend.SimpleStorage.replicas), but there would be {len(others)}; start a system with more units"
        )
    if (request.unit in state.draining) != request.undo:
        return None
    return r.UnitDraining(request.unit, not request.undo)
