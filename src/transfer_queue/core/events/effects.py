"""What the core asks its server to do. The server branches on the effect's type and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

import msgspec

from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.unit_reports import DrainFinished, Move
from transfer_queue.sampler.remote_partition import Shown
from transfer_queue.sampler.sampler_calls import SamplerCall


class Send(msgspec.Struct, frozen=True):
    """Answer request `sequence` of the connection `peer`."""

    peer: int
    sequence: int
    reply: AnyReply


class FreeExtents(msgspec.Struct, frozen=True):
    """Tell this unit that nothing lives in these extents any more."""

    unit: int
    extents: list[int]


class RefuseLeases(msgspec.Struct, frozen=True):
    """Tell this unit to refuse the leases that wait for space."""

    unit: int
    words: str


class SendToUnit(msgspec.Struct, frozen=True):
    """Tell this unit to move blocks, or whether it is being drained."""

    unit: int
    request: Union[Move, DrainFinished]


class ComputeDeal(msgspec.Struct, frozen=True):
    """Compute `run()`, which takes long and touches nothing of the core, elsewhere than in the loop.

    What it returns, or the exception that it raises, goes to `Controller.worked` under this number.
    """

    number: int
    run: Callable[[], Any]


class AskSampler(msgspec.Struct, frozen=True):
    """Have the process of a user's sampler make this call.

    Its result, or the exception, goes to `Controller.sampler_answered` with this number; None if the rows that the
    sampler was offered have changed. `Controller.sampler_reads` replies to what the sampler reads during the call.
    """

    number: int
    call: SamplerCall
    shown: Shown


class WriteState(msgspec.Struct, frozen=True):
    """Write `tree()`, as it is at this moment, into a new file of this name in the system's folder of state files.

    `Controller.state_written` is to be told when it is there, or what went wrong.
    """

    name: str
    tree: Callable[[], Any]


class ReadState(msgspec.Struct, frozen=True):
    """Read the file of this name, which a client has put there, and keep a copy of it in the journal's folder.

    `Controller.state_read` gets the state in it, or the error. watched: see `State`.
    """

    name: str
    client: str
    sequence: int
    watched: list[str]


class RemoveState(msgspec.Struct, frozen=True):
    """Remove the file of this name, where it is still there."""

    name: str


class ForgetState(msgspec.Struct, frozen=True):
    """Remove this copy, which the journal kept for a `ReadState`: its state is not loaded."""

    file: str


class Release(msgspec.Struct, frozen=True):
    """Free these partitions in a thread beside the loop (`loading.release`), because this takes long for large ones."""

    partitions: list[Any]


Effect = Union[
    ComputeDeal,
    AskSampler,
    RefuseLeases,
    Send,
    FreeExtents,
    SendToUnit,
    WriteState,
    ReadState,
    RemoveState,
    ForgetState,
    Release,
]
