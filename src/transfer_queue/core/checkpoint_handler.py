"""Saves and loads the whole state while the controller goes on serving other requests.

    BeginCheckpoint   The server writes the present state into a file whose name the client chose. No extent with a
                      value of this state is freed until the client has copied all of them.
    EndCheckpoint     The client has copied the values. The reply says whether all of them were kept until now.
    LoadState         The server reads such a file, which the client has put there, and keeps a copy of it in the
                      journal's folder. One record, which names that copy, replaces the state, or adds the partitions
                      of the file to it.

None of this is part of the state: if the controller restarts, a save in progress fails, and EndCheckpoint tells its
client. Requests name files and never contain a path.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from transfer_queue.core.claims import lease_decisions
from transfer_queue.core.control.context import ControllerContext
from transfer_queue.core.control.pending_checkpoints import PendingSave
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, ForgetState, ReadState, Release, RemoveState, Send, WriteState
from transfer_queue.core.events.registry import Caller, Decision, handles
from transfer_queue.core.samplers import sampler_states
from transfer_queue.core.samplers.sampler_states import SavedStates
from transfer_queue.core.samplers.user_sampler import UserSampler
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.serialization import check_field_numbers, load_untrusted, save_checked
from transfer_queue.core.state.state import State
from transfer_queue.core.state.wait_queues import RequestKey
from transfer_queue.core.transitions.merge import check_merge
from transfer_queue.errors import CheckpointError, InvalidArgumentError, TransferQueueError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, EndCheckpoint, LoadState
from transfer_queue.messages.envelopes import RequestEnvelope

FORMAT = 1


class SamplerForm(msgspec.Struct, forbid_unknown_fields=True):
    """The state of a user's sampler."""

    name: str
    """The name of its class."""
    state: bytes
    """The state that it returned, as msgpack."""


class SavedForm(msgspec.Struct, forbid_unknown_fields=True):
    """The content of a checkpoint's state file."""

    format: int
    time: Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]
    """The time of the save, on the clock of the controller that saved it."""
    sampler: SamplerForm | None
    """That of the system's sampler."""
    origin: str
    """See `_origin`."""
    state: Any
    """See `core.columns.schema`."""
    task_samplers: dict[str, SamplerForm] = {}
    """Those of the samplers of tasks, by the patterns of the configuration."""


class SavedState(NamedTuple):
    """A saved state that is about to be loaded."""

    tree: dict[str, Any]
    """The saved tree without its state."""
    state: State
    """The state of the tree."""
    file: str = ""
    """The journal's copy of the tree, see `records.StateLoaded`; "" if there is no journal."""


def build_saved_state(tree: Any, file: str = "", watched: Iterable[str] = ()) -> SavedState:
    """Build the state in a saved tree.

    This takes seconds for a million rows. It uses nothing of a controller, so it can run in a thread beside the loop.

    Args:
        tree: What the state file contains.
        file: The journal's copy of it; "" if there is no journal.
        watched: See `State`.

    Raises:
        CheckpointError: The tree is not a state, contradicts itself, or has a partition with too many fields.
    """
    if not isinstance(tree, dict) or "state" not in tree:
        raise CheckpointError("it does not contain the state of a controller")
    state = load_untrusted(tree["state"], None, watched)
    check_field_numbers(state)
    return SavedState({**tree, "state": None}, state, file)


def check_file_name(name: str) -> str:
    """Return the name of a state file. Raises InvalidArgumentError if it is something else, for example a path."""
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise InvalidArgumentError(f"the name of a state file must have 32 hex digits, got {name[:80]!r}")
    return name


@handles(LoadState)
def handle_load_state(context: ControllerContext, caller: Caller, request: LoadState) -> list[Effect]:
    """Load a state. A request that the client has sent again waits on its new connection."""
    check_file_name(request.name)
    sequence, ours = caller.envelope.sequence, context.checkpoints
    waits = (caller.client, sequence) in ours.loads
    ours.wait_for_load(caller.client, caller.envelope, caller.peer)
    return [] if waits else [ReadState(request.name, caller.client, sequence, list(context.state.watched))]


@handles(BeginCheckpoint)
def handle_begin_checkpoint(context: ControllerContext, caller: Caller, request: BeginCheckpoint) -> list[Effect]:
    """Begin to save the state."""
    name, ours, waiter = check_file_name(request.name), context.checkpoints, (caller.client, caller.envelope.sequence)
    known = ours.saves.get(name)
    if known is not None and known.client != caller.client:
        raise InvalidArgumentError(f"another client uses the state file {name!r}; choose another name")
    if known is not None and known.waiter is None:
        return [Send(caller.peer, caller.envelope.sequence, known.reply)]
    is_known = waiter in ours.peers
    ours.peers[waiter] = caller.peer
    if known is not None or is_known:
        return []
    samplers = context.samplers.of_users
    return sampler_states.save_states(
        context.sampler_calls, samplers, lambda found: _on_samplers_saved(context, waiter, name, samplers, found)
    )


