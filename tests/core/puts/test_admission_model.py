"""The limit of staleness in any order of events, against a model of the rule in `core.puts.limits`.

After every event the harness recounts the state. Each run ends with a replay and a restoration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from harness import Harness, column, through_file
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from differential import stateful
from transfer_queue.errors import StalenessError
from transfer_queue.messages.claims import ClaimReply, ResetConsumption
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import CreatePartition, SetPolicyVersion
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.sampler import SequentialSampler

ROWS = 3  # of each version
TASK = st.sampled_from(["train", "reward"])
COUNT = st.integers(1, 4)
WHICH = st.lists(st.integers(0, 40), min_size=1, max_size=4, unique=True)


@dataclass(eq=False)
class Row:
    """What the model knows of a row. version: its tag; None without a value."""

    index: int
    version: int | None
    consumed: set[str] = field(default_factory=set)
    claimed: set[str] = field(default_factory=set)
    skipped: bool = False
    finished_in: int = -1
    gone: bool = False

    def counts(self, sets: int) -> bool:
        """The rule: it is neither finished nor dropped nor skipped, or it was finished since the version was set."""
        return self.finished_in == sets or (self.finished_in < 0 and not self.skipped and not self.gone)


class Admission(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 2),
        first=st.sampled_from([0, 1, 500]),
        tasks=st.sampled_from([("train", []), ("", ["train"]), ("", ["train", "reward"])]),
    )
    def create(self, staleness: int, first: int, tasks: tuple[str, list[str]]) -> None:
        self.h = Harness(SequentialSampler())
        self.staleness, self.version, self.sets = staleness, first, 0
        self.finishing = [tasks[0]] if tasks[0] else tasks[1]
        self.frees = tasks[1]
        options = PartitionOptions(
            max_staleness=staleness, rows_per_version=ROWS, trained_by=tasks[0], free_when=tasks[1]
        )
        self.h.ask(CreatePartition("p", 0, options, first))
        self.rows: list[Row] = []
        self.leases: list[tuple[str, ClaimReply]] = []

    @property
    def limit(self) -> int:
        return (self.staleness + 1) * ROWS

    def counted(self) -> int:
        return sum(row.counts(self.sets) for row in self.rows)

    # ------------------------------------------------------------ events

    @rule(count=COUNT, behind=st.integers(0, 3), reserve=st.booleans())
    def add(self, count: int, behind: int, reserve: bool) -> None:
        """A producer puts samples of an older version, or reserves rows."""
        count = min(count, self.limit)
        tag = max(0, self.version - behind)
        tags = [{"policy_version": tag}] * count
        request = Reserve("p", count, None, 0) if reserve else self.h.publish(count, tags=tags)
        if self.counted() + count > self.limit:
            with pytest.raises(StalenessError):
                self.h.ask(request)
            return
        self.h.ask(request)
        first = self.h.state.next_index - count
        self.rows += [Row(first + at, None if reserve else tag) for at in range(count)]

    @rule()
    def publish_reserved(self) -> None:
        """It gets values for what was reserved, of the present version."""
        found = [row for row in self.rows if row.version is None and not row.gone]
        if found:
            tags = [{"policy_version": self.version}] * len(found)
            self.h.put(len(found), rows=[row.index for row in found], tags=tags)
            for row in found:
                row.version = self.version

    @rule(task=TASK, count=COUNT, lease=st.booleans())
    def claim(self, task: str, count: int, lease: bool) -> None:
        reply = self.h.result(self.h.claim(count, task, lease=5.0 if lease else None, name=task), task)
        offered = [row for row in self.rows if self.is_ready(row, task)]
        for row in offered:
            if self.version - row.version > self.staleness:
                self.consume(row, task, skipped=True)
        fresh = [row for row in offered if self.is_ready(row, task)]
        taken = fresh[:count] if len(fresh) >= count else []
        assert [row.index for row in taken] == list(memoryview(reply.rows).cast("q")), "in order, and none that is old"
        for row in taken:
            assert self.version - row.version <= self.staleness
            if lease:
                row.claimed.add(task)
            else:
                self.consume(row, task)
        if lease and taken:
            self.leases.append((task, reply))
        self.note_freed()

    def note_freed(self) -> None:
        """Rows that all tasks of `free_when` have finished are freed, which the rule does not depend on."""
        for row in self.rows:
            freed = self.h.state.partitions["p"].rows.position_of(row.index) < 0
            assert row.gone or not freed or (self.frees and row.consumed >= set(self.frees))
            row.gone |= freed

    def is_ready(self, row: Row, task: str) -> bool:
        return row.version is not None and not row.gone and task not in row.consumed | row.claimed

    def consume(self, row: Row, task: str, skipped: bool = False) -> None:
        row.consumed.add(task)
        row.claimed.discard(task)
        row.skipped |= skipped and row.finished_in < 0
        if row.finished_in < 0 and not row.skipped and self.finishing and row.consumed >= set(self.finishing):
            row.finished_in = self.sets

    @rule(which=WHICH, ack=st.booleans())
    def end_lease(self, which: list[int], ack: bool) -> None:
        if not self.leases:
            return
        task, reply = self.leases.pop(which[0] % len(self.leases))
        named = {*memoryview(reply.rows).cast("q")}
        (self.h.ack if ack else self.h.nack)(reply, name=task)
        for row in self.rows:
            if row.index in named and task in row.claimed:
                row.claimed.discard(task)
                if ack:
                    self.consume(row, task)
        self.note_freed()

    @rule(which=WHICH, drop=st.booleans())
    def remove(self, which: list[int], drop: bool) -> None:
        some = [row for at, row in enumerate(self.rows) if at in which]
        rows = column(row.index for row in some)
        if drop:
            self.h.ask(Drop("p", "no use", rows))
        else:
            self.h.clear([row.index for row in some])
        for row in some:
            row.gone = True
            row.claimed.clear()

    @rule(jump=st.sampled_from([1, 1, 1, 2, 7]))
    def set_version(self, jump: int) -> None:
        self.version += jump
        self.sets += 1
        self.h.ask(SetPolicyVersion("p", self.version))

    @rule(task=TASK)
    def finish(self, task: str) -> None:
        """The next fetch finishes the rows of the one before; they are freed if no task needs them."""
        self.h.dealt(100, task, name=task)
        for row in self.rows:
            if self.is_ready(row, task) and self.version - row.version > self.staleness:
                self.consume(row, task, skipped=True)
        self.note_freed()

    @rule(task=TASK)
    def reset(self, task: str) -> None:
        """The harness recounts. What is ready again is not finished, and no task has skipped it for this one."""
        if any(task in row.consumed | row.claimed for row in self.rows):
            return  # `test_limits` has this case
        self.h.ask(ResetConsumption("p", task))

    @rule()
    def restart(self) -> None:
        self.h.restart()

    # ------------------------------------------------------------ after every event

    @invariant()
    def the_rule_holds(self) -> None:
        if not hasattr(self, "h"):
            return
        window = self.h.state.partitions["p"].window
        assert window.counted == self.counted()
        assert window.counted <= self.limit
        again = through_file(self.h.state).partitions["p"].window
        assert (again.unfinished, again.finished) == (window.unfinished, window.finished)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.replay()
            self.h.check_saving()


TestAdmission = stateful(Admission, 25, 30)
