"""net.server.sockets: which sockets have events."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from transfer_queue.net.server.sockets import READ, WRITE, Poller


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def test_events_come_with_the_data_of_their_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    poller = Poller()
    poller.register(one, READ, "one")
    assert poller.poll(0) == []
    other.send(b"x")
    assert poller.poll(None) == [("one", READ)]
    assert poller.poll(0) == [("one", READ)]  # until it is read
    one.recv(1)
    assert poller.poll(0) == []
    poller.modify(one, READ | WRITE)
    assert poller.poll(0) == [("one", WRITE)]
    poller.close()


def test_the_end_of_a_connection_is_an_event_beside_reading_and_writing(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    one, other = pair
    poller = Poller()
    poller.register(one, WRITE, "one")
    other.close()
    ((data, events),) = poller.poll(None)
    assert data == "one"
    assert events & ~READ
    assert events & ~WRITE
    poller.close()


def test_a_socket_that_is_not_registered_any_more_has_no_events(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    poller = Poller()
    poller.register(one, READ, "one")
    poller.register(other, READ, "other")
    other.send(b"x")
    poller.unregister(one)
    assert poller.poll(0) == []
    one.send(b"x")
    assert poller.poll(0) == [("other", READ)]
    poller.close()
