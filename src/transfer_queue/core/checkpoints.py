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
from collections.abc import Container, Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from transfer_queue.core.claims import row_leases
from transfer_queue.core.claims.claim_handler import SamplerCalls
from transfer_queue.core.context import Context, CoreService
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, ForgetState, ReadState, Release, RemoveState, WriteState
from transfer_queue.core.events.registry import Begin, BegunWork, Caller, Decision, Ends, GivenUpError, Steps, handles
from transfer_queue.core.jobs import Jobs
from transfer_queue.core.samplers.remote_calls import load_states, save_states
from transfer_queue.core.state import unneeded_rows
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.restore import check_merge
from transfer_queue.core.state.serialization import check_field_numbers, load_untrusted, save_checked
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError, InvalidArgumentError, TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, EndCheckpoint, LoadState

FORMAT = 1

ExtentKey = tuple[int, int]
"""A storage unit, and an extent of it."""


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


class _Save:
    """One save that is under way."""

    def __init__(self, client: str, extents: frozenset[ExtentKey], reply: BeginCheckpointReply) -> None:
        self.client = client
        self.extents = extents
        """All extents that contain saved values."""
        self.reply = reply
        self.is_written = False
        """Whether the file is complete. Until then, the job of the save looks after it."""


class Checkpoints(CoreService, Container[ExtentKey]):
    """The saves under way. It contains exactly the extents that a save needs."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.saves: dict[str, _Save] = {}
        """Name of the state file -> save."""

    def __contains__(self, extent: object) -> bool:
        return any(extent in save.extents for save in self.saves.values())

    def is_working(self) -> bool:
        """See `CoreService.is_working`. The end of a save frees extents."""
        return bool(self.saves)

    def on_client_left(self, client: str, announced: bool) -> list[Effect]:
        """See `CoreService.on_client_left`. Its saves end."""
        names = [name for name, save in self.saves.items() if save.client == client and save.is_written]
        for name in names:
            del self.saves[name]
        return [RemoveState(name) for name in names]


@handles(BeginCheckpoint)
def handle_begin_checkpoint(context: Context, caller: Caller, request: BeginCheckpoint) -> BeginCheckpointReply | Begin:
    """Begin to save the state."""
    name = check_file_name(request.name)
    known = context.services[Checkpoints].saves.get(name)
    if known is None:
        return Begin(_save(context, caller.client, name), Ends.WITH_CLIENT)
    if known.client != caller.client:
        raise InvalidArgumentError(f"another client uses the state file {name!r}; choose another name")
    return known.reply


def _save(context: Context, client: str, name: str) -> Steps:
    """Write the state, with the states of users' samplers by pattern, "" for the system's sampler."""
    samplers, saves = context.samplers.of_users, context.services[Checkpoints].saves
    states = yield from save_states(context.services[SamplerCalls], samplers)
    forms = {pattern: {"name": samplers[pattern].name, "state": state} for pattern, state in states.items()}
    context.log.apply_all(row_leases.settle_unseen(context.state, context.config.handed_over))
    of_tasks = {pattern: form for pattern, form in forms.items() if pattern}
    extents = frozenset(place for place, extent in context.state.blocks.extents.items() if extent.blocks)
    origin, time = _origin(context), context.now
    reply = BeginCheckpointReply(origin, context.state.origins)
    saves[name] = save = _Save(client, extents, reply)

    def tree() -> dict[str, Any]:
        return {
            "format": FORMAT,
            "time": time,
            "sampler": forms.get(""),
            "origin": origin,
            "state": save_checked(context.state),
            **({"task_samplers": of_tasks} if of_tasks else {}),
        }

    try:
        trouble = yield BegunWork(lambda number, resume: [WriteState(number, name, tree)])
    except GivenUpError:
        del saves[name]
        context.emit(RemoveState(name))
        raise
    if trouble is not None:
        del saves[name]
        context.emit(RemoveState(name))
        raise CheckpointError(f"the controller could not write its state: {trouble}; nothing was saved")
    save.is_written = True
    return reply


def _origin(context: Context) -> str:
    """Return a string that is equal for two saves only if equal block numbers in them mean the same block.

    It stays equal when the controller restarts: everything that a client saves is in the journal before, so a number
    is used again only if the machine lost the end of the journal, and then it has lost the arenas, too. Loading a
    checkpoint changes the origin, because it brings the numbers of another system.
    """
    arenas = sorted(unit.boot_id for unit in context.state.units.values())
    system = context.config.boot if not all(arenas) else hashlib.sha256(" ".join(arenas).encode()).hexdigest()[:32]
    return f"{system}-{context.state.epoch}"


@handles(EndCheckpoint)
def handle_end_checkpoint(context: Context, caller: Caller, request: EndCheckpoint) -> Done:
    """End a save. The reply is True if all values of the saved state were kept until now."""
    name, saves = check_file_name(request.name), context.services[Checkpoints].saves
    save = saves.get(name)
    if save is None or save.client != caller.client:
        return Done(False)
    del saves[name]
    context.emit(RemoveState(name))
    return Done(True)


def record_of(context: Context, read: SavedState) -> r.StateLoaded:
    """Return the record that replaces the state by a saved one. Raises CheckpointError if it cannot be loaded."""
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


@handles(LoadState)
def handle_load_state(context: Context, caller: Caller, request: LoadState) -> Begin:
    """Load a state."""
    check_file_name(request.name)
    return Begin(_load(context, request), Ends.WITH_CLIENT)


def _load(context: Context, request: LoadState) -> Steps:
    """Load the state of a file. If anything goes wrong, or the client is gone before the end, nothing changes."""
    watched, saved = list(context.state.watched), None
    try:
        try:
            saved = yield BegunWork(lambda number, resume: [ReadState(number, request.name, watched)])
        except GivenUpError as given_up:
            saved = given_up.outcome
            raise
        except Exception as error:
            raise CheckpointError(f"the state cannot be loaded: {error}") from error
        record = record_of(context, saved)
        if request.merge:
            return _merge_state(context, record, saved)
        kept = {"": saved.tree["sampler"], **saved.tree.get("task_samplers", {})}
        states = {
            pattern: kept[pattern]["state"]
            for pattern, sampler in context.samplers.of_users.items()
            if kept.get(pattern) is not None and kept[pattern]["name"] == sampler.name
        }
        return (yield from _replace_with_samplers(context, record, saved, states))
    except (TransferQueueError, GivenUpError):
        if isinstance(saved, SavedState) and saved.file:
            context.emit(ForgetState(saved.file))
        raise


def _replace_with_samplers(
    context: Context, record: r.StateLoaded, saved: SavedState, states: dict[str, bytes]
) -> Steps:
    """Replace the state and those of users' samplers, by pattern. If one refuses its part, all get theirs back."""
    samplers = {pattern: sampler for pattern, sampler in context.samplers.of_users.items() if pattern in states}
    before = yield from save_states(context.services[SamplerCalls], samplers)
    try:
        yield from load_states(context.services[SamplerCalls], samplers, states)
        return _replace_state(context, record, saved)
    except (TransferQueueError, GivenUpError):
        restore = load_states(context.services[SamplerCalls], samplers, before)
        context.emit(*context.services[Jobs].begin(restore, object()))
        raise


