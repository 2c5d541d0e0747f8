"""The servers that a system starts for MooncakeStore: the master, with `auto_init`, and a segment of memory.

In a system of several nodes the first node has the master, and each node a segment.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlparse

from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.storage.stores.mooncake import MooncakeStore, load
from transfer_queue.storage.stores.store_server import (
    ALONE,
    LOOPBACK,
    StoreProcess,
    StoreServer,
    StoreServerRole,
    check_free,
    free_port,
    is_listening,
    kept_port,
    node_address,
    program,
)

CLIENT_SECONDS = 30  # after which the master forgets a silent process
RELEASE_SECONDS = 120  # after which it frees the memory of an unfinished write; longer than any write takes
_SHARED = ("metadata_server", "local_hostname", "protocol", "device_name", "local_buffer_size", "hard_pin", "use_gdr")


class MooncakeKeeper(StoreServer):
    """The store server of MooncakeStore. `options` is `backend.MooncakeStore` of the configuration."""

    def __init__(
        self, options: Mapping[str, Any], folder: Path, seconds: float, place: StoreServerRole = ALONE
    ) -> None:
        library = load()
        self._master: StoreProcess | None = None
        self._segment: MooncakeStore | None = None
        starts = options["auto_init"] and not place.join
        master = place.join if options["auto_init"] and place.join else str(options["master_server_address"])
        host, _, port = master.rpartition(":")
        if not port.isdecimal():
            raise StartError(
                f"backend.MooncakeStore.master_server_address must be host:port, got "
                f"{options['master_server_address']!r}"
            )
        host = LOOPBACK if host in ("", "localhost") else host
        if starts and host == LOOPBACK and place.host:
            host = place.host  # other nodes must reach it
        number = int(port)
        address = node_address(options["local_hostname"], place, "backend.MooncakeStore.local_hostname")
        try:
            if starts:
                number = number or kept_port(folder / "mooncake_port", host)
                self._start_master(folder_of_programs(library), host, number, options, folder, seconds)
            elif not is_listening(host, number):
                raise StartError(
                    f"no Mooncake master responds at {host}:{number}: start it, set "
                    f"backend.MooncakeStore.master_server_address, or auto_init: true to start it with the system"
                )
            shared = {name: options[name] for name in _SHARED}
            shared["master_server_address"] = f"{host}:{number}"
            shared["local_hostname"] = address or None
            size = int(options["global_segment_size"])
            if size:
                self._segment = MooncakeStore(**shared, segment=size)
                self._segment.connect()
        except ConnectionLostError as error:
            self.close()
            raise StartError(str(error)) from error
        except BaseException:
            self.close()
            raise
        # if other processes give memory, too, only the store knows how much there is
        capacity = size if starts and not place.host else 0
        self.address = StoreAddress("MooncakeStore", shared, uuid.uuid4().hex, capacity, f"{host}:{number}")

    def _start_master(
        self, folder: Path, host: str, port: int, options: Mapping[str, Any], logs: Path, seconds: float
    ) -> None:
        check_free(port, "backend.MooncakeStore.master_server_address", host)
        command = [
            program(folder, "mooncake_master", "mooncake-transfer-engine"), f"-client_ttl={CLIENT_SECONDS}",
            f"--rpc_address={host}", f"--rpc_port={port}", f"--metrics_port={free_port()}",
            f"--put_start_release_timeout_sec={RELEASE_SECONDS}",
        ]  # fmt: skip
        metadata = urlparse(str(options["metadata_server"]))
        serves = metadata.scheme in ("http", "https") and metadata.port is not None
        command.append(f"--enable_http_metadata_server={'true' if serves else 'false'}")
        if serves:
            command.append(f"--http_metadata_server_host={metadata.hostname}")
            command.append(f"--http_metadata_server_port={metadata.port}")
        self._master = StoreProcess(command, logs / "mooncake_master.log")
        self._master.await_ready(lambda: is_listening(host, port), seconds)

    def trouble(self) -> str | None:
        """See `StoreServer.trouble`."""
        return None if self._master is None else self._master.trouble()

    def close(self) -> None:
        """See `StoreServer.close`. Withdraws the segment from a master of others; ends a master that it started."""
        if self._master is not None:
            self._master.close()
        elif self._segment is not None:
            self._segment.close()


def folder_of_programs(library: ModuleType) -> Path:
    """Return the folder of the library's programs: that of the package `mooncake`, of which `library` is a part."""
    return Path(sys.modules[library.__name__.partition(".")[0]].__path__[0])
