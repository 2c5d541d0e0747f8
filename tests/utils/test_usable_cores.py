"""How many cores a process may use for its copies."""

import _thread
import math
import os
import threading
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
import warm
from transfer_queue.config import environment
from transfer_queue.config.environment import RANKS_OF_NODE, cgroup_quota, copy_threads, max_streams


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    for variable in RANKS_OF_NODE:
        monkeypatch.delenv(variable.name, raising=False)


def tree(folder: Path, files: dict[str, str], of_process: str) -> tuple[Path, Path]:
    """A tree of cgroups, and the file that says in which of them the process is."""
    for name, text in files.items():
        (folder / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup" / name).write_text(text)
    (folder / "self").write_text(of_process)
    return folder / "cgroup", folder / "self"


@pytest.mark.parametrize(
    ("files", "of_process", "cores"),
    [
        ({"cpu.max": "400000 100000\n"}, "0::/\n", 4),
        ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
        ({"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 8),
        ({"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "300000 100000\n"}, "0::/a/b\n", 1.5),
        ({"cpu.max": "200000 100000\n"}, "0::/of/the/host\n", 2),
        ({"cpu.max": "200000 100000\n", "x/cpu.max": "100000 100000\n"}, "0::/../../y\n", 2),
        ({"cpu/c/cpu.cfs_quota_us": "350000\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/c\n", 3.5),
        ({"cpu/c/cpu.cfs_quota_us": "-1\n", "cpu/c/cpu.cfs_period_us": "100000\n"}, "3:cpu,cpuacct:/c\n", math.inf),
        ({"memory/c/cpu.max": "100000 100000\n"}, "5:memory:/c\n", math.inf),
        ({"cpu.max": "nonsense"}, "0::/\n", math.inf),
    ],
)
def test_the_quota_of_cgroups(tmp_path, files, of_process, cores):
    assert cgroup_quota(*tree(tmp_path, files, of_process)) == cores


def test_without_cgroups_there_is_no_quota(tmp_path):
    assert cgroup_quota(tmp_path, tmp_path / "missing") == math.inf


@pytest.mark.parametrize(
    ("cores", "quota", "ranks", "threads", "streams"),
    [
        (1, math.inf, None, 1, 1),
        (2, math.inf, None, 2, 1),
        (2, math.inf, 8, 2, 1),
        (7, math.inf, None, 7, 1),
        (8, math.inf, None, 8, 2),
        (16, math.inf, None, 16, 4),
        (16, math.inf, 8, 2, 1),
        (128, 4.0, None, 4, 1),
        (128, 0.5, None, 1, 1),
        (128, math.inf, None, 16, 8),
        (128, math.inf, 8, 16, 4),
        (64, math.inf, 8, 8, 2),
    ],
)
@pytest.mark.parametrize("variable", [each.name for each in RANKS_OF_NODE])
def test_the_threads_of_a_copy_and_the_streams_to_a_node(monkeypatch, variable, cores, quota, ranks, threads, streams):
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda pid: range(cores))
    monkeypatch.setattr(environment, "cgroup_quota", lambda: quota)
    if ranks is not None:
        monkeypatch.setenv(variable, str(ranks))
    assert (copy_threads(), max_streams()) == (threads, streams)


def test_what_another_program_writes_into_its_variable_is_ignored(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8(x2)")
    assert copy_threads() >= 1


def copy_in_process_and_fork(threads: int) -> None:
    """Copy little and much, and much again in a fork; count the threads that start. Runs in a process of its own."""
    started = []
    start = _thread.start_new_thread

    def counted(*arguments):
        started.append(arguments)
        return start(*arguments)

    _thread.start_new_thread = counted
    keys, large = [str(number) for number in range(1000)], torch.arange(9 << 20).view(9, 1 << 20)
    tq.init({"client": {"copy_threads": threads}})
    tq.kv_batch_put(keys, "small", {"x": torch.ones(1000, 100)})
    tq.kv_batch_get(keys, "small")
    assert not started, "a small copy has started a thread"
    tq.kv_batch_put(keys[:9], "large", {"x": large})
    assert rows_of("large", 9).equal(large)
    assert len(started) == 2 * (threads - 1), started
    child = os.fork()
    if not child:
        tq.kv_batch_put(keys[:9], "child", {"x": large + 1})
        same = rows_of("child", 9).equal(large + 1)
        os._exit(0 if same and len(started) == 4 * (threads - 1) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert rows_of("child", 9).equal(large + 1)
    tq.close()
    assert threading.active_count() == 1


def rows_of(partition: str, rows: int) -> torch.Tensor:
    return torch.stack(list(tq.kv_batch_get([str(number) for number in range(rows)], partition)["x"].unbind()))


@pytest.mark.parametrize("threads", [1, 4])
def test_copies_of_a_real_process_and_of_its_fork(threads):
    """A process that copies little starts no thread, and none is left."""
    process = warm.process(copy_in_process_and_fork, threads, daemon=False)
    process.start()
    process.join()
    assert process.exitcode == 0
