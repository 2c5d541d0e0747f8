"""Locks of keys: who gets them in which order, how they end, and which puts they admit."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Harness, column

from transfer_queue.core.absent_clients import FIRST_CHECK, LONGEST_CHECK, AbsentHolders
from transfer_queue.core.locks import PAGE
from transfer_queue.errors import InvalidArgumentError, LockLostError, ProtocolError, WaitTimeoutError
from transfer_queue.messages.claims import Cancel
from transfer_queue.messages.locks import ListLocks, LockEntry, LockReply, ReleaseLock, TakeLock
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.messages.system import Status


def take(
    h: Harness, name: str, *keys: str, wait: float | None = None, lease: float = 10.0, partition: str = "p"
) -> int:
    """Ask for a lock; returns the sequence of the request."""
    return h.send(TakeLock(partition, list(keys), lease, wait), name)


def token(h: Harness, sequence: int, name: str) -> int | None:
    """The token of a request; None while it waits."""
    reply = h.result(sequence, name)
    assert reply is None or isinstance(reply, LockReply)
    return None if reply is None else reply.token


def locked(h: Harness, name: str, *keys: str, **more: float) -> int:
    """Take a lock that must be free; returns its token."""
    found = token(h, take(h, name, *keys, **more), name)
    assert found is not None
    return found


def release(h: Harness, name: str, number: int) -> bool:
    return bool(h.ask(ReleaseLock("p", number), name).value)


def entries(h: Harness, partitions: list[str] | None = None) -> list[LockEntry]:
    found: list[LockEntry] = []
    start: int | None = 0
    while start is not None:
        page = h.look(ListLocks(partitions, start))
        found += page.locks
        start = page.following
    return found


class TestOrder:
    def test_the_same_keys_of_two_partitions_are_two_locks(self, h: Harness) -> None:
        locked(h, "a", "k")
        assert token(h, take(h, "b", "k", partition="q"), "b") is not None

    def test_a_key_and_a_partition_need_not_exist_and_may_be_dropped(self, h: Harness) -> None:
        held = locked(h, "a", "new")
        h.put(1, keys=["new"], fence=held)
        assert "p" in h.state.partitions

    def test_an_expired_wait_names_the_holder_and_lets_the_next_one_pass(self, h: Harness) -> None:
        h.ask(Introduce("train", 3, "node-1", 77), "a")
        held = locked(h, "a", "x", lease=1000.0)
        waits, after = take(h, "b", "x", "y", wait=5.0), take(h, "c", "y", wait=60.0)
        h.tick(5.0)
        told = "waited 5 s .*'x' is locked for 5 s by train rank 3, pid 77, node-1"
        with pytest.raises(WaitTimeoutError, match=told):
            h.result(waits, "b")
        assert token(h, after, "c") is not None
        assert h.state.locks.by_token[held].keys == ["x"]

    def test_without_a_wait_a_locked_key_is_an_error_at_once(self, h: Harness) -> None:
        locked(h, "a", "x")
        with pytest.raises(WaitTimeoutError, match="'x' is locked for 0 s by client a"):
            h.ask(TakeLock("p", ["x"], 10.0), "b")
        assert not h.state.waiting.by_waiter

    @pytest.mark.parametrize("keys", [[], ["a", "a"]])
    def test_a_lock_without_keys_or_with_repeated_ones_is_refused(self, h: Harness, keys: list[str]) -> None:
        with pytest.raises(InvalidArgumentError, match="at least one key"):
            h.ask(TakeLock("p", keys, 10.0))

    def test_a_lock_without_time_is_refused(self, h: Harness) -> None:
        with pytest.raises(InvalidArgumentError, match="positive number of seconds, got 0"):
            h.ask(TakeLock("p", ["a"], 0.0))


class TestEnds:
    def test_a_holder_whose_process_is_dead_loses_its_locks_before_the_lease_ends(self) -> None:
        alive = {"a", "b"}
        h = Harness(lives=alive.__contains__)
        held = locked(h, "a", "x", lease=1000.0)
        waiting = take(h, "b", "x", wait=60.0)
        h.disconnect("a")
        h.tick(FIRST_CHECK)
        assert held in h.state.locks.by_token, "the kernel says that the process lives"
        alive.discard("a")
        h.tick(2 * LONGEST_CHECK)
        assert token(h, waiting, "b") is not None

    def test_a_living_holder_that_connects_again_keeps_its_locks(self) -> None:
        alive = {"a"}
        h = Harness(lives=alive.__contains__)
        held = locked(h, "a", "x", lease=1000.0)
        h.disconnect("a")
        h.connect("a")
        alive.discard("a")  # not asked any more
        h.tick(10.0)
        assert held in h.state.locks.by_token
        assert h.controller.context.services[AbsentHolders].next_due() is None

    def test_the_process_of_a_client_on_another_node_is_not_known_so_its_lease_counts(self) -> None:
        h = Harness(lives=set().__contains__)
        held = locked(h, "a", "x", lease=10.0)
        h.disconnect("a")
        h.tick(9.0)
        assert held in h.state.locks.by_token
        h.tick(10.0)
        assert held not in h.state.locks.by_token

    def test_a_cancelled_request_that_was_granted_unseen_is_released(self, h: Harness) -> None:
        sequence = take(h, "a", "x")
        assert h.state.locks.by_token
        h.ask(Cancel(sequence), "a")
        assert not h.state.locks.by_token

    def test_a_repeated_request_gets_the_same_token(self, h: Harness) -> None:
        sequence = take(h, "a", "x")
        first = token(h, sequence, "a")
        h.connect("a")
        h.send(TakeLock("p", ["x"], 10.0), "a", sequence)
        assert token(h, sequence, "a") == first
        assert len(h.state.locks.by_token) == 1


class TestRestarts:
    def test_a_holder_that_died_with_the_controller_loses_its_lock(self) -> None:
        alive = {"a"}
        h = Harness(lives=alive.__contains__)
        held = locked(h, "a", "x", lease=1000.0)
        h.restart([])
        alive.discard("a")
        h.tick(h.now + 2 * LONGEST_CHECK)
        assert held not in h.state.locks.by_token


class TestFences:
    @pytest.mark.parametrize("end", ["released", "expired"])
    def test_a_put_with_an_old_token_changes_nothing(self, h: Harness, end: str) -> None:
        held = locked(h, "a", "x", lease=10.0)
        if end == "released":
            release(h, "a", held)
        else:
            h.tick(10.0)
        with h.refuses(LockLostError, f"token {held} is not in force any more"):
            h.put(1, keys=["x"], fence=held)

    def test_a_put_that_waits_for_space_checks_its_lock_when_it_gets_space(self) -> None:
        h = Harness(capacity=1)
        h.put(1)
        held = locked(h, "a", "x", lease=10.0)
        waiting = h.send(h.publish(1, keys=["x"], fence=held, wait=100.0), "w")
        release(h, "a", held)
        h.clear([0])
        with pytest.raises(LockLostError):
            h.result(waiting, "w")
        assert h.state.row_count == 0


class TestLists:
    def test_holders_and_waiting_requests_are_listed(self, h: Harness) -> None:
        h.ask(Introduce("train", 0, "host", 5), "a")
        held = locked(h, "a", "x", "y", lease=30.0)
        h.tick(3.0)
        take(h, "b", "y", wait=60.0)
        h.tick(7.0)
        assert entries(h, ["p"]) == entries(h) == [
            LockEntry("p", ["x", "y"], held, "a", 7.0, 30.0, "train", 0, "host", 5),
            LockEntry("p", ["y"], 0, "b", 4.0, 10.0),
        ]  # fmt: skip
        assert [entry.held for entry in entries(h)] == [True, False]
        assert entries(h, ["other"]) == []

    def test_a_long_list_comes_in_pages(self, h: Harness) -> None:
        tokens = [h.ask(TakeLock("p", [f"k{n}"], 10.0), "a").token for n in range(PAGE + 3)]
        assert [entry.token for entry in entries(h)] == tokens

    def test_the_status_says_how_many_wait_and_for_whom(self, h: Harness) -> None:
        assert (h.look(Status()).locks.held, h.look(Status()).locks.longest) == (0, "")
        locked(h, "a", "x", lease=100.0)
        take(h, "b", "x", wait=60.0)
        take(h, "c", "x", wait=60.0)
        h.tick(2.0)
        found = h.look(Status()).locks
        assert (found.held, found.waiting) == (1, 2)
        assert found.longest.startswith(
            "a request of client b waited 2 s for a lock of 'x' of partition 'p': 'x' is locked"
        )


def versions(h: Harness, *keys: str) -> np.ndarray:
    from transfer_queue.messages.queries import Lookup

    return np.frombuffer(h.look(Lookup("p", None, list(keys), versions=True)).versions, "<i8")


def test_versions_come_in_the_order_of_the_keys(h: Harness) -> None:
    h.put(1, keys=["a"])
    h.put(1, keys=["b"])
    a, b = versions(h, "a", "b").tolist()
    assert versions(h, "b", "unknown", "a").tolist() == [b, a]
    assert b > a > 0
    assert column([a]) == versions(h, "a").tobytes()


def test_a_page_after_the_last_lock_is_empty() -> None:
    """The fuzz test found that the largest start ended in an exception of the controller, instead of a reply."""
    h = Harness()
    page = h.look(ListLocks(start=(1 << 31) - 1))
    assert (page.locks, page.following) == ([], None)
    with pytest.raises(ProtocolError):
        h.ask(ListLocks(start=1 << 31))
