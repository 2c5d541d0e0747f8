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
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.pending_checkpoints import PendingSave
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, ForgetState, ReadState, Release, RemoveState, Send, WriteState
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.samplers.remote_calls import plain_call
from transfer_queue.core.samplers.user_sampler import AnySampler, Ask, UserSampler, name_of
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.serialization import load_untrusted, saved_sound
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.errors import CheckpointError, InvalidArgumentError, SamplerError, TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, EndCheckpoint, LoadState
from transfer_queue.messages.envelopes import RequestEnvelope

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
    return SavedState({**tree, "state": None}, load_untrusted(tree["state"], None, watched), file)


def checked_name(name: str) -> str:
    """The name of a state file; InvalidArgumentError where it is none, as one that is a path."""
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise InvalidArgumentError(f"{name[:80]!r} is no name of a state file, which has 32 hex digits")
    return name


@handles(LoadState)
def handle_load(context: ControllerContext, caller: Caller, request: LoadState) -> list[Effect]:
    """A client loads a state. It came again if it is known: then it waits on its new connection."""
    checked_name(request.name)
    sequence, ours = caller.envelope.sequence, context.checkpoints
    waits = (caller.client, sequence) in ours.loads
    ours.wait_for_load(caller.client, sequence, caller.peer)
    return [] if waits else [ReadState(request.name, caller.client, sequence, list(context.state.watched))]


@handles(BeginCheckpoint)
def handle_begin(context: ControllerContext, caller: Caller, request: BeginCheckpoint) -> list[Effect]:
    """A client begins to save the state."""
    name, ours, asker = checked_name(request.name), context.checkpoints, (caller.client, caller.envelope.sequence)
    known = ours.saves.get(name)
    if known is not None and known.client != caller.client:
        raise InvalidArgumentError(f"a checkpoint {name!r} is another client's; choose a name of your own")
    if known is not None and known.waiter is None:
        return [Send(caller.peer, caller.envelope.sequence, known.reply)]
    known_asker = asker in ours.peers
    ours.peers[asker] = caller.peer
    if known is not None or known_asker:
        return []
    try:
        return _cut(context, asker, name, sampler_state(context.samplers.default))
    except Ask as ask:
        context.sampler_calls.order(ask.call, lambda outcome: _sampler_saved(context, asker, name, outcome))
        return []


def _sampler_saved(context: ControllerContext, asker: RequestKey, name: str, outcome: Any) -> list[Effect]:
    """The process of a user's sampler has returned the sampler's state, or has failed."""
    peer = context.checkpoints.peers.get(asker)
    if peer is None or name in context.checkpoints.saves:
        return []  # its client is gone, or came back on another connection, and the state was cut for it then
    if not isinstance(outcome, BaseException):
        return _cut(context, asker, name, {"name": name_of(context.samplers.default), "state": outcome})
    del context.checkpoints.peers[asker]
    return [context.failure(peer, asker[1], error_of(outcome))]


def _cut(context: ControllerContext, asker: RequestKey, name: str, sampler: dict[str, Any] | None) -> list[Effect]:
    extents = frozenset(place for place, extent in context.state.blocks.extents.items() if extent.blocks)
    origin = _origin(context)
    context.checkpoints.saves[name] = PendingSave(
        asker[0], extents, asker, BeginCheckpointReply(origin, context.state.origins)
    )
    time = context.now

    def tree() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "time": time,
            "sampler": sampler,
            "origin": origin,
            "state": saved_sound(context.state),
        }

    return [WriteState(name, tree)]


def _origin(context: ControllerContext) -> str:
    """Under equal origins equal block numbers mean the same block: also for a controller that was started again.

    What a client may save was written down before it was told so, so that a number is used again only where the
    journal lost its end with its machine; then the arenas are gone, too. A load brings numbers of elsewhere.
    """
    arenas = sorted(unit.boot_id for unit in context.state.units.values())
    whose = context.boot if not all(arenas) else hashlib.sha256(" ".join(arenas).encode()).hexdigest()[:32]
    return f"{whose}-{context.state.epoch}"


@handles(EndCheckpoint)
def handle_end(context: ControllerContext, caller: Caller, request: EndCheckpoint) -> list[Effect]:
    """True if all of the cut was there until now."""
    name, sequence = checked_name(request.name), caller.envelope.sequence
    cut = context.checkpoints.saves.get(name)
    if cut is None or cut.client != caller.client:
        return [Send(caller.peer, sequence, Done(False))]
    del context.checkpoints.saves[name]
    return [Send(caller.peer, sequence, Done(True)), RemoveState(name)]


def written(context: ControllerContext, name: str, trouble: str | None) -> list[Effect]:
    """The file of a cut is there, or could not be written: why, in words."""
    ours = context.checkpoints
    cut = ours.saves.get(name)
    if cut is None or cut.waiter is None:
        return [RemoveState(name)]  # its client has gone
    waiter, cut.waiter = cut.waiter, None
    peer = ours.peers.pop(waiter, None)
    answer: BeginCheckpointReply | Failure = cut.reply
    effects: list[Effect] = []
    if trouble is not None:
        del ours.saves[name]
        answer = Failure("CheckpointError", f"the controller could not write its state: {trouble}; nothing was saved")
        effects.append(RemoveState(name))
    return effects if peer is None else [Send(peer, waiter[1], answer), *effects]


