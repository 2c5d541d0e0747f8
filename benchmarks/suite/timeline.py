"""What does the timeline add to a put and to a claim?

Two controllers, one with the timeline and one without it, get the same requests in turns: first their cores alone, then
two systems through a client. A figure is the mean of a turn, because the core writes events some hundred at a time, and
the ratio is the median over all turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDict

from benchmarks.harness.core_driver import BATCH, Core, claim, rows_of
from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.systems import System, own_folder, start_system
from transfer_queue.client import TransferQueueClient
from transfer_queue.core.configuration import TIMELINE_EVENTS
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.reports.timeline import ReadTimeline, TimelineReply

QUESTION = "What does the timeline add to a put and to a claim?"
NOTE = (
    "The target is 2 % of what a put and a claim cost: the time of a client, and the processor time of controller and "
    "unit. The figures of the core leave out decoding, the journal and the socket, so that the one to two microseconds "
    "of an event are a larger part of them."
)
LIMIT = 1.02
PUT, CLAIM, PARKED = f"put of {BATCH} rows", f"claim of {BATCH} rows", f"put of {BATCH} rows that a claim waits for"


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    rows = _core(scale.pick(200, 6), scale.pick(128, 16))
    with _system("without", 0) as without, _system("with", TIMELINE_EVENTS) as with_it:
        rows += _clients((without, with_it), scale.pick(40, 3), scale.pick(64, 8))
    return rows


def _core(turns: int, count: int) -> list[Row]:
    cores = Core(timeline_events=0), Core()
    times: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what in (PUT, CLAIM, PARKED)}
    gc.disable()
    try:
        for turn in range(turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                for what, seconds in zip(times, _turn(cores[which], count), strict=True):
                    times[what][which].append(seconds / count * 1e6)
    finally:
        gc.enable()
    events = cores[1].controller.context.services[TimelineRecorder]
    events.flush()
    assert events.ring.end == turns * count * 5
    assert not cores[0].controller.context.services[TimelineRecorder].ring.end
    return [
        compared(f"{what}, in the core", "us", ours, without, "without the timeline")
        for what, (without, ours) in times.items()
    ]


def _turn(core: Core, count: int) -> tuple[float, float, float]:
    """Return the seconds of puts, of claims, and of puts that meet a claim. Their claims are parked before."""
    puts = claims = met = 0.0
    for _ in range(count):
        core.now += 1e-4
        puts += core.publish(BATCH)[0]
        took, effects = core.send(claim(), "reader")
        assert rows_of(effects) == BATCH
        claims += took
        core.send(claim(wait=60.0), "reader")
        took, effects = core.publish(BATCH)
        assert rows_of(effects) == BATCH
        met += took
    return puts, claims, met


@contextlib.contextmanager
def _system(name: str, events: int) -> Iterator[tuple[System, TransferQueueClient]]:
    with own_folder():
        running = start_system(name, {"timeline": {"events": events}})
        client = TransferQueueClient(running)
        try:
            yield System(running), client
        finally:
            client.close()
            running.stop()


def _clients(systems: tuple[tuple[System, TransferQueueClient], ...], turns: int, count: int) -> list[Row]:
    batch = TensorDict({name: torch.zeros(BATCH, 128) for name in ("x", "y")}, batch_size=[BATCH])
    latencies: dict[str, tuple[list[float], list[float]]] = {PUT: ([], []), CLAIM: ([], [])}
    load: tuple[list[float], list[float]] = ([], [])
    for turn in range(turns + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            system, client = systems[which]
            before = system.cpu()
            puts = _seconds(count, lambda client=client: client.put(batch, partition_id="p"))  # type: ignore[misc]
            claims = _seconds(count, lambda client=client: client.get_meta(["x", "y"], BATCH, "p", task_name="t"))  # type: ignore[misc]
            used = system.cpu() - before
            client.clear_partition("p")
            if turn:  # the first one warms up
                latencies[PUT][which].append(puts / count * 1e6)
                latencies[CLAIM][which].append(claims / count * 1e6)
                load[which].append(used / count * 1e6)
    for (_, client), is_recorded in zip(systems, (False, True)):
        reply = client._run(client._operations._ask(ReadTimeline(), TimelineReply, None))
        assert bool(reply.events) == is_recorded
    measured = {f"{what}, of a client": times for what, times in latencies.items()}
    measured["put and claim, processor time of the servers"] = load
    rows = [compared(what, "us", ours, without, "without the timeline") for what, (without, ours) in measured.items()]
    return [dataclasses.replace(row, target=row.ours / (row.ratio or 1.0) * LIMIT) for row in rows]


def _seconds(count: int, act: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(count):
        act()
    return time.perf_counter() - start
