"""Starts and ends the keeper of a RayStore, an actor on this node."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import StartError
from transfer_queue.ray_runtime.block_store_actor import KeeperActor
from transfer_queue.ray_runtime.direct_store_actor import DirectKeeperActor, arena_bytes

CALLS_AT_ONCE = 16


def start_keeper(
    ray: Any, name: str, namespace: str, detached: bool, seconds: float, capacity: int = 0, direct: int = 0
) -> tuple[Any, dict[str, Any]]:
    """A keeper on this node; its handle, and what a `RayStore` is made with.

    capacity: bytes of all blocks; 0: as many as Ray has room for. direct: bytes from which on blocks go by Ray's direct
    transport; all lie in memory of the keeper's own then; 0: none do. StartError where that is not to be had.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    context = ray.get_runtime_context()
    listens = f"tq-ray-{uuid.uuid4().hex}"
    memory, there = arena_bytes(capacity) if direct else 0, ray.available_resources().get("memory", 0)
    if memory > there:
        raise StartError(
            f"backend.RayStore.capacity of {capacity} takes {memory} bytes of memory, and Ray has {there:g} left that "
            f"nobody has reserved: lower it, or start Ray with more memory"
        )
    if direct:
        # told where the class is made: Ray 2.60 passes it over in `options`, and older releases do not know it
        kind = ray.remote(num_cpus=0, memory=memory, enable_tensor_transport=True)(DirectKeeperActor)
    else:
        kind = ray.remote(num_cpus=0)(KeeperActor)
    keeper = kind.options(
        name=name, namespace=namespace, max_restarts=-1, max_concurrency=CALLS_AT_ONCE,
        lifetime="detached" if detached else None,
        scheduling_strategy=strategy(context.get_node_id(), soft=False),
    ).remote(listens, *([capacity, direct] if direct else []))  # fmt: skip
    options = {
        "address": context.gcs_address, "namespace": namespace, "actor": name, "listens": listens,
        "capacity": capacity, "direct": direct,
    }  # fmt: skip
    try:
        ray.get(keeper.check.remote(), timeout=seconds)
    except BaseException as error:
        end_keeper(ray, options)
        if isinstance(error, StartError):  # of the actor's, with a traceback around it
            raise StartError(str(getattr(error, "cause", error))) from None
        raise
    return keeper, options


def end_keeper(ray: Any, options: Mapping[str, Any]) -> None:
    """Ends the keeper that a `RayStore` is made with, and all blocks with it."""
    try:
        ray.kill(ray.get_actor(options["actor"], namespace=options["namespace"]), no_restart=True)
    except (ValueError, KeyError, ray.exceptions.RayError):
        return  # it has ended before
