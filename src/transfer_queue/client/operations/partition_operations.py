"""Defines the operations on partitions and tasks: policy versions, group demand, samplers; as generators of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.arguments import ConsumedBy
from transfer_queue.client.operations.topic import Topic
from transfer_queue.config.environment import pre_alloc_sample_num
from transfer_queue.messages import partitions, queries
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.queries import Backlog
from transfer_queue.messages.system import RegisterSampler
from transfer_queue.net.calls import Operation
from transfer_queue.sampler.factory import built_in_spec


class PartitionOperations(Topic):
    """The operations of one client on partitions."""

    def create_partition(
        self,
        partition_id: str,
        group_size: int | None = None,
        producers: int = 1,
        *,
        free_when: ConsumedBy | Sequence[str] | None = None,
        replicas: int = 1,
        max_staleness: int | None = None,
        rows_per_version: int | None = None,
        trained_by: str | None = None,
        policy_version: int = 0,
        keep_rows: int | None = None,
        keep_bytes: int | None = None,
        keep_seconds: float | None = None,
        max_deliveries: int | None = None,
        max_rows: int | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> Operation[bool]:
        """Create a partition before its first sample, with options.

        Args:
            partition_id: The partition.
            group_size: The number of samples of each declared group. Default: groups have no declared size.
            producers: How many calls of `seal` seal the partition. Default: 1.
            free_when: Names of tasks, for example ["reward", "update"]: a sample is cleared as soon as each of them has
                consumed and finished it (see `finish`). Default: samples are cleared only by calls.
            replicas: The number of rank replicas that fetch each sample and must finish it. Default: 1.
            max_staleness: No fetch returns a sample whose tag `policy_version`, the version of the policy that
                generated it, is more than this number behind the version of the partition (`set_policy_version`) at
                the time of the fetch. Older samples are skipped, in whole groups if the sampler deals groups. To keep
                the number of skipped samples small, at most `(max_staleness + 1) * rows_per_version` samples are
                accepted at a version that were not finished before this version was set (see `trained_by`). Samples
                that are skipped or dropped, or cleared before they were finished, do not count. A put beyond this
                waits, if it has a timeout, or raises StalenessError. `get_meta([], n, mode="insert", timeout=...)`
                makes a producer wait before it generates. Samples without the tag are limited only at the put. A
                trainer that fetches n steps ahead trains on samples that are n versions older: set the limit n lower.
                Default: no limit.
            rows_per_version: The number of samples that training consumes for each policy version. Required with
                `max_staleness`.
            trained_by: The task that trains. A sample is finished, for `max_staleness`, when this task has consumed
                it: at the fetch, or with a lease at the ack. Default: all tasks of `free_when`; without `free_when` all
                tasks that have fetched samples of the partition, so name it if other tasks fetch them, too.
            policy_version: The version of the policy at which the partition begins, for example that of the checkpoint
                from which the training continues. If the partition exists, its version does not change. Default: 0.
            keep_rows: The number of samples to keep; the oldest beyond it are dropped, whole groups together. Default:
                no limit.
            keep_bytes: The same in bytes of values. Default: no limit.
            keep_seconds: The same by age in seconds. Default: no limit.
            max_deliveries: A sample whose leases ended this often without an ack is skipped; 0 never skips. Default:
                `controller.max_deliveries`.
            max_rows: New samples are accepted while fewer than this number wait for the tasks of `free_when`, or exist
                if there is no `free_when`. A put beyond this waits, if it has a timeout, or raises PartitionFullError.
                Default: no limit.
            order: The order in which every task gets the samples, in place of the system's sampler: "fifo" (by
                arrival), "lifo" (the newest first), or "priority" (the highest number in the tag "priority" first).
                Default: the system's sampler deals them.
            timeout: See `TransferQueueClient`.

        Returns:
            True; False if the partition already existed.

        Raises:
            InvalidArgumentError: An option is not valid, or the partition exists with other options. Arguments that
                have their defaults are not compared.

        Example:
            >>> client.create_partition("train_0", group_size=8, free_when=["update"])
            True
            >>> client.create_partition("train_0", group_size=8)
            False
        """
        options = PartitionOptions(
            group_size,
            producers,
            arguments.task_names(free_when),
            replicas,
            max_staleness,
            rows_per_version,
            keep_rows,
            keep_bytes,
            keep_seconds,
            max_deliveries,
            max_rows,
            "" if order is None else arguments.validated_text(order, "order"),
            "" if trained_by is None else arguments.validated_text(trained_by, "trained_by"),
        )
        request = partitions.CreatePartition(
            partition_id, pre_alloc_sample_num(), arguments.validated_options(options),
            arguments.validated_count(policy_version, "policy_version"),
        )  # fmt: skip
        return bool((yield from self._ask(request, Done, timeout)).value)

    def seal(self, partition_id: str, create: bool = False, *, timeout: float | None = None) -> Operation[None]:
        """Declare that this producer puts no new samples, so that loaders end. It may still add fields to samples.

        If the partition does not exist, it is created and sealed, so that consumers do not wait for its samples. Unless
        `create` is set, a warning names it and the nearest partitions that exist.

        Args:
            partition_id: The partition.
            create: True to suppress the warning if the partition does not exist. Default: False.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.seal("train_0")
            >>> meta, ended = client.await_batch("prompt", 1, "train_0", "update")
            >>> meta, ended = client.await_batch("prompt", 1, "train_0", "update")
            >>> ended
            True
        """
        yield from self._ask(partitions.Seal(partition_id, arguments.validated_bool(create, "create")), Done, timeout)

    def clear_partition(self, partition_id: str, *, timeout: float | None = None) -> Operation[None]:
        """Remove a partition with all its samples. A partition that does not exist is ignored.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.clear_partition("train_0")
            >>> client.get_partition_list()
            []
        """
        yield from self._ask(partitions.ClearPartition(partition_id), Done, timeout)

    def get_partition_list(self, *, timeout: float | None = None) -> Operation[list[str]]:
        """Return the names of all partitions, in order of creation.

        Args:
            timeout: See `TransferQueueClient`.

        Returns:
            The names.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.get_partition_list()
            ['train_0']
        """
        return list((yield from self._ask(partitions.ListPartitions(), Done, timeout)).value)

    def set_policy_version(self, partition_id: str, version: int, *, timeout: float | None = None) -> Operation[None]:
        """Report that the policy has reached a version. Staleness is counted from it, and waiting producers continue.

        The trainer calls it when its own version rises, after it has fetched the samples that it has trained on: they
        make space for as many new ones. With a lease, it acknowledges them first (`ack`); this includes a loader with
        `delivery="at_least_once"`, which otherwise does so too late. Producers may get the weights of that version
        earlier. The version may begin with any number and skip numbers.

        Args:
            partition_id: The partition.
            version: The version, which may not decrease.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The version is lower than the present one.
            UnknownPartitionError: The partition does not exist. Create it first.

        Example:
            >>> created = client.create_partition("train_0", max_staleness=1, rows_per_version=64)
            >>> client.set_policy_version("train_0", 1)
        """
        request = partitions.SetPolicyVersion(partition_id, arguments.validated_count(version, "version"))
        yield from self._ask(request, Done, timeout)

    def get_policy_version(self, partition_id: str, *, timeout: float | None = None) -> Operation[int]:
        """Return the version of the policy that a partition has reached.

        Args:
            partition_id: The partition.
            timeout: See `TransferQueueClient`.

        Returns:
            The version that `set_policy_version` has set last, or with which the partition was created.

        Raises:
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> created = client.create_partition("train_0", policy_version=500)
            >>> client.get_policy_version("train_0")
            500
        """
        return int((yield from self._ask(partitions.ReadPolicyVersion(partition_id), Done, timeout)).value)

    def report_done(self, partition_id: str, count: int = 1, *, timeout: float | None = None) -> Operation[None]:
        """Count samples as processed, which `await_done` waits for. It changes no sample, unlike `ack` and `finish`.

        The controller counts the samples that were added and those that are done. See `await_done`.

        Args:
            partition_id: The partition.
            count: The number of samples. Default: 1.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: More samples were reported as done than were added.
            UnknownPartitionError: The partition does not exist.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.report_done("train_0")
            >>> client.await_done("train_0")
            True
        """
        request = partitions.ReportDone(partition_id, arguments.validated_count(count, "count"))
        yield from self._ask(request, Done, timeout)

    def await_done(self, partition_id: str, *, timeout: float | None = None) -> Operation[bool]:
        """Wait until all samples that were added to a partition, without dropped ones, were reported as done.

        Args:
            partition_id: The partition.
            timeout: Seconds to wait; 0 does not wait. Default: no limit.

        Returns:
            Whether all samples are done; False if the timeout ended first.

        Raises:
            UnknownPartitionError: The partition does not exist, or was removed meanwhile.

        Example:
            >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
            >>> client.await_done("train_0", timeout=0)
            False
        """
        wait = arguments.LONGEST_TIMEOUT if timeout is None else arguments.validated_seconds(timeout)
        return bool((yield from self._ask(partitions.AwaitDone(partition_id, wait), Done, None, parked=wait)).value)

    def get_backlog(self, partition_id: str, task_name: str, *, timeout: float | None = None) -> Operation[Backlog]:
        """Return how many samples of a partition wait for a task, and how many are not done.

        Args:
            partition_id: The partition.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers; zeros if the partition does not exist.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", {"prompt": torch.zeros(2, 3)})
            >>> meta = client.get_meta("prompt", 1, "train_0", task_name="update", lease=60)
            >>> client.get_backlog("train_0", "update")
            Backlog(waiting=1, claimed=1, undone=2, sealed=False, max_rows=None)
        """
        request = queries.ReadBacklog(partition_id, arguments.validated_text(task_name, "task_name"))
        return (yield from self._ask(request, Backlog, timeout))

    def want(self, partition_id: str, groups: int, task_name: str, *, timeout: float | None = None) -> Operation[None]:
        """Set the group demand of a task: the number of complete groups that should exist or be in production.

        The demand stays until it is changed. When the task consumes groups, or groups are dropped, `wanted` reports the
        same number of new ones to producers.

        Args:
            partition_id: The partition.
            groups: The number of groups; 0 removes the demand.
            task_name: The task.
            timeout: See `TransferQueueClient`.

        Example:
            >>> created = client.create_partition("train_0", group_size=8)
            >>> client.want("train_0", 4, "update")
            >>> client.wanted("train_0", "update")
            4
        """
        request = partitions.SetGroupDemand(
            partition_id, arguments.validated_text(task_name, "task_name"), arguments.validated_count(groups, "groups")
        )
        yield from self._ask(request, Done, timeout)

    def wanted(
        self, partition_id: str, task_name: str, most: int | None = None, *, timeout: float | None = None
    ) -> Operation[int]:
        """Return how many groups a task is missing, and promise to produce some of them.

        A missing group is one of the group demand (`want`) that does not exist, is not in production, and that no
        producer has promised. With `max_staleness`, there are never more than the partition accepts at its version.

        Args:
            partition_id: The partition.
            task_name: The task.
            most: The maximum number of groups that this producer promises to produce. Other producers do not get these.
                The promise ends when the samples are put (or reserved), or when this client is gone. Default: promise
                none.
            timeout: Seconds to wait while no group is missing. Default: do not wait.

        Returns:
            The number of missing groups; with `most`, the number that this producer promised.

        Example:
            >>> created = client.create_partition("train_0", group_size=8)
            >>> client.want("train_0", 4, "update")
            >>> client.wanted("train_0", "update", most=3)
            3
            >>> client.wanted("train_0", "update", most=3)
            1
        """
        wait = arguments.validated_seconds(timeout)
        taken = None if most is None else arguments.validated_count(most, "most")
        request = partitions.TakeGroupDemand(
            partition_id, arguments.validated_text(task_name, "task_name"), taken, wait
        )
        return int((yield from self._ask(request, Done, None, parked=wait)).value)

    def register_task_sampler(self, task_name: str, sampler: Any, *, timeout: float | None = None) -> Operation[None]:
        """Use a built-in sampler for a task, in all partitions, for as long as the system exists.

        `StreamingDataset(sampler=)` calls this. Batches that were dealt before stay; claims that wait are decided with
        the new sampler. To register the sampler that the task has changes nothing.

        Args:
            task_name: The task.
            sampler: The name, the class or an instance of a built-in sampler, or a mapping with the keys `sampler` and
                `sampler_args`. A sampler of your own is named in `controller.task_samplers` where the system starts.
            timeout: See `TransferQueueClient`.

        Raises:
            InvalidArgumentError: The task has another sampler of its own, or the sampler is not built in.

        Example:
            >>> client.register_task_sampler("judge", tq.RankAwareSampler(dp_size=1))
            >>> client.register_task_sampler("judge", "SequentialSampler")
            Traceback (most recent call last):
            transfer_queue.errors.InvalidArgumentError: task 'judge' has the sampler RankAwareSampler(dp_size=1) (...
        """
        task = arguments.validated_text(task_name, "task_name")
        yield from self._ask(RegisterSampler(task, *built_in_spec(sampler, task)), Done, timeout)
