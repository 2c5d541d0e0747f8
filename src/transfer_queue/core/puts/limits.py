"""Limits how old a sample is when a task gets it, and how far producers may be ahead: of the policy, and of the tasks.

A sample has the version of the policy that generated it, which its tag `policy_version` says. It counts at the claim: a
task skips the rows that are more than `max_staleness` s versions behind the partition
(`claims.deal.stale_rows`), so no claim returns one. The version at the put would not be sufficient: a
producer that reads the weights of version v, and puts after the version has risen to v + 1, would be admitted as one
version younger than its sample is.

So that few samples are skipped, the partition limits how many rows are ahead of the training. The rule, with
`rows_per_version` n: at every policy version, at most (s + 1) * n rows *count*. A row counts from its put, or from its
reservation, until

    - a version is set after the row was finished. A row is finished as soon as the task `trained_by` has consumed it:
      at the claim, or with a lease at the acknowledgement. Whether it is then cleared makes no difference.
    - or it is dropped, cleared before it was finished, or skipped by any task, because it is not trained on: it makes
      space at once. A finished row that is dropped or skipped counts as finished.

So rows that were finished since the version was set make space only together with the next version: they were a part of
what this version trains on. When a row is put at version v, the rows before it that are trained on at version v or
later are among the (s + 1) * n that count, of which it is the last. If rows are trained on in order, n for each
version, it is trained on at version v + s at the latest. The rule counts rows and not versions, so it holds from any
first version, and for the rows that are put after the version has jumped. (A row from before the jump may be more than
s versions old; the claim skips it, and it makes space at once.) This limit is the staleness control of asynchronous RL
that AReaL describes (arXiv:2505.24298, section 5.1), stated without the number of the version.

If no task is named, a row is finished when all tasks of `free_when` have consumed it. Without `free_when`, all tasks
count that have claimed rows of the partition so far: to wait for one task too many delays producers, which errors and
`explain` then name, and to wait for one too few would let them run ahead unseen.

What a reset of the consumption makes ready again is not finished, and is taken from the rows that were finished since
the version was set, as far as there are any. A load of a whole checkpoint restores the counts with the rows; rows
that are added to a partition from a checkpoint count unless they were finished when it was saved.

A partition with `max_rows` admits new rows while fewer than `max_rows` rows wait for its tasks. A put beyond either
limit is refused, or waits at the controller in order of arrival, so producers do not race for the space that a consumer
frees.
"""

from __future__ import annotations

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.errors import CapacityError, InvalidArgumentError, PartitionFullError, SealedError, StalenessError
from transfer_queue.messages.puts import Publish, Reserve

MAX_RESERVED = 1 << 28  # rows of one request; a larger number is a mistake


def row_limit(partition: Partition) -> int | None:
    """Return the number of rows that the partition may have admitted by now; None if there is no limit."""
    window = partition.window
    return None if window.limit is None else min(partition.admitted - window.counted + window.limit, r.LARGEST)


def _check_rows(partition: Partition, count: int) -> None:
    """Raise an error if the partition does not admit `count` more rows."""
    check_staleness(partition, count)
    check_max_rows(partition, count)


def check_staleness(partition: Partition, count: int) -> None:
    """Raise StalenessError if `count` more rows would be too far ahead of the policy."""
    window, options = partition.window, partition.options
    reason = describe_staleness(partition, count)
    if reason and count > (window.limit or 0):
        raise InvalidArgumentError(
            f"partition {partition.name!r} accepts at most {window.limit} rows at a policy version (max_staleness "
            f"{options.max_staleness}, {options.rows_per_version} rows per version), and this put alone adds {count}; "
            f"put fewer rows at a time"
        )
    if reason:
        raise StalenessError(reason)


def describe_staleness(partition: Partition, count: int) -> str:
    """Return why `count` more rows would be too far ahead of the policy; "" if they would not."""
    window, options = partition.window, partition.options
    if window.limit is None or not count or window.counted + count <= window.limit:
        return ""
    return (
        f"partition {partition.name!r} has admitted {partition.admitted} rows, and its limit at policy version "
        f"{partition.policy_version} is {row_limit(partition)} (max_staleness {options.max_staleness}, "
        f"{options.rows_per_version} rows per version): {describe_counted(partition)}. {count} more would be too far "
        f"ahead of the policy, until set_policy_version is called."
    )


