"""Samplers that do what the sampling_config orders, in a module of their own: their process imports nothing heavy."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

from transfer_queue.node.controller.sampler_process import CHANNEL
from transfer_queue.node.hosting import server_log
from transfer_queue.sampler import BaseSampler


class Newest(BaseSampler):
    """Deals the newest rows, unless its sampling_config orders something else."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **config: Any) -> Any:
        how = config.get("how")
        if how == "hang":
            time.sleep(1000)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            raise SystemExit(3)
        if how == "write":
            os.write(CHANNEL, b"what is no message " * 1000)
        if how == "print":
            print("x" * server_log.MAX_BYTES, flush=True)
            logging.getLogger(__name__).error("much was printed")
        if how == "tags":
            tags = config["partition"].get_custom_meta(ready_indexes)
            ready_indexes = [row for row in ready_indexes if tags[row].get("good")]
        self._states["calls"] = self._states.get("calls", 0) + 1
        return ready_indexes[::-1][:batch_size], []


class Large(Newest):
    """A sampler whose pickled form is larger than the buffer of a socket."""

    def __init__(self, text: str) -> None:
        super().__init__()
        assert len(text) > 1 << 20


class Unwilling(BaseSampler):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("not today")

    def sample(self, *args: Any, **config: Any) -> Any: ...
