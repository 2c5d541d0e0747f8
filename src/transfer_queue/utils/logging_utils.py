"""Loggers of this package.

The logger `transfer_queue` has one handler, which writes to stderr until the program configures logging itself. The
root logger of the program is not changed.
"""

from __future__ import annotations

import logging

from transfer_queue.config import environment
from transfer_queue.config.validators import LogLevel

_PACKAGE = "transfer_queue"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  # no generic class at run time before 3.11
    """Writes records to stderr unless the root logger of the program has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        # Records propagate, so that a program with its own handler would write each of them twice.
        if not logging.getLogger().handlers:
            super().emit(record)


def get_logger(name: str, default_level: str | int = "WARNING") -> logging.Logger:
    """Return a logger whose level is TQ_LOGGING_LEVEL, or `default_level` if the variable is not set.

    A level that the program has set is kept. Loggers whose names begin with `transfer_queue.` write to stderr until the
    program configures logging.

    Args:
        name: The name of the logger.
        default_level: The name of a level, in any case, or its number. Default: "WARNING".

    Returns:
        The logger of `logging` with this name.

    Raises:
        InvalidArgumentError: TQ_LOGGING_LEVEL or default_level is not a level.

    Example:
        >>> from transfer_queue.utils.logging_utils import get_logger
        >>> get_logger("trainer", "INFO").name
        'trainer'
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
    # A logger with the usual level inherits it, so that it follows the level that the program sets for the package.
    inherits = name.startswith(_PACKAGE + ".") and level == (asked or logging.WARNING)
    if logger.level == logging.NOTSET and not inherits:
        logger.setLevel(level)
    return logger