def _on_samplers_saved(
    context: ControllerContext, waiter: RequestKey, name: str, samplers: dict[str, UserSampler], found: SavedStates
) -> list[Effect]:
    """Continue a save: the users' samplers have returned their states, or one has failed."""
    peer = context.checkpoints.peers.get(waiter)
    if peer is None or name in context.checkpoints.saves:
        return []  # the client is gone, or its request has come again and has begun the save
    if not isinstance(found, TransferQueueError):
        forms = {pattern: {"name": samplers[pattern].name, "state": state} for pattern, state in found.items()}
        return _begin_save(context, waiter, name, forms)
    del context.checkpoints.peers[waiter]
    return [context.failure(peer, waiter[1], found)]


def _begin_save(
    context: ControllerContext, waiter: RequestKey, name: str, samplers: dict[str, dict[str, Any]]
) -> list[Effect]:
    """Write the state. samplers: the states of users' samplers by pattern, "" for the system's sampler."""
    for record in lease_decisions.settle_unseen(context.state, context.handed_over):
        context.log.apply(record)
    of_tasks = {pattern: form for pattern, form in samplers.items() if pattern}
    extents = frozenset(place for place, extent in context.state.blocks.extents.items() if extent.blocks)
    origin = _origin(context)
    context.checkpoints.saves[name] = PendingSave(
        waiter[0], extents, waiter, BeginCheckpointReply(origin, context.state.origins)
    )
    time = context.now

    def tree() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "time": time,
            "sampler": samplers.get(""),
            "origin": origin,
            "state": save_checked(context.state),
            **({"task_samplers": of_tasks} if of_tasks else {}),
        }

    return [WriteState(name, tree)]


def _origin(context: ControllerContext) -> str:
    """Return a string that is equal for two saves only if equal block numbers in them mean the same block.

    It stays equal when the controller restarts: everything that a client saves is in the journal before, so a number
    is used again only if the machine lost the end of the journal, and then it has lost the arenas, too. Loading a
    checkpoint changes the origin, because it brings the numbers of another system.
    """
    arenas = sorted(unit.boot_id for unit in context.state.units.values())
    whose = context.boot if not all(arenas) else hashlib.sha256(" ".join(arenas).encode()).hexdigest()[:32]
    return f"{whose}-{context.state.epoch}"


@handles(EndCheckpoint)
def handle_end_checkpoint(context: ControllerContext, caller: Caller, request: EndCheckpoint) -> list[Effect]:
    """End a save. The reply is True if all values of the saved state were kept until now."""
    name, sequence = check_file_name(request.name), caller.envelope.sequence
    save = context.checkpoints.saves.get(name)
    if save is None or save.client != caller.client:
        return [Send(caller.peer, sequence, Done(False))]
    del context.checkpoints.saves[name]
    return [Send(caller.peer, sequence, Done(True)), RemoveState(name)]


def finish_writing(context: ControllerContext, name: str, trouble: str | None) -> list[Effect]:
    """Reply to the client whose state file was written, or could not be written. trouble: why not, in words."""
    ours = context.checkpoints
    save = ours.saves.get(name)
    if save is None or save.waiter is None:
        return [RemoveState(name)]  # the client is gone
    waiter, save.waiter = save.waiter, None
    peer = ours.peers.pop(waiter, None)
    answer: BeginCheckpointReply | Failure = save.reply
    effects: list[Effect] = []
    if trouble is not None:
        del ours.saves[name]
        answer = Failure("CheckpointError", f"the controller could not write its state: {trouble}; nothing was saved")
        effects.append(RemoveState(name))
    return effects if peer is None else [Send(peer, waiter[1], answer), *effects]


def record_of(context: ControllerContext, read: SavedState | BaseException) -> r.StateLoaded:
    """Return the record that replaces the state by a saved one. Raises CheckpointError if it cannot be loaded."""
    if isinstance(read, BaseException):
        raise CheckpointError(f"the state cannot be loaded: {read}") from read
    tree = read.tree
    if tree.get("format") != FORMAT:
        raise CheckpointError(f"this release loads states of format {FORMAT}, got {tree.get('format')!r}")
    try:
        form = msgspec.convert(tree, SavedForm)
        for each in [form.sampler, *form.task_samplers.values()]:
            if each is not None:
                msgspec.msgpack.decode(each.state)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the file was not written by a save: {error}; nothing was changed") from None
    return r.StateLoaded(b"", context.now, read.file)


