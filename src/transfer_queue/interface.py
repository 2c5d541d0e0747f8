"""Start, attach to and close a system, save and load checkpoints; and the KV functions of the attached system."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from omegaconf import DictConfig, OmegaConf

from transfer_queue._generated_kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_lock_list,
    async_kv_put,
    async_kv_update,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_lock_list,
    kv_put,
    kv_update,
)
from transfer_queue.attachment import CURRENT, current_client, find_system
from transfer_queue.attachment import attach as attach_to_running
from transfer_queue.client import TransferQueueClient
from transfer_queue.client.checkpoint import checkpoint_folder
from transfer_queue.client.checkpoint.checkpoint_data import CheckpointReport, warn_of_losses
from transfer_queue.client.control_client import still_runs
from transfer_queue.client.conversion import arguments
from transfer_queue.client.conversion.arguments import introduction
from transfer_queue.client.key_lock import LEASE_SECONDS, KVLock
from transfer_queue.config.environment import ATTACH_MODES, address, attach_mode, process_environment, system_name
from transfer_queue.config.loading import as_json, differences, merge, unknown_keys
from transfer_queue.config.settings import Settings
from transfer_queue.config.validators import validator_of
from transfer_queue.config_in_force import ConfigInForce
from transfer_queue.errors import (
    AttachError,
    CheckpointError,
    ConnectionLostError,
    InvalidArgumentError,
    NotInitializedError,
    StartError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.net.fd_limits import refuse_without_files
from transfer_queue.node.system.launcher import RunningSystem, start_local
from transfer_queue.ray_runtime import launcher as on_ray
from transfer_queue.sampler.factory import sampler_objects
from transfer_queue.system_folder.paths import DEFAULT_NAME, SystemFolder
from transfer_queue.utils.installations import warn_of_other_installations
from transfer_queue.utils.logging_utils import get_logger

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_lock",
    "async_kv_lock_list",
    "async_kv_put",
    "async_kv_update",
    "close",
    "get_client",
    "get_live_address",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_lock",
    "kv_lock_list",
    "kv_put",
    "kv_update",
    "load_checkpoint",
    "save_checkpoint",
]

_logger = get_logger(__name__)

SAVE_ATTEMPTS = 3
"""How often `save_checkpoint` tries, if storage units are lost while it saves."""

_TQ_CONTROLLER: RunningSystem | None = None
"""The system that `init` started or attached to; None after `init` means "not initialized"."""


@refuse_without_files()
def init(
    conf: DictConfig | Mapping[str, Any] | None = None,
    *,
    attach: Literal["auto", "require", "never"] | None = None,
    task: str | None = None,
    rank: int | None = None,
) -> DictConfig:
    """Start a system or attach to the running one, and return the configuration in force.

    `init` looks for a system at the address in the environment variable TQ_ADDRESS, otherwise by name: `system.name`,
    then TQ_SYSTEM, then one default name for each user. Under Ray (`runtime`) it looks for the actor
    TransferQueueController. The process that started a system stops it with `close`, or when the process ends.

    With the setting `durability.values`, a system that starts continues with the state and the values that its
    `durability.folder` keeps, also if all processes of the system before it were killed. If this process had a client
    of that system, it keeps the client.

    If the running system has other settings than `conf`, its settings stay in force, and a warning names each
    difference. Unknown keys are kept, and a warning names them.

    Args:
        conf: The settings to merge over the defaults of `transfer_queue/config.yaml`. Default: none.
        attach: "auto" attaches if a system is running and starts one otherwise. "require" only attaches. "never" only
            starts: a running system of this name is an error. Pass "require" in workers: a worker whose trainer has
            crashed then gets an error, and does not start a system of its own in which it waits forever. Default: the
            environment variable TQ_ATTACH, otherwise "auto".
        task: The task of this process, for example "rollout". The timeline shows its puts and waits under this name.
            Default: the task of its last fetch.
        rank: The rank of this process in the task, 0 or more. Default: the `dp_rank` of its first fetch.

    Returns:
        The configuration in force. It can be pickled, and any process can find the system with it. It prints as one
        line; `OmegaConf.to_yaml(config)` returns all settings as text.

    Raises:
        InvalidArgumentError: A value of conf is not allowed, the sampler is unknown, or a key is unknown and `strict`
            is set (a ValueError). Or `task` or `rank` is not valid.
        StartError: The system did not start. The message has the traceback of the server and the path of its log. Or a
            system is already running, and `attach` is "never".
        AttachError: No system is running, and `attach` is "require". The message says where `init` looked.

    Example:
        >>> config = tq.init({"controller": {"sampler": "SequentialSampler"}})
        >>> config.controller.sampler
        'SequentialSampler'
        >>> tq.close()
    """
    global _TQ_CONTROLLER
    if attach is None:
        attach = attach_mode()  # type: ignore[assignment]
    if attach not in ATTACH_MODES:
        raise InvalidArgumentError(f"attach must be 'auto', 'require' or 'never', got {attach!r}")
    introduction(task, rank)
    for unknown in unknown_keys(conf):
        _logger.warning("the configuration has a key without an effect: %s", unknown)
    with CURRENT.lock:
        if CURRENT.client is not None and CURRENT.system is not None:
            runs = CURRENT.system.is_alive() and still_runs(CURRENT.system)
            end = CURRENT.system.describe_lost_name() if runs else "has ended"
            if not end:
                _refuse_running(CURRENT.system, attach)
                _check_name(conf, CURRENT.system)
                if CURRENT.client.closed:
                    CURRENT.client = TransferQueueClient(CURRENT.system)
                in_force = _in_force(CURRENT.system, CURRENT.client, conf)
                CURRENT.client._introduce(task, rank)
                _TQ_CONTROLLER, CURRENT.by_init = CURRENT.system, True
                return in_force
            _logger.warning(
                "the system %s %s; init attaches to another one or starts one", CURRENT.system.describe(), end
            )
            if runs or not CURRENT.system.will_return():
                close()
        settings = Settings.from_config(conf)
        samplers = sampler_objects(settings, conf)
        warn_of_other_installations()
        while True:
            system = find_system(settings) or _start(settings, conf, samplers, attach)
            try:
                if still_runs(system):
                    in_force = _use(system, conf, attach, task, rank)
                    _TQ_CONTROLLER, CURRENT.by_init = system, True
                    return in_force
                system.leave()
            except BaseException as error:
                system.leave()
                if system.new or not isinstance(error, ConnectionLostError):  # otherwise it was about to end
                    raise


def _use(
    system: RunningSystem, conf: DictConfig | Mapping[str, Any] | None, attach: str, task: str | None, rank: int | None
) -> DictConfig:
    """Attach this process to a system that was found or started, and return its configuration."""
    if not system.new:
        _refuse_running(system, attach)
        _logger.info("attached to the system %s", system.describe())
    if system.live_address:
        _logger.info("the system is shown at %s", system.live_address)
    client = _client_of_before(system) or TransferQueueClient(system, task=task, rank=rank)
    try:
        in_force = _in_force(system, client, conf)
        client._introduce(task, rank)
        if system.is_ending():  # it has replied just before its end
            raise ConnectionLostError(f"the system {system.describe()} is ending; call init again")
    except BaseException:
        client.close()
        raise
    CURRENT.system, CURRENT.client = system, client
    return in_force


def _client_of_before(system: RunningSystem) -> TransferQueueClient | None:
    """Return this process's client if this start continues the durable system that it had, else close that one."""
    client, before = CURRENT.client, CURRENT.system
    if client is None or before is None:
        return None
    if (before.key, before.folder) == (system.key, system.folder) and not client.closed:
        return client
    close()
    return None


