"""The effects of a storage unit. The server carries them out, and decides only by their type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Union

from transfer_queue.messages.base import Failure, RequestBody
from transfer_queue.messages.descriptors import MEMORY, STORE
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import UnitStatusReply


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send `reply` to the request `sequence` of the connection `peer`, with this payload."""

    peer: int
    sequence: int
    reply: AnyReply
    payload: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Send this to the controller, again after each new connection until it has answered."""

    body: RequestBody


class RemoteBlock(NamedTuple):
    """A block of a unit on another node."""

    unit: int
    offset: int
    generation: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Fetch blocks from units on other nodes into memory of this one, and report which were fetched."""

    number: int
    """The number of this fetch."""
    wanted: Sequence[RemoteBlock]
    remotes: Mapping[int, str]
    """Unit -> "host:port"."""
    into: Sequence[memoryview]
    """The memory for each block."""


Effect = Union[SendReply, Report, Fetch]

Begin = Callable[[Callable[[], Any], Callable[[Any], list[Effect]]], None]
"""Runs the first function outside the unit's loop, then the second in it, with the result or the exception."""


def no_capacity(unit: int, status: UnitStatusReply, folder: Path, nbytes: int, waited: float, crowd: int) -> Failure:
    """Return the failure of a lease of nbytes for which there is no space.

    `folder` is that of the unit's pool, `waited` is in seconds, and `crowd` is the number of waiting leases if they are
    too many, else 0.
    """
    where = f", the disk at {folder}" if status.tier not in (MEMORY, STORE) else ""
    after = f" after {waited:.1f} s" if waited > 0 else ""
    setting = " (backend.SimpleStorage.arena_bytes)" if status.tier == MEMORY else ""
    advice = f"clear samples, let consumers catch up, or raise the capacity of storage{setting}"
    if nbytes > status.capacity:
        advice = f"write smaller batches, or raise the capacity of storage{setting}"
    elif crowd:
        advice += f" ({crowd} leases are waiting already, which is the limit)"
    viewed = ""
    if status.viewed:
        viewed = f" (of which {status.viewed} are free when views of readers end: `tq status` names the readers)"
    return Failure(
        "CapacityError",
        f"no capacity in storage unit {unit}{where}{after}: {nbytes} bytes wanted in one piece, capacity "
        f"{status.capacity}, held {status.held}, leased {status.leased}{viewed}, free {status.free}; {advice}",
    )


def cancelled_failure(sequence: int) -> Failure:
    """Return the failure of a lease that its client cancelled."""
    return Failure("WaitTimeoutError", f"request {sequence} was cancelled by its client while it waited for space")


def draining_message(unit: int) -> str:
    """Return the message for a lease in a unit that is being drained."""
    return f"storage unit {unit} is being drained and leases no space; write to another one"
