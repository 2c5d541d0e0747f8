"""`tq doctor`: each check against a machine that is made up, and the whole of it against this one."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import warm
from leftovers import arenas, files_in, processes_of
from server_processes import server_process
from transfer_queue.cli import main
from transfer_queue.cli.doctor import machine, runtime, selftest, selftest_reader, software
from transfer_queue.cli.doctor.report import Check, Finding, findings_of
from transfer_queue.config.settings import Settings
from transfer_queue.errors import TransferQueueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.node.system.launcher import start_local
from transfer_queue.storage.arena.arena import choose_folder
from transfer_queue.system_folder.paths import Description, SystemFolder

ROOT = Path(__file__).resolve().parents[2]


def found(check: Check) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings_of("check", check)}


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime folder of the test's own."""
    with tempfile.TemporaryDirectory(prefix="tqd-") as name:
        monkeypatch.setenv("TQ_RUNTIME_DIR", name)
        yield Path(name)


# ---------------------------------------------------------------- software


def test_versions_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    for package, least in {**software.NEEDED, **software.OPTIONAL}.items():
        asked = re.findall(rf'"{package}>=([\d.]+)"', text)
        assert min(map(software.numbers, asked)) == least  # some extras ask for more


def test_an_old_or_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"numpy": "1.25.2", "torch": None, "msgspec": "0.18.1", "omegaconf": "2.3.0", "tensordict": "0.10.0"}
    monkeypatch.setattr(software, "version_of", lambda package: versions.get(package))
    monkeypatch.setattr(software, "kernel", lambda: ("Linux", "5.4.0-100-generic"))
    got = found(software.check)
    assert {name for name, finding in got.items() if finding.level == "problem"} == {"numpy", "torch"}
    assert got["numpy"].words == "1.25.2, and 1.26 is needed"
    assert got["torch"].advice == "pip install 'torch>=2.6'"
    assert got["ray"].level == "ok"
    assert got["kernel"].level == "warning"


def test_a_local_version_is_read_up_to_its_plus() -> None:
    assert software.numbers("2.6.0+cu124") == (2, 6, 0)


# ---------------------------------------------------------------- processors, memory, limits


@pytest.mark.parametrize(("quota", "level", "usable"), [(None, "ok", 8), (1.5, "warning", 1.5), (12.0, "ok", 8)])
def test_a_small_quota_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, level: str, usable: float
) -> None:
    monkeypatch.setattr(machine, "cpus_allowed", lambda: 8)
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    got = found(machine.check_machine)["processors"]
    assert (got.level, got.values["usable"]) == (level, usable)


def test_the_limit_is_the_least_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.max": ["max", "4294967296", "8589934592"]}
    monkeypatch.setattr(machine, "cgroup_values", lambda name, *_: texts.get(name, []))
    assert machine.memory_limit() == 4 << 30


def test_groups_of_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"memory.limit_in_bytes": [str(0x7FFFFFFFFFFFF000)]}
    monkeypatch.setattr(machine, "cgroup_values", lambda _2="", _c="", name="": texts.get(name, []))
    assert machine.memory_limit() is None


def test_without_a_quota_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cgroup_quota", lambda: math.inf)
    assert machine.cpu_quota() is None


def fake_limits(monkeypatch: pytest.MonkeyPatch, **given: tuple[int, int]) -> dict[str, Finding]:
    numbers = {getattr(resource, name): value for name, value in given.items()}
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(machine, "limit", lambda number: numbers.get(number, infinite))
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (8 << 30, 8 << 30))
    return found(machine.check_limits)


def test_without_limits_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {finding.level for finding in fake_limits(monkeypatch).values()} == {"ok"}


@pytest.mark.parametrize(
    ("limit", "value", "name", "level"),
    [
        ("RLIMIT_NOFILE", (1024, 1 << 20), "open files", "ok"),
        ("RLIMIT_NOFILE", (128, 1 << 20), "open files", "warning"),
        ("RLIMIT_NOFILE", (1024, 1024), "open files", "warning"),
        ("RLIMIT_AS", (4 << 30, 4 << 30), "address space", "problem"),
        ("RLIMIT_AS", (64 << 30, 64 << 30), "address space", "warning"),
        ("RLIMIT_FSIZE", (1 << 30, 1 << 30), "file size", "warning"),
        ("RLIMIT_MEMLOCK", (0, 0), "locked memory", "ok"),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, limit: str, value: tuple[int, int], name: str, level: str) -> None:
    got = fake_limits(monkeypatch, **{limit: value})[name]
    assert got.level == level
    assert bool(got.advice) == (level != "ok")


# ---------------------------------------------------------------- shared memory


def test_missing_shared_memory_says_where_samples_go_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "choice", lambda: choose_folder(tmp_path / "none", tmp_path))
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (9 << 30, 9 << 30))
    got = found(machine.check_shared_memory)
    assert got["folder"].level == "warning"
    assert got["folder"].values["folder"] == str(tmp_path)
    assert f"{tmp_path / 'none'} does not exist" in got["folder"].advice
    assert list(tmp_path.iterdir()) == [], "the probe leaves nothing"