def _start(
    settings: Settings, conf: DictConfig | Mapping[str, Any] | None, samplers: Mapping[str, object], attach: str
) -> RunningSystem:
    """Start a system with these settings, or return the one that another process has just started."""
    under_ray = on_ray.is_used(settings.runtime)
    if attach == "require":
        raise AttachError(
            f"{_searched(settings, under_ray)}, and attach is 'require'. Start a system first (tq.init() in the "
            "trainer, or `tq start`), with the same name and TQ_RUNTIME_DIR, or use attach='auto' to start one here"
        )
    settings.check_runtime(under_ray)
    if settings.name is None and address() is not None:
        _logger.warning("TQ_ADDRESS names %s, but no system is running there; init starts one by name", address())
    merged = merge(conf)
    plain = {"settings": settings.to_json(), "conf": as_json(merged)}
    if under_ray:
        system = on_ray.start(settings, merged, plain, samplers)
    else:
        settings.refuse_one_node()
        system = start_local(
            settings.name,
            plain,
            samplers,
            timeout=settings.start_timeout,
            environment=process_environment(),
        )
    if system.new:
        system.conf = merged
    return system


def _searched(settings: Settings, under_ray: bool) -> str:
    """Return where `find_system` has found no system, for a message."""
    if under_ray:
        return f"no actor {on_ray.ACTOR} is running in the namespace {settings.ray_namespace!r} of Ray"
    folder = address() if settings.name is None else None
    if folder is not None:
        place = SystemFolder(Path(folder))
        return f"no system is running in the folder {folder}, which TQ_ADDRESS names{place.describe_crash()}"
    name = settings.name or system_name() or DEFAULT_NAME
    place = SystemFolder.named(name)
    return f"no system is running under the name {name!r}, in the folder {place.folder}{place.describe_crash()}"


