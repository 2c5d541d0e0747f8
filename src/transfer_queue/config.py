"""Configuration: the documented defaults, the caller's conf over them, and the environment.

`config.yaml` has the default of every setting. `config_tree.merge` merges the caller's conf over these. `Settings` is
the part that the servers get, as checked and typed values that can be written as JSON. The environment variables are
read here and nowhere else, at the moment of the call.

Importable by processes without omegaconf and torch.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transfer_queue.checks import (
    checked_any_text,
    checked_bool,
    checked_choice,
    checked_folder,
    checked_int,
    checked_name,
    checked_options,
    checked_port,
    checked_seconds,
    checked_text,
    mapping,
    refuse,
)
from transfer_queue.config_tree import merge, unreadable
from transfer_queue.errors import InvalidArgumentError, StartError

if TYPE_CHECKING:
    from omegaconf import DictConfig

RUNTIMES = ("auto", "local", "ray")
BACKENDS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")
DURABILITIES = ("none", "async", "sync")
ISOLATIONS = ("process", "inline")
TLS_FILES = ("certificate", "private_key", "authority")
LEAST_ARENA = 64 * 1024  # one granule of `storage.extents`
SAMPLERS = (
    "SequentialSampler", "RankAwareSampler", "GRPOGroupNSampler", "SeqlenBalancedSampler", "TokenBudgetSampler",
    "PrioritySampler", "FreshnessSampler",
)  # fmt: skip


# ---------------------------------------------------------------- the environment


def _environment(name: str) -> str | None:
    """The variable, None where it is unset or empty."""
    return os.environ.get(name, "").strip() or None


def _environment_number(name: str, default: float, least: float, wanted: str) -> float:
    text = _environment(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        raise refuse(name, text, wanted) from None
    if not math.isfinite(number) or number < least:
        raise refuse(name, text, wanted)
    return number


def pre_alloc_sample_num() -> int:
    """TQ_PRE_ALLOC_SAMPLE_NUM: indexes reserved in a new partition; 1 where unset."""
    wanted = "a whole number >= 0"
    number = _environment_number("TQ_PRE_ALLOC_SAMPLE_NUM", 1, 0, wanted)
    if number != int(number):
        raise refuse("TQ_PRE_ALLOC_SAMPLE_NUM", number, wanted)
    return int(number)


def empty_batch_sleep_interval() -> float:
    """TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL: the longest a loader waits before it asks again, seconds."""
    return _environment_number("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 1.0, 0.0, "seconds >= 0")


def get_metadata_timeout() -> float:
    """TQ_CONTROLLER_GET_METADATA_TIMEOUT: how long a fetch that does not poll waits, seconds."""
    return _environment_number("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 60.0, 0.0, "seconds >= 0")


def level_number(key: str, value: str | int) -> int:
    """The number of a logging level given by name (in any case) or number; `key` names it in the error."""
    text = str(value).strip().upper()
    number = int(text) if text.isdecimal() else logging.getLevelName(text)
    if not isinstance(number, int) or number <= logging.NOTSET:
        raise refuse(key, value, "DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number > 0")
    return number


def logging_level() -> int | None:
    """TQ_LOGGING_LEVEL as a number of `logging`; None where unset."""
    text = _environment("TQ_LOGGING_LEVEL")
    return None if text is None else level_number("TQ_LOGGING_LEVEL", text)


def _environment_folder(name: str) -> str | None:
    folder = _environment(name)
    if folder is not None and not os.path.isabs(folder):
        # Every process of a system must find the same folder, wherever it was started.
        raise refuse(name, folder, "an absolute path")
    return folder


def runtime_dir() -> str | None:
    """TQ_RUNTIME_DIR: the folder in which systems live; None where unset."""
    return _environment_folder("TQ_RUNTIME_DIR")


def ray_address() -> str | None:
    """RAY_ADDRESS: the Ray cluster that this process belongs to; None where unset."""
    return _environment("RAY_ADDRESS")


def process_environment() -> MutableMapping[str, str]:
    """This process's environment, in which the starter of a system leaves TQ_ADDRESS for its children."""
    return os.environ


def address() -> str | None:
    """TQ_ADDRESS: the folder of a running system to attach to; None where unset."""
    return _environment_folder("TQ_ADDRESS")


def system_name() -> str | None:
    """TQ_SYSTEM: the name of the system to start or attach to; None where unset."""
    name = _environment("TQ_SYSTEM")
    return None if name is None else checked_name("TQ_SYSTEM", name)


