"""Starts a system under Ray, and finds it from any process of the cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from transfer_queue.config import environment
from transfer_queue.config.settings import Settings
from transfer_queue.errors import AttachError, StartError
from transfer_queue.node.system import sampler_transfer
from transfer_queue.node.system.launcher import END_SECONDS, STOP_SECONDS, RunningSystem
from transfer_queue.node.system.launcher import find as find_local
from transfer_queue.ray_runtime.controller_actor import ControllerActor, SystemSpec
from transfer_queue.ray_runtime.node_actors import FOLDERS, NodeSystem
from transfer_queue.ray_runtime.store_actors import end_store_actor, start_store_actor
from transfer_queue.storage.stores.ray_direct import LEAST
from transfer_queue.system_folder.paths import KEY_BYTES

ACTOR = "TransferQueueController"
NAMESPACE = "transfer_queue"  # if the conf has no other
CALLS_AT_ONCE = 16  # of the actor's methods, so that one that waits does not delay the others
PAUSE = 0.05  # seconds between two calls of an actor whose system is starting
END_PAUSE = 0.005  # seconds between two looks whether Ray has removed an actor

_ADDRESS = "TQ_ADDRESS"

logger = logging.getLogger(__name__)

_forked = False
"""Whether this process was forked from one in which Ray may have run. Ray does not work in such a child."""


def is_used(runtime: str) -> bool:
    """Whether this process uses Ray, for a setting `runtime`.

    With "auto" it does if it has initialized Ray, or if RAY_ADDRESS is set.
    """
    if runtime == "ray":
        return True
    if runtime != "auto" or _forked:
        return False
    is_configured = environment.ray_address() is not None and importlib.util.find_spec("ray") is not None
    return is_configured or _is_initialised()


def _is_initialised() -> bool:
    """Whether Ray runs in this process. This does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and not _forked and bool(ray.is_initialized())


def _ray() -> Any:
    """Return Ray, initialized with RAY_ADDRESS if the program has not initialized it. Raises StartError on failure."""
    try:
        import ray
    except ImportError as error:
        raise StartError(
            f"runtime: ray needs Ray, which is not installed ({error}): pip install 'transfer_queue[ray]'"
        ) from error
    if not ray.is_initialized():
        address = environment.ray_address()
        if address is None:
            raise StartError("runtime: ray needs a Ray cluster: call ray.init() before tq.init(), or set RAY_ADDRESS")
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            raise StartError(
                f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {error}; check the address, and that the "
                f"cluster runs"
            ) from error
    return ray