def _refuse_running(system: RunningSystem, attach: str) -> None:
    if attach == "never":
        raise StartError(
            f"the system {system.name!r} is already running, {system.describe()}, and attach is 'never': give the new "
            f"one another name (system.name, or TQ_SYSTEM), or stop this one first (close() in its program, or "
            f"`tq stop`)"
        )


def _in_force(
    system: RunningSystem, client: TransferQueueClient, conf: DictConfig | Mapping[str, Any] | None
) -> DictConfig:
    """Return the configuration of a system, with its folder. Log a warning if the caller's conf differs from it."""
    if system.conf is not None:
        merged = merge(system.conf)
    else:
        client.get_partition_list()  # the configuration is known once the controller was reached
        merged = merge(client.storage_manager.config.get("conf"))
    differing = differences(conf, as_json(merged))
    if differing:
        _logger.warning("%s", system.settings_warning(differing))
    OmegaConf.update(merged, "system.folder", str(system.folder), force_add=True)
    return ConfigInForce(merged, flags={"allow_objects": True})


def _check_name(conf: object, system: RunningSystem) -> None:
    """Raise InvalidArgumentError if a conf names another system than the one this process is attached to."""
    section = conf.get("system") if isinstance(conf, Mapping) else None
    wanted = section.get("name") if isinstance(section, Mapping) else None
    if wanted is not None and wanted != system.name:
        raise InvalidArgumentError(
            f"system.name is {wanted!r}, but this process is attached to the system {system.name!r}; "
            f"call close() first, since a process has one system at a time"
        )


def close() -> None:
    """Detach from the system, and stop it if this process started it. Further calls do nothing.

    Example:
        >>> config = tq.init()
        >>> tq.close()
        >>> tq.close()
    """
    global _TQ_CONTROLLER
    with CURRENT.lock:
        client, system = CURRENT.client, CURRENT.system
        CURRENT.client = CURRENT.system = _TQ_CONTROLLER = None
        CURRENT.by_init = False
    if client is not None:
        client.close()
    if system is not None:
        system.stop() if system.owned else system.leave()


def get_client() -> TransferQueueClient:
    """Return the client of the attached system.

    Returns:
        The client. All threads of the process can share it; a forked child uses it as a new client.

    Raises:
        NotInitializedError: No system is running (also an AssertionError). Call `tq.init()` first.

    Example:
        >>> client = tq.get_client()
        >>> client.get_partition_list()
        []
    """
    return current_client()


