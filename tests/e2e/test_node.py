"""Systems as processes: that they start, are found, and leave nothing behind, however they end."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection as duplex
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import light_sampler
import warm
from leftovers import descriptors, opened_for, processes_of
from server_processes import kill_all, until
from transfer_queue.config.settings import Settings
from transfer_queue.errors import (
    AttachError,
    AuthenticationError,
    ConnectionLostError,
    ProtocolError,
    StartError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply, AnyRequest, ReplyEnvelope
from transfer_queue.messages.partitions import CreatePartition, ListPartitions
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.messages.storage import (
    ExtentLeaseReply,
    LeaseExtent,
    OpenSlot,
    UnitStatus,
)
from transfer_queue.messages.system import Topology
from transfer_queue.net.calls import CONTROLLER, Call, Request
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import Connection
from transfer_queue.net.framing import pack_frame
from transfer_queue.net.session import Session
from transfer_queue.node.system.launcher import RunningSystem, find, replace_supervisor, start_local
from transfer_queue.system_folder.liveness import StartLock
from transfer_queue.system_folder.paths import SystemFolder

SECONDS = 100.0  # within which what is to happen happens, on a busy machine, too


def files_in(folder: Path) -> list[str]:
    """All that lies in a folder, which others may be removing."""
    found = []
    for at, folders, files in os.walk(folder):
        found += [os.path.relpath(os.path.join(at, name), folder) for name in folders + files]
    return sorted(found)


class Place:
    """A runtime folder and a folder for arenas, both of one test."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="tqn-"))
        self.runtime = self.root / "run"
        self.arenas = self.root / "arenas"
        self.runtime.mkdir(mode=0o700)
        self.arenas.mkdir()

    def config(self, **changes: Any) -> dict[str, Any]:
        settings = Settings.from_config(None).to_json()
        return {"settings": {**settings, "arena_folder": str(self.arenas), "arena_bytes": 64 << 20, **changes}}

    def start(self, name: str | None = "s", **options: Any) -> RunningSystem:
        return start_local(name, self.config(), timeout=SECONDS, **options)

    def processes(self) -> list[psutil.Process]:
        """Those of systems in this folder."""
        return [process for process in processes_of(self.runtime) if _serves(process, self.runtime)]

    def is_empty(self) -> bool:
        return not files_in(self.runtime) and not files_in(self.arenas) and not self.processes()

    def story(self) -> str:
        return f"left: {files_in(self.root)}, {self.processes()}"


def _serves(process: psutil.Process, runtime: Path) -> bool:
    try:
        there = process.environ().get("TQ_RUNTIME_DIR") == str(runtime)
        return there and "transfer_queue.node.supervisor" in process.cmdline()
    except psutil.Error:  # it ended since it was found
        return False


@contextlib.contextmanager
def made_place() -> Iterator[Place]:
    """A place that is the runtime folder of this process. All systems in it must have ended at its end."""
    place = Place()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TQ_RUNTIME_DIR", str(place.runtime))
        for name in ("TQ_ADDRESS", "TQ_SYSTEM"):
            environment.delenv(name, raising=False)
        try:
            yield place
            until(place.is_empty, place.story)
        finally:
            for process in place.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            shutil.rmtree(place.root)


@pytest.fixture
def place() -> Iterator[Place]:
    with made_place() as place:
        yield place


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningSystem]:
    """A system for tests that only look at it and send it requests."""
    with made_place() as place:
        system = place.start()
        yield system
        system.stop()


def session_of(system: RunningSystem, client_id: str | None = None, key: bytes | None = None) -> Session:
    unit = str(system.folder / "unit-0.sock")
    return Session(
        uuid.uuid4().hex if client_id is None else client_id,
        system.key if key is None else key,
        lambda target: system.controller if target == CONTROLLER else unit,
        log_of=system.log_of,
    )


