"""The process that keeps the bytes of an external store, if the system starts the store itself.

`storage.stores.store_server` has the servers.
It says where the store is in a file of the system's folder, anew in each of its lives. When what it has started does
not run any more, it ends, and the supervisor forks another, whose store is empty: what was in the one before is lost.
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
from transfer_queue.node.system.launcher_protocol import NodeRole
from transfer_queue.node.system.paths import SystemFolder
from transfer_queue.storage.stores.base import StoreAddress

if TYPE_CHECKING:
    from transfer_queue.storage.stores.store_server import StoreServer

LOOK_SECONDS = 0.25  # between two looks at what was started

logger = logging.getLogger(__name__)


class StoreOwner:
    """A keeper as a server of the system: see `server_process.Serves`."""

    def __init__(self, keeper: StoreServer) -> None:
        self.counters = keeper.address.kind
        self._keeper = keeper
        self._stopped = threading.Event()

    def run(self) -> None:
        """Until `stop`, or until there is nothing to keep any more: RuntimeError then."""
        trouble = None
        while trouble is None and not self._stopped.wait(LOOK_SECONDS):
            trouble = self._keeper.trouble()
        self._keeper.close()
        if trouble is not None:
            logger.error("%s: what was stored is lost", trouble)
            raise RuntimeError(trouble)

    def stop(self) -> None:
        """From any thread, or a signal."""
        self._stopped.set()


def build_keeper(system: SystemFolder, settings: Settings, seconds: float, seat: NodeRole) -> StoreOwner:
    """Starts what keeps the bytes, and says where the store is. StartError."""
    # what it starts servers with takes a megabyte of each process
    from transfer_queue.storage.stores.store_server import StoreServerRole, keeper_of

    place = StoreServerRole(seat.host, seat.store)
    keeper = keeper_of(settings.storage_backend, settings.store_options, system.logs, seconds, place)
    if keeper is None:
        raise StartError(f"there is nothing to be kept for {settings.storage_backend}")
    write_status(system, keeper.address)
    return StoreOwner(keeper)


def write_status(system: SystemFolder, address: StoreAddress) -> None:
    """Writes down where the system's store is."""
    draft = system.store.with_name("store.new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(file, "wb") as out:
        out.write(msgspec.json.encode(address))
    draft.replace(system.store)


def read_status(system: SystemFolder) -> StoreAddress:
    """Where the system's store is. OSError before anybody has said so."""
    return msgspec.json.decode(system.store.read_bytes(), type=StoreAddress)


def reload_members(system: SystemFolder) -> None:
    """Has the storage unit look for all that it has, as some may be gone with a node."""
    with contextlib.suppress(FileNotFoundError):  # a system without an external store
        os.utime(system.store)


def store_lifetime(store: Path) -> str:
    """Another text in each life of what keeps the bytes, and after `reload_members`."""
    try:
        found = store.stat()
    except OSError:
        return ""
    return f"{found.st_ino} {found.st_mtime_ns}"
