"""The search for the running system that a command is about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.config import environment
from transfer_queue.errors import AttachError
from transfer_queue.names import nearest

if TYPE_CHECKING:
    from transfer_queue.node.system.launcher import RunningSystem

ATTACH_SECONDS = 30.0  # for a system under Ray that is being started


def find_system(name: str | None) -> RunningSystem:
    """Return the running system of this name; with RAY_ADDRESS, that of the Ray cluster first.

    Raises:
        AttachError: No system is running under this name.
    """
    from transfer_queue.node.system.launcher import find
    from transfer_queue.ray_runtime import launcher as on_ray

    system = on_ray.find(name, on_ray.NAMESPACE, ATTACH_SECONDS) if on_ray.is_used("auto") else None
    system = system or find(name)
    if system is None:
        raise AttachError(f"{_not_running(name)}; start one with `tq start`, or name another one with `--name`")
    return system


def find_system_that_replies(name: str | None) -> RunningSystem:
    """Return the running system of this name, as `find_system`.

    Raises:
        AttachError: No system is running under this name, or only stopped processes of it are left.
    """
    system = find_system(name)
    if system.is_abandoned():
        raise AttachError(f"the system {system.name!r} cannot reply: {system.describe_stopped()}, and start it again")
    return system


def _not_running(name: str | None) -> str:
    """Return a phrase that names the system that was not found, and the systems that are running."""
    from transfer_queue.node.system.paths import DEFAULT_NAME, SystemFolder, runtime_dir

    place = environment.address() if name is None else None
    wanted = name or environment.system_name() or DEFAULT_NAME
    looked = f"at TQ_ADDRESS={place}" if place is not None else f"under the name {wanted!r}"
    sought = SystemFolder(Path(place) if place is not None else runtime_dir() / wanted)
    folders = [SystemFolder(path) for path in runtime_dir().iterdir() if not path.name.startswith(".")]
    running = sorted(folder.name for folder in folders if folder.description.exists() and folder.name != sought.name)
    meant = nearest(wanted, running)
    there = f"; running: {', '.join(map(repr, running))}" if running else ""
    if meant:
        there = f" (did you mean {meant[0]!r}?)"
    return f"no system is running {looked}{sought.describe_crash()}{there}"
