"""A thread beside a server's loop, for what would hold it up."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

SWITCH_SECONDS = 0.0005  # the loop gets the interpreter back after so long; by default only after 5 ms


class Worker:
    """Runs functions one after the other, in a thread that starts with the first of them and ends with the process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = queue.SimpleQueue()
        self._started = False

    def begin(self, run: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Calls `done`, in the worker's thread, with what `run()` gives or the exception that it raises."""
        self._queue.put((run, done))
        if not self._started:
            self._started = True
            sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
            threading.Thread(target=self._work, name="worker", daemon=True).start()

    def _work(self) -> None:
        while True:
            run, done = self._queue.get()
            try:
                outcome = run()
            except BaseException as error:  # a user's code may call sys.exit()
                outcome = error
            done(outcome)
