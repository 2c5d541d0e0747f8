"""Joins gets of few samples of equal partition and fields: one lookup, and a reply for each.

If anything is missing for one of them, each goes on alone, so that its reply says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np

from transfer_queue.client.data.data_path import UNCERTAIN, Operation
from transfer_queue.client.joining.shared_errors import share_error
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.descriptors import Blocks, Placement
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.messages.system import Topology
from transfer_queue.net.calls import CONTROLLER, NOT_MADE, Call

MOST_KEYS = 16
"""The number of keys of a get that joins others."""
_I4 = 4  # bytes of an entry
_WIDTHS = {"unit": 4, "offset": 8, "generation": 8, "nbytes": 8, "rows": 4, "schema": 4, "dims": 4}


class LookupJoiner:
    """Joins the lookups of one client.

    Args:
        look_up: `DataPath._look_up`.
    """

    def __init__(self, look_up: Callable[[Lookup, float | None], Operation[LookupReply]]) -> None:
        self._look_up = look_up

    def call_for(self, request: Lookup, timeout: float | None) -> Call | None:
        """Return the call with which a get asks to join others; None if it must go alone."""
        keys, fields = request.keys, request.fields
        if timeout is not None or not keys or len(keys) > MOST_KEYS:
            return None
        key = self, (request.partition, None if fields is None else tuple(fields))
        return Call(CONTROLLER, Topology(), join=key, part=request)

    def run(self, calls: Sequence[Call]) -> Generator[Call, AnyReply, None]:
        """See `net.calls.Joiner.run`."""
        requests: list[Lookup] = [call.part for call in calls]
        counts = [len(request.keys or ()) for request in requests]
        try:
            reply = None
            if len(calls) > 1:
                keys = [key for request in requests for key in request.keys or ()]
                reply = yield from self._look_up(Lookup(requests[0].partition, None, keys, requests[0].fields), None)
        except UNCERTAIN as error:
            share_error(calls, error)
            return
        except TransferQueueError:
            reply = None
        complete = reply is not None and reply.count == sum(counts) and reply.types and not reply.lacking
        end = 0
        for call, count in zip(calls, counts, strict=True):
            start, end = end, end + count
            if reply is None or not complete:
                call.outcome = NOT_MADE
            else:
                call.outcome = part_of(reply, start, end)


def part_of(reply: LookupReply, start: int, end: int) -> LookupReply:
    """Return the reply about the rows from `start` to before `end`, with the blocks that these need."""
    blocks = [np.frombuffer(placed.block[_I4 * start : _I4 * end], "<i4") for placed in reply.placements]
    used, positions = np.unique(np.concatenate(blocks), return_inverse=True)
    renumbered = positions.astype("<i4").reshape(len(blocks), end - start)
    placements = [
        Placement(placed.fields, mine.tobytes(), placed.slot[_I4 * start : _I4 * end])
        for placed, mine in zip(reply.placements, renumbered, strict=True)
    ]
    return LookupReply(end - start, reply.types, _some_blocks(reply.blocks, used.tolist()), placements)


def _some_blocks(blocks: Blocks, used: list[int]) -> Blocks:
    columns = {
        name: b"".join([getattr(blocks, name)[width * at : width * (at + 1)] for at in used])
        for name, width in _WIDTHS.items()
    }
    return Blocks(**columns, schemas=blocks.schemas, dims_values=blocks.dims_values)
