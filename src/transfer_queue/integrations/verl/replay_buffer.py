"""The replay buffers of verl that wait for changes of one partition, while verl's own list all keys every 2 s.

Which prompts are sampled, dropped or refilled is decided by verl's code, which the classes inherit.
"""

from __future__ import annotations

import time
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import (
    VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS,
    ReplayBuffer,
    ReplayBufferAsync,
)

from transfer_queue.client.conversion.change_events import PartitionChange
from transfer_queue.display import count_text, short_name, time_of_day, worker_text
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.integrations.verl.partition_mirror import PartitionMirror
from transfer_queue.interface import get_client
from transfer_queue.messages.reports.samples import SampleReport
from transfer_queue.utils.logging_utils import get_logger

PROMPTS = {"is_prompt": True}
"""The tag entries of a prompt. A trajectory does not have them."""
MAX_PROMPTS = 8
"""The unfinished prompts that the report of a long wait describes."""

logger = get_logger(__name__)


class EventDrivenReplayBuffer(ReplayBuffer):
    """The replay buffer of verl's synchronous trainer, which waits for changes instead of polling.

    verl makes it if its configuration has `trainer.v1.sampler.custom_sampler.path=pkg://transfer_queue.integrations.verl`
    and `trainer.v1.sampler.custom_sampler.name=EventDrivenReplayBuffer`. It samples the same prompts in the same order
    as verl's ReplayBuffer. It reads only the partition that is sampled, and of it only what has changed since the
    previous call. The first call reads the whole partition.

    If `sample` waits for a long time, it logs the prompts that are not finished: for how long each of them has not
    changed, and which client wrote it last.

    Args:
        refill_fn: The method of the trainer that adds prompts. verl passes the settings of group filtering only to its
            own replay buffers; this class reads them from the configuration of that trainer.
        sampler_kwargs: `report_after`: the seconds after which a wait is logged, and between further log messages.
            Default: VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS (60). Other entries are ignored.
        arguments: See verl's ReplayBuffer. `poll_interval` has no effect on the wait.

    Raises:
        InvalidArgumentError: `report_after` is not a positive number.

    Example:
        >>> # trainer.v1.sampler.custom_sampler.path: pkg://transfer_queue.integrations.verl
        >>> # trainer.v1.sampler.custom_sampler.name: EventDrivenReplayBuffer
        >>> buffer = EventDrivenReplayBuffer(
        ...     trainer_mode="sync", trainer_config={}, sampler_kwargs={"report_after": 30},
        ...     max_off_policy_threshold=8, max_off_policy_strategy="drop",
        ... )
        >>> batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        >>> batch.keys
        ['uid_0_0']
    """

    def __init__(self, *, refill_fn: Any = None, sampler_kwargs: Any = None, **arguments: Any) -> None:
        trainer = getattr(refill_fn, "__self__", None)
        if hasattr(trainer, "_resolve_filter_groups_metric"):
            arguments = {**self._settings_of(trainer), **arguments}
        super().__init__(refill_fn=refill_fn, sampler_kwargs=sampler_kwargs, **arguments)
        self._partition_id = "train"
        self._mirrors: dict[str, PartitionMirror] = {}
        self._report_after = _positive_seconds((sampler_kwargs or {}).get("report_after"))

    @staticmethod
    def _settings_of(trainer: Any) -> dict[str, Any]:
        """Return the arguments that a trainer passes to verl's own replay buffer, and not to a custom one."""
        config = trainer.config
        metric = trainer._resolve_filter_groups_metric()
        refill = bool(config.trainer.v1.sampler.get("sync_refill_failed_groups", False))
        settings = {"filter_groups_metric": metric, "sync_refill_failed_groups": refill}
        if trainer.trainer_mode == "sync":
            size = config.data.train_batch_size
            one_by_one = metric is not None or refill
            settings["train_batch_size"] = size
            settings["gen_batch_size"] = 1 if one_by_one else config.data.get("gen_batch_size", None) or size
            if metric is not None:
                settings["max_inflight_gen_batches"] = config.algorithm.filter_groups.get("max_inflight_gen_batches", 1)
        return settings

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Return the trajectories of the next prompts, as soon as enough prompts are finished.

        Args:
            global_steps: The current step of the training.
            partition_id: The partition, "train" or "val".
            batch_size: The number of prompts.

        Returns:
            A `KVBatchMeta` with the trajectories, and verl's metrics about prompts that were dropped.
        """
        self._partition_id = partition_id
        sampled: tuple[Any, dict[str, Any]] = super().sample(global_steps, partition_id, batch_size)
        return sampled

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Update the tables of the sampled partition. verl calls this before each decision."""
        partition_id = self._partition_id
        if partition_id not in self._mirrors:
            self._mirrors[partition_id] = PartitionMirror(self, partition_id)
        self._mirrors[partition_id].update(lambda since: self._changes(partition_id, since, 0.0))

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        """Wait until the status of a prompt changes, and log a long wait.

        Returns:
            The time of the last report, which verl passes to the next call.
        """
        left = last_debug_time + self._report_after - time.time()
        self._changes(partition_id, self._mirrors[partition_id].version, max(left, 0.0), PROMPTS)
        now = time.time()
        if now - last_debug_time < self._report_after:
            return last_debug_time
        logger.warning(self._wait_text(partition_id))
        return now

    def _changes(
        self, partition_id: str, since: int | None, timeout: float, where: dict[str, Any] | None = None
    ) -> PartitionChange:
        return get_client().wait_for_change(partition_id, since, where, timeout=timeout)

    def _wait_text(self, partition_id: str) -> str:
        """Return a text that names the prompts which are not finished, the longest unchanged first."""
        prompts = self._mirrors[partition_id].prompts
        unfinished = [uid for uid, prompt in prompts.items() if prompt.status in ("pending", "running")]
        counts = [
            f"{len(keys[partition_id]):,} {status}"
            for status, keys in (
                ("finished", self.finished_keys), ("failed", self.failure_keys),
                ("running", self.running_keys), ("pending", self.pending_keys),
            )
        ]  # fmt: skip
        lines = [f"Still waiting for prompts of partition {short_name(partition_id)!r}: {', '.join(counts)}."]
        oldest = sorted(unfinished, key=lambda uid: prompts[uid].version)
        lines += [self._prompt_text(partition_id, uid) for uid in oldest[:MAX_PROMPTS]]
        if len(oldest) > MAX_PROMPTS:
            lines.append(f"  and {count_text(len(oldest) - MAX_PROMPTS, 'more unfinished prompt')}")
        if not unfinished:
            lines.append("  No prompt is being worked on: fewer prompts were submitted than the batch needs.")
        return "\n".join(lines)

    def _prompt_text(self, partition_id: str, uid: str) -> str:
        report = get_client().describe_sample(partition_id, key=uid)
        status = report.tags.get("status", report.state)
        made = sum(key.partition("_")[0] == uid for key in self.partitions[partition_id])
        return f"  {short_name(uid)}: {status}, trajectories so far: {made}, {_last_change_text(report)}"


