"""The server of a store, in its own process, as in a system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from transfer_queue.storage.stores.base import StoreAddress

CODE = """
import os, sys, msgspec
from pathlib import Path
from transfer_queue.storage.stores.store_server import start_store_server
out = os.fdopen(os.dup(1), "w")  # the libraries have things to say, too
os.dup2(2, 1)
try:
    server = start_store_server(sys.argv[1], msgspec.json.decode(sys.argv[2]), Path(sys.argv[3]), 20.0)
except BaseException as error:
    print(f"{type(error).__name__}: {error}", file=out, flush=True)
    os._exit(1)
print(msgspec.json.encode(server.address).decode(), file=out, flush=True)
sys.stdin.read()
print(server.trouble(), file=out, flush=True)
server.close()
os._exit(0)
"""


class Kept:
    """The `address` of the store, and the `failure` if it did not come up, else None."""

    def __init__(self, backend: str, options: Mapping[str, Any], folder: Path) -> None:
        arguments = [sys.executable, "-c", CODE, backend, msgspec.json.encode(dict(options)).decode(), str(folder)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self.process.stdout.readline()
        self.failure: str | None = None
        if said.startswith("{"):
            self.address = msgspec.json.decode(said, type=StoreAddress)
        else:
            self.failure = said + self.process.stdout.read()
            self.close()

    def close(self) -> str | None:
        """End it. Returns its failure, if it had one."""
        if self.process.poll() is None and self.failure is None:
            said, _ = self.process.communicate(timeout=30)
            return None if said.strip() == "None" else said
        self.process.communicate(timeout=30)
        return None
