"""Drains storage units: checks the requests, and answers those that wait until a unit is empty."""

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
    """Return the record that starts or undoes a drain; None if nothing changes.

    Raises InvalidArgumentError if the unit is not known, or if writers would have too few other units.
    """
    if request.unit not in state.units:
        there = ", ".join(map(str, sorted(state.units))) or "none"
        raise InvalidArgumentError(f"there is no storage unit {request.unit}; the units are: {there}")
    others = state.units_of(MEMORY) - state.draining - {request.unit}
    if not request.undo and len(others) < replicas:
        raise InvalidArgumentError(
            f"storage unit {request.unit} cannot be drained: writers need {replicas} other units in memory "
            f"(backend.SimpleStorage.replicas), but there would be {len(others)}; start a system with more units"
        )
    if (request.unit in state.draining) != request.undo:
        return None
    return r.UnitDraining(request.unit, not request.undo)


def left(state: State, unit: int) -> int:
    """Return the number of blocks that are still in a unit."""
    return sum(extent.blocks for (number, _), extent in state.blocks.extents.items() if number == unit)


def outcome(unit: int, blocks: int) -> AnyReply:
    """Return the reply to a request that has waited until a unit is empty. blocks: the blocks still in it."""
    if not blocks:
        return Done(0)
    return Failure(
        "WaitTimeoutError",
        f"storage unit {unit} still holds {blocks} blocks; the drain continues, call it again to wait for its end",
    )


@handles(Drain)
def handle_drain(core: ControllerContext, caller: Caller, request: Drain) -> list[Effect]:
    """Handle a request to drain a unit, or to use it again."""
    record = decide(core.state, core.moves.replicas, request)
    if record is not None:
        core.apply(record)
        core.moves.drain(request.unit, record.draining)
    if request.wait is not None and request.wait > 0 and not request.undo:
        core.drains[caller.client, caller.envelope.sequence] = (caller.peer, request.unit, core.now + request.wait)
        return []
    return [Send(caller.peer, caller.envelope.sequence, Done(left(core.state, request.unit)))]


def drained(core: ControllerContext) -> list[Effect]:
    """Answer the requests that wait for a drain whose unit is empty, or whose time has passed."""
    effects: list[Effect] = []
    for waiter, (peer, unit, deadline) in list(core.drains.items()):
        blocks = left(core.state, unit)
        if blocks and core.now < deadline:
            continue
        del core.drains[waiter]
        effects.append(Send(peer, waiter[1], outcome(unit, blocks)))
    return effects
