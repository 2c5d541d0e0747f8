"""Loggers of the package."""

from __future__ import annotations

import subprocess
import sys

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


class TestLogger:
    def run(self, before="", **environment):
        """Standard output and error of a process that logs."""
        import os

        env = {name: value for name, value in os.environ.items() if name != "TQ_LOGGING_LEVEL"}
        code = LOGGING.format(before=before)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**env, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr.splitlines()

    def test_one_handler(self):
        """One handler, on the package's own root logger; each record once; warnings by default."""
        handlers, lines = self.run()
        assert handlers == ["0", "1", "0"]
        assert [line.rpartition(" WARNING ")[2] for line in lines] == [
            "transfer_queue.part: a warning",
            "transfer_queue: of the root",
        ]

    def test_environment(self):
        """TQ_LOGGING_LEVEL sets the level."""
        assert len(self.run(TQ_LOGGING_LEVEL="INFO")[1]) == 3
        assert self.run(TQ_LOGGING_LEVEL="ERROR")[1] == []

    def test_program_that_logs_itself(self):
        """Where the program configures logging, its handlers write, and each record once."""
        _, lines = self.run("logging.basicConfig(format='mine %(message)s')")
        assert lines == ["mine a warning", "mine of the root"]

    def test_program_that_sets_the_level(self):
        """A level that the program sets for the package holds for its loggers."""
        assert len(self.run("logging.getLogger('transfer_queue').setLevel('DEBUG')")[1]) == 3

    def test_default_level(self):
        """default_level is that of a logger without TQ_LOGGING_LEVEL."""
        _, lines = self.run(
            "from transfer_queue.utils.logging_utils import get_logger as g; g('transfer_queue.part', 'INFO')"
        )
        assert len(lines) == 3
