"""A request that was refused, or that has changed nothing, and that arrives once more on an abandoned connection.

The client has sent it on an earlier connection, which broke for the client while the message was on its way.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.core.context import Connections
from transfer_queue.core.events.effects import RemoveState, Send, WriteState
from transfer_queue.core.state.state import State
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import BeginCheckpoint, EndCheckpoint
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.locks import ListLocks, ReleaseLock, TakeLock
from transfer_queue.messages.partitions import SetGroupDemand, TakeGroupDemand
from transfer_queue.messages.puts import Reserve
from transfer_queue.messages.system import Status


def ask_on_newer(h: Harness, request: AnyRequest, name: str = "late") -> tuple[int, int, Any]:
    """Send a request on a second connection; give the first one, the sequence, and the reply."""
    abandoned = h.client(name).peer
    h.connect(name)
    sequence = h.send(request, name)
    return abandoned, sequence, h.reply(sequence, name)


def arrive_late(h: Harness, request: AnyRequest, abandoned: int, sequence: int, name: str = "late") -> Any:
    """Let the request arrive on the abandoned connection; give the reply that is sent there."""
    client = h.clients[name]
    newer, client.peer = client.peer, abandoned
    h.send(request, name, sequence)
    reply = h.reply(sequence, name)
    client.peer = newer
    return reply


@pytest.fixture
def full() -> Harness:
    """A partition with as many rows as it may have."""
    h = Harness()
    h.create(max_rows=2)
    h.put(2)
    return h


@pytest.mark.parametrize("reserves", [False, True], ids=["put", "reservation"])
def test_a_put_that_was_refused_has_no_effect_when_there_is_space(full: Harness, reserves: bool) -> None:
    request = Reserve("p", 1, None, 0) if reserves else full.publish(1, name="late")
    abandoned, sequence, refusal = ask_on_newer(full, request)
    assert refusal.kind == "PartitionFullError"
    full.clear([0, 1])
    assert arrive_late(full, request, abandoned, sequence) == refusal
    assert full.live() == []


def test_a_put_that_was_refused_has_no_effect_when_it_arrives_together_with_others(full: Harness) -> None:
    h = full
    request = h.publish(1, name="late")
    abandoned, sequence, refusal = ask_on_newer(h, request)
    h.clear([0, 1])
    h.clients["late"].sequence, h.clients["late"].peer = sequence - 1, abandoned
    h.send_together([("w", h.publish(1)), ("late", request)])
    assert h.reply(sequence, "late") == refusal
    assert h.state.partitions["p"].row_count == 1


@pytest.mark.parametrize("wait", [None, 5.0], ids=["at once", "after a wait"])
def test_a_claim_that_got_nothing_takes_no_rows(wait: float | None) -> None:
    h = Harness()
    h.create()
    request = Claim("p", "t", ["x"], 1, {}, wait)
    abandoned, sequence, reply = ask_on_newer(h, request)
    if wait is not None:
        assert reply is None
        h.tick(6.0)
        reply = h.reply(sequence, "late")
    assert isinstance(reply, ClaimReply if wait is None else Failure)
    h.put(1)
    assert arrive_late(h, request, abandoned, sequence) == reply
    assert h.dealt(1) == [0]


@pytest.mark.parametrize("wait", [None, 5.0], ids=["at once", "after a wait"])
def test_a_lock_that_was_refused_is_not_taken(wait: float | None) -> None:
    h = Harness()
    token = h.ask(TakeLock("p", ["k"], 100.0)).token
    request = TakeLock("p", ["k"], 100.0, wait)
    abandoned, sequence, refusal = ask_on_newer(h, request)
    if wait is not None:
        h.tick(6.0)
        refusal = h.reply(sequence, "late")
    assert isinstance(refusal, Failure)
    assert h.ask(ReleaseLock("p", token)).value
    assert arrive_late(h, request, abandoned, sequence) == refusal
    assert not h.ask(ListLocks()).locks


def test_groups_that_were_not_promised_in_time_are_not_promised_later() -> None:
    h = Harness()
    h.create()
    request = TakeGroupDemand("p", "t", 4, wait=5.0)
    abandoned, sequence, _ = ask_on_newer(h, request)
    h.tick(6.0)
    reply = h.reply(sequence, "late")
    assert reply.value == 0
    h.ask(SetGroupDemand("p", "t", 3))
    assert arrive_late(h, request, abandoned, sequence) == reply
    assert h.ask(TakeGroupDemand("p", "t", 4), "producer").value == 3


def test_it_is_refused_when_the_client_has_its_reply(full: Harness) -> None:
    """The client has said so with a request that no record tells of either."""
    request = full.publish(1, name="late")
    abandoned, sequence, _ = ask_on_newer(full, request)
    full.clients["late"].acknowledged = sequence
    full.ask(Status(), "late")
    full.clear([0, 1])
    assert "acknowledged before" in arrive_late(full, request, abandoned, sequence).message
    assert full.live() == []


def test_a_request_with_another_number_is_carried_out(full: Harness) -> None:
    ask_on_newer(full, full.publish(1, name="late"))
    full.clear([0, 1])
    assert full.put(1, name="late") == [2]


def test_a_reply_is_kept_until_the_client_has_it_or_is_gone() -> None:
    h = Harness()
    unrecorded = h.controller.context.connections.unrecorded
    for _ in range(3):
        assert isinstance(h.reply(h.claim(1, name="late"), "late"), ClaimReply)
        assert len(unrecorded["late"].replies) == 1
        h.clients["late"].acknowledged = h.clients["late"].sequence
    h.ask(Status(), "late")
    assert not unrecorded["late"].replies
    given_up = h.claim(1, name="late", wait=5.0)
    h.clients["late"].acknowledged = given_up
    h.ask(Status(), "late")
    h.tick(6.0)
    assert not unrecorded["late"].replies
    h.disconnect("late")
    assert not unrecorded


def test_they_are_forgotten_when_no_connection_is_left_on_which_the_request_could_arrive() -> None:
    connections = Connections(State())
    connections.note_opened("c", 1)
    connections.note_opened("c", 2)
    connections.note_answer(("c", 1), Done())
    assert not connections.note_closed("c", 1)
    assert connections.unrecorded["c"].replies == {1: Done()}
    assert connections.note_closed("c", 2)
    assert not connections.unrecorded
    connections.peers.clear()
    connections.note_answer(("c", 2), Done())
    assert not connections.unrecorded, "its reply does not arrive"


def test_a_save_is_begun_again_if_its_client_was_away_when_the_reply_was_sent() -> None:
    """The save has ended with the connections of the client, so its first reply does not hold any more."""
    h = Harness()
    h.put(1)
    request = BeginCheckpoint("0" * 32)
    (write,) = h.controller.handle("w", h.clients["w"].peer, RequestEnvelope(9, 0, request), h.now)
    assert isinstance(write, WriteState)
    (first,) = h.controller.on_outcome(write.number, None, h.now)
    assert isinstance(first, Send)
    assert RemoveState("0" * 32) in h.controller.on_disconnect("w", h.clients["w"].peer, h.now)
    h.connect("w")
    (again,) = h.controller.handle("w", h.clients["w"].peer, RequestEnvelope(9, 0, request), h.now)
    assert isinstance(again, WriteState)
    h.take(h.controller.on_outcome(again.number, None, h.now))
    end = RequestEnvelope(10, 9, EndCheckpoint("0" * 32))
    ended, _ = h.controller.handle("w", h.clients["w"].peer, end, h.now)
    assert isinstance(ended, Send)
    assert ended.reply == Done(True)
