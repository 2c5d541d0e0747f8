"""TLS for connections between machines, by choice: who has no certificate of the system's authority is turned away.

It lies beneath the handshake of `net.handshake`, which proves the key as ever: a certificate alone opens nothing. Both
sides show one, signed by the same authority; what name is in it does not matter, since machines of a cluster are
addressed by numbers. UNIX sockets never use it.

Sans-IO: bytes of the socket go in, bytes for the socket come out, so that the loop and both drivers use one class.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import NamedTuple

from transfer_queue.errors import AuthenticationError, InvalidArgumentError, ProtocolError, TransferQueueError
from transfer_queue.net.handshake import MAGIC, ClientHandshake

PIECE = 1 << 16  # bytes that are decrypted at once


class Contexts(NamedTuple):
    """What the two sides of a connection are made with: for `Server.listen`, and for `Session`."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def contexts(files: Mapping[str, str] | None) -> Contexts | None:
    """The contexts of `Settings.tls`: PEM files by the names certificate, private_key and authority; None for none.

    Raises:
        InvalidArgumentError: a file is missing, unreadable or no such file, the key is encrypted or another's.
    """
    if files is None:
        return None
    return Contexts(_context(ssl.PROTOCOL_TLS_SERVER, files), _context(ssl.PROTOCOL_TLS_CLIENT, files))


def _context(protocol: ssl._SSLMethod, files: Mapping[str, str]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # none of ours resumes a session or negotiates again: what is not there cannot be misused
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    certificate, private_key, authority = (files[name] for name in ("certificate", "private_key", "authority"))
    reading = "security.tls"
    try:
        for name in ("certificate", "private_key", "authority"):  # OpenSSL does not say which one it cannot open
            reading = f"security.tls.{name} {files[name]}"
            with open(files[name], "rb"):
                pass
        reading = f"security.tls.certificate {certificate} with private_key {private_key}"
        context.load_cert_chain(certificate, private_key, password=_encrypted)
        reading = f"security.tls.authority {authority}"
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidArgumentError(
            f"{reading} cannot be used: {error}; wanted PEM files that this process can read, the private key without "
            "a password and that of the certificate, which the authority has signed"
        ) from error
    return context


def _encrypted() -> str:
    raise ValueError("the private key is encrypted")  # without this OpenSSL asks at the terminal


class Tls:
    """One side of one connection.

    done: the handshake is over as this side sees it, and messages may go. With TLS 1.3 a client gets there before the
    server has looked at its certificate: it is refused where it reads next. ended: the other side says no more.
    """

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.done = False
        self.ended = False
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._server = server
        self._begun = False  # bytes of the other side have come

    def start(self) -> bytes:
        """What a client sends first."""
        self._shake()
        return self._outgoing.read()

    def plain(self, data: bytes) -> bool:
        """Whether these bytes, not received yet, are the first, and those of a peer of ours without TLS."""
        return not self._begun and data[:1] == MAGIC[:1]  # which begins no record of TLS

    def receive(self, data: bytes) -> bytes:
        """Takes bytes of the socket, gives what the other side said. `outgoing` may have something to send then.

        Raises:
            AuthenticationError: it has no certificate of our authority, or ours is none of its.
            ProtocolError: it does not speak TLS, or what came is broken.
            AttachError: it is a server without TLS, which says why it takes no connection.
        """
        if not self._server and self.plain(data):
            ClientHandshake("client", "-", b"").receive(data)  # raises what it says
        self._begun = True
        self._incoming.write(data)
        if not self.done:
            self._shake()
            if not self.done:
                return b""
        said = bytearray()
        try:
            while piece := self._object.read(PIECE):
                said += piece
            self.ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._refusal(error) from error
        return bytes(said)

    def say(self, data: bytes | bytearray | memoryview) -> None:
        """Puts this, which is not empty, into what is to be sent."""
        self._object.write(data)

    def outgoing(self) -> bytes:
        """What is to be sent over the socket and was not taken yet; after an error, why there was one."""
        return self._outgoing.read()

    def _shake(self) -> None:
        try:
            self._object.do_handshake()
            self.done = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: ssl.SSLError) -> TransferQueueError:
        other = "client" if self._server else "server"
        said = getattr(error, "verify_message", None) or error.reason or str(error)
        # alerts come as SSLV3_ALERT_..., TLSV1_ALERT_..., TLSV13_ALERT_...
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in said or "ALERT" in said:
            return AuthenticationError(
                f"no TLS with the {other}: {said}; both need a certificate signed by the authority of the other, see "
                "security.tls"
            )
        return ProtocolError(f"no TLS with the {other}: {said}; both need to use TLS, or neither, see security.tls")
