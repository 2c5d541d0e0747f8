"""Optional TLS for connections between machines. Peers without a certificate of the system's authority are refused.

TLS is the layer below the handshake of `net.handshake`, which proves the key as without TLS: a certificate alone is not
enough. Both sides present a certificate that the same authority has signed. Its name is not checked, because machines
of a cluster are addressed by numbers. UNIX sockets never use TLS.

Sans-IO: the class takes bytes from the socket and returns bytes for the socket, so that the loop and both drivers use
it.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from transfer_queue.errors import AuthenticationError, InvalidArgumentError, ProtocolError, TransferQueueError
from transfer_queue.net.handshake import MAGIC, ClientHandshake

PIECE = 1 << 16  # bytes that one read decrypts


def make_context(files: Mapping[str, str], *, server: bool) -> ssl.SSLContext:
    """Return the context of one side for PEM files by the names certificate, private_key and authority.

    Args:
        files: The paths.
        server: True for the side that listens (`ServerLoop.listen`), False for the one that connects (`Session`).

    Raises:
        InvalidArgumentError: A file is missing, cannot be read or is not valid, or the key is encrypted or does not
            belong to the certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # no process of this package resumes or renegotiates a session, so both are disabled
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    if server:
        context.num_tickets = 0
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    certificate, private_key, authority = (files[name] for name in ("certificate", "private_key", "authority"))
    reading = "security.tls"
    try:
        for name in ("certificate", "private_key", "authority"):  # OpenSSL does not report which file it cannot open
            reading = f"security.tls.{name} {files[name]}"
            with open(files[name], "rb"):
                pass
        reading = f"security.tls.certificate {certificate} with private_key {private_key}"
        context.load_cert_chain(certificate, private_key, password=_encrypted)
        reading = f"security.tls.authority {authority}"
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise InvalidArgumentError(
            f"{reading} cannot be used: {error}. The files must be PEM files that this process can read; the private "
            "key must have no password and belong to the certificate, and the authority must have signed the "
            "certificate"
        ) from error
    return context


def _encrypted() -> str:
    raise ValueError("the private key is encrypted")  # without this, OpenSSL asks for a password at the terminal


class Tls:
    """One side of one connection."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.done = False
        """Whether this side has completed the handshake and may send messages.

        With TLS 1.3, a client completes it before the server has checked its certificate. A refused client gets the
        error at its next read.
        """
        self.ended = False
        """Whether the other side sends nothing more."""
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._server = server
        self._begun = False  # whether bytes of the other side have arrived

    def start(self) -> bytes:
        """Return the first bytes that a client sends."""
        self._shake()
        return self._outgoing.read()

    def begins_without_tls(self, data: bytes) -> bool:
        """Whether these bytes, which `receive` has not got yet, begin the handshake of a peer without TLS."""
        return not self._begun and data[:1] == MAGIC[:1]  # no record of TLS begins with this byte

    def receive(self, data: bytes) -> bytes:
        """Take bytes from the socket and return the decrypted data. `outgoing` may have bytes to send afterwards.

        Raises:
            AuthenticationError: One side has no certificate of the other side's authority.
            ProtocolError: The other side does not use TLS, or the bytes are not valid.
            AttachError: The other side is a server without TLS that refuses the connection with a reason.
        """
        if not self._server and self.begins_without_tls(data):
            ClientHandshake("client", "-", b"").receive(data)  # raises the error that the server reports
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

    def encrypt(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt data, which must not be empty, for `outgoing`."""
        self._object.write(data)

    def outgoing(self) -> bytes:
        """Return the new bytes to send over the socket. After an error, they tell the other side the reason."""
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
        # the names of alerts are SSLV3_ALERT_..., TLSV1_ALERT_..., TLSV13_ALERT_...
        if isinstance(error, ssl.SSLCertVerificationError) or "CERTIFICATE" in said or "ALERT" in said:
            return AuthenticationError(
                f"TLS with the {other} failed: {said}; both sides need a certificate that the other side's authority "
                "has signed, see security.tls"
            )
        return ProtocolError(
            f"TLS with the {other} failed: {said}; both sides must use TLS, or neither, see security.tls"
        )
