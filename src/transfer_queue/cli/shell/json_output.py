"""The option `--json`: one JSON document on standard output, with the attributes of the messages by name."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from transfer_queue.node.system.launcher import RunningSystem


def add_json(command: argparse.ArgumentParser, summary: str = "print one JSON document") -> None:
    """Add the option `--json`."""
    command.add_argument("--json", action="store_true", help=summary)


def plain(value: Any) -> Any:
    """Return a message as JSON values. A number that JSON does not have (NaN) becomes null."""
    if isinstance(value, msgspec.Struct):  # on the wire it is an array: names make it readable
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def system_as_json(system: RunningSystem) -> dict[str, Any]:
    """Return what identifies a running system."""
    its = system.description
    return {
        "name": system.name, "folder": str(system.folder), "logs": str(system.logs), "pid": its.pid,
        "starter_pid": its.starter_pid, "starter_command": its.starter_command, "started_at": its.started_at,
    }  # fmt: skip


def print_json(value: Any) -> None:
    """Print one JSON document on one line. An object that is not a JSON value is printed as its `repr`."""
    print(json.dumps(plain(value), default=repr))
