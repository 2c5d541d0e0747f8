"""Serves metrics over HTTP, from threads of the controller; imported only where they are on."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

ANY = ("0.0.0.0", "::")
MOST_READERS = 16  # at a time; the one that has been there for the longest makes room for the next
PAUSE = 0.0002  # seconds; long enough that a thread which waits for the interpreter gets it
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _MetricsServer(ThreadingHTTPServer):
    """Threads for a few readers, whatever connects."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._open: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > MOST_READERS:
            with contextlib.suppress(OSError):  # gone already
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):  # it had to make room
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """What a reader does to its connection is not worth a line in the log."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger.exception("metrics cannot be served")


def serve_metrics(listener: socket.socket, text: Callable[[], Iterable[str]]) -> str:
    """Starts to serve; the endpoint as "host:port", by this machine's name where it listens on any address.

    listener: see `net.server.sockets.bound_socket`. text: gives the metrics in pieces; called in the threads that
    serve, so it must hand what belongs to the loop to the loop and wait for it.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a client to send its request

        def do_GET(self) -> None:
            """Answers /metrics."""
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "the metrics are at /metrics")
                return
            try:
                body = b"".join(_encoded(text()))
            except TimeoutError as error:
                self.send_error(503, str(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests for metrics are not worth a line in the log."""

    server = _MetricsServer(listener, Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    host, port = listener.getsockname()[:2]
    named = socket.gethostname() if host in ANY else f"[{host}]" if ":" in host else host
    return f"{named}:{port}"


def _encoded(pieces: Iterable[str]) -> Iterable[bytes]:
    """Between two pieces the loop gets its turn: otherwise it would wait for the interpreter, 5 ms at a time."""
    for piece in pieces:
        yield piece.encode()
        time.sleep(PAUSE)
