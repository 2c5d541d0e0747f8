"""Starts and stops the actor of a RayStore on this node."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import StartError
from transfer_queue.ray_runtime.block_store_actor import KeeperActor
from transfer_queue.ray_runtime.direct_store_actor import DirectKeeperActor, arena_bytes

CALLS_AT_ONCE = 16


def start_store_actor(
    ray: Any, name: str, namespace: str, detached: bool, seconds: float, capacity: int = 0, direct: int = 0
) -> tuple[Any, dict[str, Any]]:
    """Start the actor of a RayStore on this node. Returns its handle, and the arguments of `RayStore`.

    Args:
        ray: The module.
        name: The name of the actor.
        namespace: Its namespace.
        detached: It outlives this process.
        seconds: The time in which it must be up.
        capacity: Bytes of all blocks; 0: as many as Ray has space for.
        direct: Bytes of the smallest block for Ray's direct transport, with which all blocks are in the actor's own
            memory; 0: it is not used.

    Raises:
        StartError: If the actor cannot have the transport or the memory.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    context = ray.get_runtime_context()
    listens = f"tq-ray-{uuid.uuid4().hex}"
    memory, there = arena_bytes(capacity) if direct else 0, ray.available_resources().get("memory", 0)
    if memory > there:
        raise StartError(
            f"backend.RayStore.capacity of {capacity} needs {memory} bytes of memory, but Ray has only {there:g} "
            f"unreserved bytes: lower it, or start Ray with more memory"
        )
    if direct:
        # set with the class, because Ray 2.60 ignores it in `options`; older releases do not know it
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
        end_store_actor(ray, options)
        if isinstance(error, StartError):  # the actor's error, wrapped in a traceback
            raise StartError(str(getattr(error, "cause", error))) from None
        raise
    return keeper, options


def end_store_actor(ray: Any, options: Mapping[str, Any]) -> None:
    """End the actor of a `RayStore` with these arguments, and all its blocks."""
    try:
        ray.kill(ray.get_actor(options["actor"], namespace=options["namespace"]), no_restart=True)
    except (ValueError, KeyError, ray.exceptions.RayError):
        return  # it has already ended
