"""Every decoder with what has ever gone wrong, and with new hostile input. `make fuzz` does the latter for longer."""

import contextlib
import random
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from decoders import DECODERS, generate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfer_queue.net.server.sockets import bind_socket
from transfer_queue.node.controller.metrics_http import serve_metrics

CORPUS = Path(__file__).parent / "corpus"
EXAMPLES = {"controller": 40, "unit": 25, "settings": 15, "objects": 40, "columns": 40, "tags": 30}


def kept() -> list[tuple[str, Path]]:
    return [(path.parent.name, path) for path in sorted(CORPUS.glob("*/*"))]


@pytest.mark.parametrize(("name", "path"), kept(), ids=[f"{name}-{path.name}" for name, path in kept()])
def test_kept_inputs(name: str, path: Path) -> None:
    DECODERS[name](path.read_bytes())


def test_every_decoder_has_inputs_that_are_kept() -> None:
    assert {name for name, _ in kept()} == set(DECODERS)


@pytest.mark.parametrize("name", list(DECODERS))
def test_new_inputs(name: str) -> None:
    decode = DECODERS[name]

    @settings(
        max_examples=EXAMPLES.get(name, 60), deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(rng=st.randoms(use_true_random=False))
    def feed(rng: random.Random) -> None:
        decode(generate(name, rng))

    feed()


# ---------------------------------------------------------------- metrics over HTTP


@pytest.fixture(scope="module")
def endpoint() -> tuple[str, int]:
    host, _, port = serve_metrics(bind_socket(("127.0.0.1", 0)), lambda: ["tq_partitions 1\n"]).partition(":")
    return host, int(port)


@pytest.mark.parametrize(
    "request_",
    [
        b"", b"\0" * 4000, b"GET / HTTP/9.9\r\n\r\n", b"GET /../../etc/passwd HTTP/1.1\r\n\r\n",
        b"PUT / HTTP/1.1\r\n\r\n",
        b"GET " + b"/" * 70_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500 + b"\r\n", b"\xff\xfe\r\n\r\n",
    ],
)  # fmt: skip
def test_metrics_are_served_after_any_request(endpoint: tuple[str, int], request_: bytes) -> None:
    with socket.create_connection(endpoint, 10) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(request_)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    with urllib.request.urlopen(f"http://{endpoint[0]}:{endpoint[1]}/metrics", timeout=10) as answer:
        assert b"tq_partitions 1" in answer.read()


def test_metrics_have_few_threads(endpoint: tuple[str, int]) -> None:
    others = threading.active_count()  # of this process: what other tests have left is not counted
    held = [socket.create_connection(endpoint, 10) for _ in range(40)]
    try:
        with urllib.request.urlopen(f"http://{endpoint[0]}:{endpoint[1]}/metrics", timeout=30) as answer:
            assert answer.status == 200
        assert threading.active_count() - others < 30
    finally:
        for sock in held:
            sock.close()
