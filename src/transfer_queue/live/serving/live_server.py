"""Serves the page: `tq live` in its own process, or a child of the supervisor if `live.enabled` is set."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from transfer_queue.config.settings import Settings
from transfer_queue.config.validators import is_loopback
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.live.questions.questions import Questions
from transfer_queue.live.reading.system_source import SystemSource
from transfer_queue.live.serving.guard import Guard
from transfer_queue.live.serving.hub import Hub
from transfer_queue.live.serving.web import build_app
from transfer_queue.live.snapshot import LiveSnapshot, PageAnswers, SnapshotAnswers, SnapshotSource
from transfer_queue.system_folder.paths import SystemFolder
from transfer_queue.token_text import load_tokenizer
from transfer_queue.utils.host_addresses import public_host

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 2  # for streams to end
MAX_CONNECTIONS = 128


@dataclass(frozen=True)
class LiveOptions:
    """How a page is served."""

    folder: str
    """The folder of the system; "" for a snapshot."""
    token: str
    """The secret of the address."""
    host: str = "127.0.0.1"
    """The address on which it listens."""
    values: bool = False
    """Whether it shows values."""
    tokenizer: str | None = None
    """The path or name of the tokenizer that decodes token ids; None if there is none."""
    insecure: bool = False
    """Whether it may be served without TLS on an address that other machines reach."""
    tls: Mapping[str, str] | None = None
    """The PEM files of TLS (`security.tls`); None if TLS is not set up."""

    def check(self) -> None:
        """Raise InvalidArgumentError if the page would cross the network unencrypted."""
        if not is_loopback(self.host) and self.tls is None and not self.insecure:
            raise InvalidArgumentError(
                f"live.host is {self.host}, which other machines can reach, and TLS is not set up: set security.tls, "
                f"reach 127.0.0.1 with `ssh -L`, or set live.insecure to true"
            )

    @property
    def secure(self) -> bool:
        """Whether the page is served with TLS. On loopback it never is."""
        return self.tls is not None and not is_loopback(self.host)


def address_of(options: LiveOptions, port: int) -> str:
    """Return the address of a page, with its token, as other machines can open it."""
    scheme = "https" if options.secure else "http"
    return f"{scheme}://{public_host(options.host)}:{port}/?token={options.token}"


def build_page(system: SystemFolder, settings: Settings, token: str, listener: socket.socket) -> LiveServer:
    """Return the server of a system whose `live.enabled` is set, in a child of the supervisor."""
    options = LiveOptions(
        str(system.folder), token, settings.live_host, settings.live_values, settings.live_tokenizer,
        settings.live_insecure, settings.tls,
    )  # fmt: skip
    try:
        server = LiveServer(options, listener)
    except InvalidArgumentError as error:  # such as a damaged file: the page is worth more than the text
        logger.error("token ids are shown as numbers: %s", error)
        server = LiveServer(replace(options, tokenizer=None), listener)
    system.write_live_address(address_of(options, listener.getsockname()[1]))
    return server


class LiveServer:
    """A server that runs until `stop` is called.

    Args:
        options: How the page is served.
        listener: A socket that listens.
        snapshot: A file to show. Default: the system of the options is shown.

    Raises:
        InvalidArgumentError: The page would cross the network unencrypted, or the tokenizer cannot be used.
    """

    def __init__(self, options: LiveOptions, listener: socket.socket, snapshot: LiveSnapshot | None = None) -> None:
        options.check()
        tokens = None if options.tokenizer is None else load_tokenizer(options.tokenizer)
        self._listener = listener
        self._source: SystemSource | SnapshotSource
        self._questions: PageAnswers
        if snapshot is not None:
            self._source, self._questions = SnapshotSource(snapshot), SnapshotAnswers(snapshot)
        else:
            self._source = SystemSource(options.folder, values=options.values)
            self._questions = Questions(self._source, values=options.values, tokens=tokens)
        self.hub: Hub | None = None
        self._options = options
        self._server: uvicorn.Server | None = None
        self._is_stopped = False

    @property
    def counters(self) -> dict[str, int]:
        """What the server has done, for its log."""
        return {"views": 0 if self.hub is None else self.hub.views}

    def run(self) -> None:
        """Serve until `stop` is called."""
        gc.set_threshold(700, 10, 10)  # a server of the supervisor leaves old objects alone, but asyncio makes cycles
        asyncio.run(self._serve())
        self._questions.close()
        self._source.close()

    async def _serve(self) -> None:
        options = self._options
        self.hub = Hub(self._source)
        app = Guard(build_app(self.hub, self._questions), options.token, options.host, secure=options.secure)
        files: dict[str, Any] = {}
        if options.secure and options.tls is not None:
            files = {"ssl_certfile": options.tls["certificate"], "ssl_keyfile": options.tls["private_key"]}
        config = uvicorn.Config(
            app, log_config=None, access_log=False, server_header=False, http="h11", ws="none", loop="asyncio",
            proxy_headers=False, timeout_graceful_shutdown=FAREWELL_SECONDS, limit_concurrency=MAX_CONNECTIONS,
            **files,
        )  # fmt: skip
        self._server = _Server(config, self.hub)
        self._server.should_exit = self._is_stopped
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        await self._server.serve([self._listener])

    def stop(self) -> None:
        """End `run`. Any thread or signal handler may call it."""
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True


class _Server(uvicorn.Server):
    """A server whose streams end when it does, and that leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, hub: Hub) -> None:
        super().__init__(config)
        self._hub = hub

    def install_signal_handlers(self) -> None:
        """Do nothing."""

    def capture_signals(self) -> Any:
        """Do nothing."""
        return contextlib.nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams first: a server waits for its connections."""
        self._hub.close()
        await super().shutdown(sockets)