# ---------------------------------------------------------------- what the servers get


def _checked_tls(key: str, value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != set(TLS_FILES):
        raise refuse(key, value, f"null, or a mapping with the keys {', '.join(TLS_FILES)}")
    files = {name: _select(value, name) for name in TLS_FILES}
    for name, path in files.items():
        if not isinstance(path, str) or not os.path.isabs(path):
            raise refuse(f"{key}.{name}", path, "the absolute path of a PEM file")
    return files


def _checked_backend(value: object) -> str:
    if isinstance(value, str) and ":" in value:
        return value
    return checked_choice(KEYS["storage_backend"], value, (*BACKENDS, 'an import path "package.module:Class"'))


def _checked_name_or_none(key: str, value: object) -> str | None:
    return None if value is None else checked_text(key, value)


_STORES: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "MooncakeStore": {
        "auto_init": checked_bool,
        "metadata_server": checked_text,
        "master_server_address": checked_text,
        "local_hostname": _checked_name_or_none,
        "protocol": lambda key, value: checked_choice(key, value, ("tcp", "rdma")),
        "global_segment_size": lambda key, value: checked_int(key, value, 0),
        "local_buffer_size": lambda key, value: checked_int(key, value, 0),
        "device_name": checked_any_text,
        "hard_pin": checked_bool,
        "use_gdr": checked_bool,
    },
    "Yuanrong": {
        "auto_init": checked_bool,
        "worker_port": checked_port,
        "metastore_port": checked_port,
        "enable_yr_npu_transport": checked_bool,
        "worker_args": checked_any_text,
    },
    "RayStore": {
        "capacity": lambda key, value: None if value is None else checked_int(key, value, LEAST_ARENA),
        "direct_transport": lambda key, value: None if value is None else checked_choice(key, value, ("nixl",)),
    },
}  # a section's keys, and how each is checked


def _store_options(merged: Any, backend: str) -> dict[str, Any]:
    """The options of an external store: its section of the conf, `backend.options` of one by its import path."""
    if backend == "SimpleStorage":
        return {}
    section = f"backend.{backend}" if backend in _STORES else "backend.options"
    plain = _select(merged, section)
    if not isinstance(plain, Mapping):
        raise refuse(section, plain, "a mapping")
    if backend not in _STORES:
        return mapping(section, plain)
    options = {name: check(f"{section}.{name}", _select(plain, name)) for name, check in _STORES[backend].items()}
    if options.get("direct_transport") and options["capacity"] is None:
        raise refuse(f"{section}.capacity", None, f"bytes where {section}.direct_transport is set: Ray spills nothing")
    return options


def _checked_replicas(value: Any, units: int | None, backend: str) -> int:
    if backend != "SimpleStorage":
        return checked_int(KEYS["replicas"], value, 1, 1)
    replicas = checked_int(KEYS["replicas"], value, 1, 2)
    if units is not None and replicas > units:
        key = KEYS["num_data_storage_units"]
        raise refuse(KEYS["replicas"], value, f"1, or {key} of {replicas} or more ({key} is {units})")
    return replicas


def _checked_offload(enabled: object, path: object) -> str | None:
    """The folder where cold values go; None where none do."""
    folder = None if path is None else checked_folder(KEYS["offload_path"], path)
    if not checked_bool(OFFLOAD_ENABLED, enabled):
        return None
    if folder is None:
        raise refuse(KEYS["offload_path"], path, f"an absolute path on an SSD where {OFFLOAD_ENABLED} is true")
    return folder


def _checked_watermarks(high: object, low: object) -> tuple[float, float]:
    for key, value in (("offload_high", high), ("offload_low", low)):
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise refuse(KEYS[key], value, "a fraction above 0 and up to 1")
    assert isinstance(high, (int, float))
    assert isinstance(low, (int, float))
    if low >= high:
        raise refuse(KEYS["offload_low"], low, f"less than {KEYS['offload_high']}, which is {high}")
    return float(high), float(low)


