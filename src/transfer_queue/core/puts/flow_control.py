"""Holds back producers that would be too far ahead of the policy.

A partition with `max_staleness` s and `rows_per_version` n takes new rows while fewer than (version + s + 1) * n
were taken: a row that is trained on after all that were taken before it, n a policy version, is then at most s
versions old. Dropped rows do not count, as they are not trained on. This is the staleness control of asynchronous
RL as AReaL states it (arXiv:2505.24298, section 5.1).
"""

from __future__ import annotations

from transfer_queue.core.control.unknown_names import no_partition
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.errors import InvalidArgumentError, StalenessError, UnknownPartitionError
from transfer_queue.messages.partitions import SetPolicyVersion


def limit(partition: Partition) -> int | None:
    """How many rows may have been taken in by now; None where any number may."""
    options = partition.options
    if options.max_staleness is None or options.rows_per_version is None:
        return None
    return min((partition.policy_version + options.max_staleness + 1) * options.rows_per_version, r.LARGEST)


def check_staleness(partition: Partition, count: int) -> None:
    """Raises StalenessError where `count` more rows would be too far ahead."""
    most = limit(partition)
    if most is None or not count or partition.admitted + count <= most:
        return
    options = partition.options
    raise StalenessError(
        f"partition {partition.name!r} has taken {partition.admitted} rows at policy version "
        f"{partition.policy_version} and takes {most} (max_staleness {options.max_staleness}, "
        f"{options.rows_per_version} rows a version); {count} more would be too far ahead. "
        f"Give a timeout= to wait for set_policy_version."
    )


def set_version(state: State, request: SetPolicyVersion) -> list[r.AnyRecord]:
    """The policy has a new version; the same one again is fine."""
    partition = state.partitions.get(request.partition)
    if partition is None:
        raise UnknownPartitionError(f"{no_partition(request.partition, state.partitions)}; create_partition makes it")
    if request.version < partition.policy_version:
        raise InvalidArgumentError(
            f"the policy of partition {request.partition!r} is at version {partition.policy_version} and cannot go "
            f"back to {request.version}"
        )
    if request.version == partition.policy_version:
        return []
    return [r.PolicyAdvanced(request.partition, request.version)]
