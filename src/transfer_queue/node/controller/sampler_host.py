"""Starts the process in which a user's sampler runs, makes its calls, and ends it if a call takes too long.

This runs in the controller's loop and never blocks it. Only the constructor waits, until the first process has loaded
the sampler. It is called before the controller serves, or in a thread beside its loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.errors import ProtocolError, SamplerError, TransferQueueError, by_name
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.net.framing import FrameReader, pack_frame
from transfer_queue.net.server.server_loop import Outgoing, ServerLoop
from transfer_queue.node.controller.sampler_process import (
    CHANNEL,
    READ_SIZE,
    CallFailed,
    CallMade,
    FromSampler,
    LoadSampler,
    MakeCall,
    QuestionReply,
    SamplerLoaded,
    SamplerReads,
    ToSampler,
)
from transfer_queue.sampler.calls.call_messages import Facts, Question, SamplerCall, Shown, ViewReply
from transfer_queue.sampler.calls.sampler_calls import CALLS

if TYPE_CHECKING:
    import subprocess  # takes a megabyte, which systems without a user's sampler save

METHODS = {"begin": "validate, deal_key or has_cached_result", "deal": "sample"}
KILL_SECONDS = 10.0  # the longest wait for the end of a killed process
REAP_SECONDS = 0.05  # the longest wait for the exit status of a process that has closed its end of the channel
REAP_PAUSE = 0.001  # seconds between two checks for the exit status

logger = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(FromSampler)
_results = {kind: msgspec.msgpack.Decoder(form) for kind, (_, form) in CALLS.items()}


class SamplerHost:
    """One user's sampler in a process of its own, which is restarted if it has died or was ended.

    On Linux the process ends together with the thread that has started it, so start it in a thread that does not end.
    """

    def __init__(self, load: LoadSampler, call_seconds: float, start_seconds: float) -> None:
        """Start the process and wait until it has loaded the sampler. Raises the error that the user's code raised."""
        self.restarts = 0
        """How often the process was restarted."""
        self._load = load
        self._seconds = call_seconds
        self._start_seconds = start_seconds
        self._loop: ServerLoop | None = None
        self._answered: Callable[[int, Any], Iterable[Outgoing]] = lambda number, outcome: ()
        self._reads: Callable[[int, Question], ViewReply] = lambda number, question: ViewReply()
        self._call: tuple[int, SamplerCall, Shown] | None = None
        """The current call."""
        self._deadline: float | None = None
        self._status_until: float | None = None
        """Set while the process has closed its end of the channel and its exit status is not known yet."""
        self._is_up = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        """Killed processes to be reaped."""
        self._spawn()
        self.facts = self._wait()
        """The facts about the sampler that need no call."""

    def attach(
        self,
        loop: ServerLoop,
        answered: Callable[[int, Any], Iterable[Outgoing]],
        reads: Callable[[int, Question], ViewReply],
    ) -> None:
        """Run in this loop from now on. `answered` gets results of calls; `reads` replies to the sampler's reads."""
        self._loop, self._answered, self._reads = loop, answered, reads
        loop.watch(self._sock, self._on_socket_event)

    def ask(self, number: int, call: SamplerCall, shown: Shown) -> None:
        """Make a call; its result goes to `answered`. There may be only one call at a time."""
        if self._status_until is not None:
            self._fail(self._how_it_ended(None))  # it ended while it was idle: this call goes to a new process
        self._call = number, call, shown
        if self._process is None:
            self.restarts += 1
            self._spawn()
            self._deadline = time.monotonic() + self._start_seconds
        if self._is_up:
            self._make()

    def next_deadline(self) -> float | None:
        """Return when `tick` must be called next; None if it need not be called."""
        return self._deadline

    def tick(self, now: float) -> Iterable[Outgoing]:
        """End a process that takes too long, or check for the exit status of one that has ended."""
        if self._deadline is None or now < self._deadline:
            return ()
        if self._status_until is not None:
            return self._await_status(now)
        what = f"did not return from {self._method()} within {self._seconds:g} s (timeouts.sampler)"
        if not self._is_up:
            what = f"was not loaded within {self._start_seconds:g} s (timeouts.start)"
        return self._fail(
            f"the sampler {self.facts.name} {what}; its process was ended, and the next call starts a new one"
        )

    def stop(self) -> None:
        """End the process, and wait until it is gone."""
        self.close()
        for process in self._ended:
            process.wait(KILL_SECONDS)
        self._ended.clear()

    def close(self) -> None:
        """End the process without waiting for it."""
        if self._process is None:
            return
        if self._loop is not None:
            self._loop.unwatch(self._sock)
        self._sock.close()
        self._process.kill()
        self._ended.append(self._process)
        self._process = None
        self._is_up = False
        self._deadline = self._status_until = None

    # ------------------------------------------------------------ the process

    def _spawn(self) -> None:
        self._ended = [process for process in self._ended if process.poll() is None]
        own, other = socket.socketpair()
        own.setblocking(False)
        self._sock, self._reader = own, FrameReader()
        self._out: deque[memoryview] = deque()
        self._is_up = False
        with other:
            self._process = _start_process(other)
        self._put(self._load)

    def _wait(self) -> Facts:
        """Return the first message of the process, which is sent when it has loaded the sampler."""
        limit = time.monotonic() + self._start_seconds
        poll = select.poll()
        try:
            while True:
                poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._out else 0))
                left = limit - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise SamplerError(f"the sampler was not loaded within {self._start_seconds:g} s (timeouts.start)")
                self._flush()
                data = self._read_bytes()
                if data == b"":
                    raise SamplerError(f"the process that loads the sampler has ended{_describe_exit(self._status())}")
                for message in self._messages(data or b""):
                    if isinstance(message, CallFailed):
                        raise by_name(message.kind)(message.message)
                    assert isinstance(message, SamplerLoaded)
                    self._is_up = True
                    return message.facts
        except BaseException:
            self.stop()
            raise

    def _status(self) -> int | None:
        """Wait shortly for the exit status of the process; None if it has not ended by then."""
        import subprocess

        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(REAP_SECONDS)
        return None

    def _await_status(self, now: float) -> Iterable[Outgoing]:
        """Check for the exit status without waiting; if there is none yet, schedule another check."""
        assert self._process is not None
        assert self._status_until is not None
        code = self._process.poll()
        if code is None and now < self._status_until:
            self._deadline = now + REAP_PAUSE
            return ()
        return self._fail(self._how_it_ended(code))

    def _how_it_ended(self, code: int | None) -> str:
        return f"the process of the sampler {self.facts.name} has ended{_describe_exit(code)} in {self._method()}"

    # ------------------------------------------------------------ messages

    def _make(self) -> None:
        assert self._call is not None
        self._deadline = time.monotonic() + self._seconds
        self._put(MakeCall(self._call[1], self._call[2]))

    def _put(self, message: ToSampler) -> None:
        self._out.append(memoryview(pack_frame(_encode(message))))
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                sent = self._sock.send(self._out[0])
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the next read shows that the channel has ended
        if self._loop is not None:
            self._loop.watch(self._sock, self._on_socket_event, writes=bool(self._out))

    def _on_socket_event(self, events: int) -> Iterable[Outgoing]:
        """Handle a socket that can be written to or read from."""
        if self._process is None:
            return ()
        if self._out:
            self._flush()
        data = self._read_bytes()
        if data == b"":
            assert self._loop is not None
            self._loop.unwatch(self._sock)
            self._is_up = False
            now = time.monotonic()
            self._status_until = now + REAP_SECONDS
            return self._await_status(now)
        outgoing: list[Outgoing] = []
        try:
            for message in self._messages(data or b""):
                outgoing += self._handle_message(message)
        except SamplerError as error:
            outgoing += self._fail(str(error), error)
        return outgoing

    def _read_bytes(self) -> bytes | None:
        """Return the received bytes; b"" at the end of the channel, None if there are none."""
        try:
            return self._sock.recv(READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def _messages(self, data: bytes) -> Iterator[FromSampler]:
        """Yield the complete messages. Raises SamplerError if the user's code has written to the channel."""
        try:
            for body, _ in self._reader.feed(data):
                yield _decoder.decode(body)
        except (ProtocolError, *UNREADABLE) as error:
            text = f"the process of a sampler has sent invalid bytes; its code must not use file descriptor {CHANNEL}"
            raise SamplerError(f"{text} ({error})") from error

    def _handle_message(self, message: FromSampler) -> Iterable[Outgoing]:
        if isinstance(message, SamplerLoaded):
            self._is_up = True
            self._deadline = None
            if self._call is not None:
                self._make()
            return ()
        if self._call is None:
            return ()
        number, call, _ = self._call
        if isinstance(message, SamplerReads):
            self._put(QuestionReply(self._reads(number, message.question)))
            return ()
        outcome: Any = None
        if isinstance(message, CallMade):
            outcome = _results[call.kind].decode(message.result)
            self._remember(call, outcome)
        elif isinstance(message, CallFailed):
            outcome = by_name(message.kind)(message.message)
            if call.kind == "clear_cache":
                logger.error("the sampler %s could not forget a partition: %s", self.facts.name, outcome)
            if not self._is_up:  # it could not be loaded again
                return self._fail(f"{outcome}", outcome)
        return self._answer(number, outcome)

    def _remember(self, call: SamplerCall, outcome: Any) -> None:
        """Remember the sampler's state for a new process."""
        if call.kind == "save_checkpoint":
            self._load.state = outcome
        elif call.kind == "load_checkpoint":
            self._load.state = call.state

    def _answer(self, number: int, outcome: Any) -> Iterable[Outgoing]:
        self._call = None
        self._deadline = None
        return self._answered(number, outcome)

    def _fail(self, message: str, error: TransferQueueError | None = None) -> Iterable[Outgoing]:
        """End the process after a failure, and answer the call under way with an error."""
        logger.error("%s", message)
        self.close()
        if self._call is None:
            return ()
        return self._answer(self._call[0], error or SamplerError(message))

    def _method(self) -> str:
        kind = "no call" if self._call is None else self._call[1].kind
        return METHODS.get(kind, kind)


def _describe_exit(code: int | None) -> str:
    """Return an exit status in words."""
    if code is None:
        return ""
    return f" (signal {-code})" if code < 0 else f" (exit status {code})"


def _start_process(channel: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process with this socket as descriptor 3, with no other descriptors of this process, and with its log."""
    import subprocess

    code = (
        f"import os, sys; sys.path[:] = {sys.path!r}; n = int(sys.argv.pop()); "
        f"(n == {CHANNEL}) or (os.dup2(n, {CHANNEL}), os.close(n)); "
        f"from transfer_queue.node.controller.sampler_process import main; main()"
    )
    arguments = [sys.executable, "-c", code, str(os.getpid()), str(channel.fileno())]
    return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, pass_fds=(channel.fileno(),), close_fds=True)
