"""Fixtures of all tests: a runtime directory of the run's own, and the proof that nothing is left behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import settings

import differential
import warm
from leftovers import abandoned_for, arenas, files_in, wait_for_none

# Set before any test imports the package: no test meets a system of the user's. Short, because the path of a
# UNIX socket has space for about 100 characters.
_RUNTIME_DIR = Path(tempfile.mkdtemp(prefix="tq-test-"))
os.environ["TQ_RUNTIME_DIR"] = str(_RUNTIME_DIR)
for _name in [name for name in os.environ if name.startswith("TQ_") and name not in {"TQ_RUNTIME_DIR", "TQ_CI_RUN"}]:
    del os.environ[_name]
os.environ.pop("RAY_ADDRESS", None)
# Several processes share the cores: torch's threads that wait for work give theirs to others instead of spinning.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A shell starts what it runs in the background with Ctrl-C ignored, and processes inherit that: tests that interrupt
# a process which they have started would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("untimed", deadline=None)  # no test depends on speed
settings.register_profile("few", deadline=None, max_examples=5)
settings.load_profile("untimed")

SECONDS = 60  # within which what was closed must be gone


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After the last test no process of the run is alive, its runtime directory is empty, no arena lies about."""
    yield
    warm.stop()
    processes = wait_for_none(_RUNTIME_DIR, SECONDS)
    files = files_in(_RUNTIME_DIR)
    assert processes == []
    assert files == []
    assert abandoned_for(lambda: arenas(_RUNTIME_DIR), SECONDS) == []


# What takes longest comes first, so that of several processes none is left alone with it at the end: names of files,
# which are each there once. Files that mostly wait for processes alternate with files that compute, so that both kinds
# run at the same time.
WAITING = [
    "test_durable_values.py", "test_benchmarks.py", "test_node.py", "test_worker_processes.py", "test_restarts.py",
    "test_attaching.py", "test_takeover_of_values.py", "test_processes.py", "test_takeover.py", "test_cli.py",
    "test_samplers.py", "test_sampler_host.py", "test_checkpoints_of_processes.py", "test_nodes.py",
    "test_lifecycle.py", "test_cli_watch.py", "test_timeline.py", "test_cli_doctor.py", "test_top.py",
    "test_disk_tier.py", "test_chaos_of_processes.py",
    "test_first_request.py", "test_lease_delivery.py",
]  # fmt: skip
COMPUTING = [
    "test_chaos.py", "test_locks_by_schedule.py", "test_final_rounds.py", "test_interleavings.py", "test_verdict.py",
    "test_top_screens.py", "test_docstring_examples.py", "test_object_codec.py",
    "test_codec.py", "test_planted.py", "test_user_samplers.py", "test_followers.py",
    "test_differencing.py", "test_staleness.py", "test_random_programs.py", "test_token_budget.py",
]  # fmt: skip
LONGEST = [name for pair in zip_longest(WAITING, COMPUTING) for name in pair if name is not None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make fuzz` runs more examples, `make quick` fewer."""
    parser.addoption("--examples-factor", type=float, default=1, help="multiplies the examples of differential tests")
    parser.addoption("--quick", action="store_true", help="leaves out the files that take long, and runs few examples")


def pytest_configure(config: pytest.Config) -> None:
    """Differential tests read the factor when they are imported."""
    differential.factor = config.getoption("--examples-factor")
    if config.getoption("--quick"):
        differential.factor = 0.05
        settings.load_profile("few")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """See the option `--quick`."""
    return True if config.getoption("--quick") and collection_path.name in LONGEST else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See `LONGEST`; the others come in the order of their folders."""
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONGEST)))


def pytest_unconfigure() -> None:
    """Removes the runtime directory, also of a run that only collected."""
    shutil.rmtree(_RUNTIME_DIR, ignore_errors=True)


def is_attached() -> bool:
    """Whether this process is attached to a system, by `init` or by itself."""
    current = sys.modules.get("transfer_queue.attachment")
    return current is not None and current.CURRENT.client is not None


@pytest.fixture(scope="module", autouse=True)
def everything_is_closed() -> Iterator[None]:
    """What a module has started or attached to is closed when its last test is over."""
    # Much of what imports and earlier modules have made stays. Without this, tests that collect garbage, and the
    # collector itself, look through it each time, for 0.4 s.
    gc.collect()
    gc.freeze()
    yield
    left = is_attached()
    if left:
        sys.modules["transfer_queue"].close()
    assert not left, "a test of this module left a system attached: call tq.close()"


@pytest.fixture
def runtime_dir() -> Path:
    """The TQ_RUNTIME_DIR of this run."""
    return _RUNTIME_DIR