class EventDrivenReplayBufferAsync(EventDrivenReplayBuffer, ReplayBufferAsync):
    """The replay buffer of verl's asynchronous trainers (`colocate_async`, `separate_async`).

    See `EventDrivenReplayBuffer`; the prompts that it samples are those of verl's ReplayBufferAsync.

    Example:
        >>> # trainer.v1.sampler.custom_sampler.path: pkg://transfer_queue.integrations.verl
        >>> # trainer.v1.sampler.custom_sampler.name: EventDrivenReplayBufferAsync
        >>> buffer = EventDrivenReplayBufferAsync(
        ...     trainer_mode="colocate_async", trainer_config={},
        ...     max_off_policy_threshold=8, max_off_policy_strategy="drop",
        ... )
        >>> buffer.get_sampleable_count(global_steps=1, partition_id="train")
        1
    """

    def get_sampleable_count(self, global_steps: int, partition_id: str) -> int:
        """Return the number of prompts that can be sampled now.

        Args:
            global_steps: The current step of the training.
            partition_id: The partition.

        Returns:
            The number of finished prompts, without those that verl drops.
        """
        self._partition_id = partition_id
        return int(super().get_sampleable_count(global_steps, partition_id))

    def wait_for_sampleable(
        self, global_steps: int, partition_id: str, target_count: int
    ) -> tuple[set[str], dict[str, Any]]:
        """Wait until this number of prompts can be sampled.

        Args:
            global_steps: The current step of the training.
            partition_id: The partition.
            target_count: The number of prompts.

        Returns:
            The prompts that can be sampled, and verl's metrics about prompts that were dropped.
        """
        self._partition_id = partition_id
        sampled: tuple[set[str], dict[str, Any]] = super().wait_for_sampleable(global_steps, partition_id, target_count)
        return sampled


def _positive_seconds(seconds: Any) -> float:
    if seconds is None:
        return max(float(VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS), 1.0)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise InvalidArgumentError(
            f"sampler_kwargs.report_after must be a positive number of seconds, got {seconds!r}; leave it out for "
            f"{VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS} s"
        )
    return float(seconds)


def _last_change_text(report: SampleReport) -> str:
    """Return since when a prompt has not changed, and which client changed it last."""
    if not report.history:
        return "unchanged since before the oldest event in the controller's timeline"
    last = report.history[-1]
    seconds = f"{report.now - last.time:,.0f} s (since {time_of_day(last.time)})"
    writer = worker_text(last.task, last.rank, last.pid, last.host, last.client)
    return f"unchanged for {seconds}, last written by {writer}"
