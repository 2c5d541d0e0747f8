"""The clients for maintenance: one puts lost values again, one saves and loads checkpoints, one moves
partitions through checkpoints, one drains units."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from tests.simulation.ledger import LedgerError
from tests.simulation.retrying_client import RetryingClient, Script, sleep
from tests.simulation.run_features import MAIN, MOVED
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, STATE, write_json
from transfer_queue.errors import CapacityError, InvalidArgumentError, StorageKeyNotFoundError, TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.workload import Workload


# ------------------------------------------------------------ lost values


def mender(work: Workload) -> Script:
    """Return a script that waits for reports of lost values and puts them again, until the run ends."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        since: int | None = None
        lost: dict[int, set[str]] = {}
        while True:
            closing = work.closing
            try:
                change = yield from client.operations.wait_for_change(MAIN, since, timeout=1.0)
            except TransferQueueError:
                yield from sleep(work.draw.uniform(0.01, 1.0))
                continue
            since = None if change.dropped else change.version  # after a load it is another partition
            for loss in change.lost:
                lost.setdefault(loss.global_index, set()).update(loss.fields)
            for index in list(lost):
                if (yield from _mend(work, client, index, tuple(sorted(lost[index])))):
                    del lost[index]
                else:
                    yield from sleep(work.draw.uniform(0.01, 1.0))
            if closing and not change and not lost:
                return

    return script


def _mend(work: Workload, client: RetryingClient, index: int, names: tuple[str, ...]) -> Operation[bool]:
    """Put fields of a sample again. Return True if that succeeded or the sample does not exist any more."""
    ledger = work.ledger
    try:
        if index not in ledger.by_index:
            everything = yield from client.operations.get_meta(["x"], None, MAIN, mode="force_fetch")
            for there, tag in zip(everything.global_indexes, everything.custom_meta, strict=True):
                ledger.named(tag["number"], there)
            if index not in ledger.by_index:
                return True  # the sample was cleared, or is not in a state that was loaded meanwhile
        number = ledger.by_index[index]
        version = 1 + max(ledger.samples[number].tried.values())
        epoch = ledger.trying([number], names, version, client.name)
        wait = None if work.closing else 5
        yield from client.operations.put(work.data([number], names, version), BatchMeta([index], [MAIN]), timeout=wait)
    except StorageKeyNotFoundError:
        return True
    except CapacityError:
        return work.closing and (yield from _give_up(work, client, number, index))
    except TransferQueueError:
        return False
    ledger.wrote([number], names, version, client.name, epoch)
    return True


def _give_up(work: Workload, client: RetryingClient, number: int, index: int) -> Operation[bool]:
    """Clear a sample for which there is no space and will not be any."""
    epoch = work.ledger.clearing([number])
    try:
        yield from client.operations.clear_samples(BatchMeta([index], [MAIN]))
    except TransferQueueError:
        return False
    work.ledger.cleared([number], epoch)
    return True


# ------------------------------------------------------------ checkpoints


