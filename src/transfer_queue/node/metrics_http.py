"""Serves the metrics of the controller over HTTP, from a thread of its own; imported only where they are on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from transfer_queue.messages import SystemStatus
from transfer_queue.metrics import exposition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


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

    server = ThreadingHTTPServer(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"
