"""The timeline against a log that the test keeps itself, over random interleavings of puts, claims, waits and ends.

The log follows from requests and replies alone: what was answered, when, and to whom.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness import Harness, rows_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from timeline_reader import Event, Reader

from differential import stateful
from transfer_queue.core.events import records as r
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import Ack, Claim, ClaimReply
from transfer_queue.messages.partitions import Seal, SetPolicyVersion
from transfer_queue.messages.puts import ClearRows, Publish, PublishReply
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.sampler import BaseSampler, RankAwareSampler, SequentialSampler
from transfer_queue.timeline.events import AHEAD, CLOSED, NEW_ROWS, TIMED_OUT, EventKind

READERS = st.sampled_from(["r0", "r1", "r2"])
WRITERS = st.sampled_from(["w0", "w1"])
PARTITIONS = st.sampled_from(["p", "p", "q"])
FIELDS = st.sampled_from([("x",), ("y",), ("x", "y")])
CAPACITY = 12
ENDS = (EventKind.CLEAR, EventKind.RETURN)


class Timelines(RuleBasedStateMachine):
    @initialize(ranked=st.booleans(), capacity=st.sampled_from([7, 4096]))
    def start(self, ranked: bool, capacity: int) -> None:
        sampler: BaseSampler = RankAwareSampler() if ranked else SequentialSampler()
        self.ranked = ranked
        self.h = Harness(sampler, CAPACITY, timeline_events=capacity)
        self.capacity = capacity
        self.reader = Reader(self.h)
        self.waiting: dict[tuple[str, int], tuple[float, Any]] = {}  # when the request arrived
        self.parked: dict[tuple[str, int], float] = {}
        self.tasks: dict[str, str] = {}  # client -> the task of its puts
        self.introduced: dict[str, str] = {}
        self.batches: Counter[tuple[str, str]] = Counter()
        self.leases: list[tuple[str, str, ClaimReply]] = []
        self.ended: set[tuple[str, str]] = set()  # clients and tasks whose last claim was answered with the end
        self.written = self.seen = 0

    # ------------------------------------------------------------ the log

    def expected(self, gone: str | None = None) -> list[Event]:
        """What the requests that were answered by the last event add to the log."""
        log: list[Event] = []
        for (client, sequence), (since, request) in list(self.waiting.items()):
            reply = self.h.reply(sequence, client)
            if reply is None and client != gone:
                if (client, sequence) in self.h.state.waiting.by_waiter:
                    self.parked.setdefault((client, sequence), self.h.now)
                continue
            del self.waiting[client, sequence]
            parked = self.parked.pop((client, sequence), None)
            if parked is None and isinstance(reply, Failure) and reply.kind == "DeadlockError":
                parked = self.h.now  # it was parked, and refused in the same event
            if isinstance(request, Publish):
                log += self._of_put(client, since, parked, request, reply)
            else:
                log += self._of_claim(client, since, parked, request, reply)
        return log

    def _event(
        self, kind: EventKind, since: float, client: str, task: str | None, partition: str, fields: Any, rows: int,
        flags: int = 0,
    ) -> Event:  # fmt: skip
        if task is not None and not self.introduced.get(client):
            self.tasks[client] = task
        lane = self.tasks.get(client, "") if task is None else task
        return Event(kind, self.h.now, since, client, lane, partition, tuple(fields), rows, flags)

    def _of_put(self, client: str, since: float, parked: float | None, request: Publish, reply: Any) -> list[Event]:
        log, name = [], request.partition
        done = isinstance(reply, PublishReply)
        if parked is not None:
            flags = 0 if done else TIMED_OUT
            log.append(self._event(EventKind.HOLD, parked, client, None, name, (), request.count, flags))
        if done:
            assert request.block is not None
            fields = [spec.name for spec in request.block.schema]
            log.append(self._event(EventKind.PUT, since, client, None, name, fields, request.count))
        return log

    def _of_claim(self, client: str, since: float, parked: float | None, request: Claim, reply: Any) -> list[Event]:
        log, flags = [], AHEAD if request.ahead else 0
        met = isinstance(reply, ClaimReply) and (reply.ended or bool(reply.rows))
        where = client, request.task, request.partition, request.fields
        if parked is not None:
            unmet = 0 if met else TIMED_OUT
            log.append(self._event(EventKind.WAIT, since, *where, request.count, flags | unmet))
        if met and reply.ended:
            log.append(self._event(EventKind.END, since, *where, 0, flags))
            self.ended.add((client, request.task))
        elif met:
            self.ended.discard((client, request.task))
            log.append(self._event(EventKind.CLAIM, since, *where, len(rows_of(reply)), flags))
            if reply.token:
                self.leases.append((client, request.task, reply))
        return log

    def check(self, log: list[Event]) -> None:
        """The events since the last check are those of the log; events of one moment may be in another order."""
        found = [event._replace(flags=event.flags & ~NEW_ROWS) for event in self.reader.read()]
        ended = self.ended_rows()
        assert Counter(event.kind for event in found if event.kind in ENDS) <= ended
        self.written += len(log) + ended.total()
        if len(log) + ended.total() <= self.capacity:
            assert Counter(event.kind for event in found if event.kind in ENDS) == ended
            found = [event for event in found if event.kind not in ENDS]
        else:  # the ring has lost some of the events
            log = log + [event for event in found if event.kind in ENDS]
        missed = max(0, len(log) - self.capacity)
        assert len(found) == len(log) - missed
        if missed:
            assert not Counter(found) - Counter(log)
        else:
            assert Counter(found) == Counter(log)
        assert self.reader.last is not None
        assert self.reader.last.end == self.written

    def ended_rows(self) -> Counter[EventKind]:
        """The events about rows that were cleared, and of leases that ended, since the last call."""
        records, self.seen = self.h.records[self.seen :], len(self.h.records)
        freed = [record for record in records if getattr(record, "freed", b"")]
        cleared = [record for record in records if isinstance(record, (r.RowsCleared, r.RowsDropped)) and record.rows]
        ended = [record for record in records if isinstance(record, (r.LeaseEnded, r.RankLeft)) and record.rows]
        return Counter({EventKind.CLEAR: len(freed) + len(cleared), EventKind.RETURN: len(ended)})

    def send(self, request: Any, name: str) -> None:
        sequence = self.h.send(request, name)
        self.waiting[name, sequence] = self.h.now, request

    # ------------------------------------------------------------ what happens

    @rule(name=WRITERS, partition=PARTITIONS, fields=FIELDS, count=st.integers(1, 5), wait=st.sampled_from([None, 9.0]))
    def put(self, name: str, partition: str, fields: Any, count: int, wait: float | None) -> None:
        self.send(self.h.publish(count, fields, partition, name, wait=wait), name)
        self.check(self.expected())

    @rule(
        name=READERS, task=st.sampled_from(["t", "t", "u"]), partition=PARTITIONS, fields=FIELDS,
        count=st.integers(1, 3), wait=st.sampled_from([None, 5.0, 20.0]), ahead=st.sampled_from([0, 0, 1]),
        lease=st.sampled_from([None, None, 50.0]),
    )  # fmt: skip
    def claim(
        self, name: str, task: str, partition: str, fields: Any, count: int, wait: float | None, ahead: int,
        lease: float | None,
    ) -> None:  # fmt: skip
        sampling = {}
        if self.ranked:
            sampling = {"dp_rank": int(name[1]), "batch_index": self.batches[task, name]}
            self.batches[task, name] += 1
        request = Claim(partition, task, list(fields), count, sampling, wait, lease=lease, ahead=ahead)
        self.send(request, name)
        self.check(self.expected())

    @rule(count=st.integers(2, 3), number=st.integers(2, 4))
    def equal_claims(self, count: int, number: int) -> None:
        """Claims that one put meets together."""
        for at in range(number):
            self.send(Claim("q", "together", ["x"], count, {"dp_rank": at, "batch_index": self.written}, 30.0), "r0")
            self.check(self.expected())

    @rule(rows=st.integers(1, 8))
    def clear(self, rows: int) -> None:
        for name, partition in list(self.h.state.partitions.items()):
            positions = partition.rows.live_positions()[:rows]
            self.h.send(ClearRows(name, partition.rows.indexes_of(positions).astype("<i8").tobytes()), "cleaner")
            while self.h.jobs.is_working():
                self.h.tick(self.h.now)
        self.check(self.expected())

    @rule(seconds=st.sampled_from([0.5, 3.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.h.tick(self.h.now + seconds)
        self.check(self.expected())

    @rule(name=st.sampled_from(["r0", "w0"]), task=st.sampled_from(["actor", "t", ""]))
    def introduce(self, name: str, task: str) -> None:
        self.h.ask(Introduce(task, 1), name)
        self.introduced[name] = self.tasks[name] = task
        self.check([])

    @rule()
    def acknowledge(self) -> None:
        log = []
        for client, task, reply in self.leases:
            partition = next(
                (each for each in self.h.state.partitions.values() if reply.token in each.leases.by_token), None
            )
            if partition is None:
                continue
            live = len(partition.leases.live_rows(partition.leases.by_token[reply.token]))
            done = self.h.ask(Ack(partition.name, reply.token, reply.rows), client)
            if done.value:
                lane = task
                log.append(Event(EventKind.ACK, self.h.now, self.h.now, client, lane, partition.name, (), live, 0))
        self.leases.clear()
        self.check(log + self.expected())

    @rule(name=WRITERS, partition=PARTITIONS)
    def policy(self, name: str, partition: str) -> None:
        found = self.h.state.partitions.get(partition)
        if found is None:
            return
        version = found.policy_version + 2
        log = [self._event(EventKind.POLICY, self.h.now, name, None, partition, (), version)]
        self.h.ask(SetPolicyVersion(partition, version), name)
        self.check(log + self.expected())

    @rule(name=READERS)
    def disconnect(self, name: str) -> None:
        if name not in self.h.clients:
            return
        lanes = {event.task for event in self.gone_lanes(name)}
        self.h.disconnect(name)
        log = self.expected(gone=name)
        lanes |= {event.task for event in log if event.client == name}
        for lane in lanes:
            flags = CLOSED if (name, lane) in self.ended else 0
            self.ended.discard((name, lane))
            log.append(Event(EventKind.GONE, self.h.now, self.h.now, name, lane, "", (), 0, flags))
        self.h.connect(name)
        self.check(log)

    def gone_lanes(self, name: str) -> list[Any]:
        timeline = self.h.controller.context.services[TimelineRecorder]
        timeline.flush()
        return [timeline.lanes.values[number][1] for number in timeline.lanes.all_of(name)]

    @rule()
    def seal(self) -> None:
        if "q" in self.h.state.partitions:
            self.h.ask(Seal("q"), "cleaner")
            self.check(self.expected())


TestTimelines = stateful(Timelines, 30, 30)
