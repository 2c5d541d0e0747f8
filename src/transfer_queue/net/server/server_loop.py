"""The loop of a server: one thread, one selector, many authenticated connections, one service.

    socket -> handshake -> frames -> Service.on_message -> Outgoing -> commit -> socket

The loop does not interpret bodies, and the service does not use sockets. An error of one connection ends that
connection and is counted:

    accepted       authenticated connections
    refused        connections beyond the limit, or without TLS, to which the reason was sent
    rejected       failed or slow handshakes, also of TLS
    accept_errors  failures to accept, for example because no descriptor was left
    broken         messages that are not valid
    slow           connections that did not read their replies, so that their output buffer was full, or that were the
                   slowest to do so when all replies that nobody had read took too much memory
    crowded        connections with the largest unfinished frame, when all unfinished frames took too much memory
    errors         exceptions of the service

The loop never blocks: it writes as much as a socket takes, and the rest when the socket is writable. The output of a
turn is sent at its end, after `commit`, in which a journal records the changes first. A connection cannot delay the
others for long: a turn serves FRAMES_A_TURN messages of each connection, or fewer if these take TURN_SECONDS, and the
loop does not read from a connection that leaves more than OUTPUT_MARK bytes of its replies unread, so that its further
messages wait in its own socket. Many connections cannot delay the replies for long, either: a turn serves
CONNECTIONS_A_TURN connections, or fewer if these take ALL_SECONDS. The others are first in the next turn.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Union

from transfer_queue.errors import AttachError, ProtocolError, TransferQueueError
from transfer_queue.metrics.timing import Longest
from transfer_queue.net.framing import MAX_BODY, MAX_PAYLOAD, FrameReader
from transfer_queue.net.handshake import HANDSHAKE_SECONDS, NEEDS_TLS, ServerHandshake
from transfer_queue.net.server.server_connection import (
    OUTPUT_MARK,
    Outgoing,
    Payload,
    ServerConnection,
    Service,
    UnreadOutput,
    frame_pieces,
    is_lent,
)
from transfer_queue.net.server.sockets import BACKLOG, READ, WRITE, Acceptor, Poller, Waker, set_tcp_options

if TYPE_CHECKING:
    import ssl

    from transfer_queue.net.tls import Tls

__all__ = ["Outgoing", "ServerLoop"]

READ_SIZE = 1 << 16
LARGE_READ = 1 << 20
FRAMES_A_TURN = 16
"""Messages of one connection that a turn serves."""
TURN_SECONDS = 0.001
"""After this time, no further message of the connection is served in the turn."""
CONNECTIONS_A_TURN = 64
"""Connections that a turn serves."""
ALL_SECONDS = 0.004
"""After this time, no further connection is served in the turn."""
LONGEST_SLEEP = 3600.0
"""Seconds; selectors accept at most 31 bits of milliseconds."""
FAREWELL_SECONDS = 1.0
"""Seconds that `run` waits at its end until the output is sent."""
COMMIT_PAUSE = 0.1
"""Seconds between two tries of a commit that failed."""

logger = logging.getLogger(__name__)


class ServerLoop:
    """Runs a service on any number of listening sockets.

    Args:
        service: The service.
        key: The system's key.
        clock: The clock of all times.
        max_connections: The number of connections, authenticated or not, beyond which new ones are refused.
        max_output: The bytes of unread output beyond which a connection is dropped. One frame may exceed it.
        max_unread: The memory in bytes of the unread output of all connections, beyond which the connections that have
            read nothing for the longest time are dropped.
        max_input: The bytes of the unfinished frames of all connections.
        max_body: The largest body in bytes.
        max_payload: The largest payload in bytes.
        handshake_seconds: The time limit of a handshake.
        idle: Work for times without events, a few milliseconds per call. It returns whether there is more to do. If
            not, it is called again after the next event.
        served: Called in each turn after the messages of all connections were handed to the service. It serves those
            that the service has gathered, and returns what to send. It is called again when the output of the turn was
            sent, until it returns nothing, so that the first replies of a long event are sent before the last ones are
            made.
        commit: Called before the output of a turn is sent. It returns whether the output may be sent. If not, the loop
            calls it again every COMMIT_PAUSE; until it succeeds, the loop does not read or write connections, but runs
            functions of `call_soon`.
        longest: Records how long events other than messages took: a "tick" of the service, and "work" (functions of
            `call_soon`, ends of connections).
    """

    def __init__(
        self,
        service: Service,
        key: bytes,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_connections: int = 8192,
        max_output: int = 256 << 20,
        max_unread: int = 512 << 20,
        max_input: int = 2 << 30,
        max_body: int = MAX_BODY,
        max_payload: int = MAX_PAYLOAD,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        idle: Callable[[], bool] | None = None,
        served: Callable[[], Iterable[Outgoing]] | None = None,
        commit: Callable[[], bool] | None = None,
        longest: Longest | None = None,
    ) -> None:
        self.counters = dict.fromkeys(
            ("accepted", "refused", "rejected", "accept_errors", "broken", "slow", "crowded", "errors"), 0
        )
        self._service = service
        self._key = key
        self._clock = clock
        self._max_connections = max_connections
        self._max_output = max_output
        self._unread = UnreadOutput(max_unread)
        self._max_input = max_input
        self._limits = (max_body, max_payload)
        self._handshake_seconds = handshake_seconds
        self._poller = Poller()
        self._watched: dict[socket.socket, int] = {}  # sockets of `watch` -> the events for which they wait
        self._acceptor = Acceptor(self._poller, clock, self._welcome, lambda: len(self._peers), self.counters)
        self._peers: dict[int, ServerConnection] = {}  # all connections, also those in their handshake
        self._dirty: list[ServerConnection] = []  # connections with output queued since the last flush
        self._unserved: deque[ServerConnection] = deque()  # connections with something to serve or to read, in order
        self._unfinished = 0  # bytes of unfinished frames
        self._shaking: deque[tuple[float, ServerConnection]] = deque()  # handshakes by deadline; done ones are skipped
        self._next_peer = 1
        self._tick_again = 0.0  # after a failed tick: the time of the next one
        self._idle = idle
        self._may_idle = idle is not None  # whether there may be idle work
        self._served = served
        self._commit = commit
        self._longest = Longest() if longest is None else longest
        self._ready = 0  # connections with something to serve at the beginning of this turn
        self._held = False  # whether the last commit failed, so that no output is sent
        self._stopping = False
        self._soon: deque[Callable[[], Iterable[Outgoing] | None]] = deque()
        self._waker = Waker()
        self._poller.register(self._waker.descriptor, READ, self._waker.drain)

    # ------------------------------------------------------------ set-up, from any thread before run

    def listen(
        self, address: Union[str, tuple[str, int]], tls: ssl.SSLContext | None = None
    ) -> Union[str, tuple[str, int]]:
        """Listen on an address and return the address as bound.

        Args:
            address: A path (created with mode 0600), or (host, port); port 0 for any free port.
            tls: The TLS context of connections to (host, port). Connections to a path never use TLS.
        """
        return self._acceptor.listen(address, tls)

    def inherit(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Listen on a socket of `bind_socket`. The process that made the socket removes its path."""
        self._acceptor.inherit(sock, tls)

    def adopt(self, sock: socket.socket, tls: Tls | None = None) -> int:
        """Serve a connection that this process has made and authenticated, and return its peer number.

        The loop does not call `on_connect` of the service. Call this before `run`, or in the loop's thread.

        Args:
            sock: The socket of the connection.
            tls: The TLS of the connection, whose handshake is done; None without TLS.
        """
        peer = self._add(sock, None)
        peer.tls = tls
        return peer.number

    def watch(
        self, sock: socket.socket, called: Callable[[int], Iterable[Outgoing] | None], writes: bool = False
    ) -> None:
        """Call `called` with the events when this socket is readable (or writable), and send what it returns.

        Call this before `run`, or in the loop's thread. A further call for the same socket replaces `writes`: whether
        to wait until the socket is writable, too.
        """
        events = READ | WRITE if writes else READ
        known = self._watched.get(sock)
        if known is None:
            self._poller.register(sock, events, lambda found: self._guarded(lambda: called(found)))
        elif known != events:
            self._poller.modify(sock, events)
        self._watched[sock] = events

    def unwatch(self, sock: socket.socket) -> None:
        """Stop watching this socket."""
        if self._watched.pop(sock, None) is not None:
            self._poller.unregister(sock)

    # ------------------------------------------------------------ from any thread, and signal handlers

    def call_soon(self, function: Callable[[], Iterable[Outgoing] | None]) -> None:
        """Run a function in the loop's thread soon, and send what it returns."""
        self._soon.append(function)
        self._waker.wake()

    def stop(self) -> None:
        """Make `run` return soon. Idempotent, and allowed at any time."""
        self._stopping = True
        self._waker.wake()

    @property
    def connections(self) -> int:
        """The number of open connections, including those in their handshake."""
        return len(self._peers)

    def serves_one(self) -> bool:
        """Whether at most one connection has something to serve in this turn. Only for the loop's thread."""
        return self._ready < 2

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until `stop`, then send the queued output (for at most FAREWELL_SECONDS) and close everything."""
        try:
            while not self._stopping:
                if self._held:
                    self._wait_for_commit()
                else:
                    self._turn()
            self._end_turn()
            while self._dirty and not self._held:
                self._end_turn()
            if not self._held:
                self._say_farewell()
        finally:
            self.close()

    def _turn(self) -> None:
        due = self._service.next_deadline()  # once per turn: a deadline that this turn sets is checked in the next one
        waits = self._unserved or self._may_idle
        ready = self._poller.poll(0 if waits else self._seconds_to_deadline(due))
        if self._idle is not None:
            self._may_idle = bool(ready or self._unserved) or (
                self._may_idle and self._succeeds(self._idle, "idle work")
            )
        others: list[tuple[Callable[[int], object], int]] = []
        for noted, events in ready:
            if isinstance(noted, ServerConnection):
                self._note_events(noted, events)
            else:
                others.append((noted, events))
        if self._unserved:
            self._serve_queued()
        for function, events in others:  # new connections are accepted after the proofs of others were read
            function(events)
        served = self._served
        if served is not None and (gathered := served()):
            self._queue(gathered)
        self._run_soon()
        self._check_deadlines(due)
        self._end_turn()
        while served is not None and not self._held and (more := served()):
            self._queue(more)
            self._end_turn()

    def _run_soon(self) -> None:
        while self._soon:
            self._guarded(self._soon.popleft())

    def _end_turn(self) -> None:
        """Commit, and if this succeeds send the queued output."""
        if self._commit is not None and not self._succeeds(self._commit, "the commit"):
            self._held = True
            return
        self._held = False
        if self._dirty:
            self._flush()
        if self._unread.exceeded:
            self._drop_slowest()

    def _succeeds(self, function: Callable[[], bool], what: str) -> bool:
        """Return the result of the function; False if it raises an exception."""
        try:
            return function()
        except Exception:
            self.counters["errors"] += 1
            logger.exception("%s failed", what)
            return False

    def _wait_for_commit(self) -> None:
        """Run a turn after a failed commit. The loop does not read from connections meanwhile."""
        poll = select.poll()
        poll.register(self._waker.descriptor, select.POLLIN)
        if poll.poll(COMMIT_PAUSE * 1000):
            self._waker.drain(0)
        self._run_soon()
        self._end_turn()

    def _seconds_to_deadline(self, due: float | None) -> float | None:
        """Return the seconds until the next deadline; None for no deadline. `due` is that of the service."""
        if self._dirty:  # output was queued while that of the last turn was sent
            return 0.0
        if due is not None and due < self._tick_again:
            due = self._tick_again
        if self._shaking and (due is None or self._shaking[0][0] < due):
            due = self._shaking[0][0]
        paused = self._acceptor.paused_until
        if paused is not None and (due is None or paused < due):
            due = paused
        if due is None:
            return None
        return min(max(0.0, due - self._clock()), LONGEST_SLEEP)

    def _check_deadlines(self, due: float | None) -> None:
        paused = self._acceptor.paused_until
        if due is None and not self._shaking and paused is None:
            return
        now = self._clock()
        if due is not None and due <= now and now >= self._tick_again:
            errors = self.counters["errors"]
            self._guarded(lambda: self._service.on_deadline(now), "tick")
            if self.counters["errors"] > errors:
                self._tick_again = now + 0.1  # the deadline may still be in the past, so the loop must pause
        while self._shaking and (self._shaking[0][0] <= now or self._shaking[0][1].handshake is None):
            peer = self._shaking.popleft()[1]
            if peer.handshake is not None and peer.number in self._peers:
                self._reject(peer)
        if paused is not None and paused <= now:
            self._acceptor.resume()

    def _guarded(self, function: Callable[[], Iterable[Outgoing] | None], event: str = "work") -> None:
        began = self._clock()
        try:
            self._queue(function() or ())
        except Exception:
            self.counters["errors"] += 1
            logger.exception("the service failed outside of a message")
        now = self._clock()
        self._longest.record(event, now - began, now)

    # ------------------------------------------------------------ connections

    def _welcome(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        if sock.family != socket.AF_UNIX:
            set_tcp_options(sock)
        refuse = None
        if len(self._peers) >= self._max_connections and not self._drop_oldest_unauthenticated():
            if len(self._peers) >= self._max_connections + BACKLOG:
                self.counters["refused"] += 1
                sock.close()  # without a reason, which would need a descriptor until the peer has read it
                return
            refuse = f"it has {self._max_connections} connections, its maximum; close some clients"
        peer = self._add(sock, ServerHandshake(self._key, refuse))
        if tls is not None:
            from transfer_queue.net.tls import Tls  # ssl is slow to import, and most systems do not use it

            peer.tls = Tls(tls, server=True)
        self._shaking.append((self._clock() + self._handshake_seconds, peer))

    def _drop_oldest_unauthenticated(self) -> bool:
        """Drop the oldest connection that is not authenticated, so that peers without the key cannot block others."""
        for _, peer in self._shaking:
            if peer.number in self._peers and peer.handshake is not None and not peer.handshake.refuses:
                self._reject(peer)
                return True
        return False

    def _reject(self, peer: ServerConnection) -> None:
        self.counters["rejected"] += 1
        self._drop(peer)

    def _add(self, sock: socket.socket, handshake: ServerHandshake | None) -> ServerConnection:
        sock.setblocking(False)
        peer = ServerConnection(self._next_peer, sock, FrameReader(*self._limits), handshake)
        self._next_peer += 1
        self._peers[peer.number] = peer
        self._poller.register(sock, READ, peer)
        return peer

    def _drop(self, peer: ServerConnection) -> None:
        """End a connection, and call `closed` of the service if the connection was authenticated."""
        if self._peers.pop(peer.number, None) is None:
            return
        self._poller.unregister(peer.sock)
        peer.sock.close()
        peer.discard_buffers()
        self._unread.note(peer, has_read=False)
        self._hold(peer, 0)
        if peer.handshake is None:
            self._guarded(lambda: self._service.on_disconnect(peer.number, self._clock()))

    # ------------------------------------------------------------ input

    def _note_events(self, peer: ServerConnection, events: int) -> None:
        if events & ~READ:
            self._dirty.append(peer)
        if events & ~WRITE and not peer.queued:
            peer.queued = True
            self._unserved.append(peer)

    def _serve_queued(self) -> None:
        """Serve the connections that wait, in order, at most CONNECTIONS_A_TURN, or those of ALL_SECONDS.

        Each gets one turn: its messages that were read before, otherwise one read. The others stay in the queue, so
        that each is served once before any connection is served twice.
        """
        queue = self._unserved
        self._ready = len(queue)
        until = self._clock() + ALL_SECONDS if self._ready > 1 else 0.0
        for _ in range(min(self._ready, CONNECTIONS_A_TURN)):
            peer = queue.popleft()
            peer.queued = False
            if peer.number in self._peers:  # otherwise it was dropped while it waited
                self._serve(peer)
                if queue and self._clock() > until:
                    break

    def _serve(self, peer: ServerConnection) -> None:
        if peer.out_bytes > OUTPUT_MARK:
            self._watch(peer)
        elif peer.inbox:
            self._serve_inbox(peer)
        elif not peer.ending:
            self._read(peer)

    def _read(self, peer: ServerConnection) -> None:
        try:
            data = peer.sock.recv(min(READ_SIZE + peer.reader.missing, LARGE_READ))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        elif peer.tls is not None:
            self._unseal(peer, peer.tls, data)
        elif peer.handshake is None:
            self._take_frames(peer, data)
        else:
            self._shake(peer, peer.handshake, data)

    def _handle_input(self, peer: ServerConnection, data: bytes) -> None:
        if peer.handshake is None:
            self._take_frames(peer, data)
        else:
            self._shake(peer, peer.handshake, data)

    def _unseal(self, peer: ServerConnection, tls: Tls, data: bytes) -> None:
        if tls.begins_without_tls(data):
            # a process of this package without TLS, which understands the reason of a refusal
            peer.tls, peer.handshake = None, ServerHandshake(self._key, NEEDS_TLS)
            self._handle_input(peer, data)
            return
        try:
            said = peer.decrypt(tls, data)
        except TransferQueueError as error:
            (self._break if peer.handshake is None else self._turn_away)(peer, error)
            return
        if peer.sealed:
            self._dirty.append(peer)
        if said:
            self._handle_input(peer, said)
        if tls.ended:
            self._drop(peer)

    def _shake(self, peer: ServerConnection, handshake: ServerHandshake, data: bytes) -> None:
        answer = handshake.receive(data)
        if answer:
            self._append(peer, (answer,))
        if handshake.failed is not None:
            self._turn_away(peer, handshake.failed)
        elif handshake.done:
            peer.handshake = None
            self.counters["accepted"] += 1
            errors = self.counters["errors"]
            self._guarded(lambda: self._service.on_connect(peer.number, handshake.hello))
            if self.counters["errors"] > errors:
                self._drop(peer)
            elif handshake.leftover:
                self._take_frames(peer, handshake.leftover)

    def _turn_away(self, peer: ServerConnection, error: TransferQueueError) -> None:
        self.counters["refused" if isinstance(error, AttachError) else "rejected"] += 1
        logger.warning("a connection was refused: %s", error)
        peer.ending = True
        if peer.out_bytes:
            self._dirty.append(peer)
        else:
            self._drop(peer)

    def _take_frames(self, peer: ServerConnection, data: bytes) -> None:
        try:
            peer.inbox += peer.reader.feed(data)
        except ProtocolError as error:
            self._break(peer, error)
            return
        if peer.reader.held != peer.held:
            self._hold(peer, peer.reader.held)
        if self._unfinished > self._max_input:
            self._drop_largest_input()
        if peer.inbox:
            self._serve_inbox(peer)

    def _hold(self, peer: ServerConnection, held: int) -> None:
        self._unfinished += held - peer.held
        peer.held = held

    def _drop_largest_input(self) -> None:
        largest = max(self._peers.values(), key=lambda peer: peer.held)
        self.counters["crowded"] += 1
        logger.warning(
            "connection %d is dropped: all unfinished messages have %d bytes together, more than the limit of %d, and "
            "that of this connection is the largest with %d bytes",
            largest.number, self._unfinished, self._max_input, largest.held,
        )  # fmt: skip
        self._drop(largest)

    def _serve_inbox(self, peer: ServerConnection) -> None:
        """Serve the messages of a connection that have arrived, at most FRAMES_A_TURN, or those of TURN_SECONDS."""
        inbox = peer.inbox
        now = self._clock()
        try:
            for _ in range(min(FRAMES_A_TURN, len(inbox))):
                if peer.out_bytes > OUTPUT_MARK or not inbox:
                    break  # the peer does not read its replies, or was dropped
                body, payload = inbox.popleft()
                self._queue(self._service.on_message(peer.number, body, payload, now))
                if inbox and self._clock() - now > TURN_SECONDS:
                    break
        except ProtocolError as error:
            self._break(peer, error)
        except Exception:
            self.counters["errors"] += 1
            logger.exception("the service failed on a message of connection %d, which is dropped", peer.number)
            self._drop(peer)
        if inbox:
            self._await_turn(peer)

    def _await_turn(self, peer: ServerConnection) -> None:
        if not peer.queued and peer.out_bytes <= OUTPUT_MARK:
            peer.queued = True
            self._unserved.append(peer)

    def _break(self, peer: ServerConnection, error: TransferQueueError) -> None:
        self.counters["broken"] += 1
        logger.warning("connection %d is dropped: %s", peer.number, error)
        self._drop(peer)

    # ------------------------------------------------------------ output

    def _queue(self, outgoing: Iterable[Outgoing]) -> None:
        for number, body, payload in outgoing:
            peer = self._peers.get(number)
            if peer is not None and not peer.ending:
                self._append(peer, frame_pieces(body, payload))

    def _append(self, peer: ServerConnection, pieces: Iterable[Payload]) -> None:
        if peer.out_bytes > self._max_output:
            self._overflow(peer)
            return
        if not peer.out:
            self._dirty.append(peer)
        for piece in pieces:
            peer.out.append(piece)
            peer.out_bytes += len(piece)
            if type(piece) is memoryview and is_lent(piece):
                peer.lent += len(piece)
        if peer.events != READ:  # earlier output waits for the client
            self._unread.note(peer, has_read=False)

    def _overflow(self, peer: ServerConnection) -> None:
        """Drop a peer that does not read its replies: send it nothing more, and end it with the next flush."""
        if not peer.ending:
            self.counters["slow"] += 1
            logger.warning("connection %d left %d bytes unread and is dropped", peer.number, peer.out_bytes)
            peer.ending = True
            peer.discard_buffers()
            self._dirty.append(peer)

    def _drop_slowest(self) -> None:
        """Drop the connections that have read nothing for the longest time, until the others' output is acceptable."""
        while self._unread.is_too_much:
            slowest = self._unread.slowest()
            self.counters["slow"] += 1
            logger.warning(
                "connection %d is dropped: all unread replies have %d bytes together, more than the limit of %d, and "
                "this connection has read nothing for the longest time, with %d bytes unread",
                slowest.number, self._unread.total, self._unread.limit, slowest.out_bytes,
            )  # fmt: skip
            self._drop(slowest)

    def _flush(self) -> None:
        """Send the output that is queued now. Output that follows from ended connections belongs to the next turn."""
        dirty, self._dirty = self._dirty, []
        for peer in dirty:
            if peer.number in self._peers:
                self._send(peer)

    def _send(self, peer: ServerConnection) -> None:
        before = peer.out_bytes
        try:
            peer.send()
        except OSError:
            self._drop(peer)
            return
        if peer.ending and not peer.out_bytes:
            self._drop(peer)
            return
        if peer.out_bytes or peer.events != READ:
            self._unread.note(peer, has_read=peer.out_bytes < before)
            self._watch(peer)
        if peer.inbox:
            self._await_turn(peer)

    def _watch(self, peer: ServerConnection) -> None:
        """Set the events for which the selector waits."""
        # a connection that is ending is not read, because its input would wake the loop without need
        reads = not peer.ending and peer.out_bytes <= OUTPUT_MARK
        events = (READ if reads else 0) | (WRITE if peer.out_bytes else 0)
        if events != peer.events:
            peer.events = events
            self._poller.modify(peer.sock, events)

    # ------------------------------------------------------------ the end

    def _say_farewell(self) -> None:
        limit = time.monotonic() + FAREWELL_SECONDS
        self._acceptor.stop()
        for peer in list(self._peers.values()):
            if peer.out_bytes:
                self._poller.modify(peer.sock, WRITE)
            else:
                self._poller.unregister(peer.sock)
                peer.sock.close()
                del self._peers[peer.number]
        while self._peers and (left := limit - time.monotonic()) > 0:
            for peer, _ in self._poller.poll(left):
                if isinstance(peer, ServerConnection):
                    peer.ending = True
                    self._send(peer)

    def close(self) -> None:
        """Close every socket and remove the paths that `listen` made. `run` calls this at its end."""
        self._acceptor.close()
        for peer in self._peers.values():
            peer.sock.close()
        self._peers.clear()
        self._poller.close()
        self._waker.close()
