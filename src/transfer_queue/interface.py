"""The top level: a system comes and goes, and the KV functions over the one this process is attached to."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from transfer_queue.client import TransferQueueClient, checkpoint_folder
from transfer_queue.config import Settings, address, process_environment, sampler_object, system_name
from transfer_queue.config_tree import as_json, differences, merge, unknown_keys
from transfer_queue.current import CURRENT, current_client, find_system
from transfer_queue.current import attach as attach_to_running
from transfer_queue.errors import (
    AttachError,
    CheckpointError,
    InvalidArgumentError,
    NotInitializedError,
    StartError,
    TransferQueueError,
    UnitLostError,
)
from transfer_queue.installations import advice, overlaid, own_folder
from transfer_queue.kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
)
from transfer_queue.node.launcher import RunningSystem, start_local
from transfer_queue.on_ray import launcher as on_ray
from transfer_queue.utils.logging_utils import get_logger

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]

_logger = get_logger(__name__)

SAVE_ATTEMPTS = 3
"""Of `save_checkpoint`, where storage units are lost meanwhile."""

_TQ_CONTROLLER: RunningSystem | None = None
"""The system that `init` started or attached to; None means "not initialized"."""


class ConfigInForce(DictConfig):
    """The configuration of a running system, as `init` returns it.

    It equals a conf that asks for nothing else: `tq.init(conf) == conf` says whether all settings that the caller
    named are in force.
    """

    __hash__ = None  # as of every DictConfig

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConfigInForce) or not isinstance(other, (DictConfig, Mapping)):
            return bool(super().__eq__(other))
        return not differences(other, as_json(self))


def init(
    conf: DictConfig | Mapping[str, Any] | None = None, *, attach: Literal["auto", "require", "never"] = "auto"
) -> DictConfig:
    """Start a system or attach to the running one, and return the configuration in force.

    A system is found by the environment variable TQ_ADDRESS, else by its name (`system.name`, TQ_SYSTEM, one name per
    user by default); under Ray (`runtime`) by the actor TransferQueueController. The process that started a system
    stops it with `close` or at its end.

    If the process attaches to a system with settings other than those that `conf` names, the settings in force stay,
    and a warning names each of them. Keys that are unknown are kept, and a warning names them.

    Args:
        conf: The settings to lay over the defaults of `transfer_queue/config.yaml`. Default: none.
        attach: "auto" attaches if a system runs and starts one otherwise. "require" only attaches. "never" only
            starts: a system that runs already under this name is an error.

    Returns:
        The configuration in force. It pickles, and any process finds the system through it.

    Raises:
        InvalidArgumentError: A value of conf is not allowed, the sampler is unknown, or a key is unknown and
            `strict` is set (a ValueError).
        StartError: The system did not come up, with the server's traceback and the place of its log; or one runs
            already, and `attach` is "never".
        AttachError: No system runs, and `attach` is "require".
    """
    global _TQ_CONTROLLER
    if attach not in ("auto", "require", "never"):
        raise InvalidArgumentError(f"attach is {attach!r}; allowed: 'auto', 'require', 'never'")
    for words in unknown_keys(conf):
        _logger.warning("the configuration has a key without an effect: %s", words)
    with CURRENT.lock:
        if CURRENT.client is not None and CURRENT.system is not None:
            if CURRENT.system.alive():
                _refuse_running(CURRENT.system, attach)
                _check_name(conf, CURRENT.system)
                if CURRENT.client.closed:
                    CURRENT.client = TransferQueueClient(CURRENT.system)
                in_force = _in_force(CURRENT.system, CURRENT.client, conf)
                _TQ_CONTROLLER = CURRENT.system
                return in_force
            _logger.warning("the system %s has ended; init attaches or starts anew", CURRENT.system.describe())
            close()
        settings = Settings.from_config(conf)
        _warn_of_other_installations()
        found = find_system(settings)
        if found is None:
            found = _start(settings, conf, attach)
        if not found.new:
            _refuse_running(found, attach)
            _logger.info("attached to the system %s", found.describe())
        client = TransferQueueClient(found)
        try:
            in_force = _in_force(found, client, conf)
        except BaseException:
            client.close()
            found.leave()
            raise
        CURRENT.system, CURRENT.client = found, client
        _TQ_CONTROLLER = found
        return in_force


def _start(settings: Settings, conf: DictConfig | Mapping[str, Any] | None, attach: str) -> RunningSystem:
    """The system of these settings: started here, unless another process is faster."""
    if attach == "require":
        raise AttachError(
            f"no system runs under the name {settings.name or system_name() or 'of this user'!r}, and attach is "
            f"'require': start one first (tq.init() in another process, or `tq start`), or use attach='auto'"
        )
    under_ray = on_ray.is_used(settings.runtime)
    settings.check_runtime(under_ray)
    if settings.name is None and address() is not None:
        _logger.warning("TQ_ADDRESS names %s, where no system runs; init starts one by name", address())
    merged = merge(conf)
    plain = {"settings": settings.to_json(), "conf": as_json(merged)}
    if under_ray:
        found = on_ray.start(settings, merged, plain, sampler_object(conf))
    else:
        settings.refuse_one_node()
        found = start_local(
            settings.name,
            plain,
            sampler_object(conf),
            timeout=settings.start_timeout,
            environment=process_environment(),
        )
    if found.new:
        found.conf = merged
    return found


def _warn_of_other_installations() -> None:
    others = overlaid()
    if others:
        _logger.warning(
            "two distributions have the import name transfer_queue: %s, and this one in %s. The modules of one may "
            "have replaced those of the other: %s",
            ", ".join(map(str, others)),
            own_folder(),
            advice(others),
        )


def _refuse_running(system: RunningSystem, attach: str) -> None:
    if attach == "never":
        raise StartError(
            f"the system {system.name!r} runs already, {system.describe()}, and attach is 'never': give the new one "
            f"another name (system.name, or TQ_SYSTEM), or end this one first (close() in its program, or `tq stop`)"
        )


def _in_force(
    system: RunningSystem, client: TransferQueueClient, conf: DictConfig | Mapping[str, Any] | None
) -> DictConfig:
    """The configuration of a system, with its place; warns where the caller has asked for another one."""
    if system.conf is not None:
        merged = merge(system.conf)
    else:
        client.get_partition_list()  # the configuration is known once the controller was reached
        merged = merge(client.storage_manager.config.get("conf"))
    differing = differences(conf, as_json(merged))
    if differing:
        _logger.warning("%s", system.with_other_settings(differing))
    OmegaConf.update(merged, "system.folder", str(system.folder), force_add=True)
    return ConfigInForce(merged, flags={"allow_objects": True})


def _check_name(conf: object, system: RunningSystem) -> None:
    """Refuses a conf that names another system than the one this process is attached to."""
    section = conf.get("system") if isinstance(conf, Mapping) else None
    wanted = section.get("name") if isinstance(section, Mapping) else None
    if wanted is not None and wanted != system.name:
        raise InvalidArgumentError(
            f"system.name is {wanted!r}, but this process is attached to the system {system.name!r}; "
            f"call close() first, since a process has one system at a time"
        )


def close() -> None:
    """Detaches from the system, and stops it if this process has started it. Idempotent."""
    global _TQ_CONTROLLER
    with CURRENT.lock:
        client, system = CURRENT.client, CURRENT.system
        CURRENT.client = CURRENT.system = _TQ_CONTROLLER = None
    if client is not None:
        client.close()
    if system is not None:
        system.stop() if system.owned else system.leave()


def get_client() -> TransferQueueClient:
    """The client of the attached system.

    Raises:
        NotInitializedError: there is no system (also an AssertionError); call `tq.init()`.
    """
    return current_client()


def get_metrics_endpoint() -> str | None:
    """ "host:port" where metrics are served over HTTP; None if they are off (`metrics.enabled`) or no system runs."""
    client = attach_to_running()
    if client is None:
        return None
    client.get_partition_list()  # the endpoint is known once the controller was reached
    endpoint: str | None = client.storage_manager.config.get("metrics_endpoint")
    return endpoint


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str], *, include_storage: bool = True, metadata: Mapping[str, Any] | None = None
) -> None:
    """Saves the whole system, samples and progress, into a folder, which replaces an older checkpoint there.

    It is one moment of the system, however long the copying takes and whatever goes on meanwhile. The older checkpoint
    stays until the new one is whole and on the disk, also if this process or the machine dies; samples that it holds
    already, of the same running system, are linked to and not written again. Where a storage unit is lost meanwhile,
    what is left is saved.

    include_storage: makes no difference: samples are saved whatever the backend. metadata: JSON values of the user's,
    kept under "user_metadata" in the folder's metadata.json.

    Raises:
        NotInitializedError: there is no system. CheckpointError: the folder holds other things, somebody saves there
        at this moment, a server was restarted meanwhile, storage units were lost again and again, an external store
        has lost what was to be saved, or the state contradicts itself, so that it could not be loaded. OSError: the
        disk is full, or refuses. ConnectionLostError: the system went away. Nothing has changed then.
    """
    client = _checkpoint_client()
    target = Path(os.path.realpath(checkpoint_dir))
    content = {"storage_saved": True, "user_metadata": checkpoint_folder.user_metadata(metadata)}
    checkpoint_folder.check_target(target)
    with checkpoint_folder.replacing(target) as draft:
        for attempt in range(1, SAVE_ATTEMPTS + 1):
            try:
                _save_cut(client, draft, target)
                break
            except UnitLostError as error:
                if attempt == SAVE_ATTEMPTS:
                    raise CheckpointError(
                        f"the checkpoint {target} was not saved: storage units were lost at each of {SAVE_ATTEMPTS} "
                        f"attempts ({error}); an older one there is as it was. Save again"
                    ) from error
        checkpoint_folder.write_json(draft / checkpoint_folder.METADATA, content)


def _save_cut(client: TransferQueueClient, draft: Path, target: Path) -> None:
    """Writes the system of this moment into a folder. UnitLostError where a storage unit is lost meanwhile."""
    cut = client.begin_checkpoint(draft, target)
    try:
        # by the arguments that everybody knows, for these methods may have been replaced
        client.save_storage_checkpoint(draft)
        client.save_controller_checkpoint(draft / checkpoint_folder.STATE)
    except BaseException:
        with contextlib.suppress(TransferQueueError):
            client.end_checkpoint(cut)
        raise
    if not client.end_checkpoint(cut):
        raise checkpoint_folder.broken(target)


def load_checkpoint(checkpoint_dir: str | os.PathLike[str], *, allow_pickle: bool = True) -> None:
    """Replaces the system's whole state, samples and progress, by a checkpoint's; its units may be others, or more.

    Everything is checked first. Counters of global indexes go on where the higher of both was, and metadata of samples
    from before is refused (StaleMetadataError). Those who wait go on waiting, for what is there now. There must be room
    for the checkpoint's samples beside those that the system has.

    Args:
        checkpoint_dir: The folder that `save_checkpoint` has written.
        allow_pickle: Python objects beyond msgpack, numpy and torch are pickled in a checkpoint, and to read one runs
            the code in it. False is for checkpoints of whom you do not trust: everything else is loaded, and such a
            value, in a field or a tag, is refused when it is read (UncarriableValueError, which names partition, field
            and row). The pickled bytes do not reach the system. Default: True.

    Raises:
        NotInitializedError: there is no system. CheckpointNotFoundError: no folder there, or not all of a checkpoint
        (a FileNotFoundError). CheckpointError: files are missing ("count mismatch"), damaged, of another program, or
        cannot be read. CapacityError: no room. UnitLostError: storage units were lost meanwhile, again and again.
        ConnectionLostError: the system went away. Nothing has changed then.
    """
    client = _checkpoint_client()
    folder = Path(os.path.realpath(checkpoint_dir))
    with checkpoint_folder.reading(folder):
        checkpoint_folder.put_back(folder)
    checkpoint_folder.check(folder)
    more = {} if allow_pickle else {"allow_pickle": False}  # these methods may have been replaced
    client.load_storage_checkpoint(folder, **more)
    client.load_controller_checkpoint(folder / checkpoint_folder.STATE, **more)


def _checkpoint_client() -> TransferQueueClient:
    if _TQ_CONTROLLER is None:
        raise NotInitializedError("the system is not initialized: call tq.init() before saving or loading checkpoints")
    return current_client()


atexit.register(close)
