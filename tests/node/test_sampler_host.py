"""A user's sampler in a process of its own: who waits for it, what happens when it hangs or dies, what it keeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transfer_queue.errors import SamplerError
from transfer_queue.node.processes import Process
from transfer_queue.node.sampler_host import SamplerHost
from transfer_queue.node.sampler_process import LoadSampler
from transfer_queue.sampler import BaseSampler, PrioritySampler
from transfer_queue.sampler.calls import Given, SamplerCall, SamplerRequest
from transfer_queue.sampler.remote import Question, Shown, ViewReply


class Newest(BaseSampler):
    """Deals the newest rows, unless its caller wants something else."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **config: Any) -> Any:
        how = config.get("how")
        if how == "hang":
            time.sleep(1000)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            raise SystemExit(3)
        if how == "tags":
            tags = config["partition"].get_custom_meta(ready_indexes)
            ready_indexes = [row for row in ready_indexes if tags[row].get("good")]
        self._states["calls"] = self._states.get("calls", 0) + 1
        return ready_indexes[::-1][:batch_size], []


class Unwilling(BaseSampler):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("not today")

    def sample(self, *args: Any, **config: Any) -> Any: ...


class Loop:
    """Waits for the one socket that a host has."""

    def __init__(self) -> None:
        self.called: Any = None

    def watch(self, sock: Any, called: Any, writes: bool = False) -> None:
        self.called = sock, called

    def unwatch(self, sock: Any) -> None:
        self.called = None


class Asking:
    """A host and its loop."""

    def __init__(self, name: str = "Newest", seconds: float = 60.0) -> None:
        self.outcomes: list[Any] = []
        self.loop = Loop()
        self.host = SamplerHost(LoadSampler(None, f"{__name__}:{name}", {}, None, True), seconds, 120.0)
        self.host.attach(self.loop, self.answered, self.reads)

    def answered(self, number: int, outcome: Any) -> list[Any]:
        self.outcomes.append(outcome)
        return []

    def reads(self, number: int, question: Question) -> ViewReply:
        return ViewReply(tags={row: {"good": row == 2} for row in range(4)}) if question.kind == "tags" else ViewReply()

    def call(self, kind: str = "deal", state: bytes | None = None, **config: Any) -> Any:
        """Makes a call and serves its socket until it is answered."""
        request = SamplerRequest("p", "t", 2, config)
        rows = np.arange(4, dtype="<i8").tobytes()
        self.host.ask(1, SamplerCall(kind, request, state=state), Shown("p", total=4, rows=rows))
        while not self.outcomes:
            if self.loop.called is not None:
                sock, called = self.loop.called
                sock.setblocking(True)
                sock.settimeout(0.05)
                try:
                    sock.recv(1, 2)  # MSG_PEEK
                except TimeoutError:
                    pass
                finally:
                    sock.setblocking(False)
                called(1)
            due = self.host.next_deadline()
            if due is not None:
                self.host.tick(time.monotonic())
        return self.outcomes.pop()

    def rows(self, **config: Any) -> list[int]:
        given = self.call(**config)
        assert isinstance(given, Given), given
        return np.frombuffer(given.shares[0][0], "<i8").tolist()  # type: ignore[no-any-return]


@pytest.fixture
def asking() -> Any:
    made = Asking()
    yield made
    made.host.stop()


def test_it_deals_and_reads_tags(asking: Asking) -> None:
    assert asking.host.facts.name == "Newest"
    assert asking.rows() == [3, 2]
    assert asking.rows(how="tags") == [2]


def test_an_exit_is_an_error_and_its_process_goes_on(asking: Asking) -> None:
    error = asking.call(how="exit")
    assert isinstance(error, SamplerError)
    assert "raised SystemExit: 3" in str(error)
    assert asking.rows() == [3, 2]
    assert asking.host.restarts == 0


def test_one_that_dies_or_hangs_is_made_anew_with_what_it_has_saved() -> None:
    asking = Asking(seconds=1.0)
    try:
        assert asking.rows() == [3, 2]
        saved = asking.call("save_checkpoint")
        asking.rows()
        died = asking.call(how="die")
        assert isinstance(died, SamplerError)
        assert "the process of the sampler Newest has ended (signal 9) in sample" in str(died)
        assert asking.call("save_checkpoint") == saved, "the new process has what was saved last"
        hung = asking.call(how="hang")
        assert isinstance(hung, SamplerError)
        assert "the sampler Newest did not return from sample within 1 s (timeouts.sampler)" in str(hung)
        assert asking.rows() == [3, 2]
        assert asking.host.restarts == 2
    finally:
        asking.host.stop()


def test_what_its_code_raises_when_it_is_made_is_told() -> None:
    with pytest.raises(SamplerError, match="not today"):
        Asking("Unwilling")


def test_it_ends_with_its_controller_also_while_it_hangs(tmp_path: Path) -> None:
    """The controller stands for any that is killed: it has no time to end anything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        asking = Asking()
        asking.host.ask(1, SamplerCall("deal", SamplerRequest("p", "t", 1, {"how": "hang"})), Shown("p", total=0))
        process = asking.host._process
        assert process is not None
        os.write(writer, str(process.pid).encode())
        os.close(writer)
        time.sleep(1000)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        pid = int(pipe.read())
    process = Process(pid, None)
    assert not process.gone()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.wait(60)
    process.close()


def test_built_in_samplers_need_no_process() -> None:
    from transfer_queue.node.sampler_loading import SamplerLoading
    from transfer_queue.node.samplers import dump

    loading = SamplerLoading(True, 1.0, 60.0, True)
    made = loading.from_pickle(dump(PrioritySampler("score")))
    assert isinstance(made, PrioritySampler)
    around = loading.from_pickle(dump(PrioritySampler("score", inner=Newest())))
    assert isinstance(around, SamplerHost)
    assert around.facts.tags == ["score"]
    around.stop()
