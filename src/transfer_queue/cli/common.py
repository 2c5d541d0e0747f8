"""What the commands share: their words, and how they find a system."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import AttachError

if TYPE_CHECKING:
    from transfer_queue.node.launcher import RunningSystem

ATTACH_SECONDS = 30.0  # for a system under Ray that is being started
Commands = Any  # argparse has no public name for what `add_subparsers` returns


def add_name(command: argparse.ArgumentParser) -> None:
    """The option that says which system is meant."""
    command.add_argument("--name", help="the system's name (TQ_SYSTEM, or your default one)")


def found(name: str | None) -> RunningSystem:
    """The running system of this name; with RAY_ADDRESS, of that cluster first. AttachError where there is none."""
    from transfer_queue.node.launcher import find
    from transfer_queue.on_ray import launcher as on_ray

    system = on_ray.find(name, on_ray.NAMESPACE, ATTACH_SECONDS) if on_ray.is_used("auto") else None
    system = system or find(name)
    if system is None:
        raise AttachError("no system is running under this name; `tq start` starts one, `--name` names another")
    return system