def finish_reading(
    context: ControllerContext, client: str, sequence: int, found: SavedState | Exception
) -> list[Effect]:
    """Load the state that was read for a request of a client, or reply why it cannot be loaded."""
    envelope = context.checkpoints.loads.get((client, sequence))
    peer = context.checkpoints.end_load(client, sequence)
    if peer is None or envelope is None:
        return _remove_unused(found)  # the client does not wait any more, so nothing is loaded
    try:
        record = record_of(context, found)
        assert not isinstance(found, Exception)
        request = envelope.body
        assert isinstance(request, LoadState)
        if request.merge:
            return _merge_state(context, Caller(client, peer, envelope), record, found)
        kept = {"": found.tree["sampler"], **found.tree.get("task_samplers", {})}
        states = {
            pattern: kept[pattern]["state"]
            for pattern, sampler in context.samplers.of_users.items()
            if kept.get(pattern) is not None and kept[pattern]["name"] == sampler.name
        }
        if states:
            return _load_with_samplers(context, client, peer, envelope, record, found, states)
        return _replace_state(context, Caller(client, peer, envelope), record, found)
    except TransferQueueError as error:
        return [context.failure(peer, sequence, error), *_remove_unused(found)]


def _replace_state(
    context: ControllerContext, caller: Caller, record: r.StateLoaded, found: SavedState
) -> list[Effect]:
    """Replace the state of the controller by a saved one, and reply to the client."""
    before = list(context.state.partitions.values())
    context.state.prepared = (record, found.tree, found.state)
    try:
        effects = context.commit(caller, Decision([record], lambda: _forget_replaced(context, before)))
    finally:
        context.state.prepared = None
    return [*effects, Release(before)]


def _merge_state(context: ControllerContext, caller: Caller, loaded: r.StateLoaded, found: SavedState) -> list[Effect]:
    """Add the partitions of a saved state to the controller's state, and reply to the client."""
    check_merge(context.state, found.state)
    names = list(found.state.partitions)
    record = r.StateMerged(loaded.state, loaded.time, loaded.file)
    context.state.prepared = (record, found.tree, found.state)

    def reply() -> Done:
        for name in names:
            context.changes.changes_of(name).everything = True
        return Done(context.state.epoch)

    try:
        return context.commit(caller, Decision([record], reply))
    finally:
        context.state.prepared = None


def _forget_replaced(context: ControllerContext, before: list[Partition]) -> Done:
    """Forget what the controller knew of these partitions, whose place a loaded state has taken."""
    context.background_deals.mark_all_stale()
    context.sampler_calls.void()
    context.samplers.warned.clear()
    for name in dict.fromkeys([*(partition.name for partition in before), *context.state.partitions]):
        context.changes.changes_of(name).everything = True
    for partition in list(context.state.partitions.values()):
        for record in unneeded_rows.clear_pre_allocated(partition):
            context.log.apply(record)
        if partition.sealed:
            for record in unneeded_rows.drop_abandoned(partition, ()):
                context.log.apply(record)
    return Done(context.state.epoch)


def _remove_unused(found: SavedState | Exception) -> list[Effect]:
    """Return the effects that remove the journal's copy of a state that is not loaded."""
    return [ForgetState(found.file)] if isinstance(found, SavedState) and found.file else []


def _load_with_samplers(
    context: ControllerContext,
    client: str,
    peer: int,
    envelope: RequestEnvelope,
    record: r.StateLoaded,
    found: SavedState,
    states: dict[str, bytes],
) -> list[Effect]:
    """Load a state with those of users' samplers, by pattern. If a sampler refuses its part, nothing changes.

    Nothing changes either if the client is gone before the samplers have answered. If the client reconnects meanwhile,
    its repeated request waits for the same load.
    """
    samplers = {pattern: sampler for pattern, sampler in context.samplers.of_users.items() if pattern in states}
    context.checkpoints.wait_for_load(client, envelope, peer)
    sequence = envelope.sequence

    def known(before: SavedStates) -> list[Effect]:
        if isinstance(before, TransferQueueError):
            return not_loaded(context.checkpoints.end_load(client, sequence), before)
        return sampler_states.load_states(context.sampler_calls, samplers, states, lambda error: loaded(before, error))

    def loaded(before: dict[str, bytes], error: TransferQueueError | None) -> list[Effect]:
        peer = context.checkpoints.end_load(client, sequence)
        try:
            if error is None and peer is not None:
                return _replace_state(context, Caller(client, peer, envelope), record, found)
        except TransferQueueError as raised:
            error = raised
        restored = sampler_states.load_states(context.sampler_calls, samplers, before, lambda _: [])
        return [*restored, *not_loaded(peer, error)]

    def not_loaded(peer: int | None, error: TransferQueueError | None) -> list[Effect]:
        unused = _remove_unused(found)
        return unused if peer is None or error is None else [context.failure(peer, sequence, error), *unused]

    return sampler_states.save_states(context.sampler_calls, samplers, known)
