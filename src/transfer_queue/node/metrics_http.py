"""Serves the metrics of the controller over HTTP, from a thread of its own; imported only where they are on."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transfer_queue.messages import SystemStatus
from transfer_queue.metrics import exposition

logger = logging.getLogger(__name__)

MOST_READERS = 16  # at a time; the one that has been there for the longest makes room for the next
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Server(ThreadingHTTPServer):
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


def serve_metrics(listener: socket.socket, snapshot: Callable[[], SystemStatus]) -> str:
    """Starts to serve; the endpoint as "host:port".

    listener: see `net.listening.bound_socket`. snapshot: gives the status; called in the threads that serve, so it
    must hand the work to the controller's loop and wait for it.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for a client to send its request

        def do_GET(self) -> None:
            """Answers /metrics."""
            if self.path.split("?")[0] not in ("/", "/metrics"):
                self.send_error(404, "the metrics are at /metrics")
                return
            body = exposition(snapshot()).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests for metrics are not worth a line in the log."""

    server = _Server(listener, Handler)
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"
