"""The limit of staleness in any order of events, against a model of the rule in `core.puts.limits`.

After every event the harness recounts the state. Each run ends with a replay and a restoration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from harness import Harness, column, rows_of, through_file
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from differential import stateful
from transfer_queue.errors import InvalidArgumentError, StalenessError
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
    """What the model knows of a row. version: its tag; None without a value. skipped: the tasks that skip it."""

    index: int
    version: int | None
    consumed: set[str] = field(default_factory=set)
    claimed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)
    gone: bool = False


class Admission(RuleBasedStateMachine):
    @initialize(
        staleness=st.integers(0, 2),
        first=st.sampled_from([0, 1, 500]),
        tasks=st.sampled_from(
            [("", []), ("train", []), ("", ["train"]), ("", ["train", "reward"]), ("train", ["reward", "train"])]
        ),
        poison=st.booleans(),
    )
    def create(self, staleness: int, first: int, tasks: tuple[str, list[str]], poison: bool) -> None:
        self.h = Harness(SequentialSampler(), max_deliveries=int(poison))
        self.staleness, self.version, self.poison = staleness, first, poison
        self.finished = 0  # since the version was set
        self.named = [tasks[0]] if tasks[0] else tasks[1]
        self.frees = tasks[1]
        self.seen: set[str] = set()  # tasks that have had rows
        self.waits: tuple[int, int] | None = None  # a put that waits: its sequence and its rows
        options = PartitionOptions(
            max_staleness=staleness, rows_per_version=ROWS, trained_by=tasks[0], free_when=tasks[1]
        )
        self.h.ask(CreatePartition("p", 0, options, first))
        self.rows: list[Row] = []
        self.leases: list[tuple[str, ClaimReply]] = []
        self.unseen: list[tuple[str, ClaimReply, int]] = []  # batches that were not handed over, and their version

    @property
    def limit(self) -> int:
        return (self.staleness + 1) * ROWS

    @property
    def finishing(self) -> set[str]:
        """The tasks that must have consumed a row: without a name, all that have had rows."""
        return set(self.named) or self.seen

    def is_finished(self, row: Row) -> bool:
        return bool(self.finishing) and self.finishing <= row.consumed

    def unfinished(self) -> int:
        """The rule: rows count that are neither finished nor dropped nor skipped."""
        return sum(not (row.gone or row.skipped or self.is_finished(row)) for row in self.rows)

    def counted(self) -> int:
        """They count beside those that were finished since the version was set."""
        return self.unfinished() + self.finished

    def finished_rows(self) -> set[int]:
        return {row.index for row in self.rows if not row.gone and not row.skipped and self.is_finished(row)}

    def note_changed_tasks(self, before: set[int]) -> None:
        """What is not finished any more is taken from what was finished at this version, as far as there is any."""
        after = self.finished_rows()
        self.finished += len(after - before) - min(self.finished, len(before - after))

    # ------------------------------------------------------------ events

    @rule(count=COUNT, behind=st.integers(0, 3), reserve=st.booleans())
    def add(self, count: int, behind: int, reserve: bool) -> None:
        """A producer puts samples of an older version, or reserves rows."""
        if self.waits is not None:
            return
        tag = max(0, self.version - behind)
        tags = [{"policy_version": tag}] * count
        request = Reserve("p", count, None, 0) if reserve else self.h.publish(count, tags=tags)
        if count > self.limit or self.counted() + count > self.limit:
            with pytest.raises(InvalidArgumentError if count > self.limit else StalenessError):
                self.h.ask(request)
            return
        self.h.ask(request)
        first = self.h.state.next_index - count
        self.rows += [Row(first + at, None if reserve else tag) for at in range(count)]

    @rule(count=COUNT)
    def add_later(self, count: int) -> None:
        """Another producer waits until there is space for its samples, which have no version."""
        if self.waits is None and count <= self.limit:
            self.request = self.h.publish(count, name="v", tags=[{"policy_version": 1 << 20}] * count, wait=1e9)
            self.waits = self.h.send(self.request, "v"), count

    @invariant()
    def a_put_waits_only_for_space(self) -> None:
        if not hasattr(self, "h") or self.waits is None:
            return
        sequence, count = self.waits
        if self.h.parked(sequence, "v"):
            assert self.counted() + count > self.limit
            return
        self.rows += [Row(index, 1 << 20) for index in rows_of(self.h.reply(sequence, "v"))]
        self.waits = None

    @rule()
    def publish_reserved(self) -> None:
        """It gets values for what was reserved, of the present version."""
        found = [row for row in self.rows if row.version is None and not row.gone]
        if found:
            tags = [{"policy_version": self.version}] * len(found)
            self.h.put(len(found), rows=[row.index for row in found], tags=tags)
            for row in found:
                row.version = self.version

    @rule(new=st.integers(0, 3), task=TASK, count=COUNT, kind=st.sampled_from(["", "lease", "unseen"]))
    def claim(self, new: int, task: str, count: int, kind: str) -> None:
        """Most claims come after a put, because a claim of nothing shows nothing."""
        if new:
            self.add(new, 0, False)
        lease = 5.0 if kind == "lease" else None
        reply = self.h.result(self.h.claim(count, task, lease=lease, name=task, hand_over=kind == "unseen"), task)
        offered = [row for row in self.rows if self.is_ready(row, task)]
        self.skip(task, [row for row in offered if self.is_old(row)])
        fresh = [row for row in offered if self.is_ready(row, task)]
        taken = fresh[:count] if len(fresh) >= count else []
        assert [row.index for row in taken] == list(memoryview(reply.rows).cast("q")), "in order, and none that is old"
        self.note_task(task, taken)
        for row in taken:
            if lease:
                row.claimed.add(task)
            else:
                self.consume(row, task)
        if lease and taken:
            self.leases.append((task, reply))
        if kind == "unseen" and taken:
            self.unseen.append((task, reply, self.version))
        self.note_freed()

    def note_freed(self) -> None:
        """Rows that all tasks of `free_when` have finished are freed, which the rule does not depend on."""
        for row in self.rows:
            freed = self.h.state.partitions["p"].rows.position_of(row.index) < 0
            assert row.gone or not freed or (self.frees and row.consumed >= set(self.frees))
            row.gone |= freed

    def is_ready(self, row: Row, task: str) -> bool:
        return row.version is not None and not row.gone and task not in row.consumed | row.claimed

    def is_old(self, row: Row) -> bool:
        return row.version is not None and self.version - row.version > self.staleness

    def note_task(self, task: str, rows: list[Row]) -> None:
        """A task has its first rows."""
        if rows:
            before = self.finished_rows()
            self.seen.add(task)
            self.note_changed_tasks(before)

    def consume(self, row: Row, task: str) -> None:
        before = self.is_finished(row)
        row.consumed.add(task)
        row.claimed.discard(task)
        self.finished += not before and not row.skipped and not row.gone and self.is_finished(row)

    def skip(self, task: str, rows: list[Row]) -> None:
        """The task never gets these rows. They make space at once, unless they are finished."""
        for row in rows:
            row.skipped.add(task)
        self.note_task(task, rows)
        for row in rows:
            self.consume(row, task)

    @rule(which=WHICH, ack=st.booleans())
    def end_lease(self, which: list[int], ack: bool) -> None:
        if not self.leases:
            return
        task, reply = self.leases.pop(which[0] % len(self.leases))
        named = {*memoryview(reply.rows).cast("q")}
        rows = [row for row in self.rows if row.index in named and task in row.claimed]
        counts = (self.h.ack if ack else self.h.nack)(reply, name=task)
        assert counts == bool(rows)
        for row in rows:
            row.claimed.discard(task)
            if ack:
                self.consume(row, task)
        if self.poison and not ack:
            self.skip(task, rows)
        self.note_freed()

    @rule(which=WHICH)
    def take_back(self, which: list[int]) -> None:
        """What was not handed over is ready again, and was not finished at this version."""
        if not self.unseen:
            return
        task, reply, version = self.unseen.pop(which[0] % len(self.unseen))
        before = self.finished_rows()
        self.h.notify(task, returned=[("p", reply.token)])
        rows = {*memoryview(reply.rows).cast("q")}
        for row in self.rows:
            if row.index in rows:
                row.consumed.discard(task)
        if version == self.version:
            self.finished -= len(before - self.finished_rows())

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
        self.finished = 0
        self.h.ask(SetPolicyVersion("p", self.version))

    @rule(task=TASK)
    def finish(self, task: str) -> None:
        """The next fetch finishes the rows of the one before; they are freed if no task needs them."""
        self.h.dealt(100, task, name=task)
        self.skip(task, [row for row in self.rows if self.is_ready(row, task) and self.is_old(row)])
        self.note_freed()

    @rule(task=TASK)
    def reset(self, task: str) -> None:
        """What is ready again is not finished, and no task has skipped it for this one."""
        before = self.finished_rows()
        self.h.ask(ResetConsumption("p", task))
        for row in self.rows:
            for tasks in (row.consumed, row.claimed, row.skipped):
                tasks.discard(task)
        self.seen.discard(task)
        self.unseen = [batch for batch in self.unseen if batch[0] != task]
        self.note_changed_tasks(before)

    @rule()
    def restart(self) -> None:
        self.h.restart()
        if self.waits is not None:
            self.h.send(self.request, "v", self.waits[0])

    # ------------------------------------------------------------ after every event

    @invariant()
    def the_rule_holds(self) -> None:
        if not hasattr(self, "h"):
            return
        window = self.h.state.partitions["p"].window
        assert (window.unfinished, window.finished) == (self.unfinished(), self.finished)
        again = through_file(self.h.state).partitions["p"].window
        assert (again.unfinished, again.finished) == (window.unfinished, window.finished)

    def teardown(self) -> None:
        if hasattr(self, "h"):
            self.h.replay()
            self.h.check_saving()


TestAdmission = stateful(Admission, 25, 30)
