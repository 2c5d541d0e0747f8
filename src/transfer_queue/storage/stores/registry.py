"""The built-in external stores: the class of each, and the server that the system starts for it.

The options of a built-in store are declared in `config.store_options`, so that a configuration can be checked without
the modules here. A module of a store is imported only by the processes that use the store.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltInStore:
    """Where a built-in store is implemented. Both paths have the form "package.module:Class"."""

    path: str
    """The subclass of `Store`."""
    server: str = ""
    """The class of its store server, if the system starts one; see `store_server`."""


BUILT_IN: dict[str, BuiltInStore] = {
    "MooncakeStore": BuiltInStore(
        "transfer_queue.storage.stores.mooncake:MooncakeStore",
        server="transfer_queue.storage.stores.mooncake_server:MooncakeKeeper",
    ),
    "Yuanrong": BuiltInStore(
        "transfer_queue.storage.stores.yuanrong:YuanrongStore",
        server="transfer_queue.storage.stores.yuanrong_server:YuanrongKeeper",
    ),
    "RayStore": BuiltInStore("transfer_queue.storage.stores.ray_store:RayStore"),
}
"""The stores that `backend.storage_backend` may name without an import path."""


def has_server(backend: str) -> bool:
    """Whether the system starts a store server for this backend."""
    return backend in BUILT_IN and BUILT_IN[backend].server != ""