@dataclass(frozen=True)
class Settings:
    """The conf as the servers and their launcher read it: checked and flat.

    name: of the system, None for the user's default. sampler: a built-in name or an import path; None where the
    conf holds an instance or a class that cannot be imported (`sampler_object`). sampler_args: what its class is made
    with, JSON values. total_storage_size: rows over all units, None unlimited. replicas: units that each value lies in.
    arena_bytes: of one unit. offload_path: where cold values go, None: nowhere; offload_high, offload_low: fractions of
    a unit's bytes; offload_bytes: of one unit on disk. tls: the paths of TLS_FILES; None for none. Timeouts are
    seconds. Each field's key in the conf is in `KEYS`.
    """

    name: str | None
    runtime: str
    sampler: str | None
    sampler_args: dict[str, Any]
    polling_mode: bool
    journal_durability: str
    journal_folder: str | None
    max_deliveries: int
    storage_backend: str
    total_storage_size: int | None
    num_data_storage_units: int | None
    replicas: int
    arena_bytes: int | None
    arena_folder: str | None
    offload_path: str | None
    offload_high: float
    offload_low: float
    offload_bytes: int | None
    metrics_enabled: bool
    metrics_port: int
    metrics_host: str
    allow_pickle: bool
    tls: dict[str, str] | None
    start_timeout: float
    call_timeout: float
    restart_timeout: float
    report_wait: float | None
    ray_namespace: str
    ray_detached: bool
    ray_restart_seconds: float
    ray_actor_options: dict[str, Any]
    ray_node_resource: str | None
    store_options: dict[str, Any] = field(default_factory=dict)
    sampler_isolation: str = "process"
    sampler_timeout: float = 30.0
    strict: bool = False

    @classmethod
    def from_config(cls, conf: DictConfig | Mapping[str, Any] | None = None) -> Settings:
        """The settings that this conf, laid over the defaults, asks for.

        Errors: InvalidArgumentError naming key, value and what is allowed; an unknown sampler likewise.
        """
        merged = merge(conf)
        given = {name: _select(merged, key) for name, key in KEYS.items()}
        units = given["num_data_storage_units"]
        if units is not None:
            units = checked_int(KEYS["num_data_storage_units"], units, 1)
        name, rows, size, folder = (given[k] for k in ("name", "total_storage_size", "arena_bytes", "arena_folder"))
        journal, resource = given["journal_folder"], given["ray_node_resource"]
        high, low = _checked_watermarks(given["offload_high"], given["offload_low"])
        disk, report = given["offload_bytes"], given["report_wait"]
        backend = _checked_backend(given["storage_backend"])
        if backend != "SimpleStorage":
            units = 1  # which knows what the store has, wherever the bytes are
        return cls(
            name=None if name is None else checked_name(KEYS["name"], name),
            runtime=checked_choice(KEYS["runtime"], given["runtime"], RUNTIMES),
            sampler=_sampler_path(given["sampler"]),
            sampler_args=_sampler_args(given["sampler"], given["sampler_args"]),
            polling_mode=checked_bool(KEYS["polling_mode"], given["polling_mode"]),
            journal_durability=checked_choice(KEYS["journal_durability"], given["journal_durability"], DURABILITIES),
            journal_folder=None if journal is None else checked_folder(KEYS["journal_folder"], journal),
            max_deliveries=checked_int(KEYS["max_deliveries"], given["max_deliveries"], 0),
            storage_backend=backend,
            total_storage_size=None if rows is None else checked_int(KEYS["total_storage_size"], rows, 1),
            num_data_storage_units=units,
            replicas=_checked_replicas(given["replicas"], units, backend),
            arena_bytes=None if size is None else checked_int(KEYS["arena_bytes"], size, LEAST_ARENA),
            arena_folder=None if folder is None else checked_folder(KEYS["arena_folder"], folder),
            offload_path=(
                _checked_offload(_select(merged, OFFLOAD_ENABLED), given["offload_path"])
                if backend == "SimpleStorage"
                else None
            ),
            offload_high=high,
            offload_low=low,
            offload_bytes=None if disk is None else checked_int(KEYS["offload_bytes"], disk, LEAST_ARENA),
            metrics_enabled=checked_bool(KEYS["metrics_enabled"], given["metrics_enabled"]),
            metrics_port=checked_int(KEYS["metrics_port"], given["metrics_port"], 0, 65535),
            metrics_host=checked_text(KEYS["metrics_host"], given["metrics_host"]),
            allow_pickle=checked_bool(KEYS["allow_pickle"], given["allow_pickle"]),
            tls=_checked_tls(KEYS["tls"], given["tls"]),
            start_timeout=checked_seconds(KEYS["start_timeout"], given["start_timeout"]),
            call_timeout=checked_seconds(KEYS["call_timeout"], given["call_timeout"]),
            restart_timeout=checked_seconds(KEYS["restart_timeout"], given["restart_timeout"]),
            sampler_timeout=checked_seconds(KEYS["sampler_timeout"], given["sampler_timeout"]),
            sampler_isolation=checked_choice(KEYS["sampler_isolation"], given["sampler_isolation"], ISOLATIONS),
            report_wait=None if report is None else checked_seconds(KEYS["report_wait"], report),
            ray_namespace=checked_text(KEYS["ray_namespace"], given["ray_namespace"]),
            ray_detached=checked_bool(KEYS["ray_detached"], given["ray_detached"]),
            ray_restart_seconds=checked_seconds(KEYS["ray_restart_seconds"], given["ray_restart_seconds"]),
            ray_actor_options=checked_options(KEYS["ray_actor_options"], given["ray_actor_options"]),
            ray_node_resource=None if resource is None else checked_text(KEYS["ray_node_resource"], resource),
            store_options=_store_options(merged, backend),
            strict=checked_bool(KEYS["strict"], given["strict"]),
        )

    def to_json(self) -> dict[str, Any]:
        """The settings as a dict of JSON values."""
        return asdict(self)

    def refuse_one_node(self) -> None:
        """InvalidArgumentError where one node cannot have what the conf says."""
        _checked_replicas(self.replicas, self.num_data_storage_units or 1, self.storage_backend)

    def check_runtime(self, under_ray: bool) -> None:
        """StartError for a backend that this runtime does not have."""
        if self.storage_backend == "RayStore" and not under_ray:
            raise StartError(
                f"{KEYS['storage_backend']} RayStore keeps values in Ray's object store and needs runtime: ray; call "
                f"ray.init() before tq.init(), or choose SimpleStorage"
            )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """The settings that `to_json` wrote; entries of a newer release are left out."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})


OFFLOAD_ENABLED = "backend.SimpleStorage.offload.enabled"
KEYS = {
    "name": "system.name",
    "runtime": "runtime",
    "sampler": "controller.sampler",
    "sampler_args": "controller.sampler_args",
    "sampler_isolation": "controller.sampler_isolation",
    "polling_mode": "controller.polling_mode",
    "journal_durability": "controller.journal.durability",
    "journal_folder": "controller.journal.folder",
    "max_deliveries": "controller.max_deliveries",
    "storage_backend": "backend.storage_backend",
    "total_storage_size": "backend.SimpleStorage.total_storage_size",
    "num_data_storage_units": "backend.SimpleStorage.num_data_storage_units",
    "replicas": "backend.SimpleStorage.replicas",
    "arena_bytes": "backend.SimpleStorage.arena_bytes",
    "arena_folder": "backend.SimpleStorage.arena_folder",
    "offload_path": "backend.SimpleStorage.offload.path",
    "offload_high": "backend.SimpleStorage.offload.high_watermark",
    "offload_low": "backend.SimpleStorage.offload.low_watermark",
    "offload_bytes": "backend.SimpleStorage.offload.capacity",
    "metrics_enabled": "metrics.enabled",
    "metrics_port": "metrics.port",
    "metrics_host": "metrics.host",
    "allow_pickle": "security.allow_pickle",
    "tls": "security.tls",
    "start_timeout": "timeouts.start",
    "call_timeout": "timeouts.call",
    "restart_timeout": "timeouts.restart",
    "sampler_timeout": "timeouts.sampler",
    "report_wait": "timeouts.report_wait",
    "ray_namespace": "ray.namespace",
    "ray_detached": "ray.detached",
    "ray_restart_seconds": "ray.restart_seconds",
    "ray_actor_options": "ray.actor_options",
    "ray_node_resource": "ray.node_resource",
    "store_options": "backend.options",
    "strict": "strict",
}


def _select(conf: Any, key: str) -> Any:
    """The value at a dotted key of a merged conf."""
    from omegaconf.errors import OmegaConfBaseException

    section = conf
    path, _, leaf = key.rpartition(".")
    try:
        for part in path.split(".") if path else []:
            section = section[part]
            if not isinstance(section, Mapping):
                raise refuse(path, section, "a mapping")
        return section[leaf]
    except OmegaConfBaseException as error:
        raise unreadable(error) from error


# ---------------------------------------------------------------- samplers


def _import_path(value: type) -> str | None:
    """ "package.module:Class" where another process can import the class by it, else None."""
    path = f"{value.__module__}:{value.__qualname__}"
    if value.__module__ == "__main__" or "<" in value.__qualname__:
        return None
    return path


def _sampler_path(value: object) -> str | None:
    """A sampler of the conf as a name or import path; None for an object that must travel itself."""
    if isinstance(value, str):
        if value not in SAMPLERS:
            sampler_class(value)
        return value
    _check_sampler(value)
    return _import_path(value) if isinstance(value, type) else None


def _sampler_args(sampler: object, value: Any) -> dict[str, Any]:
    """The arguments of the conf's sampler as JSON values; those of a built-in one are tried here."""
    if value is None:
        value = {}
    if not isinstance(value, Mapping):
        raise refuse(KEYS["sampler_args"], value, "a mapping of the arguments of controller.sampler")
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain: Any = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig) else dict(value)
    except OmegaConfBaseException as error:
        raise unreadable(error) from error
    try:
        args: dict[str, Any] = json.loads(json.dumps(plain))
    except (TypeError, ValueError) as error:
        wanted = f"plain values, or pass an instance as controller.sampler ({error})"
        raise refuse(KEYS["sampler_args"], plain, wanted) from None
    if args and not isinstance(sampler, (str, type)):
        raise refuse(KEYS["sampler_args"], args, "nothing where controller.sampler is an instance, which has its own")
    if sampler in SAMPLERS:
        sampler_from(sampler, args)
    return args


