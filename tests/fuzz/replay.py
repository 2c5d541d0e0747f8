"""The check that the records of a controller lead to its state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transfer_queue.core.appliers import apply_record
from transfer_queue.core.events.records import AnyRecord
from transfer_queue.core.state.state import State


def check_replay(records: Iterable[AnyRecord], state: State) -> None:
    """Assert that applying these records to an empty state gives this one."""
    replayed = State(state.capacity)
    replayed.watched = state.watched
    for record in records:
        apply_record(replayed, record)
    assert comparable(replayed.snapshot()) == comparable(state.snapshot())


def comparable(tree: Any) -> Any:
    """Return a saved tree with text in place of each NaN, which is not equal to itself. Tags may be NaN."""
    if isinstance(tree, dict):
        return {key: comparable(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [comparable(value) for value in tree]
    return "NaN" if isinstance(tree, float) and tree != tree else tree