def kv_lock(
    keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None, lease: float = LEASE_SECONDS
) -> KVLock:
    """Return a lock of keys, which is held in a `with` or an `async with` block. See `TransferQueueClient.kv_lock`.

    Args:
        keys: The keys (one str for one key), which need not exist. They are locked together.
        partition_id: The partition.
        timeout: Seconds to wait for the lock. Default: the setting `timeouts.call` (60 s). 0 does not wait.
        lease: Seconds after which the lock ends if this process cannot renew it. Default: 30.

    Returns:
        The lock. Its block raises WaitTimeoutError if the lock was not granted in time, and LockLostError at its end if
        the lock was lost.

    Raises:
        InvalidArgumentError: There is no key, or a number is not valid.

    Example:
        >>> with tq.kv_lock(["a", "b"], "train_0") as lock:
        ...     meta = tq.kv_put("a", "train_0", {"reward": torch.tensor(1.0)}, fence=lock)
    """
    return current_client().kv_lock(keys, partition_id, timeout=timeout, lease=lease)


def async_kv_lock(
    keys: Sequence[str] | str, partition_id: str, *, timeout: float | None = None, lease: float = LEASE_SECONDS
) -> KVLock:
    """Return a lock of keys for an `async with` block; see `kv_lock`, which returns the same.

    Args:
        keys: See `kv_lock`.
        partition_id: See `kv_lock`.
        timeout: See `kv_lock`.
        lease: See `kv_lock`.

    Returns:
        See `kv_lock`.

    Raises:
        InvalidArgumentError: See `kv_lock`.

    Example:
        >>> async with tq.async_kv_lock("a", "train_0") as lock:
        ...     meta = await tq.async_kv_put("a", "train_0", {"reward": torch.tensor(1.0)}, fence=lock)
    """
    return current_client().async_kv_lock(keys, partition_id, timeout=timeout, lease=lease)


def get_metrics_endpoint() -> str | None:
    """Return the address at which the system serves its metrics over HTTP.

    Returns:
        "host:port"; None if metrics are off (`metrics.enabled`) or no system is running.

    Example:
        >>> print(tq.get_metrics_endpoint())
        None
    """
    client = attach_to_running()
    if client is None:
        return None
    client.get_partition_list()  # the endpoint is known once the controller was reached
    endpoint: str | None = client.storage_manager.config.get("metrics_endpoint")
    return endpoint


def get_live_address() -> str | None:
    """Return the address of the page that shows the system in a browser.

    Returns:
        The URL, with the token that opens the page; None if the system does not serve the page (`live.enabled`) or no
        system is running.

    Example:
        >>> print(tq.get_live_address())
        None
    """
    attach_to_running()
    system = CURRENT.system
    return (system.live_address or None) if system is not None else None


