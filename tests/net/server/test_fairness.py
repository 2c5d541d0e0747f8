"""Many connections share the turns of a loop: each is served once before any is served twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from driven import Driven, Ticking, frame
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfer_queue.net.server.server_loop import (
    ALL_SECONDS,
    CONNECTIONS_A_TURN,
    FRAMES_A_TURN,
    TURN_SECONDS,
    Outgoing,
)

MANY = 2 * CONNECTIONS_A_TURN + 10


class Timed(Ticking):
    """Notes which connection it serves. Each message takes some time of the loop's clock."""

    def __init__(self, cost: Callable[[], float]) -> None:
        super().__init__()
        self.now = 0.0
        self.served: list[int] = []
        self._cost = cost

    def on_message(self, peer: int, *arguments: Any) -> Iterable[Outgoing]:
        self.served.append(peer)
        self.now += self._cost()
        return super().on_message(peer, *arguments)


def timed(driven: Callable[..., Driven], cost: Callable[[], float]) -> tuple[Driven, Timed]:
    """Return a server whose messages take this time."""
    service = Timed(cost)
    return driven(service=service, clock=lambda: service.now), service


def test_replies_leave_after_some_connections_and_the_others_are_first_in_the_next_turn(
    driven: Callable[..., Driven],
) -> None:
    system = driven()
    clients = [system.client() for _ in range(MANY)]
    system.turn()  # the system call forgets that the last handshake made its connection readable
    for client in clients:
        client.push(frame(1))
    order = []
    for _ in range(3):
        system.turn()
        answered = [number for number, client in enumerate(clients) if client.pull()]
        for number in answered:
            clients[number].push(frame(2))  # behind all that were not served yet
        order.append(answered)
    assert [len(answered) for answered in order] == [CONNECTIONS_A_TURN] * 3
    assert order[0] == list(range(CONNECTIONS_A_TURN))
    assert order[1] == list(range(CONNECTIONS_A_TURN, 2 * CONNECTIONS_A_TURN))
    assert order[2][-10:] == list(range(2 * CONNECTIONS_A_TURN, MANY))


def test_a_long_message_ends_the_turn(driven: Callable[..., Driven]) -> None:
    system, _ = timed(driven, lambda: 2 * ALL_SECONDS)
    clients = [system.client() for _ in range(5)]
    system.turn()
    for client in clients:
        client.push(frame(1))
    for number in range(5):
        system.turn()
        assert [len(client.pull()) for client in clients] == [int(at == number) for at in range(5)]


def test_a_turn_serves_connections_for_a_limited_time(driven: Callable[..., Driven]) -> None:
    system, service = timed(driven, lambda: ALL_SECONDS / 8)
    clients = [system.client() for _ in range(40)]
    for client in clients:
        client.push(frame(1))
    while len(service.served) < 40:
        before = len(service.served)
        system.turn()
        assert 8 <= len(service.served) - before <= 9 or len(service.served) == 40


def test_a_connection_that_ends_while_it_waits_is_not_in_the_way(driven: Callable[..., Driven]) -> None:
    system, service = timed(driven, lambda: 2 * ALL_SECONDS)
    clients = [system.client() for _ in range(4)]
    system.turn()
    for client in clients:
        client.push(frame(1))
    system.turn()
    clients[1].sock.close()  # what it has sent before is served
    system.turn(8)
    assert [len(client.pull()) for client in (clients[0], clients[2], clients[3])] == [1, 1, 1]
    assert len(service.gone) == 1
    assert len(system.peers) == 3


def test_new_connections_are_accepted_while_others_wait(driven: Callable[..., Driven]) -> None:
    system, _ = timed(driven, lambda: 2 * ALL_SECONDS)
    floods = [system.client() for _ in range(20)]
    for flood in floods:
        flood.push(b"".join(frame(i) for i in range(1, 11)))
    other = system.client(shake=False)
    system.turn()
    assert len(system.peers) == 21
    other.sock.close()


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pushes=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2 * FRAMES_A_TURN)), max_size=4), min_size=1, max_size=8
    ),
    costs=st.lists(st.sampled_from([0.0, TURN_SECONDS / 4, 2 * TURN_SECONDS, 2 * ALL_SECONDS]), min_size=1, max_size=8),
)
def test_no_connection_starves_and_each_keeps_its_order(
    tmp_path_factory: pytest.TempPathFactory, pushes: list[list[tuple[int, int]]], costs: list[float]
) -> None:
    """Pushes (connection, messages) before each turn. While a connection waits, no other one gets two turns."""
    service = Timed(lambda: costs[len(service.served) % len(costs)])
    system = Driven(tmp_path_factory.mktemp("fair"), service, lambda: service.now)
    clients = [system.client() for _ in range(6)]
    numbers = sorted(service.peers)
    sent, served_before = [0] * 6, [0] * 6
    waits: list[dict[int, int]] = [{} for _ in clients]  # of each that waits: the turns of each other one since then
    answers: list[list[int]] = [[] for _ in clients]
    with contextlib.ExitStack() as stack:
        stack.callback(system.server.close)
        for client in clients:
            stack.callback(client.sock.close)
        for pushed in [*pushes, *([[]] * 400)]:
            for at, count in pushed:
                clients[at].push(b"".join(frame(sent[at] + i) for i in range(1, count + 1)))
                sent[at] += count
            start = len(service.served)
            system.turn()
            counts = [service.served[start:].count(number) for number in numbers]
            for at, count in enumerate(counts):
                assert count <= FRAMES_A_TURN
                if count or served_before[at] + count == sent[at]:
                    waits[at].clear()
                else:
                    for other in (other for other in range(6) if other != at and counts[other]):
                        waits[at][other] = waits[at].get(other, 0) + 1
                    assert max(waits[at].values(), default=0) <= 2, "another one was served twice while it waited"
                served_before[at] += count
                answers[at] += [answer.sequence for answer in clients[at].pull()]
            if served_before == sent and not pushed:
                break
        assert answers == [list(range(1, count + 1)) for count in sent]
