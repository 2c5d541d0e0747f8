"""Limits how old a sample is when a task gets it, and how far producers may be ahead: of the policy, and of the tasks.

A sample has the version of the policy that generated it, which its tag `policy_version` says. It counts at the claim: a
task skips the rows that are more than `max_staleness` s versions behind the partition
(`claims.batch_selection.decide_stale`), so no claim returns one. The version at the put would not be sufficient: a
producer that reads the weights of version v, and puts after the version has risen to v + 1, would be admitted as one
version younger than its sample is.

So that few samples are skipped, the partition admits new rows while it has admitted fewer than (version + s + 1) * n,
with `rows_per_version` n. If rows are trained on in order, n for each version, a row that was generated at the version
of its put is then at most s versions old. Dropped and skipped rows do not count, because they are not trained on; other
rows are admitted in their place. This limit is the staleness control of asynchronous RL that AReaL describes
(arXiv:2505.24298, section 5.1).

A partition with `max_rows` admits new rows while fewer than `max_rows` rows wait for its tasks. A put beyond either
limit is refused, or waits at the controller in order of arrival, so producers do not race for the space that a consumer
frees.
"""

from __future__ import annotations

from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.unknown_partitions import require_partition
from transfer_queue.errors import InvalidArgumentError, PartitionFullError, StalenessError
from transfer_queue.messages.partitions import SetPolicyVersion
from transfer_queue.messages.puts import Publish, Reserve


def row_limit(partition: Partition) -> int | None:
    """Return the number of rows that the partition may have admitted by now; None if there is no limit."""
    options = partition.options
    if options.max_staleness is None or options.rows_per_version is None:
        return None
    rows = (partition.policy_version + options.max_staleness + 1) * options.rows_per_version
    return min(rows + partition.replaced, r.LARGEST)


def check_staleness(partition: Partition, count: int) -> None:
    """Raise StalenessError if `count` more rows would be too far ahead of the policy."""
    most = row_limit(partition)
    if most is None or not count or partition.admitted + count <= most:
        return
    options = partition.options
    raise StalenessError(
        f"partition {partition.name!r} has admitted {partition.admitted} rows, and its limit at policy version "
        f"{partition.policy_version} is {most} (max_staleness {options.max_staleness}, "
        f"{options.rows_per_version} rows per version); {count} more would be too far ahead of the policy. "
        f"Pass timeout= to wait for set_policy_version."
    )


def admits_rows(partition: Partition | None) -> bool:
    """Return whether a partition with `max_rows` admits a new row."""
    return (
        partition is not None
        and partition.options.max_rows is not None
        and (partition.open_rows < partition.options.max_rows)
    )


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
    if most is None or not count or partition.open_rows + count <= most:
        return
    if count > most:
        raise InvalidArgumentError(
            f"partition {partition.name!r} accepts at most {most} rows (max_rows), and this put alone adds {count}; "
            f"put fewer rows at a time"
        )
    raise PartitionFullError(
        f"partition {partition.name!r} is full: {partition.open_rows} rows wait for its tasks, the limit is {most} "
        f"(max_rows), and this put adds {count}. Pass timeout= to wait until tasks have consumed rows."
    )


def set_version(state: State, request: SetPolicyVersion) -> list[r.AnyRecord]:
    """Return the record of a new policy version; none if the version is the same."""
    partition = require_partition(state.partitions, request.partition)
    if request.version < partition.policy_version:
        raise InvalidArgumentError(
            f"the policy of partition {request.partition!r} is at version {partition.policy_version} and cannot go "
            f"back to {request.version}"
        )
    if request.version == partition.policy_version:
        return []
    return [r.PolicyAdvanced(request.partition, request.version)]
