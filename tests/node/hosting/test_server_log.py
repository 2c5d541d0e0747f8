"""The size of a server's log is bounded in every situation."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from transfer_queue.node.hosting import server_log
from transfer_queue.node.hosting.server_log import LINES_A_PERIOD, PERIOD, RepeatLimit

CHILD = """
import logging, sys
from pathlib import Path
from transfer_queue.node.hosting import server_log
server_log.MAX_BYTES = 10_000
server_log.LINES_A_PERIOD = 10**6
file = server_log.write_log_to(Path(sys.argv[1]))
for number in range(2000):
    logging.getLogger("server").info("line %d of many", number)
print("printed, " * 3000, flush=True)
file.limit_size()
print("the end", flush=True)
"""

FULL_DISK = """
import os, sys
from pathlib import Path
from transfer_queue.node.hosting import server_log
server_log.MAX_BYTES = 10
file = server_log.LogFile(Path(sys.argv[1]))

def refuse(*arguments):
    raise OSError(28, "no space left on device")

opened, os.open = os.open, refuse
print("while it is full", flush=True)
file.limit_size()
os.open = opened
print("when there is space", flush=True)
file.limit_size()
print("the end", flush=True)
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines(limit: RepeatLimit, count: int, text: str = "connection %d is dropped") -> list[str]:
    """Return the lines that are written out of this number of log lines."""
    records = [logging.LogRecord("server", logging.ERROR, "", 0, text, (number,), None) for number in range(count)]
    return [record.getMessage() for record in records if limit.filter(record)]


def test_similar_lines_are_counted_instead_of_written() -> None:
    clock = Clock()
    limit = RepeatLimit(clock)
    assert len(lines(limit, 1000)) == LINES_A_PERIOD
    assert lines(limit, 1, "another line, %d") == ["another line, 0"]
    clock.now = PERIOD
    assert lines(limit, 1) == [
        f"connection 0 is dropped ({1000 - LINES_A_PERIOD} more lines like this were not written)"
    ]
    clock.now = 2 * PERIOD
    assert lines(limit, 1) == ["connection 0 is dropped"]


def test_texts_that_never_occur_again_are_not_remembered_for_ever() -> None:
    limit = RepeatLimit(Clock())
    for number in range(3 * server_log.MAX_KINDS):
        assert lines(limit, 1, f"%d of {number}")
    assert len(limit._seen) <= server_log.MAX_KINDS


def test_only_a_log_file_and_the_one_before_it_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", CHILD, str(path)]) == 0
    assert sorted(found.name for found in tmp_path.iterdir()) == ["controller.log", "controller.log.1"]
    assert path.read_text() == "the end\n"
    old = tmp_path / "controller.log.1"
    assert "line 1999 of many" in old.read_text()
    assert "line 0 of many" not in old.read_text()
    assert old.stat().st_mode & 0o777 == 0o600


def test_a_server_continues_to_write_to_a_log_that_cannot_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "MAX_BYTES", 0)
    monkeypatch.setattr(server_log.LogFile, "_begin", lambda self: None)
    server_log.LogFile(tmp_path / "nowhere" / "controller.log").limit_size()


def test_a_new_file_is_created_when_there_is_space_for_it_again(tmp_path: Path) -> None:
    path = tmp_path / "controller.log"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", FULL_DISK, str(path)]) == 0
    assert path.read_text() == "the end\n"
    assert (tmp_path / "controller.log.1").read_text() == "while it is full\nwhen there is space\n"
