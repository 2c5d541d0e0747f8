"""What a storage unit wants done: the server carries these out and branches on nothing but their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from transfer_queue.messages.base import Failure
from transfer_queue.messages.descriptors import DISK
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.storage import UnitStatusReply
from transfer_queue.messages.unit_reports import (
    BlocksMovedReport,
    ExtentsFreedReport,
    ExtentsGone,
    ExtentsRecalledReport,
    Measured,
    SpaceShortReport,
    WriterGone,
)


@dataclass(frozen=True, slots=True)
class SendReply:
    """Send `reply` to the request `sequence` of the connection `peer`, with this payload."""

    peer: int
    sequence: int
    reply: AnyReply
    payload: Sequence[memoryview] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Send this to the controller, and again until it has answered."""

    body: (
        WriterGone
        | SpaceShortReport
        | ExtentsFreedReport
        | BlocksMovedReport
        | ExtentsRecalledReport
        | ExtentsGone
        | Measured
    )


@dataclass(frozen=True, slots=True)
class Fetch:
    """Receive blocks from units on other nodes into memory here, and say which of them came.

    number: of this fetch. wanted: unit, offset, generation and length of each block. remotes: unit -> "host:port".
    into: where each goes.
    """

    number: int
    wanted: Sequence[tuple[int, int, int, int]]
    remotes: Mapping[int, str]
    into: Sequence[memoryview]


Effect = Union[SendReply, Report, Fetch]


def no_capacity(unit: int, status: UnitStatusReply, folder: Path, nbytes: int, waited: float, crowd: int) -> Failure:
    """Return the failure of a lease of nbytes for which there is no space.

    folder: of the unit's pool. waited: seconds. crowd: leases that wait, if they are too many; else 0.
    """
    where = f", the disk at {folder}" if status.tier == DISK else ""
    after = f" after {waited:.1f} s" if waited > 0 else ""
    advice = "clear samples, let consumers catch up, or raise the capacity of storage"
    if nbytes > status.capacity:
        advice = "write smaller batches, or raise the capacity of storage"
    elif crowd:
        advice += f" ({crowd} leases wait already, which is the limit)"
    return Failure(
        "CapacityError",
        f"no capacity in storage unit {unit}{where}{after}: {nbytes} bytes wanted in one piece, capacity "
        f"{status.capacity}, held {status.held}, leased {status.leased}, free {status.free}; {advice}",
    )


def cancelled(sequence: int) -> Failure:
    """A lease was taken back by who wanted it."""
    return Failure("WaitTimeoutError", f"request {sequence} was cancelled by its client while it waited for space")


def drained(unit: int) -> str:
    """Everything is moved off the unit."""
    return f"storage unit {unit} is being drained and leases nothing; write to another one"
