"""The process that runs the server of an external store, if the system starts the store itself.

`storage.stores.store_server` has the servers.
Each process writes down where its store is, in a file of the system's folder. If a program that it has started ends,
the process ends too, and the supervisor forks another one with an empty store: the values of the store before it are
lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError
from transfer_queue.messages.reports.store_reports import ReportStoreServer
from transfer_queue.net.tls_contexts import client_context
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.node.system.paths import SystemFolder, host_and_port
from transfer_queue.node.system.store_reporter import ControllerFirstServer, StoreReporter
from transfer_queue.storage.stores.base import StoreAddress

if TYPE_CHECKING:
    from transfer_queue.storage.stores.store_server import StoreServer

LOOK_SECONDS = 0.25  # between two checks of the programs that were started

logger = logging.getLogger(__name__)


class StoreOwner:
    """Runs a store server as a server of the system: see `server_process.Serves`."""

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
    tls, join = client_context(settings.tls), seat.stores.get(backend, "")
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
    path = system.store(address.kind)
    draft = path.with_suffix(".new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as out:
        out.write(msgspec.json.encode(address))
    draft.replace(path)


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
        found = store.stat()
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns}"
