"""Saved trees of the state: which of their columns hold anything, and whether two trees are equal."""

from __future__ import annotations

from typing import Any

import numpy as np

# Dicts whose keys are not names of columns: of partitions, clients, fields, tasks, ranks, or numbers.
MAPS = {
    "clients", "origins", "lost_units", "blocks.chunks", "blocks.chunks.*.second", "partitions",
    *(
        f"partitions.*.{name}"
        for name in (
            "owners", "fields", "dtypes", "tasks", "claimed", "consumed_ever", "dealt", "dealt.*.issued",
            "dealt.*.counts", "dealt.*.sizes", "passed.codes", "passed.codes.*", "leases.delivered",
            "leases.delivered.*", "leases.acked", "leases.acked.*", "wants.groups", "drops.rows", "groups.unborn",
            "losses.events", "losses.counts", "changes.newest", "rows.chunks",
        )
    ),
    *(f"partitions.*.rows.chunks.*.{name}" for name in ("field", "consumed", "dealt", "held", "finished", "lost")),
}  # fmt: skip


def columns(tree: Any, path: str = "") -> dict[str, bool]:
    """Column -> whether it holds anything but zeros, of everything in a tree."""
    if not isinstance(tree, dict):
        return {path: bool(np.any(tree)) if isinstance(tree, np.ndarray) else bool(tree)}
    found = {path: True} if path in MAPS and tree else {path: False} if not tree else {}
    for key, value in tree.items():
        name = "*" if path in MAPS else str(key)
        for column, holds in columns(value, f"{path}.{name}" if path else name).items():
            found[column] = holds or found.get(column, False)
    return found


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where a tree lacks something of an older one, or has another value; what it has beside that is fine."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = [f"{path}.{key} is missing" for key in old if key not in new]
        found = (differences(old[key], new[key], f"{path}.{key}") for key in old if key in new)
        return missing + [words for part in found for words in part]
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        equal = (
            isinstance(old, np.ndarray)
            and isinstance(new, np.ndarray)
            and old.dtype == new.dtype
            and np.array_equal(old, new)
        )
        return [] if equal else [f"{path}: {old!r} became {new!r}"]
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        if len(old) != len(new):
            return [f"{path}: {len(old)} entries became {len(new)}"]
        parts = (differences(*pair, f"{path}[{at}]") for at, pair in enumerate(zip(old, new, strict=True)))
        return [words for part in parts for words in part]
    return [] if old == new else [f"{path}: {old!r} became {new!r}"]
