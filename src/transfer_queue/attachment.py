"""The system that this process is attached to, and its client.

`interface.py` sets it, the KV functions use it. A process that never called `init` attaches by itself if a system is
running: by TQ_ADDRESS, or by name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from transfer_queue.client import TransferQueueClient
from transfer_queue.config.settings import Settings
from transfer_queue.errors import InvalidArgumentError, NotInitializedError
from transfer_queue.net.fd_limits import refuse_without_files
from transfer_queue.node.system.launcher import RunningSystem, find
from transfer_queue.ray_runtime import launcher as on_ray


class Current:
    """The system that this process is attached to."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.system: RunningSystem | None = None
        """The system that this process started or attached to; None if it has none."""
        self.client: TransferQueueClient | None = None
        """The client of that system; None if it has none."""
        self.by_init = False
        """Whether `init` has attached this process. Otherwise it has attached by itself, or is not attached."""
        self.implicit: RunningSystem | None = None
        """The same system, if the process attached to it without `init`. When it ends, the process attaches again."""
        self.same: tuple[RunningSystem, str] | None = None
        """A system, and another folder in which no other running system was found."""

    def has_ended(self) -> bool:
        """Return whether the system that this process attached to without `init` has ended."""
        attached = self.implicit
        return attached is not None and attached is self.system and not attached.is_running()


CURRENT = Current()


def find_system(settings: Settings | None = None) -> RunningSystem | None:
    """Return the running system, found by TQ_ADDRESS, its name in the settings, or Ray's actor; None if there is none.

    Args:
        settings: The settings. Default: the defaults.
    """
    if on_ray.is_used("auto" if settings is None else settings.runtime):
        settings = settings or Settings.from_config()
        return on_ray.find(settings.name, settings.ray_namespace, settings.start_timeout)
    return find(None if settings is None else settings.name)


def attach() -> TransferQueueClient | None:
    """Return the client of the attached system. Attach to a running one if necessary; return None if there is none."""
    with refuse_without_files(), CURRENT.lock:
        if CURRENT.client is not None and CURRENT.has_ended():
            CURRENT.client.close()
            if CURRENT.system is not None:
                CURRENT.system.leave()
            CURRENT.client = CURRENT.system = CURRENT.implicit = None
        if CURRENT.client is None:
            running = find_system() or find()  # on this machine, if Ray runs and has none
            if running is None:
                return None
            CURRENT.system, CURRENT.client, CURRENT.implicit = running, TransferQueueClient(running), running
        return CURRENT.client


def current_client() -> TransferQueueClient:
    """Return the client of the attached system.

    Raises:
        NotInitializedError: No system is running (also an AssertionError).
    """
    client = CURRENT.client
    if client is None or CURRENT.has_ended():
        client = attach()
    if client is None:
        raise NotInitializedError(
            "no system is running: call tq.init() first, or start one with `tq start` (looked at "
            "TQ_ADDRESS, then for Ray's actor if Ray is initialized, then for a system of this user by name)"
        )
    return client


def is_current(client: object) -> bool:
    """Return whether a client is that of the attached system, which has not ended. Fast."""
    return client is CURRENT.client and not CURRENT.has_ended()


def client_of(config: Any) -> TransferQueueClient:
    """Return the client of the system that a config of `init` names (`system.folder`); None: of the attached system.

    A process that is not attached yet is attached to that system.

    Raises:
        InvalidArgumentError: This process is attached to another system, and that one is running.
    """
    folder = None if config is None else _folder_of(config)
    if CURRENT.client is None and folder is not None:
        with CURRENT.lock:
            if CURRENT.client is None:
                running = find(folder)
                if running is not None:
                    CURRENT.system, CURRENT.client = running, TransferQueueClient(running)
    if folder is not None:
        _check_same_system(folder)
    return current_client()


def _check_same_system(folder: str) -> None:
    """Raise InvalidArgumentError if a folder is that of another running system than the attached one.

    A system has several folders under Ray, one on each node. They have the same key.
    """
    system = CURRENT.system
    if system is None or folder == str(system.folder) or CURRENT.same == (system, folder):
        return
    named = find(folder)
    if named is not None and named.key != system.key:
        raise InvalidArgumentError(
            f"this object belongs to the system in {folder}, but this process is attached to another one, in "
            f"{system.folder}. A process has one system at a time: call tq.close() before the first use of the object, "
            f"or make an object in this system"
        )
    CURRENT.same = system, folder


def _folder_of(config: Any) -> str | None:
    if not isinstance(config, Mapping) and not hasattr(config, "get"):
        raise InvalidArgumentError(f"config must be what init returned, a client, or None, got {config!r}")
    system = config.get("system")
    folder = None if system is None else system.get("folder")
    return None if folder is None else str(folder)


def _after_fork() -> None:
    """Attach a forked child like its parent. It owns nothing, because `RunningSystem.owned` compares the pid."""
    CURRENT.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
