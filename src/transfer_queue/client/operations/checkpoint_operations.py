"""Defines the operations that save and load checkpoints, as generators of calls.

A save consists of the controller's state at one moment, and a copy of the bytes that this state needs. A load first
writes the bytes into leased space, and then replaces the state in one step. The client writes and reads the files: in
the calling thread, or in a thread beside the event loop (`net.drivers.threaded_driver`).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from transfer_queue.client.attachment import UNCERTAIN, Attachment
from transfer_queue.client.checkpoint import checkpoint_data, checkpoint_folder
from transfer_queue.client.checkpoint.block_file import BlockFile
from transfer_queue.client.checkpoint.checkpoint_data import (
    BlockLoadSource,
    CheckpointReport,
    CheckpointSave,
    Loaded,
    PickledValues,
    block_sources,
    report_on,
)
from transfer_queue.client.checkpoint.unit_blocks import UnitBlocks, fetch_state, remove_sent, send_state
from transfer_queue.client.conversion import arguments
from transfer_queue.client.operations.topic import Topic
from transfer_queue.client.space import FREEING_SECONDS
from transfer_queue.client.writer import PUT_ATTEMPTS, Writer
from transfer_queue.config.validators import validator_of
from transfer_queue.core.state.restore import select_samples
from transfer_queue.core.state.serialization import load_untrusted, needed_blocks, save_state, set_locations
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.blocks import PLACE, BlockTable
from transfer_queue.errors import (
    AttachError,
    CheckpointError,
    CheckpointNotFoundError,
    ConnectionLostError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.journal import state_file
from transfer_queue.messages.base import Done
from transfer_queue.messages.checkpoints import BeginCheckpoint, BeginCheckpointReply, EndCheckpoint, LoadState
from transfer_queue.net.calls import CONTROLLER, Operation, Request
from transfer_queue.private_files import sync_folder
from transfer_queue.storage.protocols import Reserved

_NONE = np.zeros(0, "i8")
Sources = Callable[[list[BlockFile]], BlockLoadSource]
"""Finds the blocks to load in the files of a checkpoint."""
STATE_SECONDS = 600.0
"""The time limit for the controller to write its state, or to replace it by a loaded one."""


class CheckpointOperations(Topic):
    """The operations of one client that save and load checkpoints."""

    def __init__(self, attachment: Attachment, writer: Writer | None = None) -> None:
        super().__init__(attachment, writer)
        self._blocks = UnitBlocks(attachment.units, attachment.session)
        self._lost_cuts: set[str] = set()
        """The names of pending saves that were interrupted. The next save ends them."""
        self._cuts: dict[str, tuple[CheckpointSave, str | os.PathLike[str] | None]] = {}
        """Folder -> the pending save for it, and the older checkpoint."""
        self._loaded: Loaded | None = None
        """The blocks of a checkpoint that were written and not published yet."""

    def begin_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        previous: str | os.PathLike[str] | None = None,
        *,
        partitions: str | Sequence[str] | None = None,
        keys: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> Operation[CheckpointSave]:
        """Fix the present state of the system, so that several calls can save it. `end_checkpoint` must follow.

        The system continues meanwhile, but does not reuse the space of the saved samples. Most programs call
        `tq.save_checkpoint` instead.

        Args:
            checkpoint_dir: A folder: until `end_checkpoint`, saves of this client into it use this pending save, and
                `previous`, without further arguments. Default: none.
            previous: The older checkpoint whose files may be linked to. Default: the one in `checkpoint_dir`.
            partitions: See `tq.save_checkpoint`.
            keys: See `tq.save_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            The pending save.

        Raises:
            InvalidArgumentError: `partitions` or `keys` is not valid.
            UnknownPartitionError: There is no such partition.
            StorageKeyNotFoundError: The partition has no sample with such a key.
            UnitLostError: A storage unit was lost at this moment. Call again to save the remaining samples.
            CheckpointError: The controller could not write its state.

        Example:
            >>> pending = client.begin_checkpoint()
            >>> client.save_controller_checkpoint("state.pkl", cut=pending)
            >>> client.end_checkpoint(pending)
            True
        """
        selection = arguments.selection(partitions, keys)
        yield from self.attachment.learn()
        while self._lost_cuts:
            yield from self._end_badly(self._lost_cuts.pop(), None)
        name = uuid.uuid4().hex
        try:
            reply = yield from self._ask(BeginCheckpoint(name), BeginCheckpointReply, timeout, parked=STATE_SECONDS)
            path = self.attachment.system.states / name
            blocks = BlockTable()
            with _require_state_file():
                if not self.attachment.system.shares_states:
                    fetch_state(self.attachment.session, name, path)
                tree = state_file.read(path)
                blocks.restore(tree["state"]["blocks"])
            report = None
            if selection is not None or tree["state"]["losses"]:
                state = load_untrusted(tree["state"])
                blocks = state.blocks
                if selection is not None:
                    select_samples(state, *selection)
                    path = path.with_name(f"{name}-selected")
                    state_file.write(path, {**tree, "state": save_state(state)}, sync=False)
                report = report_on(state)
            cut = CheckpointSave(name, reply.origin, path, needed_blocks(blocks), reply.origins, report)
            if not (yield from self.attachment.units.open_arenas(np.unique(cut.blocks["unit"]).tolist())):
                raise UnitLostError("a storage unit was lost before its samples were saved; save again")
            if checkpoint_dir is not None:
                self._cuts[os.path.abspath(checkpoint_dir)] = (cut, previous)
            return cut
        except BaseException as error:
            yield from self._end_badly(name, error)
            raise

    def end_checkpoint(self, cut: CheckpointSave, *, timeout: float | None = None) -> Operation[bool]:
        """End a pending save and release its samples.

        Args:
            cut: The pending save of `begin_checkpoint`.
            timeout: See `TransferQueueClient`.

        Returns:
            True if the samples were kept until now, so that all copies are complete.

        Raises:
            UnitLostError: A storage unit with samples of the save was lost meanwhile, so it is not known whether the
                copies are complete.

        Example:
            >>> pending = client.begin_checkpoint()
            >>> client.end_checkpoint(pending)
            True
        """
        lost: TransferQueueError | None = None
        is_stale = False
        try:
            is_stale = checkpoint_data.has_stale_blocks(cut.blocks, self._blocks.has_stale_blocks)
        except (UnitLostError, AttachError, ConnectionLostError) as error:
            lost = error
        self._forget_copy(cut.name)
        for folder in [folder for folder, made in list(self._cuts.items()) if made[0] is cut]:
            del self._cuts[folder]
        held = (yield from self._ask(EndCheckpoint(cut.name), Done, timeout)).value
        if lost is not None and held:
            raise (yield from self._lost_or(cut, lost))
        return bool(held) and not is_stale and lost is None

    def _lost_or(self, cut: CheckpointSave, error: TransferQueueError) -> Operation[TransferQueueError]:
        """Return UnitLostError if an error means that a unit with samples of the save is lost, or the error itself."""
        if not isinstance(error, UnitLostError):
            yield from self.attachment.units.refresh()
            if set(np.unique(cut.blocks["unit"]).tolist()) <= self.attachment.units.known.keys():
                return error
        return UnitLostError(f"a storage unit was lost while its samples were saved: {error}; save again")

    def save_controller_checkpoint(
        self, path: str | os.PathLike[str], *, cut: CheckpointSave | None = None, timeout: float | None = None
    ) -> Operation[None]:
        """Write the controller's state, without the values of samples, into a file. `tq.save_checkpoint` saves both.

        Args:
            path: The file. It is replaced in one step; missing parents are created.
            cut: The pending save to write. Default: the present state.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointError: The controller could not write its state, or was restarted meanwhile.
            UnitLostError: See `begin_checkpoint`.

        Example:
            >>> client.save_controller_checkpoint("state.pkl")
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}.draft")
        cut, _ = self._cut_of(target.parent, cut)
        made = cut or (yield from self.begin_checkpoint(timeout=timeout))
        try:
            with _require_state_file():
                checkpoint_folder.copy(made.state, draft)
            if cut is None:
                yield from self.end_checkpoint(made, timeout=timeout)
            draft.replace(target)
            sync_folder(target.parent)
        except BaseException as error:
            draft.unlink(missing_ok=True)
            if cut is None:
                yield from self._end_badly(made.name, error)
            raise

    def save_storage_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        cut: CheckpointSave | None = None,
        previous: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
    ) -> Operation[None]:
        """Write the values of all samples into `simple_storage` of a folder. `tq.save_checkpoint` saves all.

        Args:
            checkpoint_dir: The folder. Its `simple_storage` is replaced in one step.
            cut: The pending save to write. Default: the present samples.
            previous: An older checkpoint: files of it that contain enough of the saved bytes are linked to and not
                written again. Default: the one in `checkpoint_dir`.
            timeout: See `TransferQueueClient`.

        Raises:
            UnitLostError: A storage unit was lost meanwhile; `tq.save_checkpoint` saves the remaining samples.
            CheckpointError: A server was restarted meanwhile, or another client is saving into the folder.
            OSError: The disk is full or cannot be written to.

        Example:
            >>> client.save_storage_checkpoint("checkpoint")
        """
        yield from self.attachment.learn()
        folder = Path(checkpoint_dir)
        cut, known = self._cut_of(folder, cut)
        older = Path(previous or known or folder)
        made = cut or (yield from self.begin_checkpoint(timeout=timeout))
        try:
            with checkpoint_folder.replace_folder(folder / checkpoint_folder.STORAGE) as draft:
                try:
                    checkpoint_data.save_blocks(
                        draft, made, older / checkpoint_folder.STORAGE, self._blocks.source,
                        self.attachment.units.backend_of,
                    )  # fmt: skip
                except (UnitLostError, AttachError, ConnectionLostError) as error:
                    raise (yield from self._lost_or(made, error)) from error
                if cut is None and not (yield from self.end_checkpoint(made, timeout=timeout)):
                    raise checkpoint_folder.incomplete_save_error(folder)
        except BaseException as error:
            if cut is None:
                yield from self._end_badly(made.name, error)
            raise

    def load_storage_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> Operation[None]:
        """Write the bytes of a checkpoint's samples into storage. `load_controller_checkpoint` then makes them visible.

        If the folder also contains the controller's state, only the bytes that this state needs are written.

        Args:
            checkpoint_dir: The folder that `save_storage_checkpoint` wrote into.
            allow_pickle: See `tq.load_checkpoint`. With False the folder must contain the controller's state, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The folder has no manifest.
            CheckpointError: The manifest does not match its files, or a file is damaged.
            CapacityError: There is no space for the samples in addition to the present ones.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> client.load_storage_checkpoint("checkpoint")
            >>> client.load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        validator_of(bool).convert("allow_pickle", allow_pickle)
        yield from self.attachment.learn()
        folder = Path(checkpoint_dir)
        checkpoint_folder.read_manifest(folder / checkpoint_folder.STORAGE)
        state = folder / checkpoint_folder.STATE
        sources: Sources = partial(block_sources, numbers=None)
        pickled = None
        if state.exists() or not allow_pickle:
            tree, saved_state = _state_of(state)
            sources = _sources_of(tree, saved_state)
            pickled = None if allow_pickle else PickledValues(saved_state)
        yield from self._forget_loaded()
        self._loaded = yield from self._load_again_if_lost(folder, sources, pickled, timeout)

    def _load_again_if_lost(
        self, folder: Path, sources: Sources, pickled: PickledValues | None, timeout: float | None
    ) -> Operation[Loaded]:
        """Do the same as `_load_blocks`, again with the remaining units if one is lost meanwhile."""
        for _ in range(PUT_ATTEMPTS - 1):
            try:
                return (yield from self._load_blocks(folder, sources, pickled, timeout))
            except UnitLostError:
                yield from self.attachment.units.refresh()
        return (yield from self._load_blocks(folder, sources, pickled, timeout))

    def _load_blocks(
        self, folder: Path, sources: Sources, pickled: PickledValues | None, timeout: float | None
    ) -> Operation[Loaded]:
        """Write blocks of a checkpoint into storage. Raises `UnitLostError` if a unit is lost meanwhile.

        `pickled` removes values that need pickle; None keeps them.
        """
        entries = checkpoint_folder.read_manifest(folder / checkpoint_folder.STORAGE)
        seconds = max(timeout or 0.0, FREEING_SECONDS)
        with contextlib.ExitStack() as opened:
            files = [
                opened.enter_context(BlockFile(folder / checkpoint_folder.STORAGE / entry.file)) for entry in entries
            ]
            source = sources(files)
            settings = self.attachment.settings
            backends = [
                entry.backend if entry.backend in settings.backends else settings.storage_backend for entry in entries
            ]
            piece, within, sizes = checkpoint_data.layout_by_backend(source, backends)
            reserved: list[Reserved] = []
            try:
                for backend, size in sizes:
                    # loaded blocks are not published yet, so waiting until they are moved to disk would not help
                    reserved.append((yield from self.attachment.space.reserve(backend, size, timeout, patience=0.0)))
                spaces = [
                    [self._blocks.reserved_space(place, space.nbytes, seconds) for place in space.places]
                    for space in reserved
                ]
                checkpoint_data.copy_blocks(source, piece, within, spaces, pickled.strip if pickled else None)
            except BaseException as error:
                lost, interrupted = isinstance(error, UnitLostError), not isinstance(error, Exception)
                yield from self.attachment.space.abandon(reserved, lost=lost, interrupted=interrupted)
                raise
        return Loaded(checkpoint_data.block_locations(source, piece, within, reserved), reserved, pickled)

    def load_controller_checkpoint(
        self, path: str | os.PathLike[str], *, allow_pickle: bool = True, timeout: float | None = None
    ) -> Operation[None]:
        """Replace the system's state by the one in a file, after `load_storage_checkpoint` has written its samples.

        The previous samples are gone, and their metadata is refused. New global indexes continue after the higher of
        both counters.

        Args:
            path: The file that `save_controller_checkpoint` wrote.
            allow_pickle: The same as for `load_storage_checkpoint`. With False, tags that need pickle are refused, too.
                Default: True.
            timeout: See `TransferQueueClient`.

        Raises:
            CheckpointNotFoundError: The file does not exist.
            CheckpointError: The file is not a saved state, or its samples were not loaded.

        Example:
            >>> tq.save_checkpoint("checkpoint")
            >>> client.load_storage_checkpoint("checkpoint")
            >>> client.load_controller_checkpoint("checkpoint/controller_state.pkl")
        """
        validator_of(bool).convert("allow_pickle", allow_pickle)
        tree, state = _state_of(Path(path))
        yield from self.attachment.learn()
        loaded, self._loaded = self._loaded or Loaded([dict.fromkeys(("number", *PLACE), _NONE)]), None
        try:
            _check_loaded(state.blocks, loaded, path)
            if (loaded.pickled is None) != allow_pickle and len(loaded.placed[0]["number"]):
                raise CheckpointError(
                    f"the state of {path} must be loaded like its samples, with allow_pickle={not allow_pickle}, got "
                    f"allow_pickle={allow_pickle}"
                )
        except CheckpointError:
            yield from self.attachment.space.abandon(loaded.reserved)
            raise
        yield from self._send_state(tree, state, loaded, allow_pickle, merge=False, timeout=timeout)

    def _send_state(
        self,
        tree: dict[str, Any],
        state: State,
        loaded: Loaded,
        allow_pickle: bool,
        merge: bool,
        timeout: float | None,
    ) -> Operation[None]:
        """Let the controller load a state whose blocks are written. `merge` adds its partitions to the present ones."""
        name = uuid.uuid4().hex
        sent = self.attachment.system.states / name
        try:
            if not allow_pickle:
                pickled = loaded.pickled or PickledValues(state)
                pickled.strip_tags(state)
                pickled.report()
            lengths = {(place.unit, place.extent): place.length for each in loaded.reserved for place in each.places}
            set_locations(state.blocks, loaded.placed, lengths, self.attachment.client_id)
            state.units, state.draining = dict(self.attachment.units.known), set()
            state_file.write(sent, {**tree, "state": save_state(state)}, sync=False)
            if not self.attachment.system.shares_states:
                send_state(self.attachment.session, sent, name)
            yield from self._ask(LoadState(name, merge), Done, timeout, parked=STATE_SECONDS)
        except BaseException as error:
            refused = isinstance(error, Exception) and not isinstance(error, UNCERTAIN)
            if refused:
                yield from self.attachment.space.abandon(loaded.reserved)
            else:  # the controller may have loaded the state, or may still do so
                self.attachment.space.mark_published(loaded.reserved, certain=False)
            raise
        finally:
            sent.unlink(missing_ok=True)
            if not self.attachment.system.shares_states:
                remove_sent(self.attachment.session, name)
        self.attachment.space.mark_published(loaded.reserved)
        for allocator in self.attachment.space.allocators:
            yield from allocator.close_extents()

    def load_samples(
        self,
        checkpoint_dir: str | os.PathLike[str],
        partitions: str | Sequence[str],
        *,
        keys: str | Sequence[str] | None = None,
        allow_pickle: bool = True,
        timeout: float | None = None,
    ) -> Operation[CheckpointReport]:
        """Add partitions of a checkpoint to the running system, as `tq.load_checkpoint(..., partitions=...)` does.

        Args:
            checkpoint_dir: The folder that `tq.save_checkpoint` wrote.
            partitions: The partitions to load.
            keys: The keys of the samples to load. Default: all samples.
            allow_pickle: See `tq.load_checkpoint`. Default: True.
            timeout: See `TransferQueueClient`.

        Returns:
            The numbers of loaded samples, and the lost values.

        Raises:
            InvalidArgumentError: See `tq.load_checkpoint`.
            UnknownPartitionError: The checkpoint has no such partition.
            StorageKeyNotFoundError: The partition of the checkpoint has no sample with such a key.
            SealedError: A partition of that name is sealed in the running system.
            CheckpointNotFoundError: The folder or a part of the checkpoint does not exist.
            CheckpointError: The checkpoint is damaged.
            CapacityError: There is no space for the samples.

        Example:
            >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
            >>> tq.save_checkpoint("checkpoint")
            >>> client.clear_partition("train_0")
            >>> client.load_samples("checkpoint", "train_0").samples
            {'train_0': 1}
        """
        validator_of(bool).convert("allow_pickle", allow_pickle)
        selection = arguments.selection(partitions, keys)
        assert selection is not None
        folder = Path(checkpoint_dir)
        checkpoint_folder.check_folder(folder)
        yield from self.attachment.learn()
        tree, state = _state_of(folder / checkpoint_folder.STATE)
        select_samples(state, *selection)
        report = report_on(state)
        pickled = None if allow_pickle else PickledValues(state)
        loaded = yield from self._load_again_if_lost(folder, _sources_of(tree, state), pickled, timeout)
        yield from self._send_state(tree, state, loaded, allow_pickle, merge=True, timeout=timeout)
        return report

    # ------------------------------------------------------------ shared

    def _cut_of(
        self, folder: Path, cut: CheckpointSave | None
    ) -> tuple[CheckpointSave | None, str | os.PathLike[str] | None]:
        """Return `cut`, or the pending save of `begin_checkpoint` for this folder, and the older checkpoint."""
        return (cut, None) if cut is not None else self._cuts.get(os.path.abspath(folder), (None, None))

    def _forget_copy(self, name: str) -> None:
        """Remove this client's copies of a state file: with chosen samples, or from the controller's node."""
        (self.attachment.system.states / f"{name}-selected").unlink(missing_ok=True)
        if not self.attachment.system.shares_states:
            (self.attachment.system.states / name).unlink(missing_ok=True)

    def _end_badly(self, name: str, error: BaseException | None) -> Operation[None]:
        """End a pending save that failed. After an interruption no call may be made, so the next save ends it."""
        self._forget_copy(name)
        if error is None or isinstance(error, Exception):
            with contextlib.suppress(TransferQueueError):
                yield Request(CONTROLLER, EndCheckpoint(name))
        else:
            self._lost_cuts.add(name)

    def _forget_loaded(self) -> Operation[None]:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            yield from self.attachment.space.abandon(loaded.reserved)


@contextlib.contextmanager
def _require_state_file() -> Iterator[None]:
    """Raise `CheckpointError` if the state file of a pending save is missing, because the controller has removed it."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"nothing was saved: the controller has removed its saved state ({error.filename}), because it was "
            f"restarted, or lost its connection to this client; save again"
        ) from None


def _state_of(path: Path) -> tuple[dict[str, Any], Any]:
    """Return (the tree in a file, its state). Raises `CheckpointNotFoundError` or `CheckpointError`."""
    try:
        with checkpoint_folder.read_guard(path):
            if path.exists() and not path.is_file():
                raise CheckpointError(f"{path} is not a regular file; pass the file that a save has written")
            tree = state_file.read(path)
    except CheckpointNotFoundError:
        raise CheckpointNotFoundError(
            f"the state file {path} does not exist; pass the file that a save of the state has written"
        ) from None
    if not isinstance(tree, dict) or "state" not in tree:
        raise CheckpointError(f"{path} is not a saved state of a controller; pass the file that a save has written")
    return tree, load_untrusted(tree["state"])


def _sources_of(tree: dict[str, Any], state: State) -> Sources:
    """Return the function that finds the blocks that a saved state needs."""
    shared = partial(checkpoint_data.shared_below, own=str(tree.get("origin")), origins=state.origins)
    return partial(block_sources, numbers=needed_blocks(state.blocks)["number"], shared=shared)


def _check_loaded(blocks: BlockTable, loaded: Loaded, path: str | os.PathLike[str]) -> None:
    numbers = needed_blocks(blocks)["number"]
    missing = np.setdiff1d(numbers, loaded.placed[0]["number"])
    if len(missing):
        raise CheckpointError(
            f"{path} needs {len(numbers)} blocks of samples, of which {len(missing)} were not loaded; call "
            f"load_storage_checkpoint with the folder of the same checkpoint first, or tq.load_checkpoint for both"
        )
