"""Writes recorded streams to a file, reads them, and names the first difference between two outcomes of a stream."""

from __future__ import annotations

import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.simulation.streams.controller_driver import MOVE, Change, Outcome
from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope

BEFORE, AFTER = 80, 240  # characters that are shown around the first difference of two texts
FOLDER = re.compile(rb"tq-streams-\w{8}")
"""The folder of a run, which has another name in each run."""
WIDE_SCHEMA = re.compile(r"\['schemas'\]\['values'\]\[(\d+)\] = <.*WideSchema object")
"""The line of the schema of very many fields in the state of an earlier build, which does not show the fields."""
SCHEMA = re.compile(r"\['schemas'\]\['values'\]\[(\d+)\]")

_encode = msgspec.msgpack.Encoder().encode


class Stream(msgspec.Struct):
    """The events of a seed, and what the build that recorded them answers."""

    kind: str
    seed: int
    events: list[list[Any]]
    outcome: Outcome


def write_streams(path: Path, streams: Iterable[Stream]) -> None:
    """Write streams to a new file."""
    with lzma.open(path, "wb") as file:
        for stream in streams:
            packed = _encode(stream)
            file.write(len(packed).to_bytes(8, "little") + packed)


def read_streams(path: Path) -> Iterator[Stream]:
    """Iterate over the streams of a file."""
    with lzma.open(path) as file:
        while size := file.read(8):
            yield msgspec.msgpack.decode(file.read(int.from_bytes(size, "little")), type=Stream)


def first_difference(stream: Stream, outcome: Outcome) -> str:
    """Return how an outcome first differs from the recorded one; "" if it does not."""
    recorded = stream.outcome
    found = (
        _difference_of_replies(stream, outcome)
        or _difference_of_states(recorded, outcome)
        or _difference_of_texts("the run did not end", recorded.trouble, outcome.trouble)
        or _difference_of_orders(recorded.orders, outcome.orders)
    )
    return f"{stream.kind}, seed {stream.seed}: {found}" if found else ""


Sent = list[tuple[int, float, bytes]]
"""The event, the time and the body of each reply to a request."""


def _replies_by_request(outcome: Outcome) -> dict[tuple[int, int], Sent]:
    found: dict[tuple[int, int], Sent] = {}
    for event, replies in enumerate(outcome.replies):
        for reply in replies:
            sequence = msgspec.msgpack.decode(reply.body)[0]
            body = FOLDER.sub(b"tq-streams-********", reply.body)  # an error may name a file of the run
            found.setdefault((reply.peer, sequence), []).append((event, reply.time, body))
    return found


def _difference_of_replies(stream: Stream, outcome: Outcome) -> str:
    """Return the difference of the earliest request whose replies differ."""
    recorded, present = _replies_by_request(stream.outcome), _replies_by_request(outcome)
    differing = []
    for request in recorded.keys() | present.keys():
        sent, now = recorded.get(request, []), present.get(request, [])
        if sent != now and _plain(sent) != _plain(now):
            place = next(
                (n for n in range(min(len(sent), len(now))) if _plain(sent[n : n + 1]) != _plain(now[n : n + 1])), None
            )
            at = min(len(sent), len(now)) if place is None else place
            differing.append((min(each[0] for each in [*sent[at : at + 1], *now[at : at + 1]]), request, at))
    if not differing:
        return ""
    event, request, at = min(differing)
    texts = [_reply_text(each[at : at + 1], stream) for each in (recorded.get(request, []), present.get(request, []))]
    return _difference_of_texts(
        f"{_request_text(stream, request)}\n    reply {at + 1} differs at event {event}", *texts
    )


def _plain(sent: Sent) -> list[Any]:
    return [(event, time, msgspec.msgpack.decode(body)) for event, time, body in sent]


def _reply_text(sent: Sent, stream: Stream) -> str:
    for event, time, body in sent:
        decoded = msgspec.msgpack.decode(body, type=ReplyEnvelope).body
        return f"event {event}, {time or stream.events[event][1]:.6f} s: {decoded}"
    return "no reply"


def _request_text(stream: Stream, request: tuple[int, int]) -> str:
    """Return the request as text, with its client."""
    for name, time, *values in stream.events:
        for client, peer, body in [values] if name == "handle" else values[0] if name == "handle_puts" else []:
            if peer == request[0] and msgspec.msgpack.decode(body)[0] == request[1]:
                decoded = msgspec.msgpack.decode(body, type=RequestEnvelope).body
                head = f"request {request[1]} of {client} (connection {peer}) at {time:.6f} s"
                return f"{head}:\n    {str(decoded)[: 2 * AFTER]}"
    return f"request {request[1]} of connection {request[0]}, which was sent on an earlier one"


def _difference_of_states(recorded: Outcome, outcome: Outcome) -> str:
    wide = {found[1] for change in recorded.states for line in change.new if (found := WIDE_SCHEMA.search(line))}
    for change, other in zip(recorded.states, outcome.states, strict=False):
        pairs = (change.new, other.new), (change.gone, other.gone)
        lines = [
            {line for line in _named_now(one) ^ _named_now(two) if not _is_of_schemas(line, wide)} for one, two in pairs
        ]
        if any(lines):
            path = min(line.partition(" = ")[0] for line in lines[0] or lines[1])
            texts = [_line_of(path, each) for each in (change, other)]
            what = f"after event {change.event}, {max(map(len, lines))} values of the state differ, such as {path}"
            return _difference_of_texts(what, *texts)
    return ""


def _is_of_schemas(line: str, numbers: set[str]) -> bool:
    """Return whether a line of a state is of one of these schemas."""
    found = SCHEMA.search(line)
    return found is not None and found[1] in numbers


def _named_now(lines: Iterable[str]) -> set[str]:
    """Return lines of a state with the present names. Earlier builds also show empty groups of fields."""
    found = set()
    for line in lines:
        path, _, value = line.partition(" = ")
        if not path.endswith("['field_groups']"):
            path = path.replace("['own_live']", "['live']").replace("['own_ever']", "['ever']")
            path = path.replace("['passed']['_codes']", "['passed']['codes']['_columns']")
            found.add(f"{path} = {value}")
    return found


def _line_of(path: str, change: Change) -> str:
    for what, lines in (("", _named_now(change.new)), ("removed: ", _named_now(change.gone))):
        for line in lines:
            if line.startswith(f"{path} = "):
                return what + line
    return "did not change"


def _difference_of_orders(before: dict[str, int], after: dict[str, int]) -> str:
    """Return the difference of the orders to units, without the numbers of those to copy blocks."""
    recorded, present = Counter[str](), Counter[str]()
    for sent_orders, counted in ((before, recorded), (after, present)):
        for order, sent in sent_orders.items():
            counted[MOVE.sub(r"\1", order)] += sent
    for order in sorted(recorded.keys() | present.keys()):
        sent, now = recorded.get(order, 0), present.get(order, 0)
        if sent != now:
            return f"an order was sent {now} times, and {sent} times in the recorded run:\n    {order[: 2 * AFTER]}"
    return ""


def _difference_of_texts(what: str, recorded: str, present: str) -> str:
    """Return the two texts around their first difference; "" if they are equal."""
    if recorded == present:
        return ""
    first = next((n for n, pair in enumerate(zip(recorded, present, strict=False)) if pair[0] != pair[1]), 0)
    begin = max(0, first - BEFORE) if first > AFTER else 0
    texts = [("..." if begin else "") + text[begin : first + AFTER] for text in (recorded, present)]
    return f"{what}\n    recorded: {texts[0]}\n    now:      {texts[1]}"
