"""A server of the live page whose answers a test decides: the page's files, and events that the test sends."""

from __future__ import annotations

import contextlib
import copy
import json
import mimetypes
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

EXAMPLE = Path(__file__).parent.parent / "example.json"
PAGE = Path(str(resources.files("transfer_queue.live") / "page"))
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


def example(part: str) -> Any:
    """Return a part of the example document, to change at will."""
    return json.loads(EXAMPLE.read_text("utf-8"))[part]


class CannedServer(ThreadingHTTPServer):
    """The server.

    Attributes:
        full: What a new stream gets first.
        matrices: Partition -> answer of `/api/matrix`; others get 404.
        lanes: Task -> the lanes that are joined to its band, for `/api/lanes`; others get 404.
        samples: Index or key -> answer of `/api/sample`; others get 404.
        words: What `/api/explain` answers.
        requests: The paths of all requests, with their queries.
        is_up: Whether requests of the stream are answered. If not, they are refused with 503.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.full: dict[str, Any] = example("full")
        matrix, sample = example("matrix"), example("sample")
        self.matrices: dict[str, Any] = {matrix["partition"]: matrix}
        self.samples: dict[str, Any] = {str(sample["index"]): sample, sample["key"]: sample}
        self.lanes: dict[str, list[dict[str, Any]]] = {}
        self.words = "Sample 107168 was consumed by task 'reward'."
        self.requests: list[str] = []
        self.is_up = True
        self._changed = threading.Condition()
        self._events: list[bytes] = []
        self._generation = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def send(self, event: str, data: dict[str, Any]) -> None:
        """Send an event to each open stream. A `delta` becomes a part of what later streams start with."""
        if event == "delta":
            self.full = {**self.full, **{key: value for key, value in data.items() if key not in ("timeline", "rates")}}
        elif event == "full":
            self.full = data
        with self._changed:
            self._events.append(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())
            self._changed.notify_all()

    def delta(self, seconds: float = 1.0, **parts: Any) -> None:
        """Send a `delta` that is some seconds later."""
        now, seq = self.full["now"] + seconds, self.full["seq"] + 1
        self.send("delta", {"seq": seq, "now": now, **copy.deepcopy(parts)})

    def stop_streams(self, up: bool = False) -> None:
        """End every stream; new ones are refused unless `up`."""
        with self._changed:
            self.is_up = up
            self._generation += 1
            self._changed.notify_all()

    def stream_to(self, write: Any) -> None:
        """Write the events to one browser until the streams are stopped."""
        with self._changed:
            generation, place = self._generation, len(self._events)
            first = {**self.full, "seq": self.full["seq"]}
        write(f"event: full\ndata: {json.dumps(first)}\n\n".encode())
        while True:
            with self._changed:
                while len(self._events) == place and self._generation == generation:
                    self._changed.wait()
                if self._generation != generation:
                    return
                events, place = self._events[place:], len(self._events)
            write(b"".join(events))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: a browser that closes a stream is not an error."""


class _Handler(BaseHTTPRequestHandler):
    server: CannedServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        parts = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if parts.path == "/api/live":
            self._stream()
        elif parts.path == "/api/matrix":
            self._matrix(query)
        elif parts.path == "/api/lanes":
            self._lanes(query)
        elif parts.path == "/api/sample":
            self._json(self.server.samples.get(query.get("index", query.get("key", ""))), "the sample does not exist")
        elif parts.path == "/api/explain":
            self._json({"words": self.server.words})
        else:
            name = "index.html" if parts.path == "/" else parts.path.removeprefix("/static/")
            self._file(PAGE / name)

    def _stream(self) -> None:
        if not self.server.is_up:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, b'{"error": "too many pages"}', "application/json")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.server.stream_to(self._write)
        self.close_connection = True

    def _write(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _matrix(self, query: dict[str, str]) -> None:
        answer = self.server.matrices.get(query["partition"])
        tag = f'"{answer["epoch"]}"' if answer is not None else ""
        if tag and self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, b"", "application/json", tag)
        else:
            self._json(answer, f"partition {query['partition']!r} does not exist", tag)

    def _lanes(self, query: dict[str, str]) -> None:
        lanes, timeline = self.server.lanes.get(query["task"]), self.server.full["timeline"]
        if lanes is None:
            self._json(None, "no ranks of this task are joined to a line")
            return
        first, count = int(query["from"]), int(query["count"])
        shown = lanes[first : first + count]
        since = timeline["until"] if query["after"] == f"{first}-1" else 0.0
        if since:
            shown = [{**lane, "spans": [], "band": []} for lane in shown]
        its = {**timeline, "since": since, "order": [lane["id"] for lane in shown], "lanes": shown}
        epoch = f"{first}-1"
        self._json({"task": query["task"], "epoch": epoch, "first": first, "ranks": len(lanes), "timeline": its})

    def _json(self, answer: Any, otherwise: str = "", tag: str = "") -> None:
        status = HTTPStatus.NOT_FOUND if answer is None else HTTPStatus.OK
        body = json.dumps({"error": otherwise} if answer is None else answer).encode()
        self._send(status, body, "application/json", tag)

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._send(HTTPStatus.NOT_FOUND, b"", "text/plain")
            return
        kind = "text/javascript" if path.suffix == ".mjs" else mimetypes.guess_type(path.name)[0] or "text/plain"
        self._send(HTTPStatus.OK, path.read_bytes(), kind)

    def _send(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-cache")
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def canned_server() -> Iterator[CannedServer]:
    """A server that ends with the block."""
    server = CannedServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop_streams()
        server.shutdown()
        server.server_close()
        thread.join()
