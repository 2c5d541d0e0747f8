"""`tq status`, once and over and over: what it shows, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transfer_queue.cli import main, watch
from transfer_queue.cli.status_table import TimelineFacts, format_table, rates, status_as_json
from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import ConnectionLostError, WaitTimeoutError
from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, TaskProgress
from transfer_queue.messages.reports.timeline import Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.node.system import launcher
from transfer_queue.node.system.launcher import RunningSystem, start_local
from transfer_queue.timeline.recording import Recording

LONG = "600"  # seconds between two looks where the next one must come by itself, of an end


def status_of(produced: int, consumed: int, name: str = "p") -> SystemStatus:
    """One partition with one field and one task, which have counted so far."""
    fields = [FieldProgress("x", 1, "int64[]", produced)]
    return SystemStatus(
        [PartitionProgress(name, 1, 0, False, None, 8, fields, [TaskProgress("t", 1, 0, 0, consumed)])], {}
    )


def test_rates_come_of_what_was_counted_so_far() -> None:
    assert rates(status_of(10, 4), status_of(40, 4), 2.0) == {("p", "field", "x"): 15.0, ("p", "task", "t"): 0.0}


def test_what_is_new_began_at_zero() -> None:
    assert rates(SystemStatus([], {}), status_of(6, 3), 3.0) == {("p", "field", "x"): 2.0, ("p", "task", "t"): 1.0}
    assert rates(status_of(50, 50), status_of(6, 3), 3.0) == {("p", "field", "x"): 2.0, ("p", "task", "t"): 1.0}


def test_a_name_cannot_move_the_cursor() -> None:
    assert "\x1b" not in format_table(status_of(1, 1, "p\x1b[2J"))


def test_a_document_has_every_field_by_name() -> None:
    found = status_as_json(status_of(9, 4), {("p", "field", "x"): 1.5})
    (partition,) = found["partitions"]
    assert set(PartitionProgress.__struct_fields__) <= set(partition)
    assert partition["fields"][0]["produced_per_second"] == 1.5
    assert partition["tasks"][0]["consumed_per_second"] is None
    assert json.loads(json.dumps(found)) == found


class Said:
    """A display that remembers, and interrupts as Ctrl-C does after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.shown: list[tuple[str, dict[Any, float] | None]] = []
        self.lines: list[str] = []

    def show(
        self,
        system: RunningSystem,
        status: SystemStatus,
        speeds: dict[Any, float] | None,
        verdict: Verdict,
        facts: TimelineFacts,
    ) -> None:
        self.shown.append((system.name, speeds))
        if len(self.shown) == self.looks:
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.lines.append(line)


class FakeClient:
    """Answers each look with the next of these, or fails with it."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers = answers

    def __enter__(self) -> FakeClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_timeline(self, recording: Recording, timeout: float) -> None:
        pass

    def status(self, timeout: float) -> SystemStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


def fake_system(name: str, key: bytes, looks: int = 100) -> Any:
    """A system that lives for this many looks."""
    alive = iter([True] * looks)
    return SimpleNamespace(
        name=name, key=key, logs=Path("/logs"), is_alive=lambda: next(alive, False),
        describe=lambda: f"started as {name}", describe_stopped=lambda: "",
        description=SimpleNamespace(pid=os.getpid(), started=None),
    )  # fmt: skip


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the controller says to one look after the other."""
    found: list[Any] = []
    monkeypatch.setattr(watch, "ControlClient", lambda system: FakeClient(found))
    return found


