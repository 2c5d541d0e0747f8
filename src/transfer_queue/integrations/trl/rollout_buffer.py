"""The buffer from which TRL's trainer takes samples: claims them under leases, and acknowledges those it has used."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from transfer_queue.attachment import current_client
from transfer_queue.integrations.trl.rollout_partition import (
    GENERATED,
    GROUP,
    PROMPT,
    SCORED,
    TRAIN,
    VERSION,
    progress_of,
)
from transfer_queue.metadata import BatchMeta

FIELDS = [PROMPT, *GENERATED, *SCORED]
WAIT = 5.0
"""Seconds after which a get that waits checks whether the producers are alive."""
LEFT_OUT = "left out by the trainer"
"""The reason of the samples that the trainer took and did not train on."""
IN_ORDER = {"sampler": "SequentialSampler"}
"""Ready samples in the order of their prompts. A group is ready as a whole, since its advantages are put together."""

_NAMES = {field.name for field in dataclasses.fields(RolloutSample)}
_ARRAYS = "group_id" in _NAMES  # TRL 1.4 has lists in a sample, later versions arrays


class RolloutBuffer:
    """The part of `queue.Queue` that TRL's trainer uses.

    Samples have positions: the first that is taken has 0. `release` acknowledges and clears the samples before a
    position, or drops them. Samples that were taken and not released are delivered again if this process dies.

    Args:
        partition_id: The partition of the rollouts.
        group_size: The number of samples that are claimed at once.
        lease: Seconds of their lease.
        check: Called at intervals while a get waits. It may raise an error, which ends the get.
    """

    def __init__(self, partition_id: str, group_size: int, lease: float, check: Callable[[], None]) -> None:
        self._partition = partition_id
        self._group_size = group_size
        self._lease = lease
        self._check = check
        self._ready: deque[RolloutSample] = deque()
        """Samples that were claimed and not taken."""
        self._claims: deque[tuple[int, BatchMeta]] = deque()
        """The position of the first sample of each claim, and its samples that were not released."""
        self._held: set[int] = set()
        """The global indexes of all these samples."""
        self._claimed = 0
        self._taken = 0
        self._positions: dict[int, int] = {}
        """The id of the token ids of a sample that was taken -> its position."""
        self._arrays: deque[tuple[int, Any]] = deque()
        self._size = 0, -math.inf
        self.offset = 0
        """What is added to the version of a sample, since TRL counts versions from the start of the process."""

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """Return the next sample.

        Args:
            block: Whether to wait for a sample. Default: True.
            timeout: Seconds to wait. Default: without limit.

        Raises:
            queue.Empty: No sample was ready in time.
            WaitTimeoutError: No sample will come; see `TransferQueueRolloutWorker.check_health`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = WAIT if end is None else end - time.monotonic()
            if not self._claim(max(0.0, min(WAIT, left)) if block else 0.0):
                self._check()
                if not block or left <= WAIT:
                    raise queue.Empty
        sample = self._ready.popleft()
        self._positions[id(sample.input_ids)] = self._taken
        self._arrays.append((self._taken, sample.input_ids))  # kept, so that no other object gets its id
        self._taken += 1
        return sample

    def get_nowait(self) -> RolloutSample:
        """Return the next sample without waiting. Raises `queue.Empty` if there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """Return the number of samples that the trainer could take, at most a second old: TRL asks for each sample."""
        size, measured = self._size
        if time.monotonic() > measured + 1.0:
            progress = progress_of(self._partition)
            fields, tasks = ([], []) if progress is None else (progress.fields, progress.tasks)
            scored = sum(field.produced for field in fields if field.name == SCORED[0])
            size = scored - sum(task.claimed + task.consumed for task in tasks if task.name == TRAIN)
            self._size = size, time.monotonic()
        return len(self._ready) + max(0, size)

    def position_of(self, input_ids: Any) -> int:
        """Return the position of a sample that was taken and not released, by the object with its token ids."""
        return self._positions[id(input_ids)]

    def release(self, position: int, trained: Collection[int] | None = None) -> None:
        """Acknowledge and clear the samples before a position, and drop those that were not trained on.

        Args:
            position: The position.
            trained: The positions of those samples that were trained on. The trainer has taken the others and left them
                out, because they were too old. Default: all of them.
        """
        client = current_client()
        used, dropped = [], []
        while self._claims and self._claims[0][0] < position:
            first, meta = self._claims.popleft()
            count = min(position - first, len(meta))
            rows = [row for row in range(count) if trained is None or first + row in trained]
            used += [meta.select_samples(rows)] if rows else []
            dropped += [meta.select_samples(sorted({*range(count)} - {*rows}))] if len(rows) < count else []
            self._held.difference_update(meta.global_indexes[:count])
            if count < len(meta):
                self._claims.appendleft((first + count, meta.select_samples(range(count, len(meta)))))
        for meta in used:
            client.ack(meta)
        if used:
            client.clear_samples(BatchMeta.concat(used))
        if dropped:
            client.drop(self._partition, metadata=BatchMeta.concat(dropped), reason=LEFT_OUT)
        while self._arrays and self._arrays[0][0] < position:
            del self._positions[id(self._arrays.popleft()[1])]

    def _claim(self, timeout: float) -> bool:
        """Claim a group of samples. Return whether there are samples to take."""
        data, meta, _ = current_client().await_data(
            FIELDS, self._group_size, self._partition, TRAIN, IN_ORDER, lease=self._lease, layout="list",
            timeout=timeout,
        )  # fmt: skip
        if data is None:
            return False
        # If this process was stopped for longer than a lease, samples that it has are delivered to it again.
        new = [row for row, index in enumerate(meta.global_indexes) if index not in self._held]
        if new:
            columns = {name: data[name] for name in FIELDS}
            tags = meta.custom_meta
            self._ready += [self._sample({name: columns[name][row] for name in FIELDS}, tags[row]) for row in new]
            self._claims.append((self._claimed, meta.select_samples(new)))
            self._claimed += len(new)
            self._held.update(meta.global_indexes)
        return bool(new)

    def _sample(self, values: Mapping[str, Any], tag: Mapping[str, Any]) -> RolloutSample:
        arrays = {name: values[name].numpy() for name in ("input_ids", "completion_mask", "old_log_probs")}
        entries = {
            "prompt": _messages("user", values[PROMPT]["prompt"]),
            "completion": _messages("assistant", values["completion"]),
            **({name: array if _ARRAYS else array.tolist() for name, array in arrays.items()}),
            "advantage": float(values["advantage"]),
            "model_version": int(tag[VERSION]) + self.offset,
            "group_id": int(tag[GROUP]),
            "metrics": dict(values["metrics"]),
            "enqueued_at": time.time(),
        }
        return RolloutSample(**{name: value for name, value in entries.items() if name in _NAMES})


def _messages(role: str, content: Any) -> Any:
    """Return a text as a message, as TRL's traces show it."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content
