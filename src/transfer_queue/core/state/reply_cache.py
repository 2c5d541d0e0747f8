"""The replies to the mutations of one client, kept until the client does not need them any more."""

from __future__ import annotations

import msgspec

from transfer_queue.core.columns.intervals import IntervalSet
from transfer_queue.core.columns.schema import Persisted, part, scalar, value_of
from transfer_queue.messages.envelopes import AnyReply

MAX_RUNS = 4096  # ranges of finished sequence numbers that are remembered of one client

_encode = msgspec.msgpack.Encoder().encode
_decode_replies = msgspec.msgpack.Decoder(dict[int, AnyReply]).decode


class ReplyCache(Persisted, array_like=True):
    """The replies to the mutations of one client, kept for retries."""

    acknowledged: int = scalar(int, 0)
    """The client needs no reply up to this sequence number."""
    finished: IntervalSet = part(IntervalSet)
    """The later sequence numbers to which it needs no reply either.

    An old request that arrives late on an abandoned connection is recognized by these two. Otherwise it would have its
    effect twice.
    """
    replies: dict[int, AnyReply] = value_of(bytes, dict, _encode, _decode_replies)

    def __init__(self) -> None:
        super().__init__()
        self.finished = IntervalSet()

    def over(self, sequence: int) -> bool:
        """Return whether the client does not need the reply to this request any more."""
        return sequence <= self.acknowledged or sequence in self.finished

    def advance(self, acknowledged: int, finished: list[tuple[int, int]]) -> None:
        """Remove the replies that the client does not need any more, at a cost that depends on their number only."""
        if acknowledged > self.acknowledged:
            self._drop(self.acknowledged + 1, acknowledged)
            self.acknowledged = acknowledged
        for first, last in finished:
            if len(self.finished.starts) < MAX_RUNS:  # a correct client has far fewer
                first = max(first, self.acknowledged + 1)
                for gap in self.finished.gaps(first, last):
                    self._drop(*gap)
                self.finished.add(first, last)
        if self.finished.starts:
            self.finished.drop_up_to(self.acknowledged)

    def _drop(self, first: int, last: int) -> None:
        if last - first < len(self.replies):
            for sequence in range(first, last + 1):
                self.replies.pop(sequence, None)
        else:
            for sequence in [s for s in self.replies if first <= s <= last]:
                del self.replies[sequence]