def test_a_restart_is_survived(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> None:
    answers += [status_of(1, 1), ConnectionLostError("gone"), status_of(2, 2)]
    later = iter([None, fake_system("old", b"1"), fake_system("new", b"2")])  # gone, still ending, there again
    monkeypatch.setattr(launcher, "find", lambda name: next(later))
    said = Said(looks=2)
    with pytest.raises(KeyboardInterrupt):
        watch.follow_all(None, fake_system("old", b"1", looks=1), 0.001, said)
    assert said.shown == [("old", None), ("new", None)], "the rates of another system are none of this one's"
    assert said.lines == ["the system new was restarted: started as new"]


def test_a_system_that_lives_has_not_ended_if_its_controller_cannot_be_reached(answers: list[Any]) -> None:
    answers += [ConnectionLostError("refused"), status_of(1, 0)]
    said = Said(looks=1)
    with pytest.raises(KeyboardInterrupt):
        watch.follow(fake_system("s", b"1"), 0.001, said)
    assert said.lines == ["the controller cannot be reached: refused; its log is in /logs"]


def test_a_silent_controller_is_asked_again(answers: list[Any]) -> None:
    answers += [status_of(1, 0), WaitTimeoutError("Timeout"), status_of(5, 0)]
    said = Said(looks=2)
    with pytest.raises(KeyboardInterrupt):
        watch.follow(fake_system("s", b"1"), 0.001, said)
    assert len(said.lines) == 1
    assert "did not reply within 10 s; its log is in /logs" in said.lines[0]
    speeds = said.shown[1][1]
    assert speeds["p", "field", "x"] > 0


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """A system in a runtime folder of its own, with one sample of partition p. The last test stops it."""
    with tempfile.TemporaryDirectory(prefix="tqw-") as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("TQ_RUNTIME_DIR", folder)
        started = start_local("w", {"settings": Settings.from_config(None).to_json()})
        with TransferQueueClient(started) as client:
            meta = client.kv_retrieve_meta(["a"], "p", create=True)
            client.put({"x": torch.arange(3)[None]}, metadata=meta)
        try:
            yield started
        finally:
            started.stop()


def tq(*words: str, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "transfer_queue.cli", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **more)


def test_status_as_json(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--name", "w", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["system"]["name"] == "w"
    assert found["system"]["pid"] == system.description.pid
    assert found["partitions"][0]["fields"][0]["produced"] == 1
    assert found["counters"]["requests"] > 0


def test_watch_json_is_a_line_each(system: RunningSystem) -> None:
    process = tq("status", "--watch", "0.1", "--json", "--name", "w", stdout=subprocess.PIPE)
    looks = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    found = [look["partitions"][0]["fields"][0]["produced_per_second"] for look in looks]
    assert found == [None, 0.0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_watch_leaves_the_terminal_in_order(system: RunningSystem, number: signal.Signals, code: int) -> None:
    terminal, its = pty.openpty()
    process = tq("status", "--watch", LONG, "--name", "w", stdout=its)
    os.close(its)
    seen = b""
    while b"press Ctrl-C to end" not in seen:
        seen += os.read(terminal, 4096)
    process.send_signal(number)
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while piece := os.read(terminal, 4096):
            seen += piece
    os.close(terminal)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (code, "")
    text = seen.decode()
    assert text.startswith("\x1b[?1049h\x1b[?25l")
    drawn, left = re.split(r"\x1b\[\?25h\x1b\[\?1049l", text)
    assert "\r\n  x        1 of 1  int64[3]" in drawn.replace("\x1b[K", "").replace("\r\r", "\r")
    assert "\x1b" not in left
    assert "\n  x        1 of 1  int64[3]" in left, "the last look stays readable"


def test_who_reads_only_the_head_ends_it_quietly(system: RunningSystem) -> None:
    process = tq("status", "--watch", "0.1", "--name", "w", stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(300) == 1
    process.stderr.close()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_an_impossible_interval_is_an_error_of_usage(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--watch", seconds])
    assert ended.value.code == 2
    assert "must be a number of seconds >= 0.1" in capsys.readouterr().err


def test_explain_of_an_unknown_partition_fails(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "q", "--index", "0", "--name", "w"]) == 1
    words = "Partition 'q' does not exist (never created, or dropped). The partitions are: 'p'."
    assert words in capsys.readouterr().err


def test_explain_names_what_was_never_used(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "p", "--key", "a", "--task", "t", "--fields", "x, typo", "--name", "w"]) == 0
    answer, field, task = capsys.readouterr().out.splitlines()
    assert "is missing the field 'typo'" in answer
    assert field == "No sample has a field 'typo'; the fields are: x."
    assert task == "Task 't' has not received a sample yet, and no claim of it waits; the tasks are: none."


@pytest.mark.parametrize(
    "words", [(), ("--fields", "x"), ("--index", "1", "--key", "a"), ("--index", "1", "--fields", ",")]
)
def test_explain_wants_to_know_of_what(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", "p", *words, "--name", "nobody"])
    assert ended.value.code == 2


def test_watch_ends_with_the_system(system: RunningSystem) -> None:
    process = tq("status", "--watch", LONG, "--name", "w", stdout=subprocess.PIPE)
    shown: list[str] = []
    while shown.count("\n") < 3:  # an empty line is below the verdict, below the partition, and between two looks
        shown.append(process.stdout.readline())
    verdict, _, *first = shown
    assert verdict.startswith("Idle: no claim is open")
    assert first[0].startswith("p: 1 sample,")
    assert first[1].split()[:2] == ["field", "produced"]
    assert first[2].split()[:4] == ["x", "1", "of", "1"]
    assert first[3] == "\n"
    assert first[4].startswith("controller: the requests that took most of its time")
    assert first[5].split() == ["request", "served", "99", "%", "within"]
    system.stop()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert out == ""
    assert err == f"tq: the system w has ended ({system.describe()})\n"
