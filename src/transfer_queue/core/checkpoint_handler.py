"""Saving and loading the whole state, beside the service: which cuts are being saved, and who waits for what.

    BeginCheckpoint   the cut: the server writes the state as it is now into a file of the name that the client chose,
                      and no extent that holds a value of it is given back until the client has copied all of them
    EndCheckpoint     the client is through with it, and learns whether that was so
    LoadState         the server reads such a file, which the client has put there, and keeps a copy of it in the
                      journal's folder; one record, which names that copy, replaces the state

None of this is part of the state: after a restart of the controller a save in progress has failed, and its client
notices at its end. Requests name files and never carry a path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, ForgetState, ReadState, RemoveState, Send, WriteState
from transfer_queue.core.samplers.remote_calls import plain_call
from transfer_queue.core.samplers.user_sampler import AnySampler, Ask, UserSampler, name_of
from transfer_queue.core.state.serialization import saved_sound, trusted
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import Waiter
from transfer_queue.errors import CheckpointError, InvalidArgumentError, SamplerError, TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import BeginCheckpoint, CutReply, EndCheckpoint, LoadState

if TYPE_CHECKING:
    from transfer_queue.core.controller import Controller

FORMAT = 1


class SamplerForm(msgspec.Struct, forbid_unknown_fields=True):
    """What a user's sampler keeps: the name of its class, and what it gave, as msgpack."""

    name: str
    state: bytes