def describe_counted(partition: Partition) -> str:
    """Return which rows count for the limit of staleness, for messages."""
    window = partition.window
    tasks = f"task {window.tasks[0]!r}" if len(window.tasks) == 1 else f"all of the tasks {window.tasks}"
    by = tasks if window.tasks else "a task (none has fetched samples so far)"
    late = ""
    if window.unfinished < (partition.options.rows_per_version or 0) <= window.finished:
        late = f" (if version {partition.policy_version} was trained on them, ack them before you set the version)"
    return (
        f"{window.unfinished} are not finished by {by}, and {window.finished} were finished since this version was "
        f"set, which make space with the next version{late}"
    )


def admits_rows(partition: Partition | None) -> bool:
    """Return whether a partition with `max_rows` admits a new row."""
    most = None if partition is None else partition.options.max_rows
    return partition is not None and most is not None and partition.open_rows < most


def certainly_waits(state: State, request: Publish | Reserve) -> bool:
    """Return whether a put of new rows must keep waiting, because its partition has `max_rows` rows."""
    partition = state.partitions.get(request.partition)
    if partition is None or partition.options.max_rows is None or partition.sealed:
        return False
    added = request.keys is None and (isinstance(request, Reserve) or request.rows is None)
    return added and partition.open_rows + request.count > partition.options.max_rows


def check_max_rows(partition: Partition, count: int) -> None:
    """Raise PartitionFullError if `count` more rows would be more than `max_rows`."""
    most = partition.options.max_rows
    reason = describe_max_rows(partition, count)
    if reason and count > (most or 0):
        raise InvalidArgumentError(
            f"partition {partition.name!r} accepts at most {most} rows (max_rows), and this put alone adds {count}; "
            f"put fewer rows at a time"
        )
    if reason:
        raise PartitionFullError(reason)


def describe_max_rows(partition: Partition, count: int) -> str:
    """Return why `count` more rows would be more than `max_rows`; "" if they would not."""
    most = partition.options.max_rows
    if most is None or not count or partition.open_rows + count <= most:
        return ""
    return (
        f"partition {partition.name!r} is full: {partition.open_rows} rows wait for its tasks, the limit is {most} "
        f"(max_rows), and this put adds {count}. Tasks make space when they consume rows."
    )


def check_new(state: State, partition: Partition | None, count: int) -> None:
    """Raise an error if the partition or the system does not admit `count` more rows. None: it is not made yet."""
    if partition is not None and count:
        if partition.sealed:
            raise SealedError(
                f"partition {partition.name!r} is sealed: it accepts new fields of its rows, but no new rows, and this "
                f"put adds {count}. Put new rows into another partition."
            )
        if partition.is_limited:
            _check_rows(partition, count)
    if state.capacity is not None:
        check_capacity(state, count)


def check_capacity(state: State, count: int) -> None:
    """Raise CapacityError if `count` more rows exceed the capacity of the system."""
    if reason := _describe_capacity(state, count):
        raise CapacityError(f"{reason} Clear rows that are not needed any more, or raise the limit.")


def _describe_capacity(state: State, count: int) -> str:
    """Return why `count` more rows exceed the capacity of the system; "" if they do not."""
    if state.capacity is None or not count or (current := state.row_count) + count <= state.capacity:
        return ""
    return (
        f"the capacity of {state.capacity} rows (backend.SimpleStorage.total_storage_size) is exceeded: {current} rows "
        f"are stored, and this put adds {count}."
    )


def check_limits(state: State, name: str, count: int) -> None:
    """Raise CapacityError if the partition cannot admit `count` more rows now."""
    check_capacity(state, count)
    partition = state.partitions.get(name)
    if partition is not None:
        _check_rows(partition, count)


def describe_limits(state: State, name: str, count: int) -> str:
    """Return why the partition cannot admit `count` more rows now; "" if it can."""
    reason, partition = _describe_capacity(state, count), state.partitions.get(name)
    if reason or partition is None:
        return reason
    return describe_staleness(partition, count) or describe_max_rows(partition, count)


def refused_put(error: CapacityError, wait: float | None, waited: float = 0.0) -> CapacityError:
    """Return the error of a put that found no space, with what its caller can do. `wait` is that of the request."""
    advice = (
        "Pass timeout= to wait" if wait is None else f"It waited {waited:.3g} s; pass a longer timeout= to wait longer"
    )
    return type(error)(f"{error} {advice}.")
