"""A process that attaches by itself: to what runs, and to what runs after that has ended."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import OmegaConf

import transfer_queue as tq
import warm
from server_processes import SECONDS, until
from transfer_queue.attachment import CURRENT
from transfer_queue.client import client as client_module
from transfer_queue.config.settings import Settings
from transfer_queue.node.system import launcher
from transfer_queue.node.system.launcher import RunningSystem, start_local

NAME = "attached-to"


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts systems that this process has not called `init` for."""
    monkeypatch.setenv("TQ_SYSTEM", NAME)
    started: list[RunningSystem] = []

    def start() -> RunningSystem:
        started.append(start_local(NAME, {"settings": Settings.from_config(None).to_json()}))
        return started[-1]

    yield start
    tq.close()
    for system in started:
        system.stop()


@pytest.fixture(scope="module")
def kept() -> Iterator[RunningSystem]:
    """A system that stays: for tests that only attach to it."""
    system = start_local(f"{NAME}-kept", {"settings": Settings.from_config(None).to_json()})
    yield system
    system.stop()


@pytest.fixture
def running(kept: RunningSystem, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningSystem]:
    """The system that stays, empty, in the environment of a process that is not attached."""
    monkeypatch.setenv("TQ_SYSTEM", kept.name)
    yield kept
    tq.close()
    for partition in tq.kv_list():
        tq.get_client().clear_partition(partition)
    tq.close()


def test_what_has_ended_is_forgotten(systems: Any) -> None:
    """The next one under its name is another, also if nothing was called in between."""
    for value in (1, 2):
        system = systems()
        assert tq.kv_list() == {}
        tq.kv_put("k", "p", {"x": value})
        assert tq.kv_batch_get("k", "p")["x"].tolist() == [value]
        system.stop()
    with pytest.raises(tq.NotInitializedError, match=r"call tq.init\(\) first"):
        tq.kv_list()
    system = systems()
    assert tq.kv_list() == {}
    tq.close()
    # what init was called for is not changed behind its back: its end is an error, until init is called again
    tq.init({"system": {"name": NAME}})
    system.stop()
    system = systems()
    with pytest.raises((tq.ConnectionLostError, tq.AuthenticationError)):
        tq.kv_list()
    tq.init({"system": {"name": NAME}}, attach="require")
    assert tq.kv_list() == {}
    # a worker does not start another one: not by init, and not by the KV functions either, which never do
    system.stop()
    with pytest.raises(tq.AttachError, match="no system is running"):
        tq.init(attach="require")
    with pytest.raises(tq.NotInitializedError):
        tq.kv_list()


