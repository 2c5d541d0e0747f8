"""The base of the classes that define operations, each for one topic: the parts of a client that they use."""

from __future__ import annotations

from transfer_queue.client.attachment import Attachment
from transfer_queue.client.claims import Claims
from transfer_queue.client.operations.long_waits import WaitReports
from transfer_queue.client.reader import Reader
from transfer_queue.client.writer import Writer


class Topic:
    """The operations of one client on one topic.

    Args:
        attachment: The attachment of the client.
        writer: What puts its values. Default: an ordinary one.
    """

    def __init__(self, attachment: Attachment, writer: Writer | None = None) -> None:
        self.attachment = attachment
        """The attachment of the client."""
        self.claims = Claims(attachment)
        """The claims of the client."""
        self._ask = attachment.ask
        self._writer = Writer(attachment) if writer is None else writer
        self._reader = Reader(attachment)
        self._waits = WaitReports(attachment)
