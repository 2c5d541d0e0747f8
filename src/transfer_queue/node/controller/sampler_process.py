"""`python -m transfer_queue.node.controller.sampler_process`: the process in which a user's sampler runs.

The controller starts it with one end of a socket pair as descriptor 3, and is its only peer. The controller names the
sampler to load, makes one call at a time, and replies to what the sampler reads during the call. The process ends with
its controller, even if the sampler never returns: a thread waits for the end of the channel. On Linux the kernel ends
it at once, even if C code of the sampler lets no other thread run.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Union

import msgspec

from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.node.hosting.server_log import LOG_SECONDS, configure_logging, write_log_to
from transfer_queue.node.system.processes import die_with_parent
from transfer_queue.node.system.sampler_transfer import PickledSampler, load
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.calls.call_messages import Facts, Question, SamplerCall, Shown, ViewReply
from transfer_queue.sampler.calls.sampler_calls import (
    NotTheSamplers,
    RemotePartition,
    RemoteReady,
    RowsChanged,
    answer,
    describe,
    errors_of,
    failure,
)
from transfer_queue.sampler.factory import sampler_from
from transfer_queue.wire.objects.object_values import decode_tag_value_copied

CHANNEL = 3
READ_SIZE = 1 << 20

logger = logging.getLogger(__name__)


class LoadSampler(msgspec.Struct, tag=True):
    """Load a sampler."""

    pickled: PickledSampler | None
    name: str | None
    """As in the settings."""
    args: dict[str, Any]
    """As in the settings."""
    state: bytes | None
    """The sampler's saved state, as msgpack; None for a new sampler."""
    allow_pickle: bool
    log: str | None = None
    """The log file of its process; None: stderr."""


class MakeCall(msgspec.Struct, tag=True):
    """Make a call. See `core.events.effects.AskSampler`."""

    call: SamplerCall
    shown: Shown


class QuestionReply(msgspec.Struct, tag=True):
    """The reply to a `SamplerReads`."""

    reply: ViewReply


class SamplerLoaded(msgspec.Struct, tag=True):
    """The sampler is loaded."""

    facts: Facts


class CallMade(msgspec.Struct, tag=True):
    """A call has ended."""

    result: bytes
    """The result, as msgpack."""


class Changed(msgspec.Struct, tag=True):
    """A call has no result, because rows that the sampler was offered have changed."""


class CallFailed(msgspec.Struct, tag=True):
    """The sampler could not be loaded, or a call has failed: the class of the error and its message."""

    kind: str
    message: str


class SamplerReads(msgspec.Struct, tag=True):
    """A request for rows, tags or groups that the sampler reads."""

    question: Question


ToSampler = Union[LoadSampler, MakeCall, QuestionReply]
FromSampler = Union[SamplerLoaded, CallMade, Changed, CallFailed, SamplerReads]

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(ToSampler)


class _ControllerLost(NotTheSamplers):
    """The controller has closed the channel."""


class _Channel:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = FrameReader()
        self._inbox: list[bytes] = []

    def send(self, message: FromSampler) -> None:
        try:
            self._sock.sendall(pack_frame(_encode(message)))
        except OSError:
            raise _ControllerLost from None

    def receive(self) -> ToSampler:
        while not self._inbox:
            try:
                data = self._sock.recv(READ_SIZE)
            except OSError:
                data = b""
            if not data:
                raise _ControllerLost
            self._inbox += [body for body, _ in self._reader.feed(data)]
        message: ToSampler = _decoder.decode(self._inbox.pop(0))
        return message

    def read(self, question: Question) -> ViewReply:
        """Return the controller's reply to what the sampler reads during a call."""
        self.send(SamplerReads(question))
        received = self.receive()
        assert isinstance(received, QuestionReply)
        return received.reply


def serve(sock: socket.socket) -> None:
    """Load a sampler and make the calls that the controller at this socket orders, until it is gone."""
    channel = _Channel(sock)
    try:
        order = channel.receive()
        assert isinstance(order, LoadSampler)
        _guard(sock, order.log)
        try:
            sampler, facts = _load(order)
        except _ControllerLost:
            raise
        except BaseException as error:
            channel.send(_failed(error, order.name or "(pickled)"))
            return
        channel.send(SamplerLoaded(facts))
        values = partial(decode_tag_value_copied, allow_pickle=order.allow_pickle)
        while True:
            make = channel.receive()
            assert isinstance(make, MakeCall)
            channel.send(_answer(sampler, facts, make, channel, values))
    except _ControllerLost:
        return


def _load(order: LoadSampler) -> tuple[BaseSampler, Facts]:
    made: Any = sampler_from(order.name if order.pickled is None else load(order.pickled), order.args)
    if not isinstance(made, BaseSampler):
        raise SamplerError(f"a sampler must be an instance of a subclass of BaseSampler, got a {type(made).__name__}")
    facts = describe(made)
    if order.state is not None:
        with errors_of(made):
            made.load_checkpoint(msgspec.msgpack.decode(order.state))
    return made, facts


def _answer(sampler: BaseSampler, facts: Facts, make: MakeCall, channel: _Channel, values: Any) -> FromSampler:
    """Return the result of a call. `_ControllerLost` is not caught."""
    view = RemotePartition(make.shown, channel.read, values)
    ready: Sequence[int] = RemoteReady(make.shown, channel.read, view)
    try:
        return CallMade(_encode(answer(sampler, facts, make.call, ready, view, values)))
    except RowsChanged:
        return Changed()
    except TransferQueueError as error:
        return CallFailed(type(error).__name__, str(error))


def _failed(error: BaseException, name: str) -> CallFailed:
    known = error if isinstance(error, TransferQueueError) else failure(name, error)
    return CallFailed(type(known).__name__, str(known))


def _guard(sock: socket.socket, path: str | None) -> None:
    """Write to this log from now on, bound its size, and end this process when the controller is gone."""
    log = None if path is None else write_log_to(Path(path))
    poll = select.poll()
    poll.register(sock, 0)  # polls only for the end of the channel: the thread that serves calls reads messages

    def watch() -> None:
        while not poll.poll(LOG_SECONDS * 1000):
            if log is not None:
                log.limit_size()
        os._exit(1)

    threading.Thread(target=watch, name="guardian", daemon=True).start()


def main() -> None:
    """Serve the controller that has started this process."""
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    configure_logging()
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):
        os._exit(1)  # the parent has already died
    with socket.socket(fileno=CHANNEL) as sock:
        sock.set_inheritable(False)  # a process that the sampler starts must not keep it open
        serve(sock)


if __name__ == "__main__":
    main()
