"""Notices when every put waits for space and every claim for rows, so that none of them can ever be met.

Who could still move is known from what clients have asked for:

    a client that has put into a partition, or cleared rows of it, may do so again while the partition is there,
    unless a request of its waits here or at a storage unit
    one that was given rows may still clear them until it comes back for more
    a partition will be cleared, or dropped, by somebody who has not come yet or is not seen here, where nobody waits
    in it, or some row of it was consumed by all tasks that do: it is there for others
    where a claim would be met by fields of rows that are there, who puts these will come
    rows that a task was given under a lease will be acknowledged, or given back
    a client that watches a partition may act there even while another thread of it waits
    a task that is to free rows (`free_when`) and has not come yet will come, and so will the first who sets the
    policy version that puts wait for

Only where none of this is left is it a deadlock: a false alarm would fail a run, a missed one only leaves the puts to
their timeouts. Nothing here is part of the state: after a restart of the controller, every client that it knows may
have acted in every partition that there is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import ParkedRequest
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.partitions import SetPolicyVersion
from transfer_queue.messages.puts import ClearKeys, ClearRows, Drop, Publish, Reserve
from transfer_queue.messages.queries import Watch
from transfer_queue.messages.unit_reports import SpaceShortReport

Consumer = tuple[str, str, int]  # partition, task, dp_rank
_ACTS = (Publish, Reserve, ClearRows, ClearKeys, Drop, SetPolicyVersion, ResetConsumption, Watch)


class ActivityTracker:
    """Who may still make space or rows.

    actors: client -> the partitions in which it has made or cleared rows, set the policy, or asked for changes, upon
    which it may act. watchers: client -> those in which it has asked for changes. policies: partitions whose policy
    version was set. busy: client -> what it was given rows for and has not come back to. short: unit -> what it last
    said of those who wait there. freed: unit -> how many times it was told to free.
    """

    def __init__(self) -> None:
        self.actors: dict[str, set[str]] = {}
        self.watchers: dict[str, set[str]] = {}
        self.policies: set[str] = set()
        self.busy: dict[str, set[Consumer]] = {}
        self.short: dict[int, SpaceShortReport] = {}
        self.freed: dict[int, int] = {}

    def restored(self, clients: Iterable[str], partitions: Iterable[str]) -> None:
        """The controller begins with these clients, of which it does not know what they have done."""
        for client in clients:
            self.actors[client] = set(partitions)

    def acted(self, client: str, request: AnyRequest) -> None:
        """A client has asked for a change."""
        if not isinstance(request, _ACTS):
            return
        partitions = self.actors.get(client)
        if partitions is None:
            partitions = self.actors[client] = set()
        partitions.add(request.partition)
        if isinstance(request, SetPolicyVersion):
            self.policies.add(request.partition)
        elif isinstance(request, Watch):
            self.watchers.setdefault(client, set()).add(request.partition)

    def given(self, client: str, consumer: Consumer) -> None:
        """A client was given rows."""
        self.busy.setdefault(client, set()).add(consumer)

    def back(self, client: str, consumer: Consumer) -> None:
        """It is through with them."""
        self.busy.get(client, set()).discard(consumer)

    def left(self, client: str) -> None:
        """A client has gone."""
        self.actors.pop(client, None)
        self.watchers.pop(client, None)
        self.busy.pop(client, None)

    def dropped(self, partition: str) -> None:
        """A partition has gone, and with it what was done there."""
        self.policies.discard(partition)
        for partitions in (*self.actors.values(), *self.watchers.values()):
            partitions.discard(partition)
        for consumers in self.busy.values():
            consumers -= {consumer for consumer in consumers if consumer[0] == partition}

    def deadlocked(self, state: State, connected: Collection[str]) -> bool:
        """Whether nobody can move any more."""
        waiting = state.waiting
        at_units = [writer for short in self.short.values() for writer in short.writers]
        if not (waiting.space or at_units) or not waiting.claims or any(self.busy.values()):
            return False
        if any(any(partition.claimed.values()) for partition in state.partitions.values()):
            return False
        if any(short.freed != self.freed.get(unit, 0) for unit, short in self.short.items()):
            return False  # what was freed has not arrived where it is waited for
        if any(self._will_move(state, name) for name in state.partitions):
            return False
        held = (w.client for w in waiting.by_waiter.values() if not isinstance(w.request, Watch))
        still = {*held, *at_units}
        # who watches does so in a thread of its own, which may do anything while others of its client wait
        may = [(self.watchers if client in still else self.actors).get(client, set()) for client in connected]
        return not any(partitions & state.partitions.keys() for partitions in may)

    def _will_move(self, state: State, name: str) -> bool:
        """Whether room will be made in this partition by somebody who has not come yet."""
        partition, tasks = state.partitions[name], state.waiting.of_partition(name)
        if partition.row_count and not (tasks and set(partition.holds.tasks) <= set(tasks)):
            return True
        if any(_lacks_fields_only(partition, claim) for queue in tasks.values() for claim in queue.claims.values()):
            return True
        if tasks and not partition.holds.tasks and _is_there_for_others(partition, tasks):
            return True
        limited = partition.options.max_staleness is not None and name not in self.policies
        return limited and any(waiting.request.partition == name for waiting in state.waiting.space.values())


def _lacks_fields_only(partition: Partition, waiting: ParkedRequest) -> bool:
    """Whether there are rows enough for a claim, which somebody who has not come yet is to put fields of."""
    claim = waiting.claim
    ready = partition.ready_set(claim.task, tuple(claim.fields)).total
    return ready < claim.count <= partition.row_count - partition.tasks.get(claim.task, 0)


def _is_there_for_others(partition: Partition, tasks: Iterable[str]) -> bool:
    """Whether some row was consumed by all these tasks: none of them needs it, and who clears it has not come."""
    if not all(partition.tasks.get(task) for task in tasks):
        return False
    positions = partition.rows.live_positions()
    return bool(np.logical_and.reduce([partition.consumed(task, positions) == 1 for task in tasks]).any())
