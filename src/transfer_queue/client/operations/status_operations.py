"""Defines the operations that report progress, changes and status, and drain units, as generators of calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from transfer_queue.client.conversion import arguments, replies
from transfer_queue.client.conversion.change_events import PartitionChange, partition_change
from transfer_queue.client.conversion.sample_reports import describe_sample, find_stuck
from transfer_queue.client.operations.long_waits import with_verdict
from transfer_queue.client.operations.topic import Topic
from transfer_queue.config.environment import get_metadata_timeout
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages import queries, system
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.reports.overview import ShowViews, ViewsReply
from transfer_queue.messages.reports.samples import DescribeSample, SampleReport, StuckReport
from transfer_queue.messages.reports.timeline import Introduce, Verdict
from transfer_queue.messages.system import SystemStatus
from transfer_queue.net.calls import Operation


class StatusOperations(Topic):
    """The operations of one client that report the state of partitions and units."""

    def get_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return which samples have which fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows, fields],
            1 where a sample has a field, columns in the order of `data_fields`. (None, None) if the partition or a
            field does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> put = client.kv_put("a", "train_0", {"reward": torch.tensor(1.0)})
            >>> indexes, produced = client.get_production_status(["prompt", "reward"], "train_0")
            >>> produced.tolist()
            [[1, 1], [1, 0]]
        """
        fields = arguments.validated_names(data_fields, "data_fields")
        reply = yield from self._ask(queries.ProductionStatus(partition_id, fields), queries.StatusReply, timeout)
        return replies.status(reply, len(fields))

    def get_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return which samples a task has consumed.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The global indexes of all samples, reserved ones included, int64 [rows], ascending; and int8 [rows], 1 where
            the task has consumed the sample. (None, None) if the partition does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> indexes, consumed = client.get_consumption_status("update", "train_0")
            >>> consumed.tolist()
            [1, 0]
        """
        request = queries.ConsumptionStatus(partition_id, arguments.validated_text(task_name, "task_name"))
        reply = yield from self._ask(request, queries.StatusReply, timeout)
        return replies.status(reply, None)

    def check_production_status(
        self, data_fields: Sequence[str] | str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Return whether every sample has all of these fields.

        Args:
            data_fields: The fields.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if every sample has every field; False if the partition or a field does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.check_production_status(["prompt"], "train_0")
            True
        """
        request = queries.CheckProduction(partition_id, arguments.validated_names(data_fields, "data_fields"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def check_consumption_status(
        self, task_name: str, partition_id: str, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Return whether a task has consumed every sample.

        Args:
            task_name: The task.
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the task has consumed every sample, including samples that were cleared since; False if the
            partition does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.check_consumption_status("update", "train_0")
            False
        """
        request = queries.CheckConsumption(partition_id, arguments.validated_text(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def reset_consumption(
        self, partition_id: str, task_name: str | None = None, *, timeout: float | None = None
    ) -> Operation[bool]:
        """Let a task consume the partition again from the beginning.

        The dealt batches of the task are forgotten, and its leases end. A warning is logged if the partition does not
        exist.

        Args:
            partition_id: The partition.
            task_name: The task. Default: every task.
            timeout: See `TransferQueueClient`.

        Returns:
            True.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
            >>> client.reset_consumption("train_0", "update")
            True
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update")
        """
        request = ResetConsumption(partition_id, arguments.validated_text_or_none(task_name, "task_name"))
        return bool((yield from self._ask(request, Done, timeout)).value)

    def wait_for_change(
        self,
        partition_id: str,
        since: int | None = None,
        where: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> Operation[PartitionChange]:
        """Wait until samples of a partition change, and return the changes. `subscribe` repeats this.

        A sample changes when it gets a field, a tag or a key. The result describes the state now: of several changes of
        a sample the last, and no sample is omitted however late the call is. It also names the samples that were
        cleared. The wait ends when the partition is sealed or dropped. If the partition does not exist, the call waits
        for it.

        Args:
            partition_id: The partition.
            since: The version that an earlier call returned. Default: return all samples that exist, and wait only if
                there are none.
            where: Tag entries that a sample must have, with equal values. Numbers are compared by value (1 equals 1.0,
                True does not equal 1), other Python objects by their encoded bytes. Default: every sample.
            timeout: Seconds to wait; 0 does not wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s).

        Returns:
            The changes; falsy if there were none.

        Raises:
            InvalidArgumentError: `where` is not a dict of tag entries, or `since` is not a version.

        Example:
            >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
            >>> change = client.wait_for_change("train_0", where={"status": "done"})
            >>> change.keys, change.tags
            (['a'], [{'status': 'done'}])
            >>> bool(client.wait_for_change("train_0", change.version, timeout=0))
            False
        """
        yield from self.attachment.learn()
        timeout = get_metadata_timeout() if timeout is None else timeout
        allow = self.attachment.settings.allow_pickle
        timeout = arguments.validated_seconds(timeout)
        watch = queries.Watch(
            partition_id, arguments.validated_version(since), arguments.validated_filter(where, allow), timeout
        )
        return partition_change((yield from self._ask(watch, queries.ChangeReply, None, parked=timeout)), allow)

    def explain(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        task: str | None = None,
        fields: Sequence[str] | str | None = None,
        *,
        batch_size: int | None = None,
        sampling_config: Mapping[str, Any] | None = None,
        verdict: bool = False,
        timeout: float | None = None,
    ) -> Operation[str]:
        """Explain why a sample is not delivered: missing fields, the batch that took it, its group and so on.

        If no sample is named, describes the rows that lack the fewest of the fields for `task`. With `batch_size`,
        describes why a fetch of `batch_size` samples with this `sampling_config` waits, and which ranks are ahead.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none.
            task: The task that waits for the sample. Default: all tasks.
            fields: The fields that the task needs. Default: those of a claim of the task that waits; of a sample: any.
            batch_size: The batch size of the fetch to explain. Default: none.
            sampling_config: The sampling_config of the fetch to explain. Default: none.
            verdict: True to add the verdict about the whole system as the last line. Default: False.
            timeout: See `TransferQueueClient`.

        Returns:
            The explanation, one or more lines.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> "reward" in client.explain("train_0", key="a", task="update", fields=["reward"])
            True
        """
        names = None if fields is None else arguments.validated_names(fields, "fields")
        task, key = arguments.validated_text_or_none(task, "task"), arguments.validated_text_or_none(key, "key")
        count = None if batch_size is None else arguments.validated_count(batch_size, "batch_size")
        sampling = arguments.encoded_sampling_config(sampling_config)
        index = arguments.validated_int(global_index, "global_index must be an int (a key is passed as key=)")
        request = queries.Explain(partition_id, index, key, task, names, count, sampling)
        added = arguments.validated_bool(verdict, "verdict")
        text = str((yield from self._ask(request, Done, timeout)).value)
        return with_verdict(text, (yield from self._waits.bottleneck(timeout))) if added else text

    def describe_sample(
        self,
        partition_id: str,
        global_index: int | None = None,
        key: str | None = None,
        *,
        timeout: float | None = None,
    ) -> Operation[SampleReport]:
        """Return everything that the controller knows of one sample: where its values are, and what happened to it.

        The history has at most 32 events. The controller keeps them only as long as its timeline does: by default the
        last 262,144 events about 1,048,576 samples in all, since its last start.

        Args:
            partition_id: The partition.
            global_index: The global index of the sample. Default: none.
            key: The key of the sample. Default: none. Pass either a global index or a key.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The report. Its `state` is "cleared" or "unknown" if the sample does not exist any more, or never did.

        Raises:
            InvalidArgumentError: Neither a global index nor a key is given, or both.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)}, tag={"length": 3})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="reward")
            >>> report = client.describe_sample("train_0", key="a")
            >>> [(field.name, field.shape, field.nbytes) for field in report.fields], report.tags
            ([('prompt', [3], 12)], {'length': 3})
            >>> [event.kind for event in report.history], report.history[-1].task
            (['put', 'claimed'], 'reward')
        """
        index = arguments.validated_int(global_index, "global_index must be an int (a key is passed as key=)")
        key = arguments.validated_text_or_none(key, "key")
        if (index is None) == (key is None):
            raise InvalidArgumentError(
                f"describe_sample needs either a global_index or a key, got {global_index!r} and {key!r}"
            )
        yield from self.attachment.learn()
        sample, allow_pickle = DescribeSample(partition_id, index, key), self.attachment.settings.allow_pickle
        return (yield from describe_sample(self._ask, sample, allow_pickle, timeout))

    def find_stuck(
        self,
        partition_id: str | None = None,
        older_than: float = 60.0,
        limit: int = 20,
        *,
        timeout: float | None = None,
    ) -> Operation[StuckReport]:
        """Return the samples that are not finished and whose fields and tags have not changed for some time.

        A sample is finished if every task that takes samples of its partition has consumed it, and if it has every
        field that other samples of the partition have.

        Args:
            partition_id: The partition. Default: all partitions.
            older_than: The seconds for which a sample has not changed. Samples that changed before the controller was
                started count from its start.
            limit: The number of samples to describe, those that changed first. The others are only counted.
            timeout: See `TransferQueueClient`; for each of the requests of the call.

        Returns:
            The samples by prompt, the oldest first, with the client that changed each of them last.

        Raises:
            InvalidArgumentError: `older_than` or `limit` is negative, or not a number.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> put = client.kv_put("b", "train_0", {"prompt": torch.zeros(3), "answer": torch.zeros(3)})
            >>> stuck = client.find_stuck("train_0", older_than=0)
            >>> [(sample.key, sample.missing) for sample in stuck.samples]
            [('a', ['answer'])]
        """
        seconds = arguments.validated_seconds(older_than, "older_than")
        if seconds is None or seconds < 0:
            raise InvalidArgumentError(f"older_than must be a number of seconds >= 0, got {older_than!r}")
        most = arguments.validated_count(limit, "limit")
        return (yield from find_stuck(self._ask, partition_id, seconds, most, timeout))

    def status(self, *, timeout: float | None = None) -> Operation[SystemStatus]:
        """Return what `tq status` shows: the verdict, the progress of each partition by field and task, and counters.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The status; `tq status` prints it. Its `verdict` is at most a second old. The `views` of its `units` say
            which clients hold values with `copy=False`, of which process, since when and how many bytes.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> [partition.name for partition in client.status().partitions]
            ['train_0']
        """
        status = yield from self._ask(system.Status(), SystemStatus, timeout)
        verdict = self.attachment.timeline.recent_verdict()
        if verdict is None:
            verdict = yield from self._judge(status, timeout)
        with contextlib.suppress(TransferQueueError):  # units that do not answer
            status = (yield from self._ask(ShowViews(), ViewsReply, timeout)).with_views(status)
        return msgspec.structs.replace(status, verdict=verdict)

    def verdict(self, *, timeout: float | None = None) -> Operation[Verdict]:
        """Return what slows the training down: the slowest stage, who waits for it, and since when.

        The verdict is about the last minute, or about the last four steps of the slowest task if these take longer.
        Producers have names in it if they call `tq.init(task=...)` or claim samples themselves.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The verdict. `text` is a sentence for people; `stage` is None if nothing slows the training down.

        Example:
            >>> client.verdict().stage is None
            True
        """
        status = yield from self._ask(system.Status(), SystemStatus, timeout)
        return (yield from self._judge(status, timeout))

    def stats(self, *, timeout: float | None = None) -> Operation[dict[str, float]]:
        """Return flat figures for a logger: shares of waiting, rates, queues and staleness of each task.

        The figures are about the time since the previous call of this client, at most the last five minutes; those of
        the first call are about the last minute. Names stay the same during a run, for the first 16 tasks.
        `tq.SummaryLogger` writes these figures to TensorBoard and others.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            Figures by name, for example `tq/train/wait_share`. The page "Metrics and traces" lists all names. A
            figure that is not known, such as the staleness of a task that claimed nothing, is left out.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 2, "train_0", task_name="train")
            >>> stats = client.stats()
            >>> stats["tq/rows"], stats["tq/train/queue_rows"]
            (2.0, 0.0)
        """
        status = yield from self._ask(system.Status(), SystemStatus, timeout)
        yield from self.attachment.timeline.read(self._ask, timeout)
        return self.attachment.timeline.make_stats(status)

    def drain_unit(self, unit: int, *, undo: bool = False, timeout: float | None = None) -> Operation[None]:
        """Move everything off a storage unit, and return when it stores nothing. It receives nothing new from now on.

        Args:
            unit: The number of the unit, from 0.
            undo: True to let the unit receive values again. Default: False.
            timeout: Seconds to wait; moving continues after that. Default: no limit.

        Raises:
            InvalidArgumentError: The unit does not exist, or too few other units would be left to write to.
            WaitTimeoutError: The unit still stores values.

        Example:
            >>> client.drain_unit(0, undo=True)
        """
        wait = arguments.LONGEST_TIMEOUT if timeout is None else arguments.validated_seconds(timeout)
        drain = system.Drain(arguments.validated_count(unit, "unit"), arguments.validated_bool(undo, "undo"), wait)
        yield from self._ask(drain, Done, None, parked=wait)

    def _introduce(self, introduction: Introduce) -> Operation[None]:
        """Send the task and rank of this process, now and in each client that it makes after a fork."""
        self.attachment.introduction = introduction
        yield from self.attachment.learn()
        yield from self.attachment.introduce()

    def _judge(self, status: SystemStatus, timeout: float | None) -> Operation[Verdict]:
        """Return the verdict at this moment."""
        yield from self.attachment.timeline.read(self._ask, timeout)
        return self.attachment.timeline.judge(status)
