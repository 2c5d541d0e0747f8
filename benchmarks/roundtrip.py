"""Round trips of a realistic Publish through the servers' loop, as ratios to a bare socket ping-pong.

    python benchmarks/roundtrip.py [seconds per figure]

Machines differ and are shared; the bare ping-pong (blocking recv and send of as many bytes, no protocol) runs in
the same minute on the same cores, so the ratios say what the protocol costs. Servers and clients are processes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import msgspec

from transfer_queue.client.calls import Call
from transfer_queue.messages import Answer, AnyReply, Envelope, FieldSpec, NewBlock, Publish, PublishReply
from transfer_queue.net.asynchronous import run_async
from transfer_queue.net.blocking import run_blocking
from transfer_queue.net.handshake import Hello
from transfer_queue.net.server import Outgoing, Server
from transfer_queue.net.session import Session

KEY = bytes(32)
CLIENTS = 8
SCHEMA = [FieldSpec("prompt", "tensor", "int64", 1, True), FieldSpec("reward", "tensor", "float32", 1, False)]
PUBLISH = Publish(
    "train_0", 8, rows=bytes(64), block=NewBlock(0, 1, 4096, 3, 8192, 8, SCHEMA, bytes(72)), tags=[{"step": 1}] * 8
)
CALL = Call(("controller", 0), PUBLISH, 10.0)

Context = multiprocessing.get_context("fork")


class Replies:
    """Decodes the envelope and answers as the controller would, with nothing in between."""

    def __init__(self) -> None:
        self._decode = msgspec.msgpack.Decoder(Envelope).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def opened(self, peer: int, hello: Hello) -> None: ...

    def received(self, peer: int, body: bytes, payload: memoryview | None, now: float) -> Iterable[Outgoing]:
        sequence = self._decode(body).sequence
        return (Outgoing(peer, self._encode(Answer(sequence, PublishReply(rows=bytes(64))))),)

    def closed(self, peer: int, now: float) -> Iterable[Outgoing]:
        return ()

    def next_deadline(self) -> float | None:
        return None

    def ticked(self, now: float) -> Iterable[Outgoing]:
        return ()


def serve(path: str) -> None:
    server = Server(Replies(), KEY)
    server.listen(path)
    server.run()


def serve_bare(path: str, request: int, reply: int) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    accepted, _ = listener.accept()
    answer = bytes(reply)
    while accepted.recv(request, socket.MSG_WAITALL):
        accepted.sendall(answer)


def publish() -> Generator[Call, AnyReply, AnyReply]:
    return (yield CALL)


def median_us(once: Callable[[], object], seconds: float) -> float:
    """The median time of one call, over rounds of 200."""
    rounds = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(200):
            once()
        rounds.append((time.perf_counter() - start) / 200 * 1e6)
    return statistics.median(rounds)


def bare(folder: Path, seconds: float) -> float:
    encode = msgspec.msgpack.Encoder().encode
    request = encode(Envelope(1000, 999, PUBLISH))
    reply = encode(Answer(1000, PublishReply(rows=bytes(64))))
    path = str(folder / "bare")
    process = Context.Process(target=serve_bare, args=(path, len(request), len(reply)))
    process.start()
    sock = connect(path)

    def once() -> None:
        sock.sendall(request)
        sock.recv(len(reply), socket.MSG_WAITALL)

    figure = median_us(once, seconds)
    sock.close()
    process.join()
    return figure


def connect(path: str) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
        else:
            return sock


async def asynchronous(session: Session, seconds: float) -> tuple[float, float]:
    """Microseconds a call: one after another, and with 64 tasks at once."""

    async def calls(count: int) -> None:
        for _ in range(count):
            await run_async(session, publish())

    async def rounds(tasks: int) -> float:
        figures = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            await asyncio.gather(*(calls(320 // tasks) for _ in range(tasks)))
            figures.append((time.perf_counter() - start) / 320 * 1e6)
        return statistics.median(figures)

    return await rounds(1), await rounds(64)


def client(path: str, number: int, seconds: float, ready: object, counts: object) -> None:
    session = Session(f"client-{number}", KEY, lambda target: path)
    run_blocking(session, publish())
    ready.wait()  # type: ignore[attr-defined]
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(50):
            run_blocking(session, publish())
        count += 50
    counts.put(count / seconds)  # type: ignore[attr-defined]
    session.close()


def many(path: str, seconds: float) -> float:
    """Calls a second of CLIENTS processes together."""
    ready, counts = Context.Barrier(CLIENTS), Context.Queue()
    processes = [Context.Process(target=client, args=(path, i, seconds, ready, counts)) for i in range(CLIENTS)]
    for process in processes:
        process.start()
    total = sum(counts.get() for _ in processes)
    for process in processes:
        process.join()
    return total


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = str(folder / "server")
        server = Context.Process(target=serve, args=(path,))
        server.start()
        connect(path).close()
        session = Session("client", KEY, lambda target: path)
        reference = bare(folder, seconds)
        blocking = median_us(lambda: run_blocking(session, publish()), seconds)
        one, window = asyncio.run(asynchronous(session, seconds))
        rate = many(path, seconds)
        session.close()
        server.terminate()
        server.join()
    print(f"bare ping-pong                 {reference:7.1f} us")
    for label, figure in (("blocking", blocking), ("asyncio, one by one", one), ("asyncio, 64 tasks", window)):
        print(f"{label:30} {figure:7.1f} us   {figure / reference:5.2f} x bare")
    share = rate * reference / 1e6
    print(f"{CLIENTS} blocking clients             {rate / 1000:7.1f} k/s  {share:5.2f} x one bare client's")


if __name__ == "__main__":
    main()
