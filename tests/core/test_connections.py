"""A controller that takes the place of another one: which of its clients are awaited, and what the others leave.

`test_interleavings` restarts controllers at any moment, of their records and of a file.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.core.absent_clients import GRACE_SECONDS
from transfer_queue.errors import DeadlockError
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.puts import ClearKeys, Reserve


def restarted(**core: Any) -> Harness:
    """Client "a" holds two of four rows, and "w" has reserved two that it has not put; nobody has come back yet."""
    h = Harness(**core)
    h.tick(100.0)
    h.create(free_when=["t"])
    h.put(4)
    h.ask(Reserve("p", 2, None, 0))
    assert h.dealt(2, name="a") == [0, 1]
    h.restart([], replays=True)
    return h


def count(h: Harness) -> int:
    return h.state.partitions["p"].row_count


def test_a_client_that_does_not_come_back_is_gone_after_the_grace() -> None:
    h = restarted()
    connections = h.controller.context.connections
    assert h.controller.next_deadline() == h.now + GRACE_SECONDS
    h.tick(h.now + GRACE_SECONDS - 0.1)
    assert (count(h), list(connections.departed)) == (6, [])
    h.tick(h.now + 0.1)
    assert count(h) == 4, "what the client held is finished, and freed"
    assert set(connections.departed) == {"a", "w", "unit-0"}
    assert connections.peers == {}
    assert h.controller.next_deadline() is None


def test_a_client_that_comes_back_keeps_what_it_holds() -> None:
    h = restarted()
    h.connect("a")
    h.tick(h.now + GRACE_SECONDS)
    assert count(h) == 6
    assert set(h.controller.context.connections.peers) == {"a"}
    h.disconnect("a")
    assert count(h) == 4


def test_a_client_that_is_known_to_live_is_awaited_longer() -> None:
    living = {"a"}
    h = restarted(lives=living.__contains__)
    h.tick(h.now + GRACE_SECONDS)
    assert count(h) == 6
    living.clear()
    assert h.controller.next_deadline() == h.now + GRACE_SECONDS
    h.tick(h.now + GRACE_SECONDS)
    assert count(h) == 4


def test_a_seal_in_the_grace_spares_rows_of_clients_that_are_awaited() -> None:
    """What a client has reserved and not put is dropped only when it is gone."""
    h = restarted()
    h.ask(Seal("p"), "x")
    assert count(h) == 6
    h.connect("a")
    h.tick(h.now + GRACE_SECONDS)
    assert count(h) == 4, "the two that were never put"


def test_no_deadlock_is_reported_while_a_client_has_not_come_back() -> None:
    """A client that was clearing rows before the restart may go on to clear some."""
    h = Harness(capacity=2)
    h.put(2)
    h.ask(ClearKeys("p", ["none"]), "c")
    h.restart(["w"], replays=True)
    put, claim = h.send(h.publish(1, wait=50.0)), h.claim(3, name="a", wait=50.0)
    assert (h.parked(put, "w"), h.parked(claim, "a")) == (True, True)
    h.tick(h.now + GRACE_SECONDS)
    with pytest.raises(DeadlockError):
        h.result(put)


def test_rows_age_on() -> None:
    h = Harness()
    h.create(keep_seconds=10.0)
    h.put(2)
    h.restart([], replays=True)
    h.tick(h.now + 9.0)
    assert count(h) == 2
    h.tick(h.now + 2.0)
    assert count(h) == 0
