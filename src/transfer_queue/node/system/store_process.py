"""The process that runs the server of an external store, if the system starts the store itself.

`storage.stores.store_server` has the servers.
Each process writes down where its store is, in a file of the system's folder. If a program that it has started ends,
the process ends too, and the supervisor forks another one with an empty store: the values of the store before it are
lost.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.reports.store_reports import AwaitFirstStoreServer, ReportStoreServer
from transfer_queue.net.drivers.connection import Address, Connection
from transfer_queue.net.session import Session, raise_failure
from transfer_queue.net.tls_contexts import tls_context
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.private_files import replace_private
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.system_folder.paths import SystemFolder, host_and_port

if TYPE_CHECKING:
    import ssl

    from transfer_queue.storage.stores.store_server import StoreServer


# ---------------------------------------------------------------- reports to the controller
# What a store server and the controller tell each other, on connections that end together with the server's process.
#
# A store server reports that it runs. A server that joins that of the first node waits until that one runs, and learns
# when it has ended.


CALL_SECONDS = 30.0  # for which the controller's reply is awaited
RETRY_SECONDS = 0.1  # between two attempts to reach the controller
STOP_LOOK_SECONDS = 0.5  # between two checks whether it should stop


class _ControllerLine:
    """Connections of a store server to the controller, for one request each."""

    def __init__(self, controller: Address, key: bytes, tls: ssl.SSLContext | None, backend: str) -> None:
        self._controller = controller
        name = f"store-{backend}-{uuid.uuid4().hex}"
        self._session = Session(name, key, lambda target: controller, role="unit", tls=tls)

    def open(self) -> Connection:
        """Return a connection that is not connected yet."""
        return Connection(self._controller)

    def ask(
        self, connection: Connection, request: ReportStoreServer | AwaitFirstStoreServer, deadline: float = math.inf
    ) -> Any:
        """Connect, send the request and return the value of its reply.

        Raises:
            OSError: The connection broke, or there was no reply before the deadline.
            TransferQueueError: The controller refused the connection or the request.
        """
        session = self._session
        connection.connect(session, min(deadline, time.monotonic() + CALL_SECONDS))
        sequence, frame = session.begin_request(request)
        try:
            reply = raise_failure(session.decode_reply(connection.exchange(frame, deadline)).body)
        finally:
            session.finish(sequence)
        assert isinstance(reply, Done)
        return reply.value


class StoreReporter:
    """Keeps a connection to the controller from a thread of its own, until `stop` or the end of the process."""

    def __init__(self, controller: Address, key: bytes, tls: ssl.SSLContext | None, report: ReportStoreServer) -> None:
        self._line = _ControllerLine(controller, key, tls, report.backend)
        self._report = report
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report the store server", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """End the connection: the controller then knows that the server has ended."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            connection = self._line.open()
            try:
                self._line.ask(connection, self._report, time.monotonic() + CALL_SECONDS)
                self._await_end(connection)
            except (OSError, TransferQueueError) as error:
                logger.info("the store server reports itself again, because the controller is gone: %s", error)
            finally:
                connection.close()
            self._stopped.wait(RETRY_SECONDS)

    def _await_end(self, connection: Connection) -> None:
        """Return when `stop` was called. Raises OSError when the controller has closed the connection."""
        while not self._stopped.is_set():
            if connection.is_readable(time.monotonic() + STOP_LOOK_SECONDS):
                with contextlib.suppress(BlockingIOError):
                    connection.read(time.monotonic() + CALL_SECONDS)