class SavedForm(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a checkpoint's state file.

    time: of the save, on the clock of then. origin: see `_origin`. state: see `core.columns.schema`.
    """

    format: int
    time: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
    sampler: SamplerForm | None
    origin: str
    state: Any


class SavedState(NamedTuple):
    """A saved tree that is about to be loaded: the tree without its state, and the state that it held.

    file: the journal's copy of it, see `records.StateLoaded`; "" if there is no journal.
    """

    tree: dict[str, Any]
    state: State
    file: str = ""


def built(tree: Any, file: str = "", watched: Iterable[str] = ()) -> SavedState:
    """Build the state in a saved tree. Raises CheckpointError if it is not a state, or contradicts itself.

    Takes seconds for a million rows. It uses nothing of a controller, so it can run in a thread beside the loop.
    watched: see `State`.
    """
    if not isinstance(tree, dict) or "state" not in tree:
        raise CheckpointError("it does not contain the state of a controller")
    return SavedState({**tree, "state": None}, trusted(tree["state"], None, watched), file)


REQUESTS = (BeginCheckpoint, EndCheckpoint, LoadState)
Place = tuple[int, int]


class Cut:
    """One save under way. extents: (unit, extent) of all that its values lie in. asker: who waits for its file."""

    def __init__(self, client: str, extents: frozenset[Place], asker: Waiter, reply: CutReply) -> None:
        self.client = client
        self.extents = extents
        self.asker: Waiter | None = asker
        self.reply = reply


class Checkpoints(Container[Place]):
    """cuts: by name. loads: who waits for a state to be loaded. peers: where each who waits is answered.

    It contains all and only the extents that some cut needs.
    """

    def __init__(self) -> None:
        self.cuts: dict[str, Cut] = {}
        self.loads: set[Waiter] = set()
        self.peers: dict[Waiter, int] = {}

    def __contains__(self, place: object) -> bool:
        return any(place in cut.extents for cut in self.cuts.values())

    def wait_for_load(self, client: str, sequence: int, peer: int) -> None:
        """Note that a client waits for a state to be loaded, on its newest connection."""
        self.loads.add((client, sequence))
        self.peers[client, sequence] = peer

    def heard(self, client: str, sequence: int) -> int | None:
        """A file was read: where its client is answered, None where nobody waits any more."""
        waiting = (client, sequence) in self.loads
        self.loads.discard((client, sequence))
        peer = self.peers.pop((client, sequence), None)
        return peer if waiting else None

    def left(self, client: str) -> list[Effect]:
        """A client has gone: nobody saves or loads for it any more."""
        for waiter in [waiter for waiter in self.peers if waiter[0] == client]:
            del self.peers[waiter]
        self.loads = {waiter for waiter in self.loads if waiter[0] != client}
        gone = [name for name, cut in self.cuts.items() if cut.client == client]
        for name in gone:
            del self.cuts[name]
        return [RemoveState(name) for name in gone]


def checked_name(name: str) -> str:
    """The name of a state file; InvalidArgumentError where it is none, as one that is a path."""
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise InvalidArgumentError(f"{name[:80]!r} is no name of a state file, which has 32 hex digits")
    return name


def ask(core: Controller, client: str, peer: int, sequence: int, request: Any) -> list[Effect]:
    """A request of a client that saves or loads. It came again if it is known: then it waits on its new connection."""
    checked_name(request.name)
    if isinstance(request, BeginCheckpoint):
        return _begin(core, client, peer, sequence, request.name)
    if isinstance(request, EndCheckpoint):
        return _end(core, client, peer, sequence, request.name)
    ours = core.checkpoints
    waits = (client, sequence) in ours.loads
    ours.wait_for_load(client, sequence, peer)
    return [] if waits else [ReadState(request.name, client, sequence, list(core.state.watched))]


def _begin(core: Controller, client: str, peer: int, sequence: int, name: str) -> list[Effect]:
    ours = core.checkpoints
    known = ours.cuts.get(name)
    if known is not None and known.client != client:
        raise InvalidArgumentError(f"a checkpoint {name!r} is another client's; choose a name of your own")
    if known is not None and known.asker is None:
        return [Send(peer, sequence, known.reply)]
    known_asker = (client, sequence) in ours.peers
    ours.peers[client, sequence] = peer
    if known is not None or known_asker:
        return []
    try:
        return _cut(core, (client, sequence), name, sampler_state(core.samplers.default))
    except Ask as ask:
        core.asks.order(ask.call, lambda outcome: _sampler_saved(core, (client, sequence), name, outcome))
        return []


def _sampler_saved(core: Controller, asker: Waiter, name: str, outcome: Any) -> list[Effect]:
    """The process of a user's sampler has returned the sampler's state, or has failed."""
    peer = core.checkpoints.peers.get(asker)
    if peer is None or name in core.checkpoints.cuts:
        return []  # its client is gone, or came back on another connection, and the state was cut for it then
    if not isinstance(outcome, BaseException):
        return _cut(core, asker, name, {"name": name_of(core.samplers.default), "state": outcome})
    del core.checkpoints.peers[asker]
    return [core.failure(peer, asker[1], error_of(outcome))]


def _cut(core: Controller, asker: Waiter, name: str, sampler: dict[str, Any] | None) -> list[Effect]:
    extents = frozenset(place for place, extent in core.state.blocks.extents.items() if extent.blocks)
    origin = _origin(core)
    core.checkpoints.cuts[name] = Cut(asker[0], extents, asker, CutReply(origin, core.state.origins))
    time = core.now

    def tree() -> dict[str, Any]:
        return {"format": FORMAT, "time": time, "sampler": sampler, "origin": origin, "state": saved_sound(core.state)}

    return [WriteState(name, tree)]


def _origin(core: Controller) -> str:
    """Under equal origins equal block numbers mean the same block: also for a controller that was started again.

    What a client may save was written down before it was told so, so that a number is used again only where the
    journal lost its end with its machine; then the arenas are gone, too. A load brings numbers of elsewhere.
    """
    arenas = sorted(unit.boot_id for unit in core.state.units.values())
    whose = core.boot if not all(arenas) else hashlib.sha256(" ".join(arenas).encode()).hexdigest()[:32]
    return f"{whose}-{core.state.epoch}"


def _end(core: Controller, client: str, peer: int, sequence: int, name: str) -> list[Effect]:
    """True if all of the cut was there until now."""
    cut = core.checkpoints.cuts.get(name)
    if cut is None or cut.client != client:
        return [Send(peer, sequence, Done(False))]
    del core.checkpoints.cuts[name]
    return [Send(peer, sequence, Done(True)), RemoveState(name)]


def written(core: Controller, name: str, trouble: str | None) -> list[Effect]:
    """The file of a cut is there, or could not be written: why, in words."""
    ours = core.checkpoints
    cut = ours.cuts.get(name)
    if cut is None or cut.asker is None:
        return [RemoveState(name)]  # its client has gone
    waiter, cut.asker = cut.asker, None
    peer = ours.peers.pop(waiter, None)
    answer: CutReply | Failure = cut.reply
    effects: list[Effect] = []
    if trouble is not None:
        del ours.cuts[name]
        answer = Failure("CheckpointError", f"the controller could not write its state: {trouble}; nothing was saved")
        effects.append(RemoveState(name))
    return effects if peer is None else [Send(peer, waiter[1], answer), *effects]


def record_of(core: Controller, read: SavedState | BaseException) -> r.StateLoaded:
    """The record that makes a saved tree the state. CheckpointError where it is none; SamplerError."""
    if isinstance(read, BaseException):
        raise CheckpointError(f"the state cannot be loaded: {read}") from read
    tree = read.tree
    if tree.get("format") != FORMAT:
        raise CheckpointError(f"the state to load is not of format {FORMAT}, which is what this release loads")
    try:
        form = msgspec.convert(tree, SavedForm)
        if form.sampler is not None:
            msgspec.msgpack.decode(form.sampler.state)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the state to load is not what a save writes: {error}; nothing was changed") from None
    return r.StateLoaded(b"", core.now, read.file)


def sampler_state(sampler: AnySampler) -> dict[str, Any] | None:
    """What a user's sampler keeps, None of a built-in one. SamplerError where it cannot be kept without pickle."""
    return {"name": sampler.name, "state": sampler.save_checkpoint()} if isinstance(sampler, UserSampler) else None


def read(core: Controller, client: str, sequence: int, found: SavedState | Exception) -> list[Effect]:
    """A file was read for the LoadState request of a client."""
    peer = core.checkpoints.heard(client, sequence)
    if peer is None:
        return _unused(found)  # the client does not wait any more, so nothing is loaded
    try:
        record = record_of(core, found)
        assert not isinstance(found, Exception)
        kept, sampler = found.tree["sampler"], core.samplers.default
        if kept is None or not isinstance(sampler, UserSampler) or kept["name"] != sampler.name:
            return core.load_state(client, peer, sequence, record, found)
        if core.asks.runner is not None:
            return _load_with_process(core, client, peer, sequence, record, found, kept["state"])
        before = sampler.save_checkpoint()
        sampler.load_checkpoint(kept["state"])
        try:
            return core.load_state(client, peer, sequence, record, found)
        except BaseException:
            sampler.load_checkpoint(before)
            raise
    except TransferQueueError as error:
        return [core.failure(peer, sequence, error), *_unused(found)]


def _unused(found: SavedState | Exception) -> list[Effect]:
    """Return the effects that remove the journal's copy of a state that is not loaded."""
    return [ForgetState(found.file)] if isinstance(found, SavedState) and found.file else []


def _load_with_process(
    core: Controller, client: str, peer: int, sequence: int, record: r.StateLoaded, found: SavedState, state: bytes
) -> list[Effect]:
    """Load a state with a user's sampler in a process of its own. If the sampler refuses its part, nothing changes.

    Nothing changes either if the client is gone before the sampler has answered. If the client reconnects meanwhile,
    its repeated request waits for the same load.
    """
    core.checkpoints.wait_for_load(client, sequence, peer)

    def known(before: Any) -> list[Effect]:
        if isinstance(before, BaseException):
            return not_loaded(core.checkpoints.heard(client, sequence), error_of(before))
        core.asks.order(plain_call("load_checkpoint", state), lambda outcome: loaded(before, outcome))
        return []

    def loaded(before: bytes, outcome: Any) -> list[Effect]:
        peer = core.checkpoints.heard(client, sequence)
        try:
            if isinstance(outcome, BaseException):
                raise error_of(outcome)
            if peer is not None:
                return core.load_state(client, peer, sequence, record, found)
            error = None
        except TransferQueueError as raised:
            error = raised
        core.asks.order(plain_call("load_checkpoint", before), lambda _: [])
        return not_loaded(peer, error)

    def not_loaded(peer: int | None, error: TransferQueueError | None) -> list[Effect]:
        unused = _unused(found)
        return unused if peer is None or error is None else [core.failure(peer, sequence, error), *unused]

    core.asks.order(plain_call("save_checkpoint"), known)
    return []


def error_of(outcome: BaseException) -> TransferQueueError:
    """Return what a call of a sampler has raised, as an error of the tree."""
    return outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a call failed: {outcome!r}")