def archivist(work: Workload) -> Script:
    """Return a script that saves checkpoints, and sometimes loads one."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        while not work.closing:
            yield from work.pause(1.5)
            with contextlib.suppress(TransferQueueError):
                if work.saved and work.draw.random() < 0.4:
                    yield from _load(client, work.draw.choice(work.saved[-2:]))
                else:
                    yield from _save(work, client)

    return script


def _save(work: Workload, client: RetryingClient) -> Operation[None]:
    """Save a checkpoint, as `tq.save_checkpoint` does."""
    operations = client.operations
    folder = work.cluster.folder / f"checkpoint-{client.name}-{work.cluster.clock.now}"
    previous = work.saved[-1] if work.saved else None
    cut = yield from operations.begin_checkpoint(timeout=5)
    try:
        yield from operations.save_storage_checkpoint(folder, cut=cut, previous=previous)
        yield from work.pause(0.5)
        yield from operations.save_controller_checkpoint(folder / STATE, cut=cut)
    except Exception:
        yield from operations.end_checkpoint(cut, timeout=5)
        raise
    if (yield from operations.end_checkpoint(cut, timeout=5)):
        work.saved.append(folder)
    else:
        shutil.rmtree(folder)


def _load(client: RetryingClient, folder: Path) -> Operation[None]:
    """Load a checkpoint, as `tq.load_checkpoint` does."""
    yield from client.operations.load_storage_checkpoint(folder, timeout=5)
    yield from client.operations.load_controller_checkpoint(folder / STATE, timeout=5)


# ------------------------------------------------------------ moving a partition


def mover(work: Workload) -> Script:
    """Return a script that saves a partition of its own, or some keys of it, and adds them to the running system.

    Nothing else may notice: the ledger goes on to check all other samples.
    """

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        moves = 0
        while not work.closing:
            yield from work.pause(1.5)
            moves += 1
            with contextlib.suppress(TransferQueueError):
                yield from _move(work, client, f"{MOVED}-{client.name}-{moves}")

    return script


def _move(work: Workload, client: RetryingClient, partition: str) -> Operation[None]:
    """Put samples into a partition, save them, drop them, and add them again."""
    operations, epoch = client.operations, work.ledger.epoch
    keys = [f"k{n}" for n in range(work.draw.randint(1, 9))]
    tags = [{"n": n} for n in range(len(keys))]
    data = TensorDict({"z": torch.arange(len(keys)).repeat(4, 1).T.contiguous()}, batch_size=[len(keys)])
    chosen = None if work.draw.random() < 0.5 else sorted(work.draw.sample(keys, work.draw.randint(1, len(keys))))
    folder = work.cluster.folder / f"{partition}-{work.cluster.clock.now}"
    try:
        yield from operations.kv_batch_put(keys, partition, data, tags=tags, timeout=5)
        taken = yield from operations.get_meta(["z"], 1, partition, task_name="t", timeout=5)
        first = taken.global_indexes[0]
        cut = yield from operations.begin_checkpoint(partitions=partition, keys=chosen, timeout=5)
        try:
            yield from operations.save_storage_checkpoint(folder, cut=cut)
            yield from operations.save_controller_checkpoint(folder / STATE, cut=cut)
        finally:
            whole = yield from operations.end_checkpoint(cut, timeout=5)
        if not whole:
            return
        write_json(folder / METADATA, {"storage_saved": True, "user_metadata": {}, "partitions": [partition]})
        yield from operations.clear_partition(partition, timeout=5)
        report = yield from operations.load_samples(folder, partition, timeout=5)
        found = (yield from operations.kv_list(partition, timeout=5)).get(partition, {})
        left = keys if chosen is None else chosen
        if work.ledger.epoch != epoch:
            return  # another client has loaded a checkpoint of the whole system meanwhile
        if found != {key: tags[int(key[1:])] for key in left} or report.samples != {partition: len(left)}:
            raise LedgerError(f"{left} of {partition} were loaded, and the partition has {found}; report {report}")
        meta = yield from operations.kv_retrieve_meta(left, partition, timeout=5)
        if min(meta.global_indexes) <= first:
            raise LedgerError(f"global index {min(meta.global_indexes)} of {partition} was used again")
        lost = report.lost.get(partition, {})
        kept = [key for key in left if key not in lost]
        if not kept:
            return
        read = yield from operations.kv_batch_get(kept, partition, layout="dense", timeout=5)
        if work.ledger.epoch == epoch and read["z"][:, 0].tolist() != [int(key[1:]) for key in kept]:
            raise LedgerError(f"{kept} of {partition} read as {read['z'].tolist()}")
        work.moved += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------ draining


def operator(work: Workload) -> Script:
    """Return a script that drains units, one at a time, and cancels the drain; at the end no unit is drained."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        while not work.closing or work.drained:
            for unit in sorted(work.drained):
                try:
                    yield from client.operations.drain_unit(unit, undo=True, timeout=5)
                except InvalidArgumentError:  # it was lost
                    pass
                except TransferQueueError:
                    yield from sleep(work.draw.uniform(0.01, 1.0))
                    continue
                work.drained.discard(unit)
            yield from work.pause(1.0)
            if not work.closing and not work.drained:
                unit = work.draw.choice(sorted(work.cluster.controller.state.units))
                work.drained.add(unit)
                with contextlib.suppress(TransferQueueError):
                    yield from client.operations.drain_unit(unit, timeout=work.draw.uniform(0.1, 3.0))
                yield from work.pause(1.0)

    return script
