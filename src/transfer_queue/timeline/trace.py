"""Converts a recording to the JSON trace event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from transfer_queue.timeline.event_table import EventTable, KindColumns
from transfer_queue.timeline.events import AHEAD, DEMAND, EventKind
from transfer_queue.timeline.recording import Recording
from transfer_queue.timeline.spans import SpanState, measure_spans

STATES = {
    SpanState.WORKS: "work",
    SpanState.HELD: "held",
    SpanState.WAITS: "wait",
    SpanState.GONE: "gone",
}
TRACKS = ("", " puts", " claims", " gets")  # the tracks of a worker: what it does, and what it moves
SECOND = 1e6  # the unit of the format is a microsecond
LONGEST = 1e9  # seconds from the beginning that an event can have

TraceEvent = dict[str, Any]


def trace_json(recording: Recording) -> bytes:
    """Return a recording as a file that Perfetto opens.

    Each task is a process, and each rank has a track of waiting and work, one of puts, one of claims and one of gets.
    Arrows lead from a put to the claim that took one of its rows. Counters have the rows and bytes put of each field,
    the depth of the queue of each task, and the staleness of what it claims. Times are microseconds since the recording
    began; `otherData.start` has the Unix seconds of that.
    """
    trace = _Trace(recording)
    puts = trace.transfers(EventKind.PUT, 1, "put")
    claims, gets = trace.transfers(EventKind.CLAIM, 2, "claim"), trace.transfers(EventKind.READ, 3, "get")
    events = [*trace.names(), *trace.spans(), *puts, *claims, *gets, *trace.flows(), *trace.counters()]
    other = {"start": recording.start, "end": recording.now, "gaps": len(recording.gaps)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


class _Trace:
    """The trace events of a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.table = EventTable(recording)
        self.workers = self.table.workers
        self.start = recording.start

    def ticks(self, times: np.ndarray) -> np.ndarray:
        """Return times in whole microseconds since the recording began.

        With fractions, a slice would end some nanoseconds after the next one begins, and Perfetto would drop that one.
        """
        seconds = np.clip(np.nan_to_num(times - self.start), -LONGEST, LONGEST)
        return np.round(seconds * SECOND).astype(np.int64)

    def process(self, worker: int) -> int:
        return int(self.workers.task[worker]) + 1

    def names(self) -> Iterator[TraceEvent]:
        """Name the tasks as processes, and the tracks of the workers as threads."""
        for number, task in enumerate(self.workers.tasks):
            yield _metadata("process_name", number + 1, 0, task or "clients without a task")
        kinds = (None, *map(self.table.of, (EventKind.PUT, EventKind.CLAIM, EventKind.READ)))
        for track, kind in enumerate(kinds):
            workers = range(len(self.workers)) if kind is None else np.unique(kind.worker[kind.worker >= 0]).tolist()
            for worker in workers:
                name = self.workers.lanes[worker].name + TRACKS[track]
                yield _metadata("thread_name", self.process(worker), _thread(worker, track), name)

    def spans(self) -> Iterator[TraceEvent]:
        """Return a slice for each span of a worker, with the fields and rows that it waited for."""
        spans = measure_spans(self.table, self.start, self.recording.now)
        starts = self.ticks(spans.start)
        seconds = self.ticks(spans.end) - starts
        waited = self._waited_for()
        for worker, when, long, state, end in zip(
            spans.worker.tolist(), starts.tolist(), seconds.tolist(), spans.state.tolist(), spans.end.tolist()
        ):
            if state in STATES:
                args = waited.get((worker, round(end, 3), state), {})
                yield self._slice(STATES[SpanState(state)], worker, 0, when, long, args)

    def _waited_for(self) -> dict[tuple[int, float, int], TraceEvent]:
        """Return the fields that a worker waited for, or the rows that it waited to put, by worker, end and state."""
        waits_by_span: dict[tuple[int, float, int], TraceEvent] = {}
        for kind, state in ((EventKind.WAIT, SpanState.WAITS), (EventKind.HOLD, SpanState.HELD)):
            waits = self.table.of(kind)
            needed = np.flatnonzero((waits.flags & AHEAD == 0) & (waits.worker >= 0))
            columns = (waits.worker, waits.time, waits.fields, waits.rows, waits.flags & DEMAND)
            for worker, end, fields, count, demand in zip(*(column[needed].tolist() for column in columns)):
                args = self._args(fields, count) if state == SpanState.WAITS else _hold_args(int(count), bool(demand))
                waits_by_span[worker, round(end, 3), state] = args
        for wait in self.recording.open:
            worker = int(self.workers.of_lane[wait.lane])
            if worker >= 0 and not wait.ahead:
                args = _hold_args(wait.rows, wait.demand) if wait.holds else {"fields": wait.fields, "rows": wait.rows}
                state = SpanState.HELD if wait.holds else SpanState.WAITS
                waits_by_span[worker, round(self.recording.now, 3), state] = args | {"partition": wait.partition}
        return waits_by_span

    def _args(self, fields: int, rows: float) -> TraceEvent:
        return {"fields": list(self.recording.fields[fields]), "rows": int(rows)}

    def transfers(self, kind: EventKind, track: int, name: str) -> Iterator[TraceEvent]:
        """Return a slice for each put, each claim that was answered with rows, or each get that a worker has reported.

        That of a claim has the age and staleness of a row of it. Slices that overlap are shortened.
        """
        events = self.table.of(kind)
        start, end = self._apart(events)
        columns = [events.worker, start, end - start, events.fields, events.rows, events.column("bytes")]
        columns += [events.partition, events.column("age"), events.column("staleness")]
        for worker, when, long, fields, rows, nbytes, partition, age, old in zip(*(c.tolist() for c in columns)):
            if worker < 0:
                continue
            args = self._args(fields, rows) | {"partition": self.recording.partitions[partition]}
            args |= {"age": age, "staleness": old} if kind == EventKind.CLAIM else {"bytes": nbytes}
            yield self._slice(name, worker, track, when, long, args)

    def _apart(self, events: KindColumns) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of the slices of a track, shortened if they would overlap."""
        times = events.time if events.kind != EventKind.READ else events.time - np.fmax(events.column("age"), 0)
        order = np.lexsort((times, events.worker))
        worker, end = events.worker[order], self.ticks(times[order])
        start = np.maximum(self.ticks(events.since[order]), 0)
        start[1:] = np.where(worker[1:] == worker[:-1], np.maximum(start[1:], end[:-1]), start[1:])
        placed = np.zeros((2, len(order)), np.int64)
        placed[0, order], placed[1, order] = np.minimum(start, end), end
        return placed[0], placed[1]

    def _slice(self, name: str, worker: int, track: int, when: int, long: int, args: TraceEvent) -> TraceEvent:
        made = {
            "ph": "X",
            "name": name,
            "pid": self.process(worker),
            "tid": _thread(worker, track),
            "ts": when,
            "dur": long,
        }
        return made | ({"args": args} if args else {})

    def flows(self) -> Iterator[TraceEvent]:
        """Return the arrows from puts to the claims that took a row of them."""
        puts, claims = self.table.of(EventKind.PUT), self.table.of(EventKind.CLAIM)
        source = find_sources(puts, claims)
        put_start, _ = self._apart(puts)
        claim_start, _ = self._apart(claims)
        chosen = np.flatnonzero((source >= 0) & (claims.worker >= 0))
        chosen = chosen[puts.worker[source[chosen]] >= 0]
        begins, origin = put_start[source[chosen]].tolist(), puts.worker[source[chosen]].tolist()
        ends, target = claim_start[chosen].tolist(), claims.worker[chosen].tolist()
        # An arrow does not lead back in time: the slice of a claim that waited begins before the put.
        for number, (begin, a, end, b) in enumerate(zip(begins, origin, ends, target)):
            both = {"name": "rows", "cat": "rows", "id": number + 1}
            yield both | {"ph": "s", "pid": self.process(a), "tid": _thread(a, 1), "ts": begin}
            last = {"ph": "f", "bp": "e", "pid": self.process(b), "tid": _thread(b, 2), "ts": max(begin, end)}
            yield both | last

    def counters(self) -> Iterator[TraceEvent]:
        """Return the counters."""
        yield from self._put_counters()
        yield from self._depth_counters()
        claims = self.table.of(EventKind.CLAIM)
        columns = (claims.task, self.ticks(claims.time), claims.column("staleness"))
        for task, when, old in zip(*(column.tolist() for column in columns)):
            if task >= 0 and old >= 0:
                yield _counter(f"staleness of {self.table.task_name(task)}", task + 1, when, {"versions": old})

    def _put_counters(self) -> Iterator[TraceEvent]:
        puts = self.table.of(EventKind.PUT)
        rows: dict[str, int] = defaultdict(int)
        nbytes = 0
        columns = (self.ticks(puts.time), puts.fields, puts.rows, puts.column("bytes"))
        for when, fields, count, size in zip(*(column.tolist() for column in columns)):
            for name in self.recording.fields[fields]:
                rows[name] += int(count)
                yield _counter(f"rows put: {name}", 0, when, {"rows": rows[name]})
            nbytes += size
            yield _counter("bytes put", 0, when, {"bytes": nbytes})

    def _depth_counters(self) -> Iterator[TraceEvent]:
        """Return the depth of the queue of each task: the rows put of its last field minus the rows claimed.

        The depth is 0 where the recording begins, because events do not say how many rows were there before.
        """
        puts, claims = self.table.of(EventKind.PUT), self.table.of(EventKind.CLAIM)
        for number, task in enumerate(self.workers.tasks):
            made = []
            for name in self.table.takes.get(task, ()):
                with_field = np.array([name in fields for fields in self.recording.fields], bool)[puts.fields]
                if with_field.any():
                    made.append((puts.time[with_field], puts.rows[with_field]))
            of_task = claims.task == number
            if not made:
                continue
            times, rows = min(made, key=lambda each: float(each[1].sum()))
            times = np.concatenate([times, claims.time[of_task]])
            order = np.argsort(times, kind="stable")
            depth = np.cumsum(np.concatenate([rows, -claims.rows[of_task]])[order])
            depth -= min(float(depth.min(initial=0.0)), 0.0)
            for when, value in zip(self.ticks(times[order]).tolist(), depth.tolist()):
                yield _counter(f"queue of {task}", number + 1, when, {"rows": int(value)})


def find_sources(puts: KindColumns, claims: KindColumns) -> np.ndarray:
    """Return for each claim the put of the row that it names, as a position in `puts`; -1 if it is not recorded.

    This is the put with the block of the claim. If the partition has no such put, because the block of the row has
    been merged into another one, it is the put with the largest smaller number.
    """
    sources = np.full(len(claims), -1, np.int64)
    put_block, claim_block = puts.column("block"), claims.column("block")
    for partition in np.unique(claims.partition).tolist():
        put_rows = np.flatnonzero(puts.partition == partition)
        put_rows = put_rows[np.argsort(put_block[put_rows], kind="stable")]
        claim_rows = np.flatnonzero((claims.partition == partition) & (claim_block > 0))
        at = np.searchsorted(put_block[put_rows], claim_block[claim_rows], side="right") - 1
        sources[claim_rows[at >= 0]] = put_rows[at[at >= 0]]
    return sources


def _hold_args(count: int, is_demand: bool) -> TraceEvent:
    return {"for": "group demand", "groups": count} if is_demand else {"for": "capacity or policy", "rows": count}


def _thread(worker: int, track: int) -> int:
    return worker * len(TRACKS) + track + 1


def _metadata(kind: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _counter(name: str, process: int, when: int, values: TraceEvent) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": process, "ts": when, "args": values}