def record_of(context: ControllerContext, read: SavedState | BaseException) -> r.StateLoaded:
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
    return r.StateLoaded(b"", context.now, read.file)


def sampler_state(sampler: AnySampler) -> dict[str, Any] | None:
    """What a user's sampler keeps, None of a built-in one. SamplerError where it cannot be kept without pickle."""
    return {"name": sampler.name, "state": sampler.save_checkpoint()} if isinstance(sampler, UserSampler) else None


def read(context: ControllerContext, client: str, sequence: int, found: SavedState | Exception) -> list[Effect]:
    """A file was read for the LoadState request of a client."""
    peer = context.checkpoints.end_load(client, sequence)
    if peer is None:
        return _unused(found)  # the client does not wait any more, so nothing is loaded
    try:
        record = record_of(context, found)
        assert not isinstance(found, Exception)
        kept, sampler = found.tree["sampler"], context.samplers.default
        if kept is None or not isinstance(sampler, UserSampler) or kept["name"] != sampler.name:
            return _replace_state(
                context, Caller(client, peer, RequestEnvelope(sequence, 0, LoadState(""))), record, found
            )
        if context.sampler_calls.runner is not None:
            return _load_with_process(context, client, peer, sequence, record, found, kept["state"])
        before = sampler.save_checkpoint()
        sampler.load_checkpoint(kept["state"])
        try:
            return _replace_state(
                context, Caller(client, peer, RequestEnvelope(sequence, 0, LoadState(""))), record, found
            )
        except BaseException:
            sampler.load_checkpoint(before)
            raise
    except TransferQueueError as error:
        return [context.failure(peer, sequence, error), *_unused(found)]


def _replace_state(
    context: ControllerContext, caller: Caller, record: r.StateLoaded, found: SavedState
) -> list[Effect]:
    """Replace the state of the controller by a saved one, and reply to the client."""
    before = list(context.state.partitions.values())
    context.state.prepared = (record, found.tree, found.state)
    try:
        effects = context.commit(caller, Decision([record], lambda: _replaced(context, before)))
    finally:
        context.state.prepared = None
    return [*effects, Release(before)]


def _replaced(context: ControllerContext, before: list[Partition]) -> Done:
    """Forget what the controller knew of these partitions, whose place a loaded state has taken."""
    context.background_deals.void()
    context.sampler_calls.void()
    context.samplers.warned.clear()
    for name in {*(partition.name for partition in before), *context.state.partitions}:
        context.changes.of(name).everything = True
    for partition in list(context.state.partitions.values()):
        for record in unneeded_rows.never_taken(partition):
            context.log.apply(record)
        if partition.sealed:
            for record in unneeded_rows.never_put(partition, ()):
                context.log.apply(record)
    return Done(context.state.epoch)


def _unused(found: SavedState | Exception) -> list[Effect]:
    """Return the effects that remove the journal's copy of a state that is not loaded."""
    return [ForgetState(found.file)] if isinstance(found, SavedState) and found.file else []


def _load_with_process(
    context: ControllerContext,
    client: str,
    peer: int,
    sequence: int,
    record: r.StateLoaded,
    found: SavedState,
    state: bytes,
) -> list[Effect]:
    """Load a state with a user's sampler in a process of its own. If the sampler refuses its part, nothing changes.

    Nothing changes either if the client is gone before the sampler has answered. If the client reconnects meanwhile,
    its repeated request waits for the same load.
    """
    context.checkpoints.wait_for_load(client, sequence, peer)

    def known(before: Any) -> list[Effect]:
        if isinstance(before, BaseException):
            return not_loaded(context.checkpoints.end_load(client, sequence), error_of(before))
        context.sampler_calls.order(plain_call("load_checkpoint", state), lambda outcome: loaded(before, outcome))
        return []

    def loaded(before: bytes, outcome: Any) -> list[Effect]:
        peer = context.checkpoints.end_load(client, sequence)
        try:
            if isinstance(outcome, BaseException):
                raise error_of(outcome)
            if peer is not None:
                return _replace_state(
                    context, Caller(client, peer, RequestEnvelope(sequence, 0, LoadState(""))), record, found
                )
            error = None
        except TransferQueueError as raised:
            error = raised
        context.sampler_calls.order(plain_call("load_checkpoint", before), lambda _: [])
        return not_loaded(peer, error)

    def not_loaded(peer: int | None, error: TransferQueueError | None) -> list[Effect]:
        unused = _unused(found)
        return unused if peer is None or error is None else [context.failure(peer, sequence, error), *unused]

    context.sampler_calls.order(plain_call("save_checkpoint"), known)
    return []


def error_of(outcome: BaseException) -> TransferQueueError:
    """Return what a call of a sampler has raised, as an error of the tree."""
    return outcome if isinstance(outcome, TransferQueueError) else SamplerError(f"a call failed: {outcome!r}")