class RaySystem(RunningSystem):
    """A system that an actor holds, as seen from a process of the actor's node.

    While a process is attached to it, TQ_ADDRESS names it, so that children of the process find it without Ray.
    """

    def __init__(
        self, system: RunningSystem, name: str | None, namespace: str, handle: Any, owned: bool, keeper: Any = None
    ) -> None:
        owner = os.getpid() if owned else None
        super().__init__(system._system, system.description, system.key, owner)
        self.name = name or ACTOR
        self._actor = {"name": _actor_name(name), "namespace": namespace}
        self._handle = handle
        self._keeper = keeper
        """The actor of a RayStore, which ends when its handle is freed."""
        self._named = owner is not None or environment.address() is None
        if self._named:
            environment.process_environment()[_ADDRESS] = str(self.folder)

    def describe_lost_name(self) -> str:
        """See `RunningSystem.describe_lost_name`: without its actor, a system ends after `ray.restart_seconds`."""
        if not _is_initialised():
            return ""
        import ray

        try:
            is_replaced = ray.get_actor(**self._actor) != self._handle
        except ValueError:  # no actor has the name
            return f"has lost its actor {self._actor['name']}, so it ends with its samples"
        return f"has lost its actor, and another system holds the name {self._actor['name']}" if is_replaced else ""

    def leave(self) -> None:
        """Detach this process from the system."""
        self._withdraw_address()

    def _withdraw_address(self) -> None:
        variables = environment.process_environment()
        if self._named and variables.get(_ADDRESS) == str(self.folder):
            del variables[_ADDRESS]

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Stop the servers and the actor. If Ray was shut down before, the actor has ended already."""
        if not _is_initialised():
            super().stop(timeout)
            return
        self._withdraw_address()
        import ray

        try:
            ray.get(self._handle.stop.remote(), timeout=timeout + END_SECONDS)
        except ray.exceptions.RayError as error:
            logger.warning(
                "the actor of system %s cannot be asked to stop it, so this process stops its servers: %s",
                self.name,
                error,
            )
            super().stop(timeout)
        limit = time.monotonic() + END_SECONDS
        with contextlib.suppress(ray.exceptions.RayError, ValueError):  # ValueError: no actor has the name
            ray.kill(self._handle, no_restart=True)
            while ray.get_actor(**self._actor) == self._handle and time.monotonic() < limit:
                time.sleep(END_PAUSE)


def _actor_name(system: str | None) -> str:
    return ACTOR if system is None else f"{ACTOR}-{system}"


def find(system: str | None, namespace: str, seconds: float) -> RunningSystem | None:
    """Return the system of the cluster's actor of this name; None if there is none.

    Args:
        system: The name. None: TQ_ADDRESS, else TQ_SYSTEM, else the system without a name.
        namespace: The namespace of the actor.
        seconds: The time for a system that is starting.

    Raises:
        AttachError: If the actor does not say where its system is.
    """
    if system is None and environment.address() is not None:
        local = find_local(None)
        if local is not None:
            return local
    system = system or environment.system_name()
    ray = _ray()
    try:
        handle = ray.get_actor(_actor_name(system), namespace=namespace)
    except ValueError:
        return None
    place = _place(ray, handle, seconds)
    return None if place is None else RaySystem(_system_at(place), system, namespace, handle, owned=False)


def _place(ray: Any, handle: Any, seconds: float) -> NodeSystem | None:
    """Return where this node's processes find the system of an actor, once it is up; None if the actor has ended."""
    limit = time.monotonic() + seconds
    here = ray.get_runtime_context().get_node_id()
    while True:
        try:
            place: NodeSystem = ray.get(handle.place.remote(here), timeout=max(0.0, limit - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise AttachError(
                f"the actor {ACTOR} did not respond within {seconds:g} s; see its log, or raise timeouts.start"
            ) from error
        except (StartError, ray.exceptions.ActorUnavailableError) as error:
            if time.monotonic() > limit:
                raise AttachError(f"the actor {ACTOR} has no system after {seconds:g} s: {error}") from error
            time.sleep(PAUSE)  # another process is starting it, or Ray restarts the actor
        except ray.exceptions.ActorDiedError:
            return None
        except ray.exceptions.RayError as error:
            raise AttachError(f"the actor {ACTOR} cannot say where its system is: {error}; see its log") from error
        else:
            return place


def _system_at(place: NodeSystem) -> RunningSystem:
    """Return the system at a place of this node."""
    system = find_local(place.folder)
    if system is None:
        raise AttachError(
            f"the system of the actor {ACTOR} is not in {place.folder}: it has just ended; start it again"
        )
    return system


def start(settings: Settings, conf: Any, plain: dict[str, Any], samplers: Mapping[str, object]) -> RunningSystem:
    """Return the system of the settings' name; start it if there is none, held by an actor on this node.

    Args:
        settings: The settings.
        conf: The merged DictConfig, for `get_config`.
        plain: See `config` of `start_local`.
        samplers: See `start_local`.

    Raises:
        StartError: If it does not start, with the resources that Ray lacks. Nothing of the system is left then.
    """
    ray = _ray()
    limit = time.monotonic() + settings.start_timeout
    name = settings.name or environment.system_name()
    pickled = sampler_transfer.dump_all(samplers, alone=True)
    plain, keeper = _start_store_actor(ray, settings, plain)
    order = SystemSpec(
        f"{FOLDERS}{uuid.uuid4().hex[:12]}", ray.cloudpickle.dumps(conf), plain, pickled, settings.start_timeout,
        settings.ray_restart_seconds, uuid.uuid4().hex if settings.controller_moves else "",
        secrets.token_bytes(KEY_BYTES),
    )  # fmt: skip
    options = _options(ray, settings, name)
    while True:
        try:
            handle = ray.remote(ControllerActor).options(**options).remote(order)
            break
        except ValueError as error:  # the name is taken: another process was faster, or an actor is about to end
            system = find(name, settings.ray_namespace, max(0.0, limit - time.monotonic()))
            if system is not None:
                _end_store_actor(ray, settings, plain)
                return system
            if time.monotonic() > limit:
                _end_store_actor(ray, settings, plain)
                raise StartError(f"the actor {options['name']} cannot be created: {error}") from error
            time.sleep(PAUSE)
    try:
        here = ray.get_runtime_context().get_node_id()
        ray.get(handle.start.remote(), timeout=max(0.0, limit - time.monotonic()))
        place: NodeSystem = ray.get(handle.place.remote(here), timeout=max(0.1, limit - time.monotonic()))
        started = RaySystem(_system_at(place), name, settings.ray_namespace, handle, not settings.ray_detached, keeper)
        started.new = True
        return started
    except BaseException as error:
        _roll_back(ray, handle)
        _end_store_actor(ray, settings, plain)
        if isinstance(error, StartError):
            raise StartError(str(getattr(error, "cause", error))) from None
        if isinstance(error, ray.exceptions.RayError):
            late = isinstance(error, ray.exceptions.GetTimeoutError)
            how = f"was not up within {settings.start_timeout:g} s" if late else f"did not come up: {error}"
            raise StartError(f"the actor {options['name']} {how}; {_missing_resources(ray, options)}") from error
        raise


def _start_store_actor(ray: Any, settings: Settings, plain: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Start the actor of a RayStore. Returns the configuration with its address, and its handle.

    It does not belong to the controller's actor, so that it continues if that one is killed. It ends with the handle.
    """
    if "RayStore" not in settings.stores:
        return plain, None
    name = f"TransferQueueKeeper-{uuid.uuid4().hex[:12]}"
    given = settings.store_options["RayStore"]
    try:
        handle, options = start_store_actor(
            ray, name, settings.ray_namespace, settings.ray_detached, settings.start_timeout, given["capacity"] or 0,
            LEAST if given["direct_transport"] else 0,
        )  # fmt: skip
    except ray.exceptions.RayError as error:
        raise StartError(
            f"the actor {name}, which stores the blocks of RayStore, did not come up: {error}; see the logs of Ray"
        ) from error
    every = {**plain["settings"]["store_options"], "RayStore": options}
    return {**plain, "settings": {**plain["settings"], "store_options": every}}, handle


def _end_store_actor(ray: Any, settings: Settings, plain: dict[str, Any]) -> None:
    if "RayStore" in settings.stores:
        end_store_actor(ray, plain["settings"]["store_options"]["RayStore"])


def _options(ray: Any, settings: Settings, name: str | None) -> dict[str, Any]:
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    here = ray.get_runtime_context().get_node_id()
    # Ray lets the node of the caller place an actor that needs a resource, and any node place one that needs none. A
    # node that does not know this one yet would place it elsewhere, which a soft affinity allows.
    resource = {"memory": 1} if settings.controller_moves else {}
    return {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_concurrency": CALLS_AT_ONCE,
        "scheduling_strategy": strategy(here, soft=settings.controller_moves),
        **resource,
        **settings.ray_actor_options,
        "name": _actor_name(name),
        "namespace": settings.ray_namespace,
        "lifetime": "detached" if settings.ray_detached else None,
    }


def _roll_back(ray: Any, handle: Any) -> None:
    """Remove everything of a failed start. The servers end with the actor's system."""
    with contextlib.suppress(Exception):
        ray.get(handle.stop.remote(), timeout=END_SECONDS)
    with contextlib.suppress(Exception):
        ray.kill(handle, no_restart=True)


def _missing_resources(ray: Any, options: dict[str, Any]) -> str:
    """Return why an actor does not come up, judging by Ray's resources, and what to do."""
    wanted = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **(options.get("resources") or {})}
    available = ray.available_resources()
    lacking = [
        f"{amount:g} {name} (there are {available.get(name, 0):g})"
        for name, amount in wanted.items()
        if amount and available.get(name, 0) < amount
    ]
    if lacking:
        return f"ray.actor_options ask for {', '.join(lacking)}: ask for less, or add nodes"
    return "see the logs of Ray, or set timeouts.start"


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)
