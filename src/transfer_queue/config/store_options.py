"""The options of the external stores that are built in, one class for each section of `backend`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from transfer_queue.config.declaration import declared_settings, setting
from transfer_queue.config.loading import select
from transfer_queue.config.validators import NonEmptyText, PlainMapping, Port, not_allowed

SMALLEST_STORAGE = 64 * 1024
"""Bytes of the smallest storage that can be configured: one granule of an arena."""
OPTIONS = "backend.options"
SIMPLE = "SimpleStorage"
"""The backend that is built in."""
_DIRECT_TRANSPORT = "backend.RayStore.direct_transport"
_CAPACITY = "backend.RayStore.capacity"


@dataclass(frozen=True)
class MooncakeStoreOptions:
    """The store of Mooncake, if it is the backend."""

    auto_init: bool = setting(
        "backend.MooncakeStore.auto_init",
        True,
        "Whether the system starts and stops the master of the store. false: a master is running at "
        "`master_server_address`.",
    )
    metadata_server: NonEmptyText = setting(
        "backend.MooncakeStore.metadata_server",
        "P2PHANDSHAKE",
        'The URL of the metadata server, which is started with the master. "P2PHANDSHAKE": there is none.',
    )
    master_server_address: NonEmptyText = setting(
        "backend.MooncakeStore.master_server_address",
        "localhost:50051",
        'The address of the master, "host:port". Port 0 means a free port, if `auto_init` is true.',
    )
    local_hostname: NonEmptyText | None = setting(
        "backend.MooncakeStore.local_hostname",
        None,
        "The address at which nodes reach each other: a network such as 10.2.0.0/16, or in a system of one node its "
        "name. null: the address of each node in Ray.",
    )
    protocol: Literal["tcp", "rdma"] = setting(
        "backend.MooncakeStore.protocol", "tcp", "The protocol of transfers between hosts."
    )
    global_segment_size: Annotated[int, Meta(ge=0, extra={"unit": "bytes"})] = setting(
        "backend.MooncakeStore.global_segment_size",
        4 << 30,
        "The memory that the system gives to the store, held by a separate process. 0: other hosts give all memory.",
    )
    local_buffer_size: Annotated[int, Meta(ge=0, extra={"unit": "bytes"})] = setting(
        "backend.MooncakeStore.local_buffer_size",
        1 << 30,
        "How much registered memory each process keeps for its transfers.",
    )
    device_name: str = setting(
        "backend.MooncakeStore.device_name",
        "",
        'The RDMA devices, separated by commas. "": the store chooses.',
    )
    hard_pin: bool = setting("backend.MooncakeStore.hard_pin", True, "Whether the store never evicts values.")
    use_gdr: bool = setting(
        "backend.MooncakeStore.use_gdr",
        False,
        "Whether values on a GPU are sent without a copy in the memory of the host. This needs `protocol: rdma` and a "
        "build of the library with CUDA. A process without a GPU uses the memory of the host.",
    )


@dataclass(frozen=True)
class YuanrongOptions:
    """The store of openYuanrong, if it is the backend."""

    auto_init: bool = setting(
        "backend.Yuanrong.auto_init",
        True,
        "Whether the system starts and stops the worker and the metastore. false: they are running.",
    )
    worker_host: NonEmptyText | None = setting(
        "backend.Yuanrong.worker_host",
        None,
        "The address of the worker of each node: a network such as 10.2.0.0/16, or in a system of one node its name. "
        "null: the address of each node in Ray, or 127.0.0.1 in a system of one machine.",
    )
    worker_port: Port = setting(
        "backend.Yuanrong.worker_port",
        31501,
        "The port of the worker. 0 means a free port, if `auto_init` is true.",
    )
    metastore_port: Port = setting(
        "backend.Yuanrong.metastore_port",
        2379,
        "The port of the metastore. 0 means a free port, if `auto_init` is true.",
    )
    enable_yr_npu_transport: bool = setting(
        "backend.Yuanrong.enable_yr_npu_transport",
        False,
        'Whether gets with device="npu" receive values on an NPU without a copy in the memory of the host. This needs '
        "torch_npu and a build of the library for NPUs. A process without an NPU uses the memory of the host.",
    )
    worker_args: str = setting(
        "backend.Yuanrong.worker_args",
        "",
        "More arguments of the worker, as on its command line.",
    )


@dataclass(frozen=True)
class RayStoreOptions:
    """Ray's object store, if it is the backend."""

    capacity: Annotated[int, Meta(ge=SMALLEST_STORAGE, extra={"unit": "bytes"})] | None = setting(
        _CAPACITY,
        None,
        "The largest size of all values together. null: as much as Ray has; Ray writes to disk if its memory is full.",
    )
    direct_transport: Literal["nixl"] | None = setting(
        _DIRECT_TRANSPORT,
        None,
        "The transport that replaces Ray's object store. nixl: actors with `enable_tensor_transport=True` write and "
        "read values directly; this needs a `capacity` and the extra [ray-direct].",
    )


STORE_OPTIONS: dict[str, type] = {
    "MooncakeStore": MooncakeStoreOptions,
    "Yuanrong": YuanrongOptions,
    "RayStore": RayStoreOptions,
}
"""The options of each external store that `backend.storage_backend` may name without an import path.

The docstring of a class introduces its section in `config.yaml`. `storage.stores.base` names the stores' classes.
"""


def validated_store_options(merged: Any, backend: str) -> dict[str, Any]:
    """Return the options with which the class of an external store is called.

    Args:
        merged: The merged conf.
        backend: The name or the import path of the store.

    Returns:
        The section of a built-in store, `backend.options` for a store with an import path.

    Raises:
        InvalidArgumentError: An option is not allowed.
    """
    if backend not in STORE_OPTIONS:
        return PlainMapping().convert(OPTIONS, select(merged, OPTIONS))
    settings = declared_settings(STORE_OPTIONS[backend])
    options = {name: each.validator.convert(each.key, select(merged, each.key)) for name, each in settings.items()}
    if options.get("direct_transport") and options["capacity"] is None:
        raise not_allowed(
            _CAPACITY, None, f"bytes if {_DIRECT_TRANSPORT} is set, because Ray does not write these to disk"
        )
    return options
