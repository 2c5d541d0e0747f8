"""Warns of blocking calls that stop an event loop for long, and names their asynchronous forms."""

from __future__ import annotations

import sys
from types import FrameType

from transfer_queue.utils.logging_utils import get_logger

BLOCKED_SECONDS = 1.0
"""Seconds that a call blocks an event loop before it is logged."""
PACKAGE = "transfer_queue"
CO_GENERATOR = 0x20
"""The flag of the code of a generator, `inspect.CO_GENERATOR`, which servers do not import."""

_warned: set[str] = set()
"""The messages that this process has logged."""


def blocks_loop() -> bool:
    """Return whether a blocking call in this thread stops an event loop now.

    The loop of IPython and Jupyter, in which cells run that may block it, does not count.
    """
    # a process without asyncio runs no loop; servers do not load it
    running = getattr(sys.modules.get("asyncio"), "_get_running_loop", None)
    if running is None or running() is None:
        return False
    shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return shell is None or shell() is None


def warn_of_blocked_loop() -> None:
    """Log once for each method that the call in this thread has blocked an event loop, and what to use instead."""
    blocking, instead = _outermost_call(sys._getframe(1))
    text = (
        f"{blocking} has blocked the event loop of this thread for {BLOCKED_SECONDS:g} s, so that none of its other "
        f"tasks can run. In a coroutine, use {instead}."
    )
    if text not in _warned:
        _warned.add(text)
        get_logger(__name__).warning("%s", text)


def _outermost_call(frame: FrameType | None) -> tuple[str, str]:
    """Return the outermost call of this package that has an asynchronous form, and that form."""
    found = "A blocking call", "the asynchronous form of the call, or asyncio.to_thread"
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] == PACKAGE:
        found = _asynchronous_form(frame) or found
        frame = frame.f_back
    return found


def _asynchronous_form(frame: FrameType) -> tuple[str, str] | None:
    """Return the name of a call, and what a coroutine uses instead; None if nothing does the same there."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if owner is None:
        form = f"async_{name}"
        return (f"{name}()", f"`await {form}(...)`") if form in frame.f_globals else None
    kind = type(owner).__name__
    if name == "__enter__" and hasattr(owner, "__aenter__"):
        return f"`with` of a {kind}", "`async with`"
    if frame.f_code.co_flags & CO_GENERATOR and hasattr(owner, "__aiter__"):
        return f"`for` over a {kind}", "`async for`"
    for form in (f"async_{name}", f"{name}_async"):
        if not name.startswith("_") and hasattr(type(owner), form):
            return f"{kind}.{name}", f"`await {kind}.{form}(...)`"
    return None