def _replace_state(context: Context, record: r.StateLoaded, saved: SavedState) -> Decision:
    """Replace the state of the controller by a saved one."""
    before = list(context.state.partitions.values())
    decision = _apply_loaded(context, record, saved)
    _forget_replaced(context, before)
    context.emit(Release(before))
    return decision


def _merge_state(context: Context, loaded: r.StateLoaded, saved: SavedState) -> Decision:
    """Add the partitions of a saved state to the controller's state."""
    check_merge(context.state, saved.state)
    names = list(saved.state.partitions)
    decision = _apply_loaded(context, r.StateMerged(loaded.state, loaded.time, loaded.file), saved)
    for name in names:
        context.changes.changes_of(name).everything = True
    return decision


def _apply_loaded(context: Context, record: r.StateLoaded, saved: SavedState) -> Decision:
    """Apply the record of a saved state, and return the decision that replies with the epoch after it."""
    context.state.prepared = (record, saved.tree, saved.state)
    try:
        context.log.apply(record)
    finally:
        context.state.prepared = None
    epoch = context.state.epoch
    return Decision([], lambda: Done(epoch))


def _forget_replaced(context: Context, before: list[Partition]) -> None:
    """Forget what the controller knew of these partitions, whose place a loaded state has taken."""
    calls = context.services.get(SamplerCalls)
    if calls is not None:
        calls.void()
    context.samplers.warned.clear()
    for name in dict.fromkeys([*(partition.name for partition in before), *context.state.partitions]):
        context.changes.changes_of(name).everything = True
    for partition in list(context.state.partitions.values()):
        context.log.apply_all(unneeded_rows.clear_pre_allocated(partition))
        if partition.sealed:
            context.log.apply_all(unneeded_rows.drop_abandoned(partition, ()))