def ask(system: RunningSystem, request: AnyRequest, target: tuple[str, int] = CONTROLLER, **options: Any) -> AnyReply:
    """One request on a session of its own."""

    def operation() -> Generator[Call, AnyReply, AnyReply]:
        return (yield Request(target, request, 5.0))

    session = session_of(system, **options)
    try:
        return run_blocking(session, operation())
    finally:
        session.close()


def servers_of(system: RunningSystem) -> dict[str, psutil.Process]:
    """The supervisor, the controller and the unit, the latter two in order of birth."""
    supervisor = psutil.Process(system.description.pid)
    children = sorted(supervisor.children(), key=lambda child: child.pid)
    return dict(zip(("supervisor", "controller", "unit-0"), (supervisor, *children), strict=True))


STARTER = """
import json, os, sys, threading
from transfer_queue.node.system.launcher import start_local
config = json.loads(sys.argv[1])
system = start_local(sys.argv[2], config, environment=os.environ)
print(json.dumps({"pid": system.description.pid, "owned": system.owned, "address": os.environ.get("TQ_ADDRESS")}))
sys.stdout.flush()
"""
WAIT = "sys.stdin.read()\n"


class Starter:
    """A Python process that runs a script, which says one line of JSON first."""

    def __init__(self, place: Place, script: str = STARTER + WAIT, name: str = "s", **changes: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, json.dumps(place.config(**changes)), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def said(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return dict(json.loads(line))

    def end(self) -> int:
        self.process.communicate("")
        return self.process.returncode


def start_and_hold(config: dict[str, Any], options: dict[str, Any], told: duplex.Connection[Any, Any]) -> None:
    system = start_local("s", config, **options)
    told.send({"pid": system.description.pid, "owned": system.owned, "address": os.environ.get("TQ_ADDRESS")})
    with contextlib.suppress(EOFError):
        told.recv()


class ForkedStarter:
    """A process of the fork server that starts a system: for tests to which a new interpreter shows nothing more."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.process, self.pipe = warm.reporting(start_and_hold, place.config(), options, duplex=True)

    def said(self) -> dict[str, Any]:
        return dict(self.pipe.recv())

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int | None:
        self.pipe.close()
        self.process.join(SECONDS)
        code: int | None = self.process.exitcode
        return code


# ---------------------------------------------------------------- a life


def test_a_system_comes_and_goes_without_a_trace(place: Place) -> None:
    gc.collect()  # what earlier tests have left to it
    before, keys = descriptors(), set()
    for _ in range(2):
        system = place.start()
        keys.add(system.key)
        assert system.owned
        assert system.is_alive()
        assert ask(system, CreatePartition("p")) == Done(True)
        servers = servers_of(system)
        assert len(list(place.arenas.iterdir())) == 1
        system.stop()
        # at once, not some time later
        assert [p for p in servers.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
        assert place.is_empty(), place.story()
        assert not system.is_alive()
        system.stop()
    assert opened_for(before) == []
    assert len(keys) == 2


def test_controller_and_unit_serve(shared: RunningSystem) -> None:
    topology = ask(shared, Topology())
    assert [unit.unit for unit in topology.units] == [0]
    assert topology.units[0].address == str(shared.folder / "unit-0.sock")
    assert Path(topology.units[0].arena).is_dir()
    assert json.loads(topology.config)["settings"]["sampler"] == "SequentialSampler"
    status = ask(shared, UnitStatus(), ("unit", 0))
    assert status.capacity == 64 << 20


def test_what_describes_a_system(shared: RunningSystem) -> None:
    assert f"started by pid {os.getpid()} ({' '.join(psutil.Process().cmdline())[:40]}" in shared.describe()
    assert shared.log_of(("controller", 0)) == str(shared.folder / "logs" / "controller.log")
    assert shared.log_of(("unit", 0)).endswith("unit-0.log")
    assert shared.key.hex() not in repr(shared)
    assert repr(shared.key) not in repr(shared) + str(shared.description)


def test_the_key_is_in_no_log_and_no_argument(shared: RunningSystem) -> None:
    ask(shared, Topology())
    texts = [path.read_bytes() for path in shared.logs.iterdir()]
    for process in servers_of(shared).values():
        texts += [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    for text in texts:
        assert shared.key not in text
        assert shared.key.hex().encode() not in text


def test_servers_know_neither_torch_nor_ray(shared: RunningSystem) -> None:
    for process in servers_of(shared).values():
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "numpy" in maps
        assert "torch" not in maps
        assert "ray/" not in maps


# ---------------------------------------------------------------- finding


def test_threads_that_start_at_once_share_one_system_which_is_found_by_name_by_folder_and_by_environment(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(5) as pool:
        systems = list(pool.map(lambda _: place.start(), range(5)))
    assert len({system.description.pid for system in systems}) == 1
    system = systems[0]
    for found in (find("s"), find(str(system.folder)), place.start()):
        assert (found.folder, found.key, found.owned) == (system.folder, system.key, False)
    assert len(place.processes()) == 3
    assert find() is None
    assert find("other") is None
    assert find("/nowhere/at/all") is None
    monkeypatch.setenv("TQ_SYSTEM", "s")
    assert find() is not None
    monkeypatch.setenv("TQ_SYSTEM", "other")
    monkeypatch.setenv("TQ_ADDRESS", str(system.folder))
    found = find()
    assert ask(found, CreatePartition("p")) == Done(True)
    system.stop()


def report_found(told: duplex.Connection[Any, Any]) -> None:
    found = find()
    told.send(found and found.name)


def test_the_address_is_in_the_starters_environment_and_its_childrens_while_it_runs(place: Place) -> None:
    before = dict(os.environ)
    system = place.start("odd-name", environment=os.environ)
    assert os.environ == {**before, "TQ_ADDRESS": str(place.runtime / "odd-name")}
    place.start("odd-name", environment={})
    child, told = warm.reporting(report_found)
    with told:
        assert told.recv() == "odd-name"
    child.join(SECONDS)
    system.stop()
    assert os.environ == before


@pytest.mark.parametrize("dead", [False, True])
def test_simultaneous_starts_give_one_system(place: Place, dead: bool) -> None:
    """Also over the files of a system whose processes were all killed."""
    if dead:
        kill_all(place.start())
        assert (place.runtime / "s" / "controller.sock").exists()
        assert list(place.arenas.iterdir())
        assert find("s") is None
    starters = [ForkedStarter(place) for _ in range(4)]
    said = [starter.said() for starter in starters]
    assert len({one["pid"] for one in said}) == 1
    assert sorted(one["owned"] for one in said) == [False] * 3 + [True]
    assert len(place.processes()) == 3
    assert len(list(place.arenas.iterdir())) == 1
    for starter in starters:
        assert starter.end() == 0


# ---------------------------------------------------------------- strangers


def test_a_wrong_key_is_refused_on_both_servers(shared: RunningSystem) -> None:
    for target in (CONTROLLER, ("unit", 0)):
        with pytest.raises(AuthenticationError, match="attach again"):
            ask(shared, Topology(), target, key=b"x" * 32)


def shaken(system: RunningSystem, path: str) -> Connection:
    connection = Connection(path)
    connection.connect(Session("c", system.key, lambda target: path), time.monotonic() + SECONDS)
    return connection


@pytest.mark.parametrize("server", ["controller.sock", "unit-0.sock"])
def test_bodies_that_cannot_be_read(shared: RunningSystem, server: str) -> None:
    path = str(shared.folder / server)
    encode = msgspec.msgpack.encode
    connection = shaken(shared, path)
    for body in ([7, 0, ["NoSuchRequest", 1]], [8, 0, None], [9, 0, ["Claim", 5]]):
        answer = msgspec.msgpack.decode(
            connection.exchange(pack_frame(encode(body)), time.monotonic() + SECONDS), type=ReplyEnvelope
        )
        assert answer.sequence == body[0]
        assert answer.body.kind == "ProtocolError"
    with pytest.raises(ConnectionResetError):
        connection.exchange(pack_frame(encode({"not": "an envelope"})), time.monotonic() + SECONDS)
    connection.close()
    assert ask(shared, CreatePartition(f"after bodies for {server}")) == Done(True)


def test_what_only_units_may_say(shared: RunningSystem) -> None:
    with pytest.raises(ProtocolError, match="only a server of the system may send"):
        ask(shared, RegisterUnit("/x", "/y"))
    with pytest.raises(ProtocolError, match="does not answer ListPartitions"):
        ask(shared, ListPartitions(), ("unit", 0))


@pytest.mark.parametrize("how", ["mode", "link"])
def test_a_folder_that_others_could_have_made_is_refused(place: Place, how: str) -> None:
    folder = place.runtime / "s"
    if how == "mode":
        folder.mkdir(mode=0o700)
        folder.chmod(0o755)
    else:
        folder.symlink_to(place.arenas)
    with pytest.raises(AttachError, match="not a private folder of this user"):
        find("s")
    with pytest.raises(AttachError, match="not a private folder of this user"):
        place.start()
    folder.rmdir() if how == "mode" else folder.unlink()


def test_a_runtime_folder_that_others_may_change_is_refused(place: Place) -> None:
    place.runtime.chmod(0o777)
    with pytest.raises(StartError, match="others could change it"):
        place.start()
    place.runtime.chmod(0o700)


def test_a_path_too_long_for_sockets_is_an_error_that_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    long = place.root / ("x" * 100)
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(long))
    with pytest.raises(StartError, match="limit is 107: set TQ_RUNTIME_DIR"):
        place.start()
    assert files_in(long) == []


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("script", "number", "expected"),
    [
        (WAIT, None, 0),
        ("raise RuntimeError('the training failed')", None, 1),
        ("os._exit(7)", None, 7),
        (WAIT, signal.SIGKILL, -signal.SIGKILL),
        (WAIT, signal.SIGINT, -signal.SIGINT),
    ],
    ids=["end", "exception", "_exit", "SIGKILL", "SIGINT"],
)
def test_a_starter_that_ends_takes_its_system_along(
    place: Place, script: str, number: signal.Signals | None, expected: int
) -> None:
    starter = Starter(place, STARTER + script)
    starter.said()
    if number is not None:
        starter.process.send_signal(number)
        starter.process.wait(SECONDS)
    assert starter.end() == expected
    until(place.is_empty, place.story)


def test_a_starter_killed_in_the_middle_of_a_start(place: Place) -> None:
    for delay in (0.0, 0.1):
        starter = ForkedStarter(place)
        until(lambda: files_in(place.runtime))
        threading.Timer(delay, starter.kill).run()
        until(lambda: not place.processes(), place.story)
        place.start().stop()
        assert place.is_empty(), place.story()


def test_an_heir_takes_the_place_of_a_killed_starter(place: Place) -> None:
    """The servers go on; then the heir's end is theirs, where no other heir comes."""
    starter = ForkedStarter(place, heirs=100.0)
    starter.said()
    found = find("s")
    assert ask(found, CreatePartition("p")) == Done(True)
    starter.kill()
    heir = replace_supervisor("s")
    assert heir.owned
    log = heir.logs / "supervisor.log"
    until(lambda: f"process {os.getpid()} replaces the starter" in log.read_text(), place.story)
    assert ask(heir, CreatePartition("p")) == Done(False)
    heir.stop()
    assert replace_supervisor("s") is None


def test_without_an_heir_in_time_a_system_ends(place: Place) -> None:
    starter = ForkedStarter(place, heirs=0.2)
    starter.said()
    starter.kill()
    until(place.is_empty, place.story)


def test_ctrl_c_at_the_terminal_does_not_reach_the_servers(place: Place) -> None:
    deaf = "import signal; signal.signal(2, signal.SIG_IGN)\nprint('{}', flush=True)\n"
    starter = Starter(place, STARTER + deaf + WAIT)
    starter.said()
    starter.said()
    os.killpg(starter.process.pid, signal.SIGINT)
    for process in place.processes():
        assert os.getsid(process.pid) != starter.process.pid
        process.send_signal(signal.SIGINT)
    system = find("s")
    assert ask(system, CreatePartition("p")) == Done(True)
    assert starter.end() == 0


def test_a_killed_supervisor_and_a_server_that_does_not_react(place: Place) -> None:
    """The other server removes the files; the one that was stopped ends when it goes on."""
    system = place.start()
    servers = servers_of(system)
    servers["controller"].suspend()
    os.kill(system.description.pid, signal.SIGKILL)
    until(lambda: not files_in(place.runtime), place.story)
    again = place.start()
    servers["controller"].resume()
    until(lambda: len(place.processes()) == 3, place.story)
    assert ask(again, CreatePartition("p")) == Done(True)
    again.stop()


def test_a_controller_that_dies_and_cannot_be_resumed_ends_the_system_and_leaves_its_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    system = start_local("s", place.config(durability_mode="none"), timeout=SECONDS)
    session = session_of(system)

    def operation() -> Generator[Call, AnyReply, AnyReply]:
        return (yield Request(CONTROLLER, ListPartitions()))

    run_blocking(session, operation())
    dead = servers_of(system)["controller"]
    dead.kill()
    until(lambda: not place.processes())
    with pytest.raises(ConnectionLostError, match=r"controller at .*its log: (?P<log>\S+controller\.log)"):
        run_blocking(session, operation())
    session.close()
    told = f"the controller, process {dead.pid}, was killed by SIGKILL"
    assert told in (system.logs / "controller.log").read_text()
    assert {path.split(os.sep)[1] for path in files_in(place.runtime) if path != "s"} == {"logs"}
    assert find("s") is None
    with caplog.at_level(logging.ERROR):
        system.stop()
    assert f"process {dead.pid}, was killed by SIGKILL" in caplog.text
    assert place.is_empty(), place.story()


@pytest.mark.slow
def test_a_server_that_does_not_end_is_ended(place: Place) -> None:
    system = place.start()
    servers_of(system)["unit-0"].suspend()
    start = time.monotonic()
    system.stop()
    assert time.monotonic() - start < SECONDS
    assert place.is_empty(), place.story()


def test_a_supervisor_that_does_not_end_is_killed(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    system = place.start()
    servers_of(system)["supervisor"].suspend()
    system.stop(timeout=0.1)
    assert "this process kills it" in caplog.text
    assert place.is_empty(), place.story()


def test_a_lock_that_is_held_for_too_long_is_named(place: Place) -> None:
    lock = SystemFolder(place.runtime / "s").lock
    with StartLock(lock, 1.0), pytest.raises(StartError, match=rf"another process has held {lock} for 0\.1 s"):
        start_local("s", place.config(), timeout=0.1)
    assert not lock.exists()


# ---------------------------------------------------------------- failures to start


def test_an_error_of_a_server_reaches_the_caller_with_its_traceback(place: Place) -> None:
    gc.collect()  # what earlier tests have left to it
    before = descriptors()
    with pytest.raises(StartError, match="the controller could not be started") as raised:
        start_local("s", place.config(sampler="no.such:Sampler"), timeout=SECONDS)
    assert "Traceback" in str(raised.value)
    assert "no.such:Sampler" in str(raised.value)
    assert place.is_empty(), place.story()
    assert opened_for(before) == []


FILES = {name: f"/no/such/{name}.pem" for name in ("certificate", "private_key", "authority")}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("arena_folder", "/no/such/folder", "backend.SimpleStorage.arena_folder"),
        ("arena_folder", "/dev/null", "backend.SimpleStorage.arena_folder"),
        ("tls", FILES, "security.tls.certificate /no/such/certificate.pem cannot be used"),
        ("storage_backend", "no.such:Store", "the store no.such:Store .* cannot be used: No module named 'no'"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_without_a_traceback(
    place: Place, key: str, value: object, told: str
) -> None:
    with pytest.raises(StartError, match=told) as raised:
        start_local("s", place.config(**{key: value}, store_options={"no.such:Store": {}}), timeout=SECONDS)
    assert "Traceback" not in str(raised.value)
    assert place.is_empty(), place.story()


def test_an_error_of_the_users_sampler_reaches_the_caller(place: Place) -> None:
    with pytest.raises(StartError, match=r"(?s)Traceback.*ZeroDivisionError: in the user's sampler"):
        place.start(samplers={"": light_sampler.Failing()})


def test_a_start_that_takes_too_long_ends_with_the_reason(place: Place) -> None:
    with pytest.raises(StartError, match=r"the controller was not up within [01]\.\d s"):
        start_local("s", place.config(), samplers={"": light_sampler.Stuck()}, timeout=1.0)
    assert place.is_empty(), place.story()


def test_an_interrupted_start_leaves_nothing(place: Place) -> None:
    def interrupt() -> None:
        until(lambda: (place.runtime / "s" / "logs" / "controller.log").exists())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        place.start(samplers={"": light_sampler.Stuck()})
    thread.join()
    assert place.is_empty(), place.story()


def test_a_sampler_that_cannot_be_pickled_is_said_to_be_one(place: Place) -> None:
    sampler = light_sampler.Failing()
    sampler.__dict__["lock"] = threading.Lock()
    sampler.__class__.__getstate__, kept = lambda self: self.__dict__, sampler.__class__.__getstate__  # type: ignore[method-assign]
    try:
        with pytest.raises(StartError, match="define its class at the top level"):
            place.start(samplers={"": sampler})
    finally:
        sampler.__class__.__getstate__ = kept  # type: ignore[method-assign]


SCRIPT = """
import json, os, sys
from transfer_queue.node.system.launcher import start_local
from transfer_queue.sampler import SequentialSampler

class Mine(SequentialSampler):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def __setstate__(self, state):
        with open(state["path"], "w") as file:
            file.write(f"{type(self).__module__} {os.getpid()}")
        self.__dict__.update(state)

def main():
    config, name, seen = (sys.argv + os.environ.get("ARGUMENTS", "").split("|"))[1:4]
    system = start_local(name, json.loads(config), samplers={"": Mine(seen)})
    print(json.dumps({"pid": system.description.pid}))
    system.stop()

GUARD main()
"""


@pytest.mark.parametrize("way", ["script", "module", "command"])
def test_a_sampler_defined_in_main_travels(place: Place, way: str) -> None:
    text = SCRIPT.replace("GUARD", "if __name__ == '__main__':")
    (place.root / "training_script.py").write_text(text)
    run = {
        "script": [str(place.root / "training_script.py")],
        "module": ["-m", "training_script"],
        "command": ["-c", text],
    }[way]
    seen = place.root / "seen"
    environment = {**os.environ, "PYTHONPATH": str(place.root)} if way == "module" else None
    done = subprocess.run(
        [sys.executable, *run, json.dumps(place.config()), "s", str(seen)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    module, pid = seen.read_text().split()
    assert module == {"script": "__mp_main__", "module": "__mp_main__", "command": "__main__"}[way]
    assert int(pid) != json.loads(done.stdout)["pid"]


def test_a_script_without_a_guard_is_told_what_to_do(place: Place) -> None:
    script = place.root / "unguarded.py"
    script.write_text(SCRIPT.replace("GUARD ", ""))
    # not on the command line, which the controller's run of the script has not
    arguments = "|".join([json.dumps(place.config()), "s", str(place.root / "seen")])
    environment = {**os.environ, "ARGUMENTS": arguments}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "put the script's work under `if __name__ == '__main__':`" in done.stderr


def test_a_writer_in_this_process(shared: RunningSystem) -> None:
    slot = ask(shared, OpenSlot("w"), ("unit", 0), client_id="w")
    assert Path(slot.lock_path).parent.parent == shared.folder / "slots-0"
    with pytest.raises(ProtocolError, match="slot"):
        # without the lock, and with the slot withdrawn when its connection ended
        assert isinstance(ask(shared, LeaseExtent(slot.slot, 1, 1), ("unit", 0), client_id="w"), ExtentLeaseReply)
