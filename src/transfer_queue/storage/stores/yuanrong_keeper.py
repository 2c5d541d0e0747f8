"""What a system keeps for Yuanrong with `auto_init`: a worker with its metastore.

The worker is started with what the library's own CLI (`dscli start`) makes of the arguments, but as a child of this
process, with which it ends.
"""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transfer_queue.config import process_environment
from transfer_queue.errors import StartError
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.storage.stores.keeping import Keeper, ServerOfStore, check_free, kept_port, listens

HOST = "127.0.0.1"
DEFAULTS = {"arena_per_tenant": "1", "shared_memory_size_mb": "4096"}


class YuanrongKeeper(Keeper):
    """options: `backend.Yuanrong` of the conf."""

    def __init__(self, options: Mapping[str, Any], folder: Path, seconds: float) -> None:
        self._worker: ServerOfStore | None = None
        port = int(options["worker_port"])
        given = _arguments(str(options["worker_args"]))
        capacity = 0
        if options["auto_init"]:
            port = port or kept_port(folder / "yuanrong_worker_port")
            check_free(port, "backend.Yuanrong.worker_port", HOST)
            metastore = int(options["metastore_port"]) or kept_port(folder / "yuanrong_metastore_port")
            check_free(metastore, "backend.Yuanrong.metastore_port", HOST)
            arguments = {
                **DEFAULTS,
                "worker_address": f"{HOST}:{port}",
                "metastore_address": f"{HOST}:{metastore}",
                "start_metastore_service": "true",
                **given,
            }
            self._start(arguments, folder, seconds)
            try:
                capacity = int(arguments["shared_memory_size_mb"]) << 20
            except ValueError:
                capacity = 0
        elif not listens(HOST, port):
            raise StartError(
                f"no Yuanrong worker answers at {HOST}:{port}: start it (dscli start), set "
                f"backend.Yuanrong.worker_port, or auto_init: true to have it started here"
            )
        where = {"host": HOST, "port": port, "npu_transport": bool(options["enable_yr_npu_transport"])}
        self.address = StoreAddress("Yuanrong", where, uuid.uuid4().hex, capacity)

    def _start(self, arguments: Mapping[str, str], folder: Path, seconds: float) -> None:
        try:
            from yr.datasystem.cli.start import Command
        except ImportError as error:
            raise StartError(
                f"Yuanrong needs its library, which cannot be loaded ({error}): pip install 'transfer_queue[yuanrong]'"
            ) from error
        home = folder / f"yuanrong-{time.time_ns()}"
        home.mkdir(mode=0o700)
        cli = Command()
        cli._home_dir = str(home)
        try:
            parameters = cli.parse_cli_args(
                [word for name, value in arguments.items() for word in (f"--{name}", value)]
            )
            command = cli.build_command(parameters, False)
        except (ValueError, RuntimeError) as error:
            raise StartError(f"backend.Yuanrong.worker_args cannot be used: {error}") from error
        environment = dict(process_environment())
        libraries = [str(Path(cli._base_dir) / "lib"), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
        ready = Path(parameters["ready_check_path"])
        self._worker = ServerOfStore(command, home / "worker.log", environment)
        self._worker.await_ready(ready.exists, seconds)

    def trouble(self) -> str | None:
        """See `Keeper.trouble`."""
        return None if self._worker is None else self._worker.trouble()

    def close(self) -> None:
        """See `Keeper.close`."""
        if self._worker is not None:
            self._worker.close()


def _arguments(text: str) -> dict[str, str]:
    """Those of a command line: --name value."""
    words = shlex.split(text)
    if len(words) % 2 or any(not word.startswith("--") for word in words[::2]):
        raise StartError(f"backend.Yuanrong.worker_args is {text!r}; give it as --name value --name value")
    return {name[2:]: value for name, value in zip(words[::2], words[1::2], strict=True)}
