import pytest

from transfer_queue.errors import AttachError, AuthenticationError, ProtocolError
from transfer_queue.messages.base import PROTOCOL_VERSION
from transfer_queue.net.handshake import MAGIC, MAX_ID, ClientHandshake, Hello, ServerHandshake

KEY = b"k" * 32


def shake(client: ClientHandshake, server: ServerHandshake, size: int = 1 << 16) -> None:
    """Passes bytes between the two in pieces until neither has more to say."""
    to_server, to_client = client.start(), b""
    while to_server or to_client:
        if to_server:
            piece, to_server = to_server[:size], to_server[size:]
            if server.failed is None:
                to_client += server.receive(piece)
        if to_client:
            piece, to_client = to_client[:size], to_client[size:]
            to_server += client.receive(piece)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
@pytest.mark.parametrize("role", ["client", "unit"])
def test_both_sides_get_to_know_each_other(size: int, role: str) -> None:
    client, server = ClientHandshake(role, "träger-1", KEY), ServerHandshake(KEY)
    shake(client, server, size)
    assert client.done
    assert server.done
    assert server.failed is None
    assert server.hello == Hello(role, "träger-1")


def test_messages_may_follow_the_proof_at_once() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY)
    proof = client.receive(server.receive(client.start()) + b"early")
    server.receive(proof + b"first message")
    assert client.leftover == b"early"
    assert server.leftover == b"first message"


def test_the_key_does_not_travel() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY)
    hello = client.start()
    welcome = server.receive(hello)
    proof = client.receive(welcome)
    assert KEY[:8] not in hello + welcome + proof


def test_a_client_with_another_key_is_told_and_tells_nothing() -> None:
    client, server = ClientHandshake("client", "c", b"x" * 32), ServerHandshake(KEY)
    with pytest.raises(AuthenticationError, match="does not hold the key"):
        client.receive(server.receive(client.start()))
    assert not client.done


def test_a_wrong_proof_of_the_client_fails() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY)
    proof = client.receive(server.receive(client.start()))
    server.receive(bytes([proof[0] ^ 1]) + proof[1:])
    assert isinstance(server.failed, AuthenticationError)
    assert not server.done


def test_a_recorded_conversation_is_worth_nothing_later() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY)
    hello = client.start()
    proof = client.receive(server.receive(hello))
    later = ServerHandshake(KEY)
    later.receive(hello)
    later.receive(proof)
    assert isinstance(later.failed, AuthenticationError)


def test_the_servers_own_proof_does_not_pass_for_a_clients() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY)
    welcome = server.receive(client.start())
    server.receive(welcome[-32:])
    assert isinstance(server.failed, AuthenticationError)


def test_other_versions_are_named_on_both_sides() -> None:
    client, server = ClientHandshake("client", "c", KEY, version=7), ServerHandshake(KEY)
    with pytest.raises(ProtocolError, match=rf"version 7, its peer version {PROTOCOL_VERSION}; install the same"):
        client.receive(server.receive(client.start()))
    assert isinstance(server.failed, ProtocolError)
    assert f"version {PROTOCOL_VERSION}, its peer version 7" in str(server.failed)


def test_a_refusal_gives_its_reason() -> None:
    client, server = ClientHandshake("client", "c", KEY), ServerHandshake(KEY, refuse="it is full " + "x" * 400)
    answer = server.receive(client.start())
    assert len(answer) < 300
    with pytest.raises(AttachError, match="refuses this connection: it is full"):
        client.receive(answer)


@pytest.mark.parametrize("foreign", [b"GET / HTTP/1.1\r\n", b"\x00", b"\x93TX", MAGIC + b"\xff\xff"])
def test_foreign_bytes_are_refused(foreign: bytes) -> None:
    server = ServerHandshake(KEY)
    server.receive(foreign + b"\x00\x00" * 8)
    assert isinstance(server.failed, ProtocolError)
    client = ClientHandshake("client", "c", KEY)
    with pytest.raises(ProtocolError):
        client.receive(foreign + b"\x00\x00" * 8)


@pytest.mark.parametrize(("role", "client_id"), [("king", "c"), ("client", ""), ("client", "x" * (MAX_ID + 1))])
def test_nonsense_is_not_even_sent(role: str, client_id: str) -> None:
    with pytest.raises(ProtocolError):
        ClientHandshake(role, client_id, KEY)
