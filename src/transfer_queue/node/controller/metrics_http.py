"""Serves metrics over HTTP, in threads of the controller. Imported only if metrics are on."""

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

from transfer_queue.utils.host_addresses import public_host

logger = logging.getLogger(__name__)

MAX_READERS = 16  # at a time; the oldest connection is closed for the next one
PAUSE = 0.0002  # seconds; long enough that another thread which waits for the interpreter gets it
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _MetricsServer(ThreadingHTTPServer):
    """Serves a limited number of connections, each in a thread, however many are made."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._open: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.append(request)
        if len(self._open) > MAX_READERS:
            with contextlib.suppress(OSError):  # it is closed already
                self._open.pop(0).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(ValueError):  # it was closed for another one
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log errors of the server only, not those of a client's connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger.exception("the controller failed to serve metrics")


def serve_metrics(listener: socket.socket, text: Callable[[], Iterable[str]]) -> str:
    """Start to serve. Returns the endpoint as "host:port", with a host that other machines can reach if they may.

    Args:
        listener: See `net.server.sockets.bind_socket`.
        text: Yields the metrics in pieces. It is called in the threads that serve, so it must run anything that
            belongs to the loop in the loop and wait for the result.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a client to send its request

        def do_GET(self) -> None:
            """Answer /metrics."""
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
            """Do not log requests for metrics."""

    server = _MetricsServer(listener, Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    host, port = listener.getsockname()[:2]
    return f"{public_host(host)}:{port}"


def _encoded(pieces: Iterable[str]) -> Iterable[bytes]:
    """Pause after each piece, so that the loop gets the interpreter at once and not only after 5 ms."""
    for piece in pieces:
        yield piece.encode()
        time.sleep(PAUSE)
