"""Gives recorded events to the controller of the present build, and collects what it answers.

This is the only module of the streams that knows how the core is called. A build whose core has another interface has
another driver. What it owes to the streams is in the docstring of `tests.simulation.streams`.
"""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np
from msgspec.structs import replace

from transfer_queue import sampler as samplers
from transfer_queue.config.settings import Settings
from transfer_queue.core.controller import Controller
from transfer_queue.core.events import effects as e
from transfer_queue.core.events.records import SamplesPut
from transfer_queue.core.events.registry import APPLIERS
from transfer_queue.core.puts.apply import apply_put
from transfer_queue.core.state.state import State
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import Journal, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.messages.envelopes import ReplyEnvelope, RequestEnvelope
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, ReleaseExtents
from transfer_queue.node.controller.controller_service import core_config
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.sampler.sampler_wrapper import ranked_tags

ROUNDING = 1e-9
"""Seconds by which a time differs after it was converted between two clocks."""
MAX_TICKS = 10_000  # at one moment
MAX_TEXT = 60  # characters of a value in the state; of a longer text a hash is kept, too
EVENTS = 100
"""The state is noted after each of this number of events."""

MOVE = re.compile(r"(unit \d+: Move\()number=(\d+), ")
"""The beginning of an order to copy blocks, and its number."""

_encode = msgspec.msgpack.Encoder().encode
_envelope = msgspec.msgpack.Decoder(RequestEnvelope).decode


class Reply(NamedTuple):
    """A reply. Its body has the sequence of its request."""

    peer: int
    """The connection."""
    time: float
    """When it was sent; 0 if that is the time of its event."""
    body: bytes


class Change(NamedTuple):
    """What of the state has changed. The state is a set of lines, one for each value."""

    event: int
    """The number of the event after which the state was compared with the one before."""
    gone: list[str]
    new: list[str]


class Outcome(msgspec.Struct):
    """What a build answers to a stream."""

    replies: list[list[Reply]]
    """The replies that each event has led to, or that became due between the event before and this one."""
    orders: dict[str, int]
    """Orders to storage units -> how often each was sent."""
    states: list[Change]
    """The state before each restart, at each event with a round number, and at the end, each as changes."""
    trouble: str = ""
    """Why the stream was not carried out to its end."""


