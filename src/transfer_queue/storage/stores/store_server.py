"""The servers of an external store that a system starts itself: programs of the store, and memory for it.

They run in a process of their own, so that no value is lost if a writer or a storage unit dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transfer_queue.errors import StartError
from transfer_queue.storage.stores.base import BUILT_IN, StoreAddress, has_server
from transfer_queue.utils.host_addresses import resolve, source_address

LOOPBACK = "127.0.0.1"
END_SECONDS = 2.0  # between SIGTERM and SIGKILL to a program
_PR_SET_PDEATHSIG = 1


class StoreServer(ABC):
    """The server of an external store."""

    address: StoreAddress
    """The address for the processes that use the store."""

    @abstractmethod
    def trouble(self) -> str | None:
        """Return why the store has failed; None if it works."""

    @abstractmethod
    def close(self) -> None:
        """End what this object has started, and nothing else."""


class FirstServer(Protocol):
    """The store server of the first node, for those of the other nodes."""

    def wait(self, seconds: float) -> None:
        """Wait until it runs. Raises StartError if it does not."""

    def ended(self) -> bool:
        """Whether the one that `wait` has found has ended."""

    def stop(self) -> None:
        """Watch it no longer, from the end of the present connection to the controller on."""


@dataclass(frozen=True)
class StoreServerRole:
    """The role of a store server in a system of several nodes."""

    host: str = ""
    """The address by which the other nodes reach this one."""
    join: str = ""
    """`StoreAddress.join` of the first node's store server; "" for that one itself."""
    first: FirstServer | None = None
    """The first node's store server; None for that one itself."""


ALONE = StoreServerRole()


def node_address(given: str | None, place: StoreServerRole, key: str) -> str:
    """Return the address at which the store servers of other nodes reach this node.

    Args:
        given: The value of the setting. A network ("10.2.0.0/16") stands for the address of each node in it. None: the
            node's address in Ray, or "" in a system of one machine.
        place: The role of this node.
        key: The name of the setting, for messages.

    Raises:
        StartError: This node has no such address.
    """
    if given is None:
        return place.host
    if "/" not in given:
        if place.join and not _is_own(given.rpartition(":")[0] if given.count(":") == 1 else given):
            raise StartError(
                f"{key} must be an address of each node, but {given!r} is not an address of node {place.host}: leave "
                f"it out to use the addresses of Ray, or name the network of the addresses, for example 10.2.0.0/16"
            )
        return given
    try:
        network = ipaddress.ip_network(given, strict=False)
    except ValueError as error:
        raise StartError(
            f"{key} must be a host name, an address or a network such as 10.2.0.0/16, got {given!r} ({error})"
        ) from error
    small = network.num_addresses <= 2
    address = source_address(str(network[0] if small else network.broadcast_address - 1))
    if address is None or ipaddress.ip_address(address.partition("%")[0]) not in network:
        raise StartError(
            f"node {place.host or socket.gethostname()} has no address in the network {given} ({key}): name a network "
            f"in which every node has one, or leave it out"
        )
    return address


def _is_own(host: str) -> bool:
    """Whether this is a name or an address of this host."""
    with contextlib.suppress(OSError), _bound(host, 0):
        return True
    return False


def check_free(port: int, key: str, host: str = LOOPBACK) -> None:
    """Raise StartError if another program listens on this port. `key` is the setting that names the port."""
    try:
        _bound(host, port).close()
    except OSError as error:
        raise StartError(
            f"port {port} of {host} cannot be used ({error}): choose another one by {key}, or set auto_init: false "
            f"to use the server that runs there"
        ) from error


def kept_port(path: Path, host: str = LOOPBACK) -> int:
    """Return the port that the previous store server wrote into a file, because clients know it; else a free one."""
    if not path.exists():
        path.write_text(str(free_port(host)))
    return int(path.read_text())


def free_port(host: str = "0.0.0.0") -> int:
    """Return a port that is free on this address; by default on all addresses of this machine."""
    with _bound(host, 0) as probe:
        return int(probe.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to this port of this host."""
    family, address = resolve(host, port)[0]
    probe = socket.socket(family)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
    except BaseException:
        probe.close()
        raise
    return probe


def is_listening(host: str, port: int) -> bool:
    """Whether a program listens at this address."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def program(folder: Path, name: str, package: str) -> str:
    """Return the path of a program of a package. Raises StartError if it is missing."""
    for path in (folder / name, Path(sys.prefix) / "bin" / name, shutil.which(name)):
        if path is not None and os.access(path, os.X_OK):
            return str(path)
    raise StartError(f"the program {name} is missing: install {package} again, or set auto_init: false")


class StoreProcess:
    """A program that ends when this process ends, for whatever reason. Its output goes to `log`."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.name = Path(command[0]).name
        self._log = log
        libc = ctypes.CDLL(None)

        def follow() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

        with open(log, "ab") as file:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, preexec_fn=follow,
                env=None if environment is None else dict(environment), cwd=log.parent,
            )  # fmt: skip

    def await_ready(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until the program serves. Raises StartError, with the end of its log, if it does not."""
        limit = time.monotonic() + seconds
        while not ready():
            trouble = self.trouble()
            if trouble is None and time.monotonic() > limit:
                trouble = f"{self.name} does not serve after {seconds:g} s"
            if trouble is not None:
                self.close()
                raise StartError(f"{trouble}; its log {self._log} ends:\n{self._tail()}")
            time.sleep(0.02)

    def trouble(self) -> str | None:
        """Return why the program does not run; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"{self.name} has ended with status {code}"

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            return self._log.read_text("utf-8", "replace")[-3000:]
        return ""

    def close(self) -> None:
        """End the program."""
        for end in (self._process.terminate, self._process.kill):
            with contextlib.suppress(ProcessLookupError):
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
                return


def start_store_server(
    backend: str, options: Mapping[str, Any], folder: Path, seconds: float, place: StoreServerRole = ALONE
) -> StoreServer | None:
    """Start the server of a store; return None if the system has nothing to start for it.

    Args:
        backend: The value of `backend.storage_backend`.
        options: The backend's section of the configuration.
        folder: The folder for logs.
        seconds: The time within which everything must be up.
        place: The role of this node in a system of several nodes.

    Raises:
        StartError: It did not come up.
    """
    if not has_server(backend):
        return None
    module, _, name = BUILT_IN[backend].server.partition(":")
    start: Callable[[Mapping[str, Any], Path, float, StoreServerRole], StoreServer] = getattr(
        importlib.import_module(module), name
    )
    return start(options, folder, seconds, place)