@overload
def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    partitions: None = None,
    keys: None = None,
) -> None: ...
@overload
def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    partitions: str | Sequence[str],
    keys: str | Sequence[str] | None = None,
) -> CheckpointReport: ...
def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    include_storage: bool = True,
    metadata: Mapping[str, Any] | None = None,
    partitions: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
) -> CheckpointReport | None:
    """Save the whole system, samples and progress, or some partitions of it, into a folder.

    The checkpoint is the system at one moment. Changes that are made while it is copied are not in it. An older
    checkpoint in the folder is replaced when the new one is complete and on the disk; until then it stays unchanged,
    even if this process or the machine fails. Blocks that it already contains, of the same running system, are linked
    to and not written again. If a storage unit is lost meanwhile, the remaining samples are saved.

    Args:
        checkpoint_dir: The folder. Missing parents are created.
        include_storage: Has no effect, because samples are saved with every backend. Default: True.
        metadata: Your own values, which JSON must be able to represent, stored under "user_metadata" in the folder's
            metadata.json. Default: none.
        partitions: The partitions to save. Such a checkpoint can only be added to a running system:
            `load_checkpoint(..., partitions=...)`. Default: None, the whole system.
        keys: The keys of the samples to save, if `partitions` names a single partition. Default: all its samples.

    Returns:
        The numbers of saved samples, and the values that were lost before the save, by key. None if the whole system is
        saved.

    Raises:
        NotInitializedError: No system is running.
        InvalidArgumentError: `partitions` or `keys` is not valid. Nothing was changed.
        UnknownPartitionError: There is no such partition. Nothing was changed.
        StorageKeyNotFoundError: The partition has no sample with such a key. Nothing was changed.
        CheckpointError: JSON cannot represent `metadata`, the folder contains other files, another process is saving
            into it, a server was restarted meanwhile, storage units were lost during every attempt, an external store
            lost data that was to be saved, or the state is inconsistent. Nothing was changed.
        OSError: The disk is full or cannot be written to. Nothing was changed.
        ConnectionLostError: The system stopped. Nothing was changed.

    Example:
        >>> meta = tq.kv_put("a", "train_0", {"prompt": torch.tensor([1, 2])})
        >>> tq.save_checkpoint("checkpoint", metadata={"step": 100})
        >>> tq.load_checkpoint("checkpoint")
    """
    client = _checkpoint_client()
    target = Path(os.path.realpath(checkpoint_dir))
    content: dict[str, Any] = {"storage_saved": True, "user_metadata": checkpoint_folder.user_metadata(metadata)}
    selection = arguments.selection(partitions, keys)
    checkpoint_folder.check_target(target)
    with checkpoint_folder.replace_folder(target) as draft:
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            try:
                report = _save_cut(client, draft, target, selection)
                break
            except UnitLostError as error:
                if attempt == SAVE_ATTEMPTS:
                    raise CheckpointError(
                        f"the checkpoint {target} was not saved: storage units were lost at each of "
                        f"{SAVE_ATTEMPTS} attempts ({error}). An older checkpoint there is unchanged. Save again"
                    ) from error
        if report is not None:
            warn_of_losses(report)
            content["lost"] = report.lost
        if selection is not None:
            content[checkpoint_folder.PARTITIONS] = selection[0]
        checkpoint_folder.write_json(draft / checkpoint_folder.METADATA, content)
    return report if selection is not None else None


def _save_cut(
    client: TransferQueueClient, draft: Path, target: Path, selection: tuple[list[str], list[str] | None] | None
) -> CheckpointReport | None:
    """Write the state of this moment into a folder. Raises UnitLostError if a storage unit is lost meanwhile."""
    partitions, keys = selection or (None, None)
    cut = client.begin_checkpoint(draft, target, partitions=partitions, keys=keys)
    try:
        # only with arguments of the public contract, because callers may have replaced these methods
        client.save_storage_checkpoint(draft)
        client.save_controller_checkpoint(draft / checkpoint_folder.STATE)
    except BaseException:
        with contextlib.suppress(TransferQueueError):
            client.end_checkpoint(cut)
        raise
    if not client.end_checkpoint(cut):
        raise checkpoint_folder.incomplete_save_error(target)
    return cut.report