def sampler_object(conf: DictConfig | Mapping[str, Any] | None) -> object | None:
    """The sampler of the conf as an object or class, which travels with the caller's import paths.

    None for a built-in one, which every process finds by its name.
    """
    value: object = _select(merge(conf), KEYS["sampler"])
    if isinstance(value, str):
        return None if value in SAMPLERS else sampler_class(value)
    return value


def _check_sampler(value: object) -> None:
    if not callable(getattr(value, "sample", None)):
        raise refuse(KEYS["sampler"], value, f"{', '.join(SAMPLERS)}, 'package.module:Class', a sampler or its class")


def sampler_class(name: str) -> type:
    """The class of a built-in name, or of an import path "package.module:Class" or "package.module.Class".

    Errors: InvalidArgumentError (a ValueError) naming it where there is no such sampler.
    """
    if name in SAMPLERS:
        found = getattr(importlib.import_module("transfer_queue.sampler"), name)
    else:
        module, colon, attribute = name.partition(":")
        if not colon:
            module, _, attribute = name.rpartition(".")
        found = _imported(name, module, attribute)
    if not isinstance(found, type):
        raise refuse(KEYS["sampler"], name, "the path of a class")
    _check_sampler(found)
    return found


def _imported(name: str, module: str, attribute: str) -> Any:
    wanted = f"{', '.join(SAMPLERS)}, or 'package.module:Class' of a class that can be imported"
    if not module or not attribute:
        raise refuse(KEYS["sampler"], name, wanted)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{refuse(KEYS['sampler'], name, wanted)}; {error}") from error
    return found


def sampler_from(value: object, args: Mapping[str, Any] | None = None) -> object:
    """A sampler from a built-in name, an import path, a class (made with `args`) or an instance.

    args: an `inner` of a sampler around others is a name or path, or a mapping of `sampler` and `sampler_args`.
    Errors: InvalidArgumentError (a ValueError) naming an unknown one, or a class that takes other arguments.
    """
    if isinstance(value, str):
        value = sampler_class(value)
    _check_sampler(value)
    if not isinstance(value, type):
        return value
    given = dict(args or {})
    try:
        if "inner" in given and _wraps(value):
            given["inner"] = _inner(given["inner"])
        made: object = value(**given)
    except (TypeError, InvalidArgumentError) as error:
        if not given:
            wanted = (
                f"a class that is made without arguments, or with controller.sampler_args, or an instance ({error})"
            )
            raise refuse(KEYS["sampler"], value, wanted) from error
        raise refuse(KEYS["sampler_args"], dict(args or {}), f"arguments of {value.__name__} ({error})") from error
    return made


def _wraps(value: type) -> bool:
    return issubclass(value, importlib.import_module("transfer_queue.sampler.wrapper").SamplerWrapper)


def _inner(value: Any) -> object:
    if isinstance(value, Mapping):
        if "sampler" not in value or not set(value) <= {"sampler", "sampler_args"}:
            raise InvalidArgumentError(f"inner is {value!r}, and as a mapping has the keys sampler and sampler_args")
        return sampler_from(value["sampler"], value.get("sampler_args"))
    return sampler_from(value) if isinstance(value, str) else value