class ControllerFirstServer:
    """The store server of the first node, as the controller knows it: see `store_server.FirstServer`."""

    def __init__(self, controller: Address, key: bytes, tls: ssl.SSLContext | None, backend: str) -> None:
        self._line = _ControllerLine(controller, key, tls, backend)
        self._backend = backend
        self._ended = threading.Event()
        self._stopped = threading.Event()

    def wait(self, seconds: float) -> None:
        """See `store_server.FirstServer.wait`."""
        life = self._other_life("", time.monotonic() + seconds)
        if not life:
            raise StartError(
                f"the {self._backend} server of the system's first node, which this node joins, does not run after "
                f"{seconds:g} s: see it in tq status and in the logs of that node"
            )
        threading.Thread(target=self._watch, args=(life,), name="watch the first store server", daemon=True).start()

    def ended(self) -> bool:
        """See `store_server.FirstServer.ended`."""
        return self._ended.is_set()

    def stop(self) -> None:
        """See `store_server.FirstServer.stop`."""
        self._stopped.set()

    def _watch(self, life: str) -> None:
        if self._other_life(life, math.inf) is not None:
            self._ended.set()

    def _other_life(self, life: str, deadline: float) -> str | None:
        """Return the life of the first node's server when it is not this one; None after the deadline or `stop`.

        "" stands for no server.
        """
        request = AwaitFirstStoreServer(self._backend, life)
        while time.monotonic() < deadline and not self._stopped.is_set():
            connection = self._line.open()
            try:
                return str(self._line.ask(connection, request, deadline))
            except (OSError, TransferQueueError) as error:
                logger.info("the controller is asked again for the store server of the first node: %s", error)
            finally:
                connection.close()
            self._stopped.wait(RETRY_SECONDS)
        return None


# ---------------------------------------------------------------- the process

LOOK_SECONDS = 0.25  # between two checks of the programs that were started

logger = logging.getLogger(__name__)


class StoreOwner:
    """Runs a store server as a server of the system: see `child_process.Serves`."""

    def __init__(self, keeper: StoreServer, reporter: StoreReporter) -> None:
        self.counters = keeper.address.kind
        self._keeper = keeper
        self._reporter = reporter
        self._stopped = threading.Event()

    def run(self) -> None:
        """Serve until `stop` is called. Raises RuntimeError if the store fails."""
        self._reporter.start()
        trouble = None
        while trouble is None and not self._stopped.wait(LOOK_SECONDS):
            trouble = self._keeper.trouble()
        self._reporter.stop()
        self._keeper.close()
        if trouble is not None:
            logger.error("the store server ends, and all values in the store are lost: %s", trouble)
            raise RuntimeError(trouble)

    def stop(self) -> None:
        """End `run`. Any thread or signal handler may call it."""
        self._stopped.set()


def build_store_server(
    system: SystemFolder, settings: Settings, backend: str, seconds: float, seat: NodeRole, controller: str, key: bytes
) -> StoreOwner:
    """Start the server of a store and write down where the store is. Raises StartError if it does not start.

    `controller` is where the controller listens, to which the server reports itself; `key` is the system's key.
    """
    # imported here, because the module takes a megabyte of each process
    from transfer_queue.storage.stores.store_server import StoreServerRole, start_store_server

    address = controller if controller.startswith("/") else host_and_port(controller)
    tls, join = tls_context(settings.tls, server=False), seat.stores.get(backend, "")
    first = ControllerFirstServer(address, key, tls, backend) if join else None
    place = StoreServerRole(seat.host, join, first)
    keeper = start_store_server(backend, settings.store_options[backend], system.logs, seconds, place)
    if keeper is None:
        raise StartError(f"the backend {backend} has no server that a system could start; name a backend that has one")
    write_status(system, keeper.address)
    report = ReportStoreServer(backend, seat.node, seat.host, keeper.address.life, os.getpid(), first=not join)
    return StoreOwner(keeper, StoreReporter(address, key, tls, report))


def write_status(system: SystemFolder, address: StoreAddress) -> None:
    """Write down where a store of the system is."""
    replace_private(system.store(address.kind), msgspec.json.encode(address))


def read_status(path: Path) -> StoreAddress:
    """Return where a store is, as its file says. Raises OSError if that has not been written yet."""
    return msgspec.json.decode(path.read_bytes(), type=StoreAddress)


def check_all_objects(system: SystemFolder) -> None:
    """Make the storage units of external stores check all their objects, because some may be gone with a node."""
    for path in system.stores:
        with contextlib.suppress(FileNotFoundError):  # it was replaced at this moment
            os.utime(path)


def store_lifetime(store: Path) -> str:
    """Return a text that changes with each process of the store server, and with `check_all_objects`."""
    try:
        status = store.stat()
    except OSError:
        return ""
    return f"{status.st_ino} {status.st_mtime_ns}"
