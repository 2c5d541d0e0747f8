"""Store servers of several nodes follow that of the first one through the controller, also when the controller dies."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from server_processes import until
from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError
from transfer_queue.messages.reports.store_reports import ReportStoreServer
from transfer_queue.node.system.launcher import RunningSystem, start_local
from transfer_queue.node.system.store_process import ControllerFirstServer, StoreReporter

SECONDS = 60.0


@pytest.fixture
def system() -> Iterator[RunningSystem]:
    settings = {"settings": Settings.from_config({}).to_json()}
    started = start_local(f"first-{uuid.uuid4().hex[:8]}", settings, timeout=SECONDS)
    threads = set(threading.enumerate())
    yield started
    for each in made:
        each.stop()
    made.clear()
    started.stop()
    until(lambda: not any(thread.is_alive() for thread in set(threading.enumerate()) - threads))


made: list[ControllerFirstServer | StoreReporter] = []  # by the running test


def first_server(system: RunningSystem, backend: str = "Yuanrong") -> ControllerFirstServer:
    first = ControllerFirstServer(system.description.controller, system.key, None, backend)
    made.append(first)
    return first


def reporter(system: RunningSystem, life: str) -> StoreReporter:
    report = ReportStoreServer("Yuanrong", "node-0", "", life, 71, first=True)
    reports = StoreReporter(system.description.controller, system.key, None, report)
    made.append(reports)
    return reports


@pytest.fixture(params=[0, 1100])
def open_files(request: pytest.FixtureRequest) -> Iterator[None]:
    """Other open files of this process. Of more than 1,024, `select` refuses the last ones."""
    with contextlib.ExitStack() as stack:
        for _ in range(request.param):
            stack.enter_context(open(os.devnull))
        yield


@pytest.mark.usefixtures("open_files")
def test_the_end_of_the_first_server_is_noticed_also_over_the_death_of_the_controller(system: RunningSystem) -> None:
    first, joining = reporter(system, "a"), first_server(system)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(joining.wait, SECONDS)
        first.start()
        waiting.result(SECONDS)

    def processes() -> list[str]:
        return re.findall(r"up, process (\d+)", (system.logs / "controller.log").read_text())

    psutil.Process(int(processes()[0])).kill()
    until(lambda: len(processes()) == 2)
    later = first_server(system)
    later.wait(SECONDS)  # the first server has reported itself to the new controller
    assert not joining.ended()
    first.stop()
    until(lambda: joining.ended() and later.ended())
    newest = first_server(system)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(newest.wait, SECONDS)
        reporter(system, "b").start()
        waiting.result(SECONDS)
    assert not newest.ended()


def test_a_first_server_that_does_not_come_is_named(system: RunningSystem) -> None:
    with pytest.raises(
        StartError, match=r"the MooncakeStore server of the system's first node, .* does not run after 0.1"
    ):
        first_server(system, "MooncakeStore").wait(0.1)