WANTED = {"system": {"name": f"{NAME}-kept"}, "controller": {"polling_mode": True}}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_call_that_attaches_returns_the_settings_in_force_and_names_those_that_differ(
    running: RunningSystem, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # the first call attaches, the second is one of a process that is attached
        caplog.clear()
        conf = tq.init(WANTED)
        assert conf.controller.polling_mode is False
        assert conf.system.folder == str(running.folder)
        (said,) = warnings_of(caplog)
        assert "controller.polling_mode: requested true, in force false" in said
        assert running.describe() in said
        assert "system.name" in said
    caplog.clear()
    assert tq.init() == tq.init({"metrics": {"enabled": False}}) == conf
    assert warnings_of(caplog) == []


def test_the_configuration_in_force_equals_every_conf_whose_settings_are_in_force(running: RunningSystem) -> None:
    for conf in ({"controller": {"polling_mode": False}}, {}, WANTED):
        assert (tq.init(conf) == conf) is (conf is not WANTED)
        assert (tq.init(conf) != OmegaConf.create(conf)) is (conf is WANTED)
    copy = pickle.loads(pickle.dumps(tq.init()))
    assert copy == tq.init()
    copy.controller.polling_mode = True
    assert copy != tq.init()


def test_the_starter_gets_the_same_settings_from_every_call(caplog: pytest.LogCaptureFixture) -> None:
    conf = {"system": {"name": f"{NAME}-mine"}, "controller": {"sampler": tq.RankAwareSampler()}, "wandb": 5}
    try:
        first = tq.init(OmegaConf.create(conf, flags={"allow_objects": True}))
        assert warnings_of(caplog) == ["the configuration has a key without an effect: wandb: unknown"]
        assert tq.init() == first
        assert isinstance(first.controller.sampler, tq.RankAwareSampler)
        assert first.wandb == 5
    finally:
        tq.close()


def test_attach_decides_whether_init_starts_or_attaches(systems: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument, or TQ_ATTACH if the call has none."""
    with pytest.raises(tq.AttachError, match=rf"under the name '{NAME}', in the folder /.*{NAME}"):
        tq.init(attach="require")
    monkeypatch.setenv("TQ_ATTACH", "require")
    with pytest.raises(tq.AttachError, match=f"no system is running under the name '{NAME}'"):
        tq.init()
    system = systems()
    assert tq.init().system.folder == str(system.folder)
    monkeypatch.delenv("TQ_ATTACH")
    assert tq.init(attach="require").system.folder == str(system.folder)
    for _ in range(2):
        with pytest.raises(tq.StartError, match="attach is 'never'"):
            tq.init(attach="never")
        tq.close()
    with pytest.raises(tq.InvalidArgumentError, match=r"attach must be .* got 'perhaps'"):
        tq.init(attach="perhaps")  # type: ignore[arg-type]
    monkeypatch.setenv("TQ_ATTACH", "often")
    with pytest.raises(tq.InvalidArgumentError, match="TQ_ATTACH is 'often'; allowed: auto, require or never"):
        tq.init()


def train(name: str, told: Connection[Any, Any]) -> None:
    """Start a system, and crash."""
    tq.init({"system": {"name": name}, "runtime": "local"}, attach="never")
    tq.kv_put("k", "p", {"x": 1})
    told.send(os.environ["TQ_ADDRESS"])
    os.kill(os.getpid(), signal.SIGKILL)


def work(heir: dict[str, str], told: Connection[Any, Any]) -> None:
    """Attach to what the environment names."""
    os.environ.update(heir, TQ_ATTACH="require")
    try:
        tq.init({"runtime": "local"})
    except tq.AttachError as error:
        told.send(str(error))


def told_by(target: Callable[..., None], *arguments: Any) -> tuple[int | None, str]:
    """Run a function in a process of its own, to its end; returns the exit code, and what the function sent."""
    process, ours = warm.reporting(target, *arguments)
    with ours:
        told = ours.recv()
        process.join(100)
    return process.exitcode, told


def checkpoint(attached_by: str, queue: Any, folder: Path, told: Connection[Any, Any]) -> None:
    """Save and load without a call of `init`. attached_by: what has attached the process before."""
    if attached_by == "a put":
        tq.kv_put("own", "p", {"x": 2})
    elif attached_by == "a queue":  # which knows its system
        queue.put(1)
    tq.save_checkpoint(folder)
    tq.kv_put("later", "p", {"x": 3})
    tq.load_checkpoint(folder)
    report = tq.save_checkpoint(folder.with_name("some"), partitions="p")
    tq.interface._TQ_CONTROLLER = None  # as it is already
    tq.load_checkpoint(folder)
    told.send(report.samples)


@pytest.mark.parametrize(("attached_by", "samples"), [("nothing", 1), ("a put", 2), ("a queue", 1)])
def test_a_process_that_never_called_init_saves_and_loads_checkpoints(
    running: RunningSystem, tmp_path: Path, attached_by: str, samples: int
) -> None:
    tq.init()
    tq.kv_put("k", "p", {"x": 1})
    assert told_by(checkpoint, attached_by, tq.Queue("q"), tmp_path / "ck") == (0, {"p": samples})
    assert len(tq.kv_list("p")["p"]) == samples


def test_a_process_whose_system_init_has_attached_is_not_initialized_if_its_controller_is_set_to_none(
    running: RunningSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tq.kv_list() == {}
    tq.init()
    with monkeypatch.context() as patched:
        patched.setattr(tq.interface, "_TQ_CONTROLLER", None)
        for call in (tq.save_checkpoint, tq.load_checkpoint):
            with pytest.raises(tq.NotInitializedError, match="not initialized"):
                call(tmp_path / "ck")
    tq.save_checkpoint(tmp_path / "ck")
    tq.close()
    tq.save_checkpoint(tmp_path / "ck")  # attaches by itself again
    tq.load_checkpoint(tmp_path / "ck")


@pytest.mark.parametrize("by", ["TQ_ADDRESS", "TQ_SYSTEM"])
def test_a_worker_whose_trainer_has_crashed_starts_no_system(by: str) -> None:
    """Whether it inherited the folder from the trainer, or was started with the same name on its own."""
    name = f"{NAME}-{by.lower()}".replace("_", "-")
    code, folder = told_by(train, name)
    assert code == -signal.SIGKILL
    heir = {"TQ_ADDRESS": folder} if by == "TQ_ADDRESS" else {"TQ_SYSTEM": name}
    until(lambda: launcher.find(folder) is None)  # the servers of a process that was killed end by themselves
    code, words = told_by(work, heir)
    assert code == 0
    assert "no system is running" in words
    assert folder in words
    assert (f"under the name '{name}'" in words) == (by == "TQ_SYSTEM")
    assert "attach is 'require'. Start a system first (tq.init() in the trainer, or `tq start`)" in words
    assert launcher.find(folder) is None


def test_init_starts_a_system_while_the_last_process_of_a_killed_one_ends(
    systems: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is found as a running system, whose controller ends while `init` asks it."""
    old = systems()
    servers = psutil.Process(old.description.pid).children()
    for server in servers:
        server.suspend()
    os.kill(old.description.pid, signal.SIGKILL)
    find = launcher._find
    found_before: list[RunningSystem | None] = []

    def find_then_resume(folder: Any) -> RunningSystem | None:
        found = find(folder)
        if not found_before:
            for server in servers:
                server.resume()
        found_before.append(found)
        return found

    monkeypatch.setattr(launcher, "_find", find_then_resume)
    tq.init()
    assert found_before[0] is not None
    system = CURRENT.system
    assert system.new
    tq.kv_put("k", "p", {"x": 1})


def test_init_does_not_stay_with_a_system_that_replied_just_before_its_end(
    systems: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    systems()
    answers = [True, False]
    monkeypatch.setattr(RunningSystem, "is_ending", lambda system: answers.pop(0))
    tq.init()
    assert not answers
    tq.kv_put("k", "p", {"x": 1})


def test_a_finalizer_may_use_a_client_that_its_thread_connects(
    running: RunningSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected at any moment, and what is collected may belong to a client."""
    client = tq.TransferQueueClient(running)
    replies: list[Any] = []
    attach = client_module.Attachment

    def collect_and_attach(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(client_module, "Attachment", attach)
        replies.append(client.get_partition_list())
        return attach(*arguments, **more)

    monkeypatch.setattr(client_module, "Attachment", collect_and_attach)
    calling = threading.Thread(target=lambda: replies.append(client.get_partition_list()), daemon=True)
    calling.start()
    calling.join(SECONDS)
    assert replies == [[], []]
    client.close()


def test_with_strict_an_unknown_key_is_an_error_of_init(systems: Any) -> None:
    with pytest.raises(tq.InvalidArgumentError, match=r"controller\.samplr: unknown; did you mean controller\.sampler"):
        tq.init({"strict": True, "controller": {"samplr": "RankAwareSampler"}})
    with pytest.raises(tq.NotInitializedError):
        tq.get_client()
