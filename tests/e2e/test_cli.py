"""The command `tq` as a person uses it, against real systems."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from server_processes import kill_together, server_process
from transfer_queue.cli import main
from transfer_queue.cli.status_table import format_table
from transfer_queue.messages.descriptors import DISK, MEMORY
from transfer_queue.messages.locks import LockSummary
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    TaskProgress,
    Timing,
    UnitProgress,
)
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metrics.timing import LOOP_BOUNDS
from transfer_queue.node.system.launcher import find
from transfer_queue.system_folder.paths import SystemFolder

NAME = "cli"


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """`tq` with these words, in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TQ_ADDRESS"}
    command = [sys.executable, "-m", "transfer_queue.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """`tq` with these words, in this process, which is faster."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv("TQ_ADDRESS", raising=False)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def started() -> Iterator[subprocess.CompletedProcess[str]]:
    """A system that `tq start` made, stopped at the end; this process would attach to it."""
    done = program("start", "--name", NAME, "--set", "controller.polling_mode=true")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TQ_SYSTEM", NAME)
        try:
            yield done
        finally:
            tq.close()
            program("stop", "--name", NAME)


# The first of the tests of this system, which says what it is before anything happens in it.
def test_a_status_begins_with_the_verdict(started: subprocess.CompletedProcess[str]) -> None:
    idle = "Idle: no claim is open, and nothing was recorded in the last 5 minutes.\n\n"
    assert program("status", "--name", NAME).stdout.startswith(idle)
    found = json.loads(command("status", "--json", "--name", NAME).stdout)["verdict"]
    assert (found["state"], found["stage"]) == ("idle", None)


def test_start_outlives_its_command(started: subprocess.CompletedProcess[str]) -> None:
    assert started.returncode == 0, started.stderr
    assert started.stdout.startswith("running: started by pid")
    assert "logs in" in started.stdout
    tq.kv_put("a", "outlives", {"x": torch.arange(3)})
    assert tq.kv_list("outlives") == {"outlives": {"a": {}}}


def test_commands_that_look_at_a_system_load_no_torch(
    started: subprocess.CompletedProcess[str], tmp_path: Path
) -> None:
    tq.kv_put("a", "looked at", {"x": torch.arange(3)})
    commands = [
        ["status"], ["explain", "looked at", "--key", "a", "--task", "t"], ["list"],
        ["show", "looked at", "a", "--no-values"],
        ["stuck"], ["trace", str(tmp_path / "trace.json")],
    ]  # fmt: skip
    code = f"""
import sys
from transfer_queue.cli import main
print([main(each) for each in {commands}], "torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stderr == f"{[0] * len(commands)} False\n"


def test_start_again_says_whose_it_is(started: subprocess.CompletedProcess[str]) -> None:
    again = command("start", "--name", NAME)
    assert again.returncode == 0
    assert again.stdout.startswith("already running: started by pid")
    other = command("start", "--name", NAME, "--set", "controller.polling_mode=false")
    assert other.returncode == 1
    assert "controller.polling_mode: requested false, in force true" in other.stderr
    assert "started by pid" in other.stderr


def test_a_trace_has_a_track_for_each_task(started: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    words = ("trace", str(path), "--last", "3600", "--name", NAME)
    before = json.loads(command(*words, "--json").stdout)["events"]
    client = tq.get_client()
    client.put(TensorDict({"prompt": torch.zeros(3, 2)}, batch_size=[3]), partition_id="traced")
    client.get_meta(["prompt"], 2, "traced", task_name="traced task", sampling_config={"dp_rank": 1})
    written = command(*words)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith(f"wrote {before + 2} events to ")
    events = json.loads(path.read_text())["traceEvents"]
    assert any("traced task" in str(event.get("args", {}).get("name")) for event in events if event["ph"] == "M")
    assert [found.name for found in tmp_path.iterdir()] == ["trace.json"]
    missing = command("trace", str(tmp_path / "no" / "folder.json"), "--name", NAME)
    assert missing.returncode == 1
    assert "No such file or directory" in missing.stderr
    assert "Traceback" not in missing.stderr


def test_stop_ends_it() -> None:
    assert command("start", "--name", "stopped").returncode == 0
    stopped = command("stop", "--name", "stopped")
    assert stopped.returncode == 0
    assert stopped.stdout.startswith("stopped: ")
    assert command("status", "--name", "stopped").returncode == 1


def test_a_system_of_another_pid_namespace_is_not_stopped() -> None:
    name, unshare = "elsewhere", ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    works = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if works.returncode:
        pytest.skip(f"no PID namespace can be made here: {works.stderr.strip()}")
    stop = [sys.executable, "-m", "transfer_queue.cli", "stop", "--name", name]
    assert command("start", "--name", name).returncode == 0
    try:
        done = subprocess.run([*unshare, *stop], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1
        assert "runs in another PID namespace than this process" in done.stderr
        assert command("status", "--name", name).returncode == 0  # it runs as before
    finally:
        assert command("stop", "--name", name).returncode == 0
    inside = f"{sys.executable} -m transfer_queue.cli start --name {name} && {' '.join(stop)}"
    done = subprocess.run([*unshare, "sh", "-c", inside], capture_output=True, text=True, timeout=120)
    assert done.stdout.rpartition("stopped: ")[1], done.stderr  # both in the same namespace


@pytest.mark.parametrize("words", [("status",), ("stop",), ("explain", "p", "--key", "a")])
def test_without_a_system_it_says_what_to_do(words: tuple[str, ...]) -> None:
    done = command(*words, "--name", "nobody")
    assert done.returncode == 1
    assert "tq start" in done.stderr


def test_after_a_crash_it_names_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a system whose controller was killed and could not be restarted; a system that was stopped has none."""
    tq.close()  # the attachment of the tests before
    name, none = "journalless", "controller.journal.durability=none"
    assert command("start", "--name", name, "--set", none).returncode == 0
    monkeypatch.setenv("TQ_SYSTEM", name)
    system, logs = find(name), SystemFolder.named(name).logs
    supervisor = psutil.Process(system.description.pid)
    try:
        server_process("controller", system).kill()
        psutil.wait_procs([supervisor], timeout=60)
        words = f"(the last one crashed; its logs are in {logs})"
        assert words in command("status", "--name", name).stderr
        with pytest.raises(tq.AttachError) as error:
            tq.init(attach="require")
        assert words in str(error.value)
        (listed,) = [each for each in json.loads(command("list", "--json").stdout)["systems"] if each["name"] == name]
        assert (listed["state"], listed["words"]) == ("crashed", words.strip("()"))
    finally:
        assert command("start", "--name", name).returncode == 0
        command("stop", "--name", name)
    assert "crashed" not in command("status", "--name", name).stderr


def test_a_stopped_process_that_is_left_of_a_system_is_named() -> None:
    name = "half-stopped"
    assert command("start", "--name", name).returncode == 0
    system = find(name)
    supervisor, unit = psutil.Process(system.description.pid), server_process("unit-0", system)
    others = [supervisor, *(child for child in supervisor.children() if child != unit)]
    unit.suspend()
    try:
        kill_together(others)  # a server that notices the death of its supervisor would remove the system's files
        psutil.wait_procs(others, timeout=60)
        told = command("status", "--name", name)
        left = f"its supervisor is gone, but process {unit.pid} of it is stopped (SIGSTOP): end it with `kill -KILL"
        assert (told.returncode, told.stdout) == (1, "")
        assert left in told.stderr
    finally:
        unit.kill()
        psutil.wait_procs([unit], timeout=60)
        SystemFolder.named(name).sweep()


def test_table_of_everything() -> None:
    partition = PartitionProgress(
        "p", 5, 2, True, 4, 3 * 2**20, [FieldProgress("x", 4, "int64[3]")], [TaskProgress("t", 1, 2, 3.25)], 1
    )
    lines = format_table(SystemStatus([partition], {})).splitlines()
    assert lines[0] == "p: 5 samples, 3.0 MiB, 2 pre-allocated, groups of 4, 1 orphaned group, sealed"
    assert [line.split() for line in lines[1:]] == [
        ["field", "produced", "type"], ["x", "4", "of", "5", "int64[3]"],
        ["task", "consumed", "waiting", "longest"], ["t", "1", "of", "5", "2", "3.2", "s"],
    ]  # fmt: skip
    assert format_table(SystemStatus([], {})) == "no partitions"
    locks = LockSummary(2, 1, "client a waited 3 s")
    assert format_table(SystemStatus([], {}, locks=locks)).splitlines()[-1] == (
        "locks of keys: 2 held, requests that wait: 1; the longest: client a waited 3 s"
    )
    counts = [0, 0, 0, 100, *[0] * (len(LOOP_BOUNDS) - 3)]
    busy = SystemStatus([], {}, requests=[Timing("Publish", counts, 0.01)], longest=("Claim", 0.0042))
    assert format_table(busy).splitlines()[-3:] == [
        "controller: the requests that took most of its time, longest recent event 4.2 ms (Claim)",
        "  request  served  99 % within",
        "  Publish     100       0.1 ms",
    ]


def test_bytes_by_tier_are_shown_where_there_are_two() -> None:
    memory = [UnitProgress(0, MEMORY, 8 << 20, 3 << 20), UnitProgress(1, MEMORY, 8 << 20, 2 << 20, True)]
    assert format_table(SystemStatus([], {}, units=memory)) == "no partitions"
    disk = UnitProgress(2, DISK, 64 << 20, 1 << 20)
    shown = format_table(SystemStatus([], {}, units=[*memory, disk])).splitlines()
    assert shown[2:] == [
        "storage in memory: 5.0 MiB of 16.0 MiB leased, units: 2, being drained: 1",
        "storage on disk: 1.0 MiB of 64.0 MiB leased, units: 1",
    ]


def test_where_the_bytes_of_a_partition_are_is_shown_where_it_has_two_tiers() -> None:
    def first(stored: dict[str, int]) -> str:
        partition = PartitionProgress("p", 5, 0, False, None, 3 * 2**20, [], [], stored=stored)
        return format_table(SystemStatus([partition], {})).splitlines()[0]

    assert first({MEMORY: 3 << 20}) == "p: 5 samples, 3.0 MiB"
    assert first({MEMORY: 1 << 20, DISK: 2 << 20}) == "p: 5 samples, 3.0 MiB (1.0 MiB in memory, 2.0 MiB on disk)"


def test_what_is_claimed_and_what_is_poison(started: subprocess.CompletedProcess[str]) -> None:
    client = tq.get_client()
    client.create_partition("poisoned", max_deliveries=1)
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id="poisoned")
    meta = client.get_meta("x", 3, "poisoned", task_name="train", lease=60)
    assert client.nack(meta.select_samples([2]))
    assert client.ack(meta.select_samples([0]))
    shown = command("status", "--name", NAME).stdout
    assert re.search(r"\n  task +consumed  claimed\n  train +2 of 3 +1\n      1 skipped \(poison: delivered max", shown)
    poison = command("explain", "poisoned", "--index", str(meta.global_indexes[2]), "--task", "train", "--name", NAME)
    assert "is skipped by task 'train': poison (delivered once, never acknowledged)" in poison.stdout
    claimed = command("explain", "poisoned", "--index", str(meta.global_indexes[1]), "--task", "train", "--name", NAME)
    assert "and is not acknowledged yet" in claimed.stdout
    assert client.ack(meta.select_samples([1]))
    drained = command("explain", "poisoned", "--task", "train", "--fields", "x", "--name", NAME)
    assert "consumed every sample of partition 'poisoned'; new ones are needed. Skipped so far: 1 (poison)." in (
        drained.stdout
    )
