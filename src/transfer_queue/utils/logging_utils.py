"""The loggers of this package.

This module owns the only handler, on the package's own root logger. The handler is silent as soon as the program
configures logging, and the program's root logger is never changed.
"""

from __future__ import annotations

import logging

from transfer_queue.config import environment
from transfer_queue.config.validators import LogLevel

_PACKAGE = "transfer_queue"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]  # no generic class at run time before 3.11
    """Writes to stderr what no handler of the program writes."""

    def emit(self, record: logging.LogRecord) -> None:
        # Records propagate, so that a program with its own handler would write each of them twice.
        if not logging.getLogger().handlers:
            super().emit(record)


def get_logger(name: str, default_level: str | int = "WARNING") -> logging.Logger:
    """Return a logger with the level of TQ_LOGGING_LEVEL, or else `default_level`.

    A level that the program has set is kept. Loggers below `transfer_queue` write to stderr until the program
    configures logging.

    Args:
        name: The name of the logger.
        default_level: The name or number of a level. Default: "WARNING".

    Returns:
        The logger.

    Raises:
        InvalidArgumentError: `default_level` or TQ_LOGGING_LEVEL is not a level.

    Example:
        >>> from transfer_queue.utils.logging_utils import get_logger
        >>> get_logger("my_program", "INFO").name
        'my_program'
    """
    configured = environment.logging_level()
    package = logging.getLogger(_PACKAGE)
    if package.level == logging.NOTSET:
        package.setLevel(configured or logging.WARNING)
    if not any(isinstance(handler, _Fallback) for handler in package.handlers):
        handler = _Fallback()
        handler.setFormatter(logging.Formatter(_FORMAT))
        package.addHandler(handler)
    logger = logging.getLogger(name)
    level = configured or LogLevel().convert("default_level", default_level)
    # A logger with the usual level inherits it, so that it follows the level that the program sets for the package.
    inherits = name.startswith(_PACKAGE + ".") and level == (configured or logging.WARNING)
    if logger.level == logging.NOTSET and not inherits:
        logger.setLevel(level)
    return logger