def test_no_space_anywhere_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "choice", lambda: choose_folder(tmp_path / "none", tmp_path))
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (64 << 20, 1 << 20))
    monkeypatch.setattr(machine, "held", lambda folder: 0)
    assert found(machine.check_shared_memory)["folder"].level == "problem"


def test_a_memory_limit_below_the_arena_is_warned_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "choice", lambda: choose_folder(tmp_path, least=0))
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (64 << 30, 64 << 30))
    monkeypatch.setattr(machine, "memory_limit", lambda: 16 << 30)
    got = found(machine.check_shared_memory)["folder against memory"]
    assert got.level == "warning"
    assert "arena_bytes" in got.advice


def test_allocation_that_fails_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "allocation_error", lambda folder: OSError(95, "Operation not supported"))
    got = found(machine.check_shared_memory)["allocation ahead"]
    assert (got.level, got.values["works"]) == ("warning", False)
    assert "Operation not supported" in got.words


def test_shared_memory_that_samples_fill_is_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The probe of a container must not restart it, because that loses the samples."""
    unit = tmp_path / f"transfer_queue-{os.geteuid()}-mine-0123abcd" / "unit-0"
    unit.mkdir(parents=True)
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine, "MIN_SHARED_MEMORY", 2 << 20)
    monkeypatch.setattr(machine, "choice", lambda: choose_folder(tmp_path / "none", tmp_path))
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (4 << 20, 1 << 20))
    assert found(machine.check_shared_memory)["folder"].level == "problem"
    (unit / "arena").write_bytes(b"1" * (3 << 20))
    (got,) = found(machine.check_shared_memory).values()
    assert got.level == "warning"
    assert "1.0 MiB free, 3.0 MiB used by systems" in got.words


# ---------------------------------------------------------------- the settings of a file


@pytest.mark.parametrize(
    ("arena_bytes", "limit", "level", "words"),
    [
        (4 << 30, None, "ok", "may grow to 4.0 GiB (arena_bytes)"),
        (9 << 30, None, "problem", "but FOLDER has 8.0 GiB"),
        (4 << 30, 4 << 30, "problem", "this control group may only use 4.0 GiB"),
        (None, None, "warning", "arena_bytes is not set"),
    ],
)
def test_the_storage_of_a_file_of_settings_must_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arena_bytes: int | None, limit: int | None, level: str, words: str
) -> None:
    monkeypatch.setattr(machine, "file_system_space", lambda folder: (8 << 30, 8 << 30))
    monkeypatch.setattr(machine, "memory_limit", lambda: limit)
    storage = {"arena_bytes": arena_bytes, "arena_folder": str(tmp_path)}
    path = tmp_path / "conf.yaml"
    path.write_text(json.dumps({"backend": {"SimpleStorage": storage}}))
    got = found(lambda: machine.check_storage_settings(path))["arena size"]
    assert got.level == level
    assert words.replace("FOLDER", str(tmp_path)) in got.words
    assert bool(got.advice) == (level != "ok")


def test_a_missing_folder_of_arenas_and_a_missing_file_are_problems(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"
    path.write_text(json.dumps({"backend": {"SimpleStorage": {"arena_folder": str(tmp_path / "none")}}}))
    assert found(lambda: machine.check_storage_settings(path))["arena folder"].level == "problem"
    (got,) = found(lambda: machine.check_storage_settings(tmp_path / "other.yaml")).values()
    assert got.level == "problem"
    assert "cannot be read" in got.words


# ---------------------------------------------------------------- the runtime folder, its systems, the variables


def test_a_long_runtime_folder_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(tmp_path / ("x" * 90)))
    got = found(runtime.check_folder)["socket paths"]
    assert got.level == "problem"
    assert "TQ_RUNTIME_DIR" in got.advice
    assert list(tmp_path.iterdir()) == [], "a folder that was not there is not there afterwards"


def test_a_folder_that_others_can_change_is_a_problem(folder: Path) -> None:
    folder.chmod(0o777)
    (got,) = found(runtime.check_folder).values()
    assert got.level == "problem"
    assert "mode 777" in got.words


def test_systems_are_listed_with_what_dead_ones_left(folder: Path) -> None:
    assert found(runtime.check_systems)["systems"].words == "none is running"
    for name in ("killed", "crashed"):
        (folder / name / "logs").mkdir(parents=True)
        (folder / name).chmod(0o700)
    SystemFolder(folder / "killed").key.write_bytes(b"k" * 32)
    (folder / ".other.1234.gone").mkdir()
    system = start_local("alive", {"settings": Settings.from_config(None).to_json()})
    try:
        got = found(runtime.check_systems)
    finally:
        system.stop()
    assert got["alive"].level == "ok"
    assert got["alive"].values["alive"]
    assert f"started by pid {os.getpid()}" in got["alive"].words
    assert "all its processes were killed" in got["killed"].words
    assert str(folder / "crashed" / "logs") in got["crashed"].words
    assert {got[name].level for name in ("killed", "crashed", ".other.1234.gone")} == {"warning"}


def test_a_controller_that_does_not_reply_is_a_problem_of_its_own_node(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "REPLY_SECONDS", 0.2)
    system = start_local("alive", {"settings": Settings.from_config(None).to_json()})
    try:
        controller = server_process("controller", system)
        controller.suspend()
        silent = found(runtime.check_systems)["alive"]
        monkeypatch.setattr(runtime, "_replies", lambda system: False)  # the address of an outpost is another one
        monkeypatch.setattr(Description, "is_outpost", True)
        elsewhere = found(runtime.check_systems)["alive"]
        monkeypatch.undo()
        controller.resume()
    finally:
        system.stop()
    assert (silent.level, silent.values["replies"]) == ("problem", False)
    assert "did not reply within 0.2 s" in silent.words
    assert "controller" in silent.advice
    assert elsewhere.level == "warning"
    assert "on another node" in elsewhere.words


def test_samples_that_nobody_uses_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arena = tmp_path / f"transfer_queue-{os.geteuid()}-gone-0123abcd"
    arena.mkdir()
    unit = arena / "unit-0"
    unit.mkdir()
    (unit / "header").write_text("{}")
    (unit / "arena").write_bytes(b"1" * (2 << 20))
    monkeypatch.setattr(machine, "choice", lambda: choose_folder(tmp_path, least=0))
    got = found(runtime.check_systems)[str(arena)]
    assert got.level == "warning"
    assert got.words.startswith("2.0 MiB of a system that has ended")


def test_every_variable_is_known() -> None:
    text = (ROOT / "src" / "transfer_queue" / "config" / "environment.py").read_text("utf-8")
    assert set(re.findall(r"TQ_[A-Z_]+", text)) == set(runtime.VARIABLES)


def test_variables_say_what_they_do(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TQ_SYSTEM", "mine")
    monkeypatch.setenv("TQ_ADDRESS", str(folder / "nobody"))
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "many")
    monkeypatch.setenv("TQ_SYSTEMS", "typo")
    got = found(runtime.check_environment)
    assert got["TQ_SYSTEM"].words == "mine (the name of the system to start or attach to)"
    assert (got["TQ_ADDRESS"].level, got["TQ_ADDRESS"].advice[:8]) == ("warning", "unset it")
    assert got["TQ_PRE_ALLOC_SAMPLE_NUM"].level == "problem"
    assert "does not read this variable" in got["TQ_SYSTEMS"].words


# ---------------------------------------------------------------- the self-test


@pytest.mark.parametrize("kind", ["dense", "small"])
def test_one_wrong_byte_is_seen(kind: str) -> None:
    wanted, got = selftest_reader.make(kind, 2 << 20, 7), selftest_reader.make(kind, 2 << 20, 7)
    assert selftest_reader.differences(got, wanted) == []
    name = "values" if kind == "dense" else "numbers"
    got[name].view(torch.uint8)[-1, -1] ^= 1
    assert selftest_reader.differences(got, wanted) == [name]


class Wrong:
    """Stands in for the client and for the reader: every value and every row that it returns is a wrong one."""

    def __init__(self) -> None:
        self.puts = 0

    def put(self, values: Any, **_: Any) -> BatchMeta:
        self.puts += 1
        rows = len(values)
        return BatchMeta(list(range(self.puts * rows, (self.puts + 1) * rows)), ["p"] * rows)

    def get_meta(self, fields: list[str], batch_size: int, *_: Any, **__: Any) -> BatchMeta:
        return BatchMeta(list(range(batch_size)), ["p"] * batch_size)  # the same rows each time

    def status(self) -> SimpleNamespace:
        partition = SimpleNamespace(name="wake-ups", tasks=[SimpleNamespace(waiting=1)])
        return SimpleNamespace(partitions=[partition])

    def result(self) -> dict[str, Any]:
        return {"seconds": 1.0, "wrong": ["values"], "woken": time.monotonic(), "global_indexes": [0]}

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_wrong_bytes_are_a_problem() -> None:
    got = selftest._put_and_get(Wrong(), Wrong(), "dense", 1 << 20, 1e9)  # type: ignore[arg-type]
    assert got.level == "problem"
    assert not got.values["verified"]


def test_a_row_that_is_claimed_twice_is_a_problem() -> None:
    got = selftest._claims(Wrong())  # type: ignore[arg-type]
    assert got.level == "problem"
    assert not got.values["verified"]


def test_a_waiting_claim_that_gets_another_row_is_a_problem() -> None:
    got = selftest._wake_ups(Wrong(), Wrong())  # type: ignore[arg-type]
    assert got.level == "problem"
    assert not got.values["verified"]
    assert f"{selftest.WARM_UPS + selftest.WAKEUPS} of" in got.words


def test_a_reader_that_ends_is_an_error_with_its_last_words(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transfer_queue.py").write_text("raise SystemExit('these are the last words')")
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[no-untyped-call]
    idle = SimpleNamespace(status=lambda: SimpleNamespace(partitions=[]))
    with selftest._Reader(SimpleNamespace(folder=folder)) as reader:  # type: ignore[arg-type]
        with pytest.raises(TransferQueueError, match="ended with status 1: these are the last words"):
            selftest._await_claim(idle, "wake-ups", reader)  # type: ignore[arg-type]
        assert reader.has_ended()


def test_a_reader_without_a_system_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["selftest_reader", str(folder / "nobody")])
    with pytest.raises(SystemExit, match="no system is running in"):
        selftest_reader.main()


def command(*words: str, folder: Path, temporary: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "TQ_RUNTIME_DIR": str(folder), "TMPDIR": str(temporary)}
    arguments = [sys.executable, "-m", "transfer_queue.cli", "doctor", *words]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short folder for temporary files."""
    with tempfile.TemporaryDirectory(prefix="tqt-") as name:
        yield Path(name)


