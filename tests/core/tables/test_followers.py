"""Clients that follow a partition by versions, at any pace, end with its state: a stateful hypothesis test.

The model is a dict of tags. A follower keeps the reported rows in a dict of its own, removes those that were cleared,
and lists all rows again after an incomplete reply. It asks with or without waiting, and may disconnect while it waits.
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import pytest
from harness import DELETE, Harness
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from differential import stateful
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, Publish, Reserve
from transfer_queue.messages.queries import ChangeReply, ListKeys, Watch

KEYS = st.sampled_from("abcdef")
VALUES = st.sampled_from([0, 1, 1.0, True, None, "x"])
WHERES: list[dict[str, Any]] = [{}, {"s": 1}, {"s": True}, {"s": 0, "t": 1}]


@pytest.fixture(autouse=True)
def few_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remember so few clears that followers miss some."""
    monkeypatch.setattr("transfer_queue.core.tables.changes.MAX_CLEARED", 1)


def number(value: Any) -> Any:
    """Return what distinguishes values of tags."""
    return (isinstance(value, bool), value)


def matches(tag: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(name in tag and number(tag[name]) == number(value) for name, value in where.items())


class Follower:
    """A client with the rows that were reported to it: global index -> (key, tag)."""

    def __init__(self, name: str, where: dict[str, Any]) -> None:
        self.name = name
        self.where = where
        self.rows: dict[int, tuple[str | None, dict[str, Any]]] = {}
        self.since: int | None = None
        self.parked: int | None = None

    def take(self, reply: ChangeReply, model: dict[int, tuple[str | None, dict[str, Any]]]) -> None:
        """Take over a reply."""
        if reply.dropped:
            self.rows.clear()
        for index in np.frombuffer(reply.cleared, "<i8").tolist():
            self.rows.pop(index, None)
        rows = np.frombuffer(reply.rows, "<i8").tolist()
        keys, tags = reply.keys or [None] * len(rows), reply.tags or [{} for _ in rows]
        for index, key, tag in zip(rows, keys, tags, strict=True):
            assert matches(tag, self.where), "a row was reported that does not match"
            self.rows[index] = key, tag
        assert len(reply.versions) == len(reply.rows)
        assert len(reply.cleared_versions) == len(reply.cleared)
        if not reply.complete:
            self.rows = {index: row for index, row in self.rows.items() if index in model}
        self.since = reply.version


class Following(RuleBasedStateMachine):
    """The model is a dict: global index -> (key, tag) of every row that has a key, a tag or a field."""

    @initialize()
    def begin(self) -> None:
        self.h = Harness()
        self.model: dict[int, tuple[str | None, dict[str, Any]]] = {}
        self.silent: set[int] = set()  # reserved, without key, tag or field
        self.followers = [Follower(f"f{i}", WHERES[i % len(WHERES)]) for i in range(6)]

    def _index_of(self, key: str) -> int | None:
        return next((index for index, (other, _) in self.model.items() if other == key), None)

    @rule(keys=st.lists(KEYS, min_size=1, max_size=3, unique=True), s=VALUES, t=VALUES, gone=st.booleans())
    def tag(self, keys: list[str], s: Any, t: Any, gone: bool) -> None:
        entries = {"s": s, "t": DELETE if gone else t}
        request = Publish("p", len(keys), keys=keys, tags=[dict(entries) for _ in keys], pre_allocate=0)
        for key, index in zip(keys, harness.rows_of(self.h.ask(request)), strict=True):
            tag = dict(self.model.get(index, (key, {}))[1], s=s, t=t)
            if gone:
                del tag["t"]
            self.model[index] = key, tag

    @rule(key=KEYS)
    def make(self, key: str) -> None:
        """Put a key without a tag."""
        index = harness.rows_of(self.h.ask(Reserve("p", 1, [key], 0)))[0]
        self.model.setdefault(index, (key, {}))

    @rule(count=st.integers(1, 3))
    def put(self, count: int) -> None:
        self.model.update({index: (None, {}) for index in self.h.put(count)})

    @rule(count=st.integers(1, 2))
    def reserve(self, count: int) -> None:
        self.silent.update(harness.rows_of(self.h.ask(Reserve("p", count, None, 0))))

    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        rows = sorted({*self.model, *self.silent})
        if rows:
            index = data.draw(st.sampled_from(rows))
            self.h.put(1, rows=[index])
            self.model.setdefault(index, (None, {}))
            self.silent.discard(index)

    @rule()
    def claim(self) -> None:
        """Change the partition, but no sample."""
        self.h.claim(1)
        self.h.ask(ResetConsumption("p"))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=2))
    def clear_keys(self, keys: list[str]) -> None:
        self.h.ask(ClearKeys("p", keys))
        for key in keys:
            index = self._index_of(key)
            if index is not None:
                del self.model[index]

    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        rows = sorted({*self.model, *self.silent})
        if rows:
            gone = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4, unique=True))
            self.h.clear(gone)
            for index in gone:
                self.model.pop(index, None)
                self.silent.discard(index)

    @rule()
    def drop(self) -> None:
        self.h.ask(ClearPartition("p"))
        self.model.clear()
        self.silent.clear()

    @rule(which=st.integers(0, 5), wait=st.booleans())
    def ask(self, which: int, wait: bool) -> None:
        follower = self.followers[which]
        if follower.parked is None:
            request = Watch("p", follower.since, follower.where, 5.0 if wait else None)
            follower.parked = self.h.send(request, follower.name)

    @rule(which=st.integers(0, 5), again=st.booleans())
    def lose_the_connection(self, which: int, again: bool) -> None:
        """Send the same request again afterwards, or not."""
        follower = self.followers[which]
        if follower.parked is None:
            return
        old = self.h.clients[follower.name].peer
        self.h.connect(follower.name)
        if again:
            self.h.send(Watch("p", follower.since, follower.where, 5.0), follower.name, follower.parked)
        else:
            follower.parked = None
        self.h.disconnect(follower.name, old)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.h.tick(self.h.now + seconds)

    @rule(which=st.integers(0, 5))
    def hear(self, which: int) -> None:
        """Let a follower take its reply, which may be old."""
        follower = self.followers[which]
        if follower.parked is None:
            return
        reply = self.h.reply(follower.parked, follower.name)
        if reply is not None:
            assert isinstance(reply, ChangeReply)
            follower.take(reply, self.model)
            follower.parked = None

    @invariant()
    def waiting_followers_are_up_to_date(self) -> None:
        for follower in self.followers:
            if follower.parked is not None and self.h.parked(follower.parked, follower.name):
                self._is_up_to_date(follower)

    def _is_up_to_date(self, follower: Follower) -> None:
        wanted = {index: row for index, row in self.model.items() if matches(row[1], follower.where)}
        assert {i: row for i, row in follower.rows.items() if matches(row[1], follower.where) and i in wanted} == wanted
        assert set(follower.rows) <= set(self.model), "a clear was not reported"

    @invariant()
    def lists_are_the_model(self) -> None:
        for where in WHERES:
            listed = self.h.look(ListKeys(["p"], where)).value.get("p", {})
            assert listed == {key: tag for key, tag in self.model.values() if key is not None and matches(tag, where)}

    def teardown(self) -> None:
        if not hasattr(self, "h"):
            return
        for which, follower in enumerate(self.followers):
            self.hear(which)
            if follower.parked is None:
                for _ in range(2):  # the first reply may report a drop
                    reply = self.h.ask(Watch("p", follower.since, follower.where), follower.name)
                    follower.take(reply, self.model)
            self._is_up_to_date(follower)
        harness.made.remove(self.h)
        self.h.replay()


TestFollowing = stateful(Following, 50, 50)
