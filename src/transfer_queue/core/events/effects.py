"""What the controller asks its server to do. The type of an effect alone decides what the server does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import msgspec

from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.reports.store_reports import CheckExtents, CheckStore
from transfer_queue.messages.reports.unit_reports import DrainFinished, Move, RefuseWriters, ReleaseExtents
from transfer_queue.sampler.calls.call_messages import SamplerCall, Shown


class Send(msgspec.Struct, frozen=True):
    """Send the reply to request `sequence` of the connection `peer`."""

    peer: int
    sequence: int
    reply: AnyReply


class RemoveMirror(msgspec.Struct, frozen=True):
    """Order the retired mirror at this connection, which is not a unit of the system any more, to remove its arena."""

    peer: int


class SendToUnit(msgspec.Struct, frozen=True):
    """Order this unit to move, check or free blocks, or report to it what it needs to know."""

    unit: int
    request: Union[Move, DrainFinished, CheckStore, CheckExtents, ReleaseExtents, RefuseWriters]


class ComputeDeal(msgspec.Struct, frozen=True):
    """Call `run()` outside the event loop. It takes long and reads nothing of the core's state.

    Its result, or the exception that it raises, goes to `Controller.on_outcome` with this number.
    """

    number: int
    run: Callable[[], Any]


class AskSampler(msgspec.Struct, frozen=True):
    """Make this call in the process of a user's sampler.

    The result or the exception goes to `Controller.on_sampler_answer` with this number, or None if the rows that the
    sampler was offered have changed. `Controller.answer_sampler_read` replies to what the sampler reads during the
    call.
    """

    number: int
    call: SamplerCall
    shown: Shown
    sampler: str = ""
    """Which sampler (`HostedRunner.pattern`)."""


class WriteState(msgspec.Struct, frozen=True):
    """Write `tree()`, as it is at this moment, into a new file of this name in the system's folder of state files.

    The outcome (`Controller.on_outcome`) is None when the file is complete, and else says why it is not, in words.
    """

    number: int
    """Of the job that waits for the outcome."""
    name: str
    tree: Callable[[], Any]


class ReadState(msgspec.Struct, frozen=True):
    """Read the file of this name, which a client has written, and keep a copy of it in the journal's folder.

    The outcome (`Controller.on_outcome`) is the state in it, or the error.
    """

    number: int
    """Of the job that waits for the outcome."""
    name: str
    watched: list[str]
    """See `State`."""


class RemoveState(msgspec.Struct, frozen=True):
    """Remove the file of this name if it exists."""

    name: str


class ForgetState(msgspec.Struct, frozen=True):
    """Remove this copy, which the journal kept for a `ReadState` whose state is not loaded."""

    file: str


class Release(msgspec.Struct, frozen=True):
    """Free these partitions in a thread beside the event loop (`restore.free_partitions`): large ones take long."""

    partitions: list[Any]


Effect = Union[
    ComputeDeal,
    AskSampler,
    Send,
    SendToUnit,
    RemoveMirror,
    WriteState,
    ReadState,
    RemoveState,
    ForgetState,
    Release,
]
