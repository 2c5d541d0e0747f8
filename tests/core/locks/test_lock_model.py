"""Locks in any order of events, against a model: two locks never share a key, and nobody overtakes.

The model grants locks in the order in which they were asked for. After every event the harness checks the state's
invariants, and each run ends with a replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from harness import Harness, through_file
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from differential import stateful
from transfer_queue.errors import LockLostError, WaitTimeoutError
from transfer_queue.messages.claims import Cancel, Renew
from transfer_queue.messages.locks import LockReply, ReleaseLock, TakeLock

CLIENTS = st.sampled_from(["a", "b", "c", "d"])
KEYS = st.lists(st.sampled_from(["w", "x", "y", "z"]), min_size=1, max_size=3, unique=True)
WHICH = st.integers(0, 1 << 16)


@dataclass(eq=False)
class Request:
    """A request for a lock, and what the model knows of it. end: of the wait, and then of the lease."""

    client: str
    sequence: int
    keys: frozenset[str]
    lease: float
    end: float
    token: int = 0


class Locks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.h = Harness()
        self.queue: list[Request] = []
        self.held: list[Request] = []
        self.over: list[Request] = []
        self.top = 0

    # ------------------------------------------------------------ events

    @rule(client=CLIENTS, keys=KEYS, lease=st.sampled_from([1.0, 5.0, 50.0]), wait=st.sampled_from([None, 2.0, 100.0]))
    def take(self, client: str, keys: list[str], lease: float, wait: float | None) -> None:
        sequence = self.h.send(TakeLock("p", keys, lease, wait), client)
        asked = Request(client, sequence, frozenset(keys), lease, self.h.now + (wait or 0.0))
        self.queue.append(asked)
        self.grant()
        if wait is None and asked in self.queue:
            with pytest.raises(WaitTimeoutError):
                self.h.result(sequence, client)
            self.queue.remove(asked)

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        found = self.some(which, self.held + self.over)
        if found is None:
            return
        assert self.h.ask(ReleaseLock("p", found.token), found.client).value == (found in self.held)
        self.end([found] if found in self.held else [])

    @rule(which=WHICH, other=CLIENTS)
    def release_by_another(self, which: int, other: str) -> None:
        found = self.some(which, self.held)
        if found is not None and other != found.client:
            assert self.h.ask(ReleaseLock("p", found.token), other).value is False

    @rule(which=WHICH)
    def renew(self, which: int) -> None:
        found = self.some(which, self.held + self.over)
        if found is None:
            return
        assert self.h.ask(Renew([("p", found.token)]), found.client).value == [found in self.held]
        found.end = self.h.now + found.lease

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0]))
    def wait(self, seconds: float) -> None:
        now = self.h.now + seconds
        late = [asked for asked in self.queue if asked.end <= now]
        self.queue = [asked for asked in self.queue if asked.end > now]
        ended = [lock for lock in self.held if lock.end <= now]
        self.h.tick(now)
        self.end(ended)
        for asked in late:
            with pytest.raises(WaitTimeoutError, match="for a lock of"):
                self.h.result(asked.sequence, asked.client)

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        found = self.some(which, self.queue)
        if found is not None:
            assert self.h.ask(Cancel(found.sequence), found.client).value is True
            self.queue.remove(found)
            self.grant()

    @rule(client=CLIENTS)
    def lose_connection(self, client: str) -> None:
        self.h.client(client)
        self.h.disconnect(client)
        self.queue = [asked for asked in self.queue if asked.client != client]
        self.h.connect(client)
        self.grant()

    @rule(seldom=st.integers(0, 4))
    def restart(self, seldom: int) -> None:
        if not seldom:
            self.h.restart()
            self.queue.clear()
            for lock in self.held:
                lock.end = self.h.now + lock.lease

    @rule(which=WHICH)
    def put(self, which: int) -> None:
        found = self.some(which, self.held + self.over)
        if found is None:
            return
        rows = self.h.state.next_index
        try:
            self.h.put(1, fence=found.token, name="w")
        except LockLostError:
            assert found in self.over
            assert self.h.state.next_index == rows
        else:
            assert found in self.held

    # ------------------------------------------------------------ the model

    def some(self, which: int, among: list[Request]) -> Request | None:
        return among[which % len(among)] if among else None

    def end(self, locks: list[Request]) -> None:
        for lock in locks:
            self.held.remove(lock)
            self.over.append(lock)
        self.grant()

    def grant(self) -> None:
        """Grant what can be granted, in order of arrival; the controller must have done the same."""
        taken = {key for lock in self.held for key in lock.keys}
        for asked in list(self.queue):
            if taken.isdisjoint(asked.keys):
                reply = self.h.result(asked.sequence, asked.client)
                assert isinstance(reply, LockReply), f"{asked} was not granted"
                assert reply.token > self.top, "tokens only grow"
                self.top = asked.token = reply.token
                asked.end = self.h.now + asked.lease
                self.queue.remove(asked)
                self.held.append(asked)
            taken |= asked.keys

    @invariant()
    def the_controller_has_the_same_locks(self) -> None:
        assert {lock.token: lock.keys for lock in self.held} == {
            token: frozenset(lock.keys) for token, lock in self.h.state.locks.by_token.items()
        }
        waiting = self.h.state.waiting.locks.get("p", {})
        assert list(waiting) == [(asked.client, asked.sequence) for asked in self.queue]


TestLocks = stateful(Locks, 40, 40)


def test_the_order_of_the_holders_is_the_same_after_a_load() -> None:
    """When several clients are gone, their locks end in this order."""
    locks = Locks()
    locks.take("c", ["x"], 50.0, None)
    locks.take("a", ["y"], 50.0, None)
    locks.take("b", ["z"], 50.0, None)
    locks.take("c", ["w"], 50.0, None)
    locks.release(0)
    holders = list(locks.h.state.locks.holders())
    assert holders == ["a", "b", "c"]
    assert list(through_file(locks.h.state).locks.holders()) == holders


def test_the_rules_of_the_model_in_a_fixed_order() -> None:
    """The rules of the state machine in one fixed order, so that a change that disables them fails here."""
    locks = Locks()
    locks.take("a", ["x", "y"], 5.0, None)
    locks.take("b", ["y"], 5.0, 100.0)
    locks.take("c", ["y", "z"], 50.0, 100.0)
    locks.release_by_another(0, "b")
    locks.renew(0)
    locks.release(0)
    locks.put(0)
    assert [lock.client for lock in locks.held] == ["b"]
    locks.wait(20.0)
    locks.put(1)
    locks.the_controller_has_the_same_locks()
    assert [lock.client for lock in locks.held] == ["c"]
    locks.take("d", ["z"], 5.0, 2.0)
    locks.cancel(0)
    locks.restart(0)
    locks.wait(2.0)
    locks.the_controller_has_the_same_locks()
    assert [lock.client for lock in locks.held] == ["c"]
