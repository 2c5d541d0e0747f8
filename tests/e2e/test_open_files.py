"""A process without free file descriptors: whatever it tries, the error names the limit and `ulimit -n`."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import psutil
import torch

import transfer_queue as tq
from server_processes import living_server, started, until
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.interface import CURRENT
from transfer_queue.node.system.launcher import start_local

NAME = "open-files"
MOST = 64
"""Descriptors with which every call succeeds."""


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave this process the given number of descriptors."""
    gc.collect()  # garbage of other tests would close its descriptors later
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + MOST, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in held:
            os.close(file)


def check_advice(error: Exception | str) -> None:
    assert "has reached its open-file limit of " in str(error)
    assert "raise `ulimit -n`" in str(error)


def test_init_with_too_few_free_descriptors_names_the_limit() -> None:
    """Also with none at all; with some more, the same call succeeds."""
    tq.close()
    refused = 0
    for count in range(0, MOST, 2):
        with free_descriptors(count):
            try:
                tq.init({"system": {"name": NAME}})
                break
            except tq.TransferQueueError as error:
                check_advice(error)
                refused += 1
    assert refused
    assert CURRENT.client is not None
    tq.close()


def test_the_first_use_of_the_package_without_a_free_descriptor_names_the_limit() -> None:
    program = (
        "import os, resource, transfer_queue as tq\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))\n"
        "try:\n"
        "    while True: os.open(os.devnull, os.O_RDONLY)\n"
        "except OSError: pass\n"
        "try: tq.init()\n"
        "except OSError as error: print(error)\n"
    )
    check_advice(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout)


def test_a_worker_with_too_few_free_descriptors_names_the_limit() -> None:
    """Whether it attaches, connects, opens its slot or an arena."""
    system = start_local(NAME, {"settings": Settings.from_config(None).to_json()})
    try:
        refused = 0
        for count in range(MOST):
            with free_descriptors(count), contextlib.closing(TransferQueueClient(system)) as client:
                try:
                    client.kv_put("k", "p", {"x": torch.arange(3)})
                    break
                except tq.TransferQueueError as error:
                    check_advice(error)
                    refused += 1
        assert refused > 1
    finally:
        system.stop()


def test_a_storage_unit_without_a_free_descriptor_names_its_limit() -> None:
    with started(NAME):
        unit, system = until(lambda: living_server("unit-0")), CURRENT.system
        _, hard = unit.rlimit(psutil.RLIMIT_NOFILE)
        errors: list[str] = []
        for count in range(MOST):
            unit.rlimit(psutil.RLIMIT_NOFILE, (unit.num_fds() + count, hard))
            with contextlib.closing(TransferQueueClient(system)) as client:
                try:
                    client.kv_put("k", "p", {"x": torch.arange(3)})
                    break
                except tq.TransferQueueError as error:
                    check_advice(error)
                    errors.append(str(error))
        assert any("failed to serve OpenSlot" in text for text in errors)
        unit.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
