"""Puts the prompts of a dataset into the queue, as far ahead of the policy as the partition allows."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np

from transfer_queue.attachment import current_client
from transfer_queue.errors import CapacityError, SealedError, TransferQueueError
from transfer_queue.integrations.trl.rollout_partition import GROUP, PROMPT, progress_of, table
from transfer_queue.utils.logging_utils import get_logger

_logger = get_logger(__name__)

PAUSE = 1.0
"""Seconds after which a put that waits for the policy checks whether it should end."""


class Prompts(Protocol):
    """A dataset of prompts, such as `datasets.Dataset` or a list."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return a row: a dict with the entry "prompt"."""
        ...


class PromptFeed:
    """A thread that puts one group of samples for each prompt, and seals the partition after the last one.

    The number of a prompt is the number of groups that the partition has admitted before it. So a feed continues where
    the previous one ended, also after a checkpoint was loaded.

    Args:
        prompts: The dataset.
        partition_id: The partition of the rollouts.
        group_size: The number of completions of each prompt.
        epochs: How often the dataset is repeated; None: without end.
        seed: The seed of the order, which differs in each epoch; None: the order of the dataset.
    """

    def __init__(
        self, prompts: Prompts, partition_id: str, group_size: int, epochs: int | None, seed: int | None
    ) -> None:
        self._prompts = prompts
        self._partition = partition_id
        self._group_size = group_size
        self._end = None if epochs is None else epochs * len(prompts)
        self._seed = seed
        self._order: tuple[int, Any] = -1, None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The error that ended the thread; None if there was none."""

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="tq-prompt-feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            progress = progress_of(self._partition)
            assert progress is not None
            assert progress.policy is not None
            number = (progress.policy.admitted + sum(progress.dropped.values())) // self._group_size
            while not self._stop.is_set() and (self._end is None or number < self._end):
                number += self._put(number)
            if not self._stop.is_set():
                current_client().seal(self._partition)
        except SealedError:
            pass  # the training has ended
        except BaseException as error:
            self.failure = error
            if not isinstance(error, TransferQueueError):
                _logger.exception("the prompts of the training cannot be read or put")

    def _put(self, number: int) -> int:
        """Put the group of a prompt. Return 1, or 0 if it may not be put yet."""
        row = self._row(number)
        size = self._group_size
        try:
            current_client().put(
                table({PROMPT: [row] * size}), partition_id=self._partition, group_ids=[number] * size,
                tags=[{GROUP: number}] * size, timeout=PAUSE,
            )  # fmt: skip
        except CapacityError:  # also of samples that would be too far ahead of the policy
            return 0
        return 1

    def _row(self, number: int) -> Any:
        epoch, position = divmod(number, len(self._prompts))
        if self._seed is None:
            return dict(self._prompts[position])
        if self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts))
        return dict(self._prompts[int(self._order[1][position])])
