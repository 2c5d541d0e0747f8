"""The system that this process is attached to, and its client.

`interface.py` sets it, the KV functions use it. A process that never called `init` attaches by itself where a
system exists: by TQ_ADDRESS, or by name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import NotInitializedError
from transfer_queue.node.system.launcher import RunningSystem, find
from transfer_queue.ray_runtime import launcher as on_ray


class Current:
    """system: what this process started or attached to; client: its client. Both None where it has none.

    found: the same system, where the process attached to it by itself: it attaches to another once that has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.system: RunningSystem | None = None
        self.client: TransferQueueClient | None = None
        self.found: RunningSystem | None = None

    def has_ended(self) -> bool:
        """Whether there is nothing to use any more that this process has found by itself."""
        found = self.found
        return found is not None and found is self.system and not found.is_there()


CURRENT = Current()


def find_system(settings: Settings | None = None) -> RunningSystem | None:
    """The running system that the settings mean, None if there is none: by TQ_ADDRESS, its name, or Ray's actor.

    settings: None for the defaults.
    """
    if on_ray.is_used("auto" if settings is None else settings.runtime):
        settings = settings or Settings.from_config()
        return on_ray.find(settings.name, settings.ray_namespace, settings.start_timeout)
    return find(None if settings is None else settings.name)


def attach() -> TransferQueueClient | None:
    """The client of the attached system, attaching to a running one if need be; None where there is none."""
    with CURRENT.lock:
        if CURRENT.client is not None and CURRENT.has_ended():
            CURRENT.client.close()
            if CURRENT.system is not None:
                CURRENT.system.leave()
            CURRENT.client = CURRENT.system = CURRENT.found = None
        if CURRENT.client is None:
            found = find_system() or find()  # of this machine, where Ray runs and has none
            if found is None:
                return None
            CURRENT.system, CURRENT.client, CURRENT.found = found, TransferQueueClient(found), found
        return CURRENT.client


def current_client() -> TransferQueueClient:
    """The client of the attached system; NotInitializedError (also an AssertionError) where there is none."""
    client = CURRENT.client
    if client is None or CURRENT.has_ended():
        client = attach()
    if client is None:
        raise NotInitializedError(
            "no system is running: call tq.init() first, or start one with `tq start` (looked at "
            "TQ_ADDRESS, then for Ray's actor where Ray is initialised, then for a system of this user by name)"
        )
    return client


def client_of(config: Any) -> TransferQueueClient:
    """The client of the system that a config names (`system.folder`, as `init` returns it); None: the attached one.

    A process that is attached to nothing yet is attached to that system.
    """
    folder = None if config is None else _folder_of(config)
    if CURRENT.client is None and folder is not None:
        with CURRENT.lock:
            if CURRENT.client is None:
                found = find(folder)
                if found is not None:
                    CURRENT.system, CURRENT.client = found, TransferQueueClient(found)
    return current_client()


def _folder_of(config: Any) -> str | None:
    system = config.get("system") if isinstance(config, Mapping) or hasattr(config, "get") else None
    folder = None if system is None else system.get("folder")
    return None if folder is None else str(folder)


def _forked() -> None:
    """A forked child is attached like its parent (and owns nothing: `RunningSystem.owned` looks at the pid)."""
    CURRENT.lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)
