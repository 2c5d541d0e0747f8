"""Detects that puts wait for space and claims wait for rows so that none of them can ever be met.

The controller knows from the requests of clients which client may still act:

    - A client that has put rows into a partition or cleared rows of it may do so again while the partition exists,
      unless a request of this client waits at the controller or at a storage unit.
    - A client that received rows may still clear them until it asks for more.
    - A client that is not known yet will clear or drop a partition if no request waits for it, or if all tasks that
      wait have consumed some row of it, because that row is kept for another task.
      The same holds for a partition that is full (`max_rows`): a consumer may come while no claim waits for it.
    - A client that is not known yet will put the missing fields of rows if a claim lacks only these fields.
    - Rows that a task holds under a lease will be acknowledged or returned.
    - A client that watches a partition may act there in another thread while one of its requests waits.
    - A client that waits for a lock may act when it gets the lock, or when the wait ends.
    - A task that frees rows (`free_when`) will come if it has not come yet, and so will the client that sets the first
      policy version if puts wait for it.

It is a deadlock only if none of these is left. A false alarm would fail a run; a missed deadlock only means that the
puts wait until their timeouts. None of this is part of the state: after a restart, every client that the controller
knows may act in every partition.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from transfer_queue.core.context import Context, CoreService, observes
from transfer_queue.core.events import records as r
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import SetPolicyVersion
from transfer_queue.messages.puts import ClearKeys, ClearRows, Drop, Publish, Reserve
from transfer_queue.messages.queries import Watch
from transfer_queue.messages.reports.unit_reports import SpaceShortReport

Consumer = tuple[str, str, int]  # partition, task, dp_rank
_ACTS = (Publish, Reserve, ClearRows, ClearKeys, Drop, SetPolicyVersion, ResetConsumption, Watch)


class Activity(CoreService):
    """The clients that may still make space or rows. It runs always, because it needs to have seen all requests."""

    runs_always = True

    def __init__(self, context: Context) -> None:
        """Begin. What the clients of a controller before this one have done is not known, so each may act anywhere."""
        super().__init__(context)
        everywhere = context.state.partitions
        self.actors: dict[str, set[str]] = {client: set(everywhere) for client in context.connections.peers}
        """Client -> the partitions in which it may act: it made or cleared rows, set the policy version, or watches."""
        self.watchers: dict[str, set[str]] = {}
        """Client -> the partitions that it watches."""
        self.policies: set[str] = set()
        """The partitions whose policy version was set."""
        self.busy: dict[str, set[Consumer]] = {}
        """Client -> the consumers for which it received rows and has not asked for more."""
        self.short: dict[int, SpaceShortReport] = {}
        """Unit -> its last report of the writers that wait for its space."""
        self.freed: dict[int, int] = {}
        """Unit -> how many times it was told to free extents."""

    @observes(*_ACTS)
    def note_request(self, client: str, request: Any) -> None:
        """Note a request that may change the state, or that watches for changes."""
        partitions = self.actors.get(client)
        if partitions is None:
            partitions = self.actors[client] = set()
        partitions.add(request.partition)

    @observes(SetPolicyVersion)
    def note_policy(self, client: str, request: SetPolicyVersion) -> None:
        """Note that the policy version of a partition is set."""
        self.policies.add(request.partition)

    @observes(Watch)
    def note_watch(self, client: str, request: Watch) -> None:
        """Note that a client watches a partition."""
        self.watchers.setdefault(client, set()).add(request.partition)

    def begin_work(self, client: str, consumer: Consumer) -> None:
        """Note that a client received rows."""
        self.busy.setdefault(client, set()).add(consumer)

    def end_work(self, client: str, consumer: Consumer) -> None:
        """Note that a client has finished the rows that it received."""
        self.busy.get(client, set()).discard(consumer)

    def on_client_removed(self, client: str) -> None:
        """See `CoreService.on_client_removed`."""
        self.actors.pop(client, None)
        self.watchers.pop(client, None)
        self.busy.pop(client, None)

    def on_unit_removed(self, unit: int) -> None:
        """See `CoreService.on_unit_removed`."""
        self.short.pop(unit, None)

    @observes(r.PartitionDropped)
    def forget_partition(self, record: r.PartitionDropped) -> None:
        """Forget what clients have done in a partition that was dropped."""
        partition = record.partition
        self.policies.discard(partition)
        for partitions in (*self.actors.values(), *self.watchers.values()):
            partitions.discard(partition)
        for consumers in self.busy.values():
            consumers -= {consumer for consumer in consumers if consumer[0] == partition}

    def is_deadlocked(self) -> bool:
        """Return whether no client can make space or rows any more."""
        state, connected = self.context.state, self.context.connections.peers
        waiting = state.waiting
        at_units = [writer for short in self.short.values() for writer in short.writers]
        if not (waiting.space or at_units) or not waiting.claims or any(self.busy.values()):
            return False
        if any(any(partition.claimed.values()) for partition in state.partitions.values()):
            return False
        if any(short.freed != self.freed.get(unit, 0) for unit, short in self.short.items()):
            return False  # the freed extents have not reached the unit whose writers wait
        if any(self._will_free_space(state, name) for name in state.partitions):
            return False
        held = (w.client for w in waiting.by_waiter.values() if not isinstance(w.request, (Watch, TakeLock)))
        still = {*held, *at_units}
        # A client watches in a thread of its own, which may do anything while other requests of the client wait.
        may = [(self.watchers if client in still else self.actors).get(client, set()) for client in connected]
        return not any(partitions & state.partitions.keys() for partitions in may)

    def _will_free_space(self, state: State, name: str) -> bool:
        """Return whether a client that is not known yet will free space of this partition."""
        partition, tasks = state.partitions[name], state.waiting.claim_queues(name)
        if partition.row_count and not (tasks and set(partition.holds.tasks) <= set(tasks)):
            return True
        if any(_lacks_fields_only(partition, claim) for queue in tasks.values() for claim in queue.claims.values()):
            return True
        if tasks and not partition.holds.tasks and _is_kept_for_others(partition, tasks):
            return True
        limited = partition.options.max_staleness is not None and name not in self.policies
        return limited and any(waiting.request.partition == name for waiting in state.waiting.space.values())


def _lacks_fields_only(partition: Partition, waiting: ParkedRequest) -> bool:
    """Return whether enough rows exist for a claim, so that a client will put their missing fields."""
    claim = waiting.claim
    ready = partition.ready_set(claim.task, tuple(claim.fields)).total
    return ready < claim.count <= partition.row_count - partition.tasks.get(claim.task, 0)


def _is_kept_for_others(partition: Partition, tasks: Iterable[str]) -> bool:
    """Return whether all these tasks have consumed some row, so that it is kept for a task that is not known yet."""
    if not all(partition.tasks.get(task) for task in tasks):
        return False
    positions = partition.rows.live_positions()
    return bool(np.logical_and.reduce([partition.consumed_flags(task, positions) == 1 for task in tasks]).any())
