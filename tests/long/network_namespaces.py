"""Network namespaces of this machine as nodes: each has an address of its own, and a bridge joins them.

Everything that runs in a namespace is killed before the namespace is removed, however the program ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch

CLONE_NEWNET = 0x40000000
SECONDS = 120.0
RAW_PORT = 40999
_NAME = re.compile(r"tq([0-9a-f]+)-\d+")


@dataclass(frozen=True)
class Namespace:
    """A node. number: from 1 on; its address ends with it. mark: the run's process, in hex."""

    number: int
    mark: str

    @property
    def name(self) -> str:
        return f"tq{self.mark}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.197.{int(self.mark, 16) % 250}.{self.number}"

    def enter(self) -> None:
        """Moves this process into it, for good."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {self.name} cannot be entered")
        os.close(file)

    def processes(self) -> list[int]:
        """The processes in it."""
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def kill_processes(self) -> None:
        """Kills all that runs in it, with what that starts meanwhile."""
        limit = time.monotonic() + SECONDS
        while (there := self.processes()) and time.monotonic() < limit:
            for pid in there:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def obstacle() -> str:
    """Why namespaces cannot be made; "" if they can."""
    if os.geteuid() or shutil.which("ip") is None:
        return "this needs root and the command ip (iproute2)"
    return ""


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Namespace]]:
    """This number of namespaces, on one bridge. No other run has the same names."""
    _remove_those_of_dead_runs()
    mark = f"{os.getpid():x}"
    nodes = [Namespace(number, mark) for number in range(1, count + 1)]
    try:
        ip("link", "add", _bridge(mark), "type", "bridge")
        ip("link", "set", _bridge(mark), "up")
        for node in nodes:
            outside, inside = f"tqv{mark}{node.number}", f"tqw{mark}{node.number}"
            ip("netns", "add", node.name)
            ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            ip("link", "set", inside, "netns", node.name)
            ip("link", "set", outside, "master", _bridge(mark))
            ip("link", "set", outside, "up")
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", inside)
            ip("-n", node.name, "link", "set", inside, "up")
            ip("-n", node.name, "link", "set", "lo", "up")
            ip("-n", node.name, "route", "add", "default", "dev", inside)  # as a host has one: programs look at it
        yield nodes
    finally:
        _remove(mark, [node for node in nodes if os.path.exists(f"/run/netns/{node.name}")])


def _bridge(mark: str) -> str:
    return f"tqb{mark}"


def _remove(mark: str, nodes: list[Namespace]) -> None:
    for node in nodes:
        node.kill_processes()
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("netns", "del", node.name)
    with contextlib.suppress(subprocess.CalledProcessError):
        ip("link", "del", _bridge(mark))


def _remove_those_of_dead_runs() -> None:
    there = os.listdir("/run/netns") if os.path.isdir("/run/netns") else []
    for found in filter(None, map(_NAME.fullmatch, there)):
        mark = found[1]
        if not psutil.pid_exists(int(mark, 16)):
            _remove(mark, [Namespace(int(found[0].rpartition("-")[2]), mark)])


class Process:
    """A process in a namespace, which carries out the calls that it receives, one after the other."""

    def __init__(self, node: Namespace) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=(node, theirs), daemon=False)
        self._process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.ours.send((function, arguments))

    def result(self, seconds: float = SECONDS) -> Any:
        assert self.ours.poll(seconds), "no answer"
        good, value = self.ours.recv()
        if not good:
            raise AssertionError(value)
        return value

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.result()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.ours.send(None)
        self._process.join(SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(node: Namespace, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the program, which ends this process
    torch.set_num_threads(1)
    node.enter()
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return  # the program is gone
        if order is None:
            return
        function, arguments = order
        try:
            pipe.send((True, function(*arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def end_at_signals() -> None:
    """Lets SIGTERM and Ctrl-C (also of a background job) end this program and all that it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---------------------------------------------------------------- raw streams between two namespaces

SO_MAX_PACING_RATE = 47
PIDFD_GETFD = 438  # the number of the system call, the same on all machines


def limit_listeners(processes: list[int], pace: int) -> None:
    """Limit each connection that processes of a node accept from now on to this number of bytes a second.

    A connection takes this option from its listening socket. The caller is in the namespace of the node.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for process in map(psutil.Process, processes):
        descriptor = os.pidfd_open(process.pid)
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                with socket.socket(fileno=libc.syscall(PIDFD_GETFD, descriptor, each.fd, 0)) as listener:
                    listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        os.close(descriptor)


def send_raw(address: str, nbytes: int, turns: int, streams: int = 1, pace: int | None = None) -> int:
    """Listen, and send this number of bytes in equal parts to this number of peers, from warm memory."""
    memory = memoryview(bytearray(os.urandom(1 << 20) * (nbytes >> 20)))[: nbytes // streams]

    def send(peer: socket.socket) -> None:
        with peer:
            peer.recv(1)
            peer.sendall(memory)

    with socket.create_server((address, RAW_PORT)) as listener, ThreadPoolExecutor(streams) as pool:
        if pace is not None:
            listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
        for _ in range(turns):
            list(pool.map(send, [listener.accept()[0] for _ in range(streams)]))
    return nbytes


def receive_raw(address: str, nbytes: int, streams: int = 1) -> float:
    """Return the seconds that this number of bytes from `send_raw` takes over this number of streams."""
    memory = memoryview(bytearray(nbytes))
    memory[:] = bytes(nbytes)  # touched
    size = nbytes // streams

    def receive(peer: socket.socket, at: int) -> None:
        with peer:
            peer.sendall(b"g")
            end = at + size
            while at < end:
                at += peer.recv_into(memory[at:end])

    with ThreadPoolExecutor(streams) as pool:
        peers = [_connect(address) for _ in range(streams)]
        begun = time.perf_counter()
        list(pool.map(receive, peers, range(0, nbytes, size)))
        return time.perf_counter() - begun


def _connect(address: str) -> socket.socket:
    limit = time.monotonic() + SECONDS
    while True:
        try:
            peer = socket.create_connection((address, RAW_PORT))
            break
        except ConnectionRefusedError:
            assert time.monotonic() < limit
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer
