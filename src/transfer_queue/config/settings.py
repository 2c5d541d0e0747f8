"""Configuration: the documented defaults, the caller's conf over them, and the environment.

`config.yaml` has the default of every setting. `config_tree.merge` merges the caller's conf over these. `Settings` is
the part that the servers get, as checked and typed values that can be written as JSON. The environment variables are
read here and nowhere else, at the moment of the call.

Importable by processes without omegaconf and torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from transfer_queue.config.loading import merge, select, unreadable
from transfer_queue.config.validators import (
    mapping,
    refuse,
    validated_any_text,
    validated_bool,
    validated_choice,
    validated_folder,
    validated_int,
    validated_name,
    validated_options,
    validated_port,
    validated_seconds,
    validated_text,
)
from transfer_queue.errors import StartError

if TYPE_CHECKING:
    from omegaconf import DictConfig

RUNTIMES = ("auto", "local", "ray")
BACKENDS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")
DURABILITIES = ("none", "async", "sync")
ISOLATIONS = ("process", "inline")
TLS_FILES = ("certificate", "private_key", "authority")
LEAST_ARENA = 64 * 1024  # one granule of `storage.extents`

# ---------------------------------------------------------------- what the servers get


def _checked_tls(key: str, value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or set(value) != set(TLS_FILES):
        raise refuse(key, value, f"null, or a mapping with the keys {', '.join(TLS_FILES)}")
    files = {name: select(value, name) for name in TLS_FILES}
    for name, path in files.items():
        if not isinstance(path, str) or not os.path.isabs(path):
            raise refuse(f"{key}.{name}", path, "the absolute path of a PEM file")
    return files


def _checked_backend(value: object) -> str:
    if isinstance(value, str) and ":" in value:
        return value
    return validated_choice(KEYS["storage_backend"], value, (*BACKENDS, 'an import path "package.module:Class"'))


def _checked_name_or_none(key: str, value: object) -> str | None:
    return None if value is None else validated_text(key, value)


_STORES: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "MooncakeStore": {
        "auto_init": validated_bool,
        "metadata_server": validated_text,
        "master_server_address": validated_text,
        "local_hostname": _checked_name_or_none,
        "protocol": lambda key, value: validated_choice(key, value, ("tcp", "rdma")),
        "global_segment_size": lambda key, value: validated_int(key, value, 0),
        "local_buffer_size": lambda key, value: validated_int(key, value, 0),
        "device_name": validated_any_text,
        "hard_pin": validated_bool,
        "use_gdr": validated_bool,
    },
    "Yuanrong": {
        "auto_init": validated_bool,
        "worker_port": validated_port,
        "metastore_port": validated_port,
        "enable_yr_npu_transport": validated_bool,
        "worker_args": validated_any_text,
    },
    "RayStore": {
        "capacity": lambda key, value: None if value is None else validated_int(key, value, LEAST_ARENA),
        "direct_transport": lambda key, value: None if value is None else validated_choice(key, value, ("nixl",)),
    },
}  # a section's keys, and how each is checked


def _store_options(merged: Any, backend: str) -> dict[str, Any]:
    """The options of an external store: its section of the conf, `backend.options` of one by its import path."""
    if backend == "SimpleStorage":
        return {}
    section = f"backend.{backend}" if backend in _STORES else "backend.options"
    plain = select(merged, section)
    if not isinstance(plain, Mapping):
        raise refuse(section, plain, "a mapping")
    if backend not in _STORES:
        return mapping(section, plain)
    options = {name: check(f"{section}.{name}", select(plain, name)) for name, check in _STORES[backend].items()}
    if options.get("direct_transport") and options["capacity"] is None:
        raise refuse(f"{section}.capacity", None, f"bytes where {section}.direct_transport is set: Ray spills nothing")
    return options


def _checked_replicas(value: Any, units: int | None, backend: str) -> int:
    if backend != "SimpleStorage":
        return validated_int(KEYS["replicas"], value, 1, 1)
    replicas = validated_int(KEYS["replicas"], value, 1, 2)
    if units is not None and replicas > units:
        key = KEYS["num_data_storage_units"]
        raise refuse(KEYS["replicas"], value, f"1, or {key} of {replicas} or more ({key} is {units})")
    return replicas


def _checked_offload(enabled: object, path: object) -> str | None:
    """The folder where cold values go; None where none do."""
    folder = None if path is None else validated_folder(KEYS["offload_path"], path)
    if not validated_bool(OFFLOAD_ENABLED, enabled):
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
        given = {name: select(merged, key) for name, key in KEYS.items()}
        units = given["num_data_storage_units"]
        if units is not None:
            units = validated_int(KEYS["num_data_storage_units"], units, 1)
        name, rows, size, folder = (given[k] for k in ("name", "total_storage_size", "arena_bytes", "arena_folder"))
        journal, resource = given["journal_folder"], given["ray_node_resource"]
        high, low = _checked_watermarks(given["offload_high"], given["offload_low"])
        disk, report = given["offload_bytes"], given["report_wait"]
        backend = _checked_backend(given["storage_backend"])
        if backend != "SimpleStorage":
            units = 1  # which knows what the store has, wherever the bytes are
        return cls(
            name=None if name is None else validated_name(KEYS["name"], name),
            runtime=validated_choice(KEYS["runtime"], given["runtime"], RUNTIMES),
            sampler=_sampler_path(given["sampler"]),
            sampler_args=_sampler_arguments(given["sampler"], given["sampler_args"]),
            polling_mode=validated_bool(KEYS["polling_mode"], given["polling_mode"]),
            journal_durability=validated_choice(KEYS["journal_durability"], given["journal_durability"], DURABILITIES),
            journal_folder=None if journal is None else validated_folder(KEYS["journal_folder"], journal),
            max_deliveries=validated_int(KEYS["max_deliveries"], given["max_deliveries"], 0),
            storage_backend=backend,
            total_storage_size=None if rows is None else validated_int(KEYS["total_storage_size"], rows, 1),
            num_data_storage_units=units,
            replicas=_checked_replicas(given["replicas"], units, backend),
            arena_bytes=None if size is None else validated_int(KEYS["arena_bytes"], size, LEAST_ARENA),
            arena_folder=None if folder is None else validated_folder(KEYS["arena_folder"], folder),
            offload_path=(
                _checked_offload(select(merged, OFFLOAD_ENABLED), given["offload_path"])
                if backend == "SimpleStorage"
                else None
            ),
            offload_high=high,
            offload_low=low,
            offload_bytes=None if disk is None else validated_int(KEYS["offload_bytes"], disk, LEAST_ARENA),
            metrics_enabled=validated_bool(KEYS["metrics_enabled"], given["metrics_enabled"]),
            metrics_port=validated_int(KEYS["metrics_port"], given["metrics_port"], 0, 65535),
            metrics_host=validated_text(KEYS["metrics_host"], given["metrics_host"]),
            allow_pickle=validated_bool(KEYS["allow_pickle"], given["allow_pickle"]),
            tls=_checked_tls(KEYS["tls"], given["tls"]),
            start_timeout=validated_seconds(KEYS["start_timeout"], given["start_timeout"]),
            call_timeout=validated_seconds(KEYS["call_timeout"], given["call_timeout"]),
            restart_timeout=validated_seconds(KEYS["restart_timeout"], given["restart_timeout"]),
            sampler_timeout=validated_seconds(KEYS["sampler_timeout"], given["sampler_timeout"]),
            sampler_isolation=validated_choice(KEYS["sampler_isolation"], given["sampler_isolation"], ISOLATIONS),
            report_wait=None if report is None else validated_seconds(KEYS["report_wait"], report),
            ray_namespace=validated_text(KEYS["ray_namespace"], given["ray_namespace"]),
            ray_detached=validated_bool(KEYS["ray_detached"], given["ray_detached"]),
            ray_restart_seconds=validated_seconds(KEYS["ray_restart_seconds"], given["ray_restart_seconds"]),
            ray_actor_options=validated_options(KEYS["ray_actor_options"], given["ray_actor_options"]),
            ray_node_resource=None if resource is None else validated_text(KEYS["ray_node_resource"], resource),
            store_options=_store_options(merged, backend),
            strict=validated_bool(KEYS["strict"], given["strict"]),
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


def _sampler_path(value: object) -> str | None:
    """Return the sampler of a conf as a name or import path; None for an object that must be sent itself."""
    if isinstance(value, str) and value:
        return value
    if not callable(getattr(value, "sample", None)):
        allowed = "the name of a built-in sampler, 'package.module:Class', a sampler or its class"
        raise refuse(KEYS["sampler"], value, allowed)
    return _import_path(value) if isinstance(value, type) else None


def _import_path(value: type) -> str | None:
    """Return "package.module:Class" if another process can import the class by it, else None."""
    if value.__module__ == "__main__" or "<" in value.__qualname__:
        return None
    return f"{value.__module__}:{value.__qualname__}"


def _sampler_arguments(sampler: object, value: Any) -> dict[str, Any]:
    """Return the arguments of the conf's sampler as JSON values."""
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
        allowed = f"plain values, or pass an instance as controller.sampler ({error})"
        raise refuse(KEYS["sampler_args"], plain, allowed) from None
    if args and not isinstance(sampler, (str, type)):
        allowed = "nothing if controller.sampler is an instance, which has its own"
        raise refuse(KEYS["sampler_args"], args, allowed)
    return args
