"""Loggers of the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

LOGGING = """
import logging, os, sys
{before}
from transfer_queue.utils.logging_utils import get_logger
for _ in range(3):
    logger = get_logger("transfer_queue.part")
logger.info("an info"); logger.warning("a warning")
get_logger("transfer_queue").warning("of the root")
print(len(logging.getLogger().handlers), len(logging.getLogger("transfer_queue").handlers), len(logger.handlers))
"""


WARNINGS = ["transfer_queue.part: a warning", "transfer_queue: of the root"]
FROM_INFO = ["transfer_queue.part: an info", *WARNINGS]
INFO_BY_DEFAULT = "from transfer_queue.utils.logging_utils import get_logger as g; g('transfer_queue.part', 'INFO')"


@pytest.mark.parametrize(
    ("before", "level", "expected"),
    [
        ("", None, WARNINGS),
        ("", "INFO", FROM_INFO),
        ("", "ERROR", []),
        ("logging.getLogger('transfer_queue').setLevel('DEBUG')", None, FROM_INFO),
        (INFO_BY_DEFAULT, None, FROM_INFO),
    ],
    ids=["default", "INFO", "ERROR", "a level of the program", "default_level"],
)
def test_each_record_is_written_once_by_one_handler(before: str, level: str | None, expected: list[str]) -> None:
    handlers, lines = run(before, level)
    assert handlers == ["0", "1", "0"]
    assert [re.split(" (?:INFO|WARNING) ", line)[1] for line in lines] == expected


def test_if_the_program_configures_logging_its_handlers_write() -> None:
    _, lines = run("logging.basicConfig(format='mine %(message)s')")
    assert lines == ["mine a warning", "mine of the root"]


def run(before: str, level: str | None = None) -> tuple[list[str], list[str]]:
    """Return standard output and error of a process that logs, with this TQ_LOGGING_LEVEL."""
    environment = {**os.environ, **({} if level is None else {"TQ_LOGGING_LEVEL": level})}
    done = subprocess.run(
        [sys.executable, "-c", LOGGING.format(before=before)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr.splitlines()
