"""A page that a thread of the test serves, and readers of its stream."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import torch
from tensordict import TensorDict

from transfer_queue.interface import CURRENT
from transfer_queue.live.serving.guard import new_token
from transfer_queue.live.serving.live_server import LiveOptions, LiveServer, address_of
from transfer_queue.live.snapshot import LiveSnapshot
from transfer_queue.net.server.sockets import bind_socket
from transfer_queue.node.system.launcher import RunningSystem

SECONDS = 60.0  # for anything that happens at all

Event = tuple[str, dict[str, Any]]


def client_of(address: str) -> httpx.Client:
    """A client without the machine's certificates, which take longer to read than most tests: pages are plain HTTP."""
    return httpx.Client(base_url=address, timeout=SECONDS, verify=False)


class Page:
    """A page that is served, and a browser's side of it."""

    def __init__(self, address: str, stop: Callable[[], None]) -> None:
        self.address = address
        self.stop = stop
        self.base = address.split("/?")[0]

    @contextmanager
    def browser(self) -> Iterator[httpx.Client]:
        """Yield a client that has exchanged the token for the cookie."""
        with client_of(self.base) as client:
            assert client.get(self.address).status_code == 303
            yield client

    @contextmanager
    def stream(self) -> Iterator[Iterator[Event]]:
        """Open the stream."""
        with self.browser() as client, client.stream("GET", "/api/live") as response:
            assert response.status_code == 200
            yield read_events(response)

    def view_when(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first view for which a condition holds, combined from the stream."""
        with self.stream() as events:
            return view_when(events, condition)


def read_events(response: httpx.Response) -> Iterator[Event]:
    """Iterate over server-sent events. Their lines end with a newline, and not with U+2028 as lines of text may."""
    unread = b""
    for piece in response.iter_bytes():
        unread += piece
        while b"\n\n" in unread:
            event, unread = unread.split(b"\n\n", 1)
            kind, data = event.split(b"\n")
            yield kind.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))


def view_when(events: Iterator[Event], condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    limit = time.monotonic() + SECONDS
    view: dict[str, Any] = {}
    for kind, data in events:
        view = data if kind == "full" else {**view, **data}
        if condition(view):
            return view
        assert time.monotonic() < limit, view.get("state")
    raise AssertionError(f"the stream ended: {view.get('state')}")


@contextmanager
def served(
    *, values: bool = False, tokenizer: str | None = None, host: str = "127.0.0.1", tls: dict[str, str] | None = None,
    system: RunningSystem | None = None, snapshot: LiveSnapshot | None = None,
) -> Iterator[Page]:  # fmt: skip
    """Serve the page of a system, by default of the current one, or of a snapshot, in a thread."""
    system = system or CURRENT.system
    assert system is not None or snapshot is not None
    folder = "" if system is None or snapshot is not None else str(system.folder)
    listener = bind_socket((host, 0))
    options = LiveOptions(folder, new_token(), host, values, tokenizer, tls=tls)
    server = LiveServer(options, listener, snapshot)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield Page(address_of(options, listener.getsockname()[1]), server.stop)
    finally:
        server.stop()
        thread.join(SECONDS)
        listener.close()
        assert not thread.is_alive()


def rows(count: int, *fields: str) -> TensorDict:
    return TensorDict({name: torch.arange(4 * count).reshape(count, 4) for name in fields}, batch_size=[count])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