class ControllerDriver:
    """Carries out the events of one stream."""

    def __init__(self, folder: Path, recorded: Iterable[str]) -> None:
        self.outcome = Outcome([], {}, [])
        moves = [(order, MOVE.match(order)) for order in recorded]
        self._recorded = {int(found[2]): MOVE.sub(r"\1", order) for order, found in moves if found}
        """Number of a recorded order to copy blocks -> the order without the number."""
        self._moves: dict[str, list[int]] = {}
        """Order to copy blocks, without its number -> the numbers under which it was sent."""
        self._folder = folder
        self._now = 0.0
        self._boots = 0
        self._event_time = 0.0
        self._state: set[str] = set()
        self._is_running = False

    def feed(self, event: list[Any]) -> None:
        """Carry out an event at its time, and everything that is due until then."""
        name, time, *values = event
        self._event_time = time
        self.outcome.replies.append([])
        # what is due at the same time as a stop, did not happen any more
        self._complete_until(time if name != "stop" else math.nextafter(time, -math.inf))
        self._now = time
        getattr(self, f"_{name}")(*values)
        self._complete_until(time)
        if len(self.outcome.replies) % EVENTS == 0:
            self._note_state()

    def close(self) -> None:
        """Close the journal."""
        if self._boots:
            self._journal.close()

    # ------------------------------------------------------------ events

    def _system(self, skew: float, settings: dict[str, Any], sampler: str, arguments: dict[str, Any]) -> None:
        self._settings = Settings.from_json(settings)
        self._sampler = getattr(samplers, sampler)(**arguments)
        for name in ("journal", "states"):
            (self._folder / name).mkdir()
        self._loaded = LoadedStates(self._folder / "journal", sync=False)
        self._states = StateFiles(self._folder / "states", self._loaded)
        self._start(skew)

    def _restart(self, skew: float) -> None:
        self._note_state()
        self._journal.close()
        self._start(skew)

    def _stop(self) -> None:
        self._is_running = False

    def _go_on(self) -> None:
        self._is_running = True

    def _tick(self) -> None:
        """Do nothing: what was due at this time has happened."""

    def _start(self, skew: float) -> None:
        """Start a controller on a node whose clock shows this more than the virtual time."""
        self._is_running, self._skew = True, skew
        clock = ClockIdentity(f"{skew:016.0f}".encode(), -skew)
        settings, folder = self._settings, self._folder / "journal"
        recovered = recover(folder, clock, settings.total_storage_size, ranked_tags(self._sampler))
        self._boots += 1
        self._journal = Journal(folder, recovered, clock, durable=False)
        text = msgspec.json.encode({"settings": settings.to_json(), "conf": {}}).decode()
        core = core_config(settings, self._sampler, text, boot=f"boot {self._boots}", part=2, lease_key=b"")
        self._controller = Controller(core, recovered.state, self._clock_time)

    def _file(self, name: str, content: bytes) -> None:
        self._states.path(name).write_bytes(content)

    def _on_connect(self, client: str, peer: int) -> None:
        self._controller.on_connect(client, peer)

    def _on_disconnect(self, client: str, peer: int) -> None:
        self._carry_out(self._controller.on_disconnect(client, peer, self._clock_time))

    def _handle(self, client: str, peer: int, request: bytes) -> None:
        envelope = _envelope(request)
        if isinstance(envelope.body, BlocksMovedReport):
            sent = self._moves.get(self._recorded.get(envelope.body.move, ""), [envelope.body.move])
            number = envelope.body.move if envelope.body.move in sent else sent[-1]
            envelope = replace(envelope, body=replace(envelope.body, move=number))
        self._carry_out(self._controller.handle(client, peer, envelope, self._clock_time))

    def _handle_puts(self, puts: list[tuple[str, int, bytes]]) -> None:
        decoded = [(client, peer, _envelope(request)) for client, peer, request in puts]
        self._carry_out(self._controller.handle_puts(decoded, self._clock_time))

    def _end(self) -> None:
        self._note_state()

    def _note_state(self) -> None:
        before, now = self._state, set(lines_of(self._controller.state.to_comparable(), "state"))
        self.outcome.states.append(Change(len(self.outcome.replies) - 1, sorted(before - now), sorted(now - before)))
        self._state = now

    # ------------------------------------------------------------ what follows from them

    @property
    def _clock_time(self) -> float:
        """The time on the clock of the controller's node."""
        return self._now + self._skew

    def _complete_until(self, time: float) -> None:
        """Let the controller do everything that is due until a time."""
        moment, ticks = self._now, 0
        while self._is_running:
            due = self._controller.next_deadline()
            if due is None or due - self._skew > time + ROUNDING:
                break
            self._now = max(self._now, due - self._skew)
            moment, ticks = (moment, ticks + 1) if self._now == moment else (self._now, 0)
            if ticks > MAX_TICKS:
                raise RuntimeError(f"the controller is still busy after {MAX_TICKS} ticks at {moment}")
            self._carry_out(self._controller.tick(max(self._clock_time, due)))
        self._now = time

    def _carry_out(self, effects: list[e.Effect]) -> None:
        """Write the records of an event, and carry out its effects, and all that follow from it."""
        controller, now = self._controller, self._clock_time
        self._journal.append(controller.take_records())
        self._journal.commit()
        for effect in effects:
            if isinstance(effect, e.Send):
                self._note_reply(effect)
            elif isinstance(effect, (e.SendToUnit, e.RemoveMirror)):
                self._note_order(effect)
            elif isinstance(effect, e.ComputeDeal):
                try:
                    outcome = effect.run()
                except Exception as error:
                    outcome = error
                self._carry_out(controller.on_outcome(effect.number, outcome, now))
            elif isinstance(effect, e.WriteState):
                trouble = None
                try:
                    state_file.write(self._states.path(effect.name), effect.tree(), sync=False)
                except Exception as error:
                    trouble = f"{type(error).__name__}: {error}"
                self._carry_out(controller.on_outcome(effect.number, trouble, now))
            elif isinstance(effect, e.ReadState):
                found = self._states.read(effect.name, effect.watched)
                self._carry_out(controller.on_outcome(effect.number, found, now))
            elif isinstance(effect, e.RemoveState):
                self._states.remove(effect.name)
            elif isinstance(effect, e.ForgetState):
                self._states.forget(effect.file)
        if controller.unfinished:
            self._carry_out(controller.settle_further())

    def _note_reply(self, send: e.Send) -> None:
        time = 0.0 if self._now == self._event_time else self._now
        self.outcome.replies[-1].append(Reply(send.peer, time, _encode(ReplyEnvelope(send.sequence, send.reply))))

    def _note_order(self, order: e.SendToUnit | e.RemoveMirror) -> None:
        if isinstance(order, e.SendToUnit) and isinstance(order.request, ReleaseExtents):
            orders = [f"unit {order.unit}: free extent {extent}" for extent in order.request.extents]
        elif isinstance(order, e.SendToUnit):
            orders = [f"unit {order.unit}: {order.request}"]
            move = MOVE.match(orders[0])
            if move:
                self._moves.setdefault(MOVE.sub(r"\1", orders[0]), []).append(int(move[2]))
        else:
            orders = [repr(order)]
        for each in orders:
            self.outcome.orders[each] = self.outcome.orders.get(each, 0) + 1


def lines_of(value: Any, path: str) -> Iterable[str]:
    """Return a line for each value of a tree."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from lines_of(each, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)) and value:
        for number, each in enumerate(value):
            yield from lines_of(each, f"{path}[{number}]")
    else:
        text = repr(sorted(value) if isinstance(value, (set, frozenset)) else value)
        if len(text) > MAX_TEXT:
            text = f"{text[:MAX_TEXT]}... ({len(text)} characters, {hashlib.sha256(text.encode()).hexdigest()[:12]})"
        yield f"{path} = {text}"


def drive(events: list[list[Any]], recorded: Iterable[str] = ()) -> Outcome:
    """Return what the present build answers to a stream.

    Args:
        events: The events.
        recorded: The orders of the build that recorded them. This build may send them in another order, and thus under
            other numbers; the reports of the units get the present numbers.
    """
    with (
        tempfile.TemporaryDirectory(prefix="tq-streams-") as folder,
        patch.dict(APPLIERS, {SamplesPut: _apply_in_steps}),
    ):
        driver = ControllerDriver(Path(folder), recorded)
        try:
            for event in events:
                driver.feed(event)
        except Exception as error:
            driver.outcome.trouble = f"at {event[1]}, {event[0]}: {type(error).__name__}: {error}"
        finally:
            driver.close()
        return driver.outcome


def _apply_in_steps(state: State, put: SamplesPut) -> None:
    """Apply a put with as many versions as it had when each of its steps was a record of its own.

    First rows were added, unless the rows and their values were in one record; then values of earlier puts were shared;
    then blocks, tags and groups were published.
    """
    is_plain = put.rows is None and not put.shared
    published = put.first_block > 0 or put.tags is not None or put.groups is not None
    steps = [put.count + put.taken > 0, bool(put.shared), published]
    for _ in range(0 if is_plain else sum(steps) - 1):
        state.new_version(put.partition)
    apply_put(state, put)
