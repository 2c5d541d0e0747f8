"""A user's sampler in its own process: which calls wait for it, what ends it, and what it keeps."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ordered_sampler import Newest
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.errors import SamplerError
from transfer_queue.node.controller import sampler_host
from transfer_queue.node.controller.controller_service import ControllerService, core_sampler
from transfer_queue.node.controller.sampler_host import SamplerHost
from transfer_queue.node.controller.sampler_process import CHANNEL, LoadSampler
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.hosting import server_log
from transfer_queue.node.system.processes import Process
from transfer_queue.sampler import PrioritySampler, SequentialSampler
from transfer_queue.sampler.calls.call_messages import Given, Question, SamplerCall, SamplerRequest, Shown, ViewReply


class Loop:
    """Waits for the one socket that a host has."""

    def __init__(self) -> None:
        self.called: Any = None

    def watch(self, sock: Any, called: Any, writes: bool = False) -> None:
        self.called = sock, called, writes

    def unwatch(self, sock: Any) -> None:
        self.called = None


class Asking:
    """A host and its loop."""

    def __init__(
        self,
        name: str = "Newest",
        args: dict[str, Any] | None = None,
        seconds: float = 60.0,
        start_seconds: float = 120.0,
        log: Path | None = None,
    ) -> None:
        self.outcomes: list[Any] = []
        self.loop = Loop()
        load = LoadSampler(None, f"ordered_sampler:{name}", args or {}, None, True, None if log is None else str(log))
        self.host = SamplerHost(load, seconds, start_seconds)
        self.host.attach(self.loop, self.answered, self.reads)

    @property
    def process(self) -> Any:
        """The process of the sampler."""
        return self.host._process

    def answered(self, number: int, outcome: Any) -> list[Any]:
        self.outcomes.append(outcome)
        return []

    def reads(self, number: int, question: Question) -> ViewReply:
        return ViewReply(tags={row: {"good": row == 2} for row in range(4)}) if question.kind == "tags" else ViewReply()

    def ask(self, kind: str = "deal", state: bytes | None = None, **config: Any) -> None:
        """Make a call."""
        request = SamplerRequest("p", "t", 2, config)
        rows = np.arange(4, dtype="<i8").tobytes()
        self.host.ask(1, SamplerCall(kind, request, state=state), Shown("p", total=4, rows=rows))

    def turn(self) -> None:
        """Run one turn of the loop, which waits for the host's socket or the next deadline."""
        poll = select.poll()
        due = self.host.next_deadline()
        left = None if due is None else max(0.0, due - time.monotonic())
        if self.loop.called is not None:
            sock, called, writes = self.loop.called
            poll.register(sock, select.POLLIN | (select.POLLOUT if writes else 0))
        if poll.poll(None if left is None else left * 1000 + 1):
            called(1)
        if due is not None:
            self.host.tick(time.monotonic())

    def end_channel(self) -> None:
        """Let the host read the end of its channel."""
        sock, called, _ = self.loop.called
        sock.shutdown(socket.SHUT_RDWR)
        called(1)

    def call(self, kind: str = "deal", state: bytes | None = None, **config: Any) -> Any:
        """Make a call and serve its socket until it is answered."""
        self.ask(kind, state, **config)
        while not self.outcomes:
            self.turn()
        return self.outcomes.pop()

    def failure(self, **config: Any) -> str:
        error = self.call(**config)
        assert isinstance(error, SamplerError)
        return str(error)

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self.host.stop()

    def rows(self, **config: Any) -> list[int]:
        given = self.call(**config)
        assert isinstance(given, Given), given
        return np.frombuffer(given.shares[0][0], "<i8").tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def asking() -> Any:
    """Of all tests that leave its sampler able to deal."""
    with Asking() as made:
        yield made


def test_a_sampler_deals_and_reads_tags(asking: Asking) -> None:
    assert asking.host.facts.name == "Newest"
    assert asking.rows() == [3, 2]
    assert asking.rows(how="tags") == [2]


@pytest.mark.parametrize(
    ("how", "words", "restarts"),
    [
        ("exit", "raised SystemExit: 3", 0),
        ("write", f"its code must not use file descriptor {CHANNEL}", 1),
    ],
)
def test_code_that_misbehaves_fails_only_its_call(asking: Asking, how: str, words: str, restarts: int) -> None:
    before = asking.host.restarts
    assert words in asking.failure(how=how)
    assert asking.rows() == [3, 2]
    assert asking.host.restarts == before + restarts


