"""The server that a system starts for Yuanrong with `auto_init`: a worker with its metastore.

In a system of several nodes the first node has the metastore, and each node a worker for its processes. A new metastore
does not know the earlier blocks, so that all workers are restarted when the metastore has ended.
The library's own CLI (`dscli start`) makes the worker's command from the arguments. The worker is a child of this
process and ends with it.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfer_queue.config.environment import process_environment
from transfer_queue.errors import StartError
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.storage.stores.store_server import (
    ALONE,
    LOOPBACK,
    FirstServer,
    StoreProcess,
    StoreServer,
    StoreServerRole,
    check_free,
    is_listening,
    kept_port,
    node_address,
)

DEFAULTS = {
    "arena_per_tenant": "1",
    "shared_memory_size_mb": "4096",
    "node_timeout_s": "15",  # until the blocks of a dead node are given up
    "node_dead_timeout_s": "30",
}


class YuanrongKeeper(StoreServer):
    """The store server of Yuanrong. `options` is `backend.Yuanrong` of the configuration."""

    def __init__(
        self, options: Mapping[str, Any], folder: Path, seconds: float, place: StoreServerRole = ALONE
    ) -> None:
        self._worker: StoreProcess | None = None
        self._first: FirstServer | None = None
        """The server of the first node, which has the metastore of this worker; None if this process has it."""
        port = int(options["worker_port"])
        given = _arguments(str(options["worker_args"]))
        host = node_address(options["worker_host"], place, "backend.Yuanrong.worker_host") or LOOPBACK
        join, capacity = place.join, 0
        if options["auto_init"]:
            port = port or kept_port(folder / "yuanrong_worker_port", host)
            check_free(port, "backend.Yuanrong.worker_port", host)
            if not place.join:
                metastore = int(options["metastore_port"]) or kept_port(folder / "yuanrong_metastore_port", host)
                check_free(metastore, "backend.Yuanrong.metastore_port", host)
                join = f"{host}:{metastore}"
            arguments = {
                **DEFAULTS,
                "worker_address": f"{host}:{port}",
                "metastore_address": join,
                "start_metastore_service": "false" if place.join else "true",
                **given,
            }
            if place.first is not None:
                self._first = place.first
                self._first.wait(seconds)
            self._start(arguments, folder, seconds)
            try:
                capacity = 0 if place.host else int(arguments["shared_memory_size_mb"]) << 20
            except ValueError:
                capacity = 0
        else:
            host = next((each for each in (host, LOOPBACK) if is_listening(each, port)), "")
            if not host:
                raise StartError(
                    f"no Yuanrong worker responds at {place.host or LOOPBACK}:{port}: start it (dscli start), set "
                    f"backend.Yuanrong.worker_port, or auto_init: true to start it with the system"
                )
        where = {"host": host, "port": port, "npu_transport": bool(options["enable_yr_npu_transport"])}
        self.address = StoreAddress("Yuanrong", where, uuid.uuid4().hex, capacity, join)

    def _start(self, arguments: Mapping[str, str], folder: Path, seconds: float) -> None:
        try:
            from yr.datasystem.cli.start import Command
        except ImportError as error:
            raise StartError(
                f"Yuanrong needs its library, which cannot be loaded ({error}): pip install 'transfer_queue[yuanrong]'"
            ) from error
        home = folder / f"yr{len(list(folder.glob('yr*')))}"
        home.mkdir(mode=0o700)
        # the path of a UNIX socket may have about 100 characters
        arguments = {"unix_domain_socket_dir": str(home / "s"), **arguments}
        cli = Command()
        cli._home_dir = str(home)
        try:
            parameters = cli.parse_cli_args(
                [word for name, value in arguments.items() for word in (f"--{name}", value)]
            )
            command = cli.build_command(parameters, False)
        except (ValueError, RuntimeError) as error:
            raise StartError(f"backend.Yuanrong.worker_args cannot be used: {error}; correct them") from error
        environment = dict(process_environment())
        libraries = [str(Path(cli._base_dir) / "lib"), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        ready = Path(parameters["ready_check_path"])
        self._worker = StoreProcess(command, home / "worker.log", environment)
        self._worker.await_ready(ready.exists, seconds)

    def trouble(self) -> str | None:
        """See `StoreServer.trouble`."""
        if self._worker is None:
            return None
        if self._first is not None and self._first.ended():
            return "the metastore of the first node, which had the record of all blocks, has ended"
        return self._worker.trouble()

    def close(self) -> None:
        """See `StoreServer.close`."""
        if self._first is not None:
            self._first.stop()
        if self._worker is not None:
            self._worker.close()


def _arguments(text: str) -> dict[str, str]:
    """Return the arguments of a command line of the form --name value."""
    parts = shlex.split(text)
    if len(parts) % 2 or any(not word.startswith("--") for word in parts[::2]):
        raise StartError(f"backend.Yuanrong.worker_args must be --name value --name value, got {text!r}")
    return {name[2:]: value for name, value in zip(parts[::2], parts[1::2], strict=True)}
