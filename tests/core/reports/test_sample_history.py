"""The history of samples against a model that keeps a list for each sample, over random requests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import Harness, column, rows_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from report_reader import describe

from differential import stateful
from transfer_queue.core.timeline import event_ring
from transfer_queue.core.timeline.event_ring import EventRing, RowHistory
from transfer_queue.messages.claims import Ack, Claim, ClaimReply, Nack
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, ClearRows, Drop

Entry = tuple[str, str, str, tuple[str, ...]]
"""What, client, task, fields."""
PARTITIONS = st.sampled_from(["p", "p", "q"])
WRITERS = st.sampled_from(["w0", "w1"])
FIELDS = st.sampled_from([("x",), ("y",), ("x", "y")])


class Histories(RuleBasedStateMachine):
    @initialize(capacity=st.sampled_from([11, 64, 4096]), page=st.sampled_from([3, 1 << 16]))
    def start(self, capacity: int, page: int) -> None:
        self.before = event_ring.PAGE_EVENTS, event_ring.PAGE_ROWS
        event_ring.PAGE_EVENTS, event_ring.PAGE_ROWS = page, 4 * page
        self.h = Harness(timeline_events=capacity)
        self.capacity = capacity
        self.model: dict[int, list[Entry]] = {}
        self.partition: dict[int, str] = {}
        self.produced: dict[int, set[str]] = {}
        self.leases: list[tuple[str, str, ClaimReply]] = []
        self.keys: dict[tuple[str, str], int] = {}
        self.dropped: dict[int, str] = {}
        """Sample -> the client that cleared its partition first, after which it did not exist."""

    def teardown(self) -> None:
        event_ring.PAGE_EVENTS, event_ring.PAGE_ROWS = self.before

    def live(self, partition: str) -> list[int]:
        return self.h.live(partition) if partition in self.h.state.partitions else []

    def note(self, rows: list[int], what: str, client: str, task: str = "", fields: tuple[str, ...] = ()) -> None:
        for row in rows:
            kind = what
            if what == "put":
                kind = "replaced" if self.produced[row] & set(fields) else "put"
                self.produced[row] |= set(fields)
            self.model[row].append((kind, client, task, fields))

    # ------------------------------------------------------------ what happens

    @rule(name=WRITERS, partition=PARTITIONS, fields=FIELDS, count=st.integers(1, 5), keyed=st.booleans())
    def put(self, name: str, partition: str, fields: tuple[str, ...], count: int, keyed: bool) -> None:
        more: dict[str, Any] = {}
        if keyed:
            more["keys"] = [f"k{self.h.state.next_index + at}" for at in range(count)]
        reply = self.h.ask(self.h.publish(count, fields, partition, name, **more), name)
        for at, row in enumerate(rows_of(reply)):
            self.model[row], self.produced[row], self.partition[row] = [], set(), partition
            if keyed:
                self.keys[partition, more["keys"][at]] = row
        self.note(rows_of(reply), "put", name, "", fields)

    @rule(name=WRITERS, partition=PARTITIONS, fields=FIELDS, at=st.integers(0, 20), count=st.integers(1, 4))
    def put_again(self, name: str, partition: str, fields: tuple[str, ...], at: int, count: int) -> None:
        rows = self.live(partition)[at :: max(1, at)][:count]
        if rows:
            self.h.ask(self.h.publish(len(rows), fields, partition, name, rows=rows), name)
            self.note(rows, "put", name, "", fields)

    @rule(name=WRITERS, partition=PARTITIONS, at=st.integers(0, 20))
    def tag(self, name: str, partition: str, at: int) -> None:
        rows = self.live(partition)[at : at + 2]
        if rows:
            self.h.ask(self.h.publish(len(rows), None, partition, name, rows=rows, tags=[{"a": 1}] * len(rows)), name)
            self.note(rows, "tagged", name)

    @rule(
        task=st.sampled_from(["t", "u"]), partition=PARTITIONS, fields=FIELDS, count=st.integers(1, 4),
        lease=st.sampled_from([None, 50.0]),
    )  # fmt: skip
    def claim(self, task: str, partition: str, fields: tuple[str, ...], count: int, lease: float | None) -> None:
        reply = self.h.ask(Claim(partition, task, list(fields), count, lease=lease), f"r-{task}")
        self.note(rows_of(reply), "claimed", f"r-{task}", task, fields)
        if reply.token:
            self.leases.append((partition, task, reply))

    @rule(acknowledge=st.booleans(), part=st.booleans())
    def end_lease(self, acknowledge: bool, part: bool) -> None:
        if not self.leases:
            return
        partition, task, reply = self.leases.pop()
        rows = rows_of(reply)
        mine = column(rows[:1] if part else rows)
        live = [row for row in np.frombuffer(mine, "<i8").tolist() if row in self.live(partition)]
        request = Ack(partition, reply.token, mine) if acknowledge else Nack(partition, reply.token, mine)
        if partition in self.h.state.partitions and self.h.ask(request, f"r-{task}").value:
            self.note(live, "acknowledged" if acknowledge else "returned", f"r-{task}", task)

    @rule(partition=PARTITIONS, at=st.integers(0, 20), drop=st.booleans(), name=WRITERS)
    def clear(self, partition: str, at: int, drop: bool, name: str) -> None:
        rows = self.live(partition)[at :: max(1, at)][:3]
        if not rows:
            return
        self.h.ask(Drop(partition, "bad", column(rows)) if drop else ClearRows(partition, column(rows)), name)
        self.note(rows, "cleared", name)

    @rule(name=WRITERS)
    def clear_key(self, name: str) -> None:
        found = [(partition, key) for (partition, key), row in self.keys.items() if row in self.live(partition)]
        if found:
            partition, key = found[0]
            self.h.ask(ClearKeys(partition, [key]), name)
            self.note([self.keys[partition, key]], "cleared", name)

    @rule(name=WRITERS, partition=PARTITIONS)
    def clear_partition(self, name: str, partition: str) -> None:
        rows = self.live(partition)
        if partition in self.h.state.partitions:
            self.h.ask(ClearPartition(partition), name)
            self.note(rows, "partition cleared", name)
            for row, of in self.partition.items():
                if of == partition and row not in self.dropped:
                    self.dropped[row] = name

    @rule(name=WRITERS)
    def reconnect(self, name: str) -> None:
        """An event without rows, in each lane of the client."""
        if name in self.h.clients:
            self.h.disconnect(name)
            self.h.connect(name)

    # ------------------------------------------------------------ the comparison

    @rule()
    def compare(self) -> None:
        self.h.now += 1.0
        for row, expected in self.model.items():
            report = describe(self.h, row, partition=self.partition[row])
            tasks = ("claimed", "acknowledged", "returned")
            found = [
                (each.kind, each.client, each.task if each.kind in tasks else "", tuple(each.fields))
                for each in report.history
            ]
            end = expected[len(expected) - len(found) :]
            if len(found) == len(expected):
                assert found == expected
                assert report.complete or len(found) <= 32
            elif [entry[0] for entry in found] == ["partition cleared"] and expected[-1][0] == "cleared":
                assert found == [("partition cleared", self.dropped[row], "", ())]  # what is left of a longer history
                assert not report.complete
            else:
                assert len(found) < len(expected)
                assert [entry[1:] for entry in found] == [entry[1:] for entry in end]
                assert not report.complete
                assert self.capacity < 4096 or len(found) == 32
            live = row in self.live(self.partition[row])
            assert report.state == ("live" if live else "cleared" if found else report.state)
            if live:
                assert {field.name for field in report.fields} == self.produced[row]


TestHistories = stateful(Histories, 30, 40)


def test_the_clear_of_a_partition_is_not_reported_for_a_sample_whose_own_clear_is_not_kept() -> None:
    h = Harness(timeline_events=2)
    (row,) = rows_of(h.ask(h.publish(1, ("x",), "p", "w", keys=["k"]), "w"))
    h.ask(ClearKeys("p", ["k"]), "a")
    h.ask(h.publish(1, ("x",), "p", "w"), "w")
    h.ask(ClearPartition("p"), "b")
    report = describe(h, row)
    assert (report.state, report.complete) == ("cleared", False)
    assert [(event.kind, event.client) for event in report.history] == [("partition cleared", "b")]


class TestRowHistory:
    """The ring of rows without a controller."""

    @pytest.mark.parametrize("page", [2, 1 << 16])
    def test_more_rows_than_it_has_space_for(self, monkeypatch: pytest.MonkeyPatch, page: int) -> None:
        monkeypatch.setattr(event_ring, "PAGE_EVENTS", page)
        ring = EventRing(4)
        history = RowHistory(ring)
        for rows in ([1, 2, 3], list(range(100, 140)), [7, 2]):
            ring.append(0.0, 0.0, 4, 0, 1, 0, len(rows), before=history.end)
            history.write(column(rows))
        assert self.positions(history, 2) == [2]
        assert self.positions(history, 139) == [1]
        assert self.positions(history, 100) == []
        assert not history.reaches_start()

    def test_ranges_and_events_without_rows(self) -> None:
        ring = EventRing(3)
        history = RowHistory(ring)
        for which in (None, (0, 9), column([10, 4]), None, column([4])):
            first, last = which if isinstance(which, tuple) else (1, 0)
            ring.append(0.0, 0.0, 4, 0, 1, 0, 1, first, last, history.end)
            history.write(which if isinstance(which, bytes) else b"")
        assert self.positions(history, 4) == [2, 4]
        assert self.positions(history, 10) == [2]
        assert self.positions(history, 0) == []

    def positions(self, history: RowHistory, row: int) -> list[int]:
        found, rest = history.find(row)
        while rest is not None:
            more, rest = history.find(row, rest)
            found = more + found
        return found