def left(folder: Path, temporary: Path) -> list[str]:
    return files_in(folder) + files_in(temporary) + [str(process) for process in processes_of(folder)]


def test_this_machine(folder: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = warm.run_program(main, "doctor", "--json", "--size", "4")
    (line,) = done.stdout.splitlines()
    told = json.loads(line)
    assert done.returncode == (0 if told["ok"] else 1), done.stderr
    test = {entry["name"]: entry for entry in told["findings"] if entry["topic"] == "self-test"}
    assert {entry["level"] for entry in test.values()} == {"ok"}, test
    assert all(entry["values"].get("verified", True) for entry in test.values())
    moved = [entry["values"] for entry in test.values() if "put_seconds" in entry["values"]]
    assert [entry["rows"] for entry in moved] == [4, 4096]
    assert moved[0]["nbytes"] == 4 << 20
    for entry in moved:
        for name in ("put", "get"):
            assert entry[f"{name}_bytes_per_second"] == pytest.approx(entry["nbytes"] / entry[f"{name}_seconds"])
            assert entry[f"{name}_rows_per_second"] == pytest.approx(entry["rows"] / entry[f"{name}_seconds"])
    claim = test["claim"]["values"]
    assert claim["rows_per_second"] == pytest.approx(claim["claims_per_second"] * claim["batch_size"])
    assert (claim["rows"], claim["batch_size"]) == (4096, 32)
    wake_up = test["wake-up"]["values"]
    assert 0 < wake_up["milliseconds"] <= wake_up["slowest_milliseconds"]
    assert wake_up["count"] == 50
    copied = test["memcpy"]["values"]["bytes_per_second"]
    assert moved[0]["get_of_memcpy"] == pytest.approx(moved[0]["get_bytes_per_second"] / copied)
    assert test["round trip"]["values"]["microseconds"] > 0
    assert left(folder, temporary) == []
    assert arenas(folder) == set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing(folder: Path, temporary: Path, number: signal.Signals, code: int) -> None:
    process = command("--size", "256", folder=folder, temporary=temporary)
    assert process.stdout.readline()  # all of the self-test is still to come
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (code, "")
    assert left(folder, temporary) == []


def test_a_problem_is_exit_1(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "soon")
    assert main(["doctor", "--no-test"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == ["problem"])
    assert lines[at + 1].strip().startswith("-> ")
    assert "TQ_CONTROLLER_GET_METADATA_TIMEOUT" in lines[at] + lines[at + 1]
    assert lines[-1].startswith("1 problem, ")
    assert "self-test" not in lines


def test_a_check_that_cannot_look_is_a_problem_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQ_RUNTIME_DIR", "not/absolute")
    assert main(["doctor", "--no-test", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    levels = {(entry["topic"], entry["level"]) for entry in told["findings"]}
    assert {("runtime folder", "problem"), ("systems", "problem"), ("environment", "problem")} <= levels
