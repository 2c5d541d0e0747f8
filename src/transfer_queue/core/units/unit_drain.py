"""A storage unit that everything is to be moved off: when that may be asked for, and what is left to do."""

from __future__ import annotations

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Caller, handles
from transfer_queue.core.state.state import State
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Drain


def decide(state: State, replicas: int, request: Drain) -> r.UnitDraining | None:
    """The record, where something changes.

    Raises InvalidArgumentError for an unknown unit, or where too few others would be left to write to.
    """
    if request.unit not in state.units:
        there = ", ".join(map(str, sorted(state.units))) or "none"
        raise InvalidArgumentError(f"there is no storage unit {request.unit}; the units are: {there}")
    others = state.units_of(MEMORY) - state.draining - {request.unit}
    if not request.undo and len(others) < replicas:
        raise InvalidArgumentError(
            f"storage unit {request.unit} cannot be drained: {len(others)} others would be left to write to, and "
            f"{replicas} are needed (backend.SimpleStorage.replicas); start a system with more units"
        )
    if (request.unit in state.draining) != request.undo:
        return None
    return r.UnitDraining(request.unit, not request.undo)


def left(state: State, unit: int) -> int:
    """How many blocks still have a place in a unit."""
    return sum(extent.blocks for (number, _), extent in state.blocks.extents.items() if number == unit)


def outcome(unit: int, blocks: int) -> AnyReply:
    """What is answered to who has waited until nothing is left."""
    if not blocks:
        return Done(0)
    return Failure(
        "WaitTimeoutError",
        f"storage unit {unit} still holds {blocks} blocks; it goes on being drained, ask again to wait for it",
    )


@handles(Drain)
def handle_drain(core: ControllerContext, caller: Caller, request: Drain) -> list[Effect]:
    """A request to drain a unit, or to use it again, arrived."""
    record = decide(core.state, core.moves.replicas, request)
    if record is not None:
        core.apply(record)
        core.moves.drain(request.unit, record.draining)
    if request.wait is not None and request.wait > 0 and not request.undo:
        core.drains[caller.client, caller.envelope.sequence] = (caller.peer, request.unit, core.now + request.wait)
        return []
    return [Send(caller.peer, caller.envelope.sequence, Done(left(core.state, request.unit)))]


def drained(core: ControllerContext) -> list[Effect]:
    """Answers those who wait until nothing lies in a unit, or until their time is over."""
    effects: list[Effect] = []
    for waiter, (peer, unit, deadline) in list(core.drains.items()):
        blocks = left(core.state, unit)
        if blocks and core.now < deadline:
            continue
        del core.drains[waiter]
        effects.append(Send(peer, waiter[1], outcome(unit, blocks)))
    return effects
