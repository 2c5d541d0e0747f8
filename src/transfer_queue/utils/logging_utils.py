"""Loggers of this package.

Owns the one handler, on the package's own root logger. It stays silent as soon as the program configures
logging itself, and the program's root logger is never touched.
"""

from __future__ import annotations

import logging

from transfer_queue.config import environment
from transfer_queue.config.validators import LogLevel

_PACKAGE = "transfer_queue"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  # no generic class at run time before 3.11
    """Writes to stderr what no handler of the program would write."""

    def emit(self, record: logging.LogRecord) -> None:
        # Records propagate, so a program with a handler of its own would see each of them twice.
        if not logging.getLogger().handlers:
            super().emit(record)


def get_logger(name: str, default_level: str | int = "WARNING") -> logging.Logger:
    """The logger called `name`, at the level that TQ_LOGGING_LEVEL asks for, else at `default_level`.

    A level that the program has set itself stays. Loggers below `transfer_queue` write to stderr until the
    program configures logging. Errors: InvalidArgumentError where either names no level.
    """
    asked = environment.logging_level()
    package = logging.getLogger(_PACKAGE)
    if package.level == logging.NOTSET:
        package.setLevel(asked or logging.WARNING)
    if not any(isinstance(handler, _Fallback) for handler in package.handlers):
        handler = _Fallback()
        handler.setFormatter(logging.Formatter(_FORMAT))
        package.addHandler(handler)
    logger = logging.getLogger(name)
    level = asked or LogLevel().convert("default_level", default_level)
    # One that wants the package's usual level inherits it, and so follows what the program sets for the package.
    inherits = name.startswith(_PACKAGE + ".") and level == (asked or logging.WARNING)
    if logger.level == logging.NOTSET and not inherits:
        logger.setLevel(level)
    return logger
