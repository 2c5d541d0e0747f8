"""Replies of the controller with events that a test writes down."""

from __future__ import annotations

from typing import Any

import numpy as np

from transfer_queue.messages.reports.timeline import Lane, OpenWait, TimelineReply
from transfer_queue.timeline.events import EVENT, EventKind
from transfer_queue.timeline.recording import Recording

WALL = 1_700_000_000.0
LANES = [Lane(0, "a", "train", 0), Lane(1, "b", "train", 1), Lane(2, "c", "reward", -1), Lane(3, "d", "reward", -1)]
PARTITIONS = {0: "train_0", 1: "train_1"}
FIELDS = {0: [], 1: ["response"], 2: ["reward"], 3: ["response", "reward"]}


def event(kind: EventKind, time: float, lane: int, since: float | None = None, **more: float) -> tuple[float, ...]:
    return (
        time, time if since is None else since, kind, more.get("flags", 0), 0, lane, more.get("partition", 0),
        more.get("fields", 0), more.get("rows", 8), 0, more.get("bytes", 0), more.get("block", 0), more.get("age", -1),
        more.get("staleness", -1),
    )  # fmt: skip


def reply(
    events: list[tuple[float, ...]] | np.ndarray,
    now: float,
    *,
    boot: str = "boot",
    position: int | None = None,
    end: int | None = None,
    missed: int = 0,
    lanes: list[Lane] = LANES,
    open_: list[OpenWait] | None = None,
    connected: list[str] | None = None,
    gone: dict[str, float] | None = None,
    wall: float = WALL,
) -> TimelineReply:
    array = np.array(events, EVENT)
    position = len(array) if position is None else position
    end = position if end is None else end
    return TimelineReply(
        boot, now, wall, position, end, missed, array.tobytes(), lanes, PARTITIONS, FIELDS, open_ or [],
        connected or [], gone or {},
    )  # fmt: skip


def recorded(events: list[tuple[float, ...]] | np.ndarray, now: float, **more: Any) -> Recording:
    """Return a recording of one reply."""
    recording = Recording()
    recording.add(reply(events, now, **more))
    return recording