def test_a_sampler_that_dies_or_hangs_is_restarted_with_its_saved_state() -> None:
    with Asking(seconds=1.0) as asking:
        assert asking.rows() == [3, 2]
        saved = asking.call("save_checkpoint")
        asking.rows()
        died = asking.failure(how="die")
        assert "the process of the sampler Newest has ended (signal 9) in sample" in died
        assert asking.call("save_checkpoint") == saved, "the new process has what was saved last"
        hung = asking.failure(how="hang")
        assert "the sampler Newest did not return from sample within 1 s (timeouts.sampler)" in hung
        assert asking.rows() == [3, 2]
        assert asking.host.restarts == 2


def test_an_error_of_the_constructor_is_raised() -> None:
    with pytest.raises(SamplerError, match="not today"):
        Asking("Unwilling")


def test_the_loop_does_not_wait_for_the_end_of_a_process_whose_channel_has_ended(asking: Asking) -> None:
    process = stopped(asking)
    asking.ask()
    asking.end_channel()
    assert not asking.outcomes
    assert process.poll() is None
    while not asking.outcomes:
        asking.turn()
    assert "the process of the sampler Newest has ended in sample" in str(asking.outcomes.pop())
    assert process.wait(60) == -signal.SIGKILL
    assert asking.rows() == [3, 2]


def test_a_call_goes_to_a_new_process_while_the_exit_status_of_the_last_is_not_known(asking: Asking) -> None:
    before, process = asking.host.restarts, stopped(asking)
    asking.end_channel()
    assert asking.rows() == [3, 2]
    assert asking.host.restarts == before + 1
    assert process.wait(60) == -signal.SIGKILL


def stopped(asking: Asking) -> subprocess.Popen[bytes]:
    """The process of a sampler, which does not even see that its channel has ended."""
    process = asking.process
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    return process


def never_reads(theirs: Any) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", "import time; time.sleep(1000)"]
    return subprocess.Popen(arguments, pass_fds=(theirs.fileno(),))


def test_the_wait_for_a_process_that_does_not_read_its_order_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = {"text": "x" * (4 << 20)}
    with Asking("Large", args, start_seconds=120.0) as asking:
        assert asking.rows() == [3, 2]
        asking.call(how="die")
        monkeypatch.setattr(sampler_host, "_start_process", never_reads)
        asking.host._start_seconds = 0.5
        assert "the sampler Large was not loaded within 0.5 s (timeouts.start)" in asking.failure()
    with pytest.raises(SamplerError, match=r"the sampler was not loaded within 0.5 s \(timeouts.start\)"):
        Asking("Large", args, start_seconds=0.5)


def test_the_log_of_a_sampler_is_a_separate_file_of_bounded_size(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    with Asking(log=log) as asking:
        assert asking.rows(how="print") == [3, 2]
        assert (tmp_path / "sampler.log.1").stat().st_size > server_log.MAX_BYTES
        assert log.stat().st_size < server_log.MAX_BYTES
        asking.rows(how="print")
        assert sorted(found.name for found in tmp_path.iterdir()) == ["sampler.log", "sampler.log.1"]


def test_a_sampler_that_hangs_ends_with_its_controller(tmp_path: Path) -> None:
    """The controller is killed, so it has no time to end the process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        asking = Asking()
        asking.host.ask(1, SamplerCall("deal", SamplerRequest("p", "t", 1, {"how": "hang"})), Shown("p", total=0))
        process = asking.process
        os.write(writer, str(process.pid).encode())
        os.close(writer)
        time.sleep(1000)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        pid = int(pipe.read())
    process = Process(pid, None)
    assert not process.has_ended()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.wait(60)
    process.close()


def test_built_in_samplers_need_no_process() -> None:
    from transfer_queue.node.controller.sampler_loading import SamplerLoading
    from transfer_queue.node.system.sampler_transfer import dump

    loading = SamplerLoading(True, 1.0, 60.0, True)
    made = loading.from_pickle(dump(PrioritySampler("score")))
    assert isinstance(made, PrioritySampler)
    around = loading.from_pickle(dump(PrioritySampler("score", inner=Newest())))
    assert isinstance(around, SamplerHost)
    assert around.facts.tags == ["score"]
    around.stop()


# It ends the process of the other tests.
def test_the_process_of_a_sampler_that_was_replaced_is_gone(asking: Asking, tmp_path: Path) -> None:
    process = asking.process
    service = ControllerService(Controller(CoreConfig(core_sampler(asking.host))), StateFiles(tmp_path))
    service.use_hosts({"": asking.host}, asking.loop)
    service.use_hosts({"": SequentialSampler()}, asking.loop)
    limit = time.monotonic() + 60
    while Path(f"/proc/{process.pid}").exists():
        assert time.monotonic() < limit, "it is a zombie"
        time.sleep(0.002)