@overload
def load_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True, partitions: None = None, keys: None = None
) -> None: ...
@overload
def load_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    allow_pickle: bool = True,
    partitions: str | Sequence[str],
    keys: str | Sequence[str] | None = None,
) -> CheckpointReport: ...
def load_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    allow_pickle: bool = True,
    partitions: str | Sequence[str] | None = None,
    keys: str | Sequence[str] | None = None,
) -> CheckpointReport | None:
    """Replace the state of the system, samples and progress, with that of a checkpoint, or add partitions of it.

    The checkpoint is checked completely before anything is changed. The system may have other storage units than the
    one that was saved. New global indexes continue after the higher of both counters. Metadata of samples from before
    the load is refused (`StaleMetadataError`). Waiting requests continue to wait, for the loaded samples. While
    loading, the system needs space for the samples of the checkpoint in addition to those it has.

    With `partitions`, the samples of these partitions are added in one step, and everything else continues: other
    partitions, other samples and their metadata stay valid. The samples keep their keys, tags, groups and consumption,
    and get new global indexes. A lease ends with the save, so its samples are ready again; batches that were dealt to
    ranks are forgotten. A partition that does not exist is created as it was saved: with its settings, its policy
    version and its seals. One that exists must have the same settings, be unsealed and have none of the keys. Samples
    that all tasks of `free_when` have consumed are not kept.

    Args:
        checkpoint_dir: The folder that `save_checkpoint` wrote.
        allow_pickle: A checkpoint contains pickled Python objects, except for types of msgpack, numpy and torch.
            Reading a pickled object runs the code in it. Pass False for a checkpoint whose author you do not trust:
            everything else is loaded, the pickled bytes do not reach the system, and reading such a value in a field or
            a tag raises UncarriableValueError, which names partition, field and row. Default: True.
        partitions: The partitions to add, of a checkpoint of the whole system or of some partitions. Default: None,
            replace the system.
        keys: The keys of the samples to add, if `partitions` names a single partition. Default: all its samples.

    Returns:
        The numbers of added samples, and the values that were lost before the save, by key. None if the system is
        replaced.

    Raises:
        NotInitializedError: No system is running.
        InvalidArgumentError: `allow_pickle` is not a bool, or `partitions` or `keys` is not valid. Or a partition
            exists with other settings, with such a key (DuplicateError), or with values of another type
            (FieldTypeError). Nothing was changed.
        UnknownPartitionError: The checkpoint has no such partition. Nothing was changed.
        StorageKeyNotFoundError: The partition has no sample with such a key. Nothing was changed.
        SealedError: A partition of that name is sealed. Nothing was changed.
        CheckpointNotFoundError: The folder or a part of the checkpoint does not exist (a FileNotFoundError).
        CheckpointError: Files are missing ("count mismatch"), damaged, written by another program, or cannot be read.
            Or the checkpoint contains only some partitions, and `partitions` is missing. Nothing was changed.
        CapacityError: There is not enough space. Nothing was changed.
        UnitLostError: Storage units were lost during every attempt. Nothing was changed.
        ConnectionLostError: The system stopped. Nothing was changed.

    Example:
        >>> meta = tq.kv_put("a", "replay", {"prompt": torch.tensor([1, 2])})
        >>> report = tq.save_checkpoint("checkpoint", partitions="replay")
        >>> tq.kv_clear("a", "replay")
        >>> tq.load_checkpoint("checkpoint", partitions="replay")
        CheckpointReport(samples={'replay': 1}, lost={})
        >>> tq.kv_list("replay")
        {'replay': {'a': {}}}
    """
    client = _checkpoint_client()
    # callers may have replaced the methods that load by older ones
    more = {} if validator_of(bool).convert("allow_pickle", allow_pickle) else {"allow_pickle": False}
    folder = Path(os.path.realpath(checkpoint_dir))
    with checkpoint_folder.read_guard(folder):
        checkpoint_folder.put_back(folder)
    checkpoint_folder.check_folder(folder)
    selection = arguments.selection(partitions, keys)
    if selection is not None:
        names, chosen = selection
        report = client.load_samples(folder, names, keys=chosen, allow_pickle=allow_pickle)
        warn_of_losses(report)
        return report
    checkpoint_folder.check_complete(folder)
    client.load_storage_checkpoint(folder, **more)
    client.load_controller_checkpoint(folder / checkpoint_folder.STATE, **more)
    return None


def _checkpoint_client() -> TransferQueueClient:
    client = attach_to_running()
    if client is None or (CURRENT.by_init and _TQ_CONTROLLER is None):  # callers may set _TQ_CONTROLLER to None
        raise NotInitializedError("the system is not initialized: call tq.init() before saving or loading checkpoints")
    return client


def _close_with_child(module: object = None) -> None:
    """Close when a child of `multiprocessing` ends, which may run no handlers of `atexit`."""
    multiprocessing.util.Finalize(None, close, exitpriority=0)


atexit.register(close)
_close_with_child()
multiprocessing.util.register_after_fork(sys.modules[__name__], _close_with_child)
