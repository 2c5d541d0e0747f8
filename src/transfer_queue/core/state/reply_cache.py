"""The replies of one client, kept until it needs them no more."""

from __future__ import annotations

import msgspec

from transfer_queue.core.columns.intervals import IntervalSet
from transfer_queue.core.columns.schema import Persisted, part, scalar, value_of
from transfer_queue.messages.envelopes import AnyReply

MAX_RUNS = 4096  # of finished sequences that are remembered of one client

_encode = msgspec.msgpack.Encoder().encode
_decode_replies = msgspec.msgpack.Decoder(dict[int, AnyReply]).decode


class ReplyCache(Persisted, array_like=True):
    """Replies of one client, kept for retries. acknowledged: up to here it needs none again.

    finished: of the sequences above `acknowledged`, those that it needs no reply to either. An old request that
    comes late, out of a connection given up, is known by these two; else it would have its effect twice.
    """

    acknowledged: int = scalar(int, 0)
    finished: IntervalSet = part(IntervalSet)
    replies: dict[int, AnyReply] = value_of(bytes, dict, _encode, _decode_replies)

    def __init__(self) -> None:
        super().__init__()
        self.finished = IntervalSet()

    def over(self, sequence: int) -> bool:
        """Whether the client waits for this reply no more."""
        return sequence <= self.acknowledged or sequence in self.finished

    def advance(self, acknowledged: int, finished: list[tuple[int, int]]) -> None:
        """Drop the replies that the client does not need any more. The cost depends on these, not on those kept."""
        if acknowledged > self.acknowledged:
            self._drop(self.acknowledged + 1, acknowledged)
            self.acknowledged = acknowledged
        for first, last in finished:
            if len(self.finished.starts) < MAX_RUNS:  # an honest client has far fewer
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
