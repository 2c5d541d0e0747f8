"""A process is waited for and signalled with a pidfd, and also if the kernel or this build of Python has none."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing

import pytest

from transfer_queue.node.system import processes


@pytest.fixture(params=["pidfd", "refused", "missing"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if request.param == "refused":
        monkeypatch.setattr(os, "pidfd_open", refuse)
    elif request.param == "missing":
        monkeypatch.delattr(os, "pidfd_open")
    return str(request.param)


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as started:
        yield started.pid
        started.kill()


def test_a_process_ends_with_a_signal_before_its_parent_has_reaped_it(how: str, child: int) -> None:
    with closing(processes.Process(child, processes.start_time(child))) as process:
        assert (process.descriptor is not None) == (how == "pidfd")
        assert not process.has_ended()
        assert not process.wait(0)
        process.signal(signal.SIGKILL)
        assert process.wait(60)
        process.reap()
        assert process.has_ended()


def test_a_later_process_with_the_same_id_is_another_one(how: str, child: int) -> None:
    started = processes.start_time(child)
    assert started is not None
    with closing(processes.Process(child, started - 1)) as process:
        assert process.has_ended()
        process.signal(signal.SIGKILL)
    with closing(processes.Process(child, started)) as process:
        assert not process.has_ended()
