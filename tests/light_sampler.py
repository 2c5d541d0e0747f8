"""A user's sampler in a module of its own: whoever unpickles it imports nothing heavy with it."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from transfer_queue.sampler import BaseSampler


class FirstOnes(BaseSampler):
    """The first ready samples."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        chosen = list(ready_indexes)[:batch_size]
        return chosen, chosen


class Gated(BaseSampler):
    """Deals the first ready rows, and counts its deals. If its caller names a file `gate`, waits until it exists.

    It makes a file "<gate> is asked for" when it begins to wait.
    """

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, gate: str | None = None, **config: Any) -> Any:
        if gate is not None:
            with open(f"{gate} is asked for", "x"):
                pass
        while gate is not None and not os.path.exists(gate):
            time.sleep(0.01)
        if config.get("die"):
            os._exit(7)
        self._states["deals"] = self._states.get("deals", 0) + 1
        if config.get("deals"):
            raise RuntimeError(f"{self._states['deals']} deals so far in {os.getpid()}")
        return list(ready_indexes[:batch_size]), list(ready_indexes[:batch_size])


class Failing(FirstOnes):
    """Fails where it is unpickled: in the controller."""

    def __setstate__(self, state: object) -> None:
        raise ZeroDivisionError("in the user's sampler")

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}


class Stuck(Failing):
    """Does not come to an end where it is unpickled."""

    def __setstate__(self, state: object) -> None:
        threading.Event().wait()
