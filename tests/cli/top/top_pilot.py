"""A source that a test controls, pictures of simulated pipelines, and the text that an application shows."""

from __future__ import annotations

import asyncio
import functools
import html
import inspect
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from pipeline_scenarios import Expected, Scenario, grpo
from pipeline_simulation import WALL, Pipeline
from textual.pilot import Pilot

from transfer_queue.cli.top.app import TopApp
from transfer_queue.cli.top.follower import Answer, News, Question, Seen
from transfer_queue.cli.top.picture import Picture, make_picture
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.base import Done
from transfer_queue.messages.descriptors import MEMORY
from transfer_queue.messages.queries import Explain, SnapshotReply
from transfer_queue.messages.reports import samples
from transfer_queue.messages.reports.progress import (
    FieldProgress,
    PartitionProgress,
    TaskProgress,
    Timing,
    UnitProgress,
)
from transfer_queue.messages.reports.samples import SampleEvent, SampleField, SampleReport, SampleTask
from transfer_queue.messages.system import SystemStatus
from transfer_queue.metrics.timing import LOOP_BOUNDS
from transfer_queue.timeline.recording import Recording

LIMIT = 60.0  # seconds for a program of a test
NOW = 1000.0
"""The time of the application, which stands still: a busy machine does not make what it shows old."""


def slow_reward() -> Scenario:
    """Reward takes three times as long as it may."""
    return Scenario("", grpo(), Expected("slow", "reward", "reward")).with_stage("reward", seconds=6.0, gone={3: 100.0})


def timing(name: str, fast: int, seconds: float) -> Timing:
    counts = [0] * (len(LOOP_BOUNDS) + 1)
    counts[3] = fast
    return Timing(name, counts, seconds)


def with_system(status: SystemStatus, more: list[PartitionProgress] | None = None) -> SystemStatus:
    """Return a status that has units and requests, too."""
    units = [UnitProgress(0, MEMORY, 1 << 30, 1 << 28), UnitProgress(1, MEMORY, 1 << 30, 1 << 29, drained=True)]
    requests = [timing("Claim", 100, 0.2), timing("Publish", 300, 0.1)]
    return SystemStatus(
        status.partitions + (more or []), {}, units=units, requests=requests, longest=("Publish", 0.0359)
    )


def picture_at(until: float, scenario: Scenario | None = None, more: list[PartitionProgress] | None = None) -> Picture:
    """Return the picture of a pipeline after this many seconds."""
    pipeline = Pipeline(scenario or slow_reward(), 1).run(until)
    return make_picture(pipeline.recording(), with_system(pipeline.status(), more))


def partition(name: str, rows: int = 10, produced: int = 10, consumed: int = 0, **more: Any) -> PartitionProgress:
    fields = [FieldProgress("prompt", rows, "int64[4]", rows), FieldProgress("reward", produced, "float32[]", produced)]
    return PartitionProgress(name, rows, 0, False, None, rows * 100, fields, [TaskProgress("train", consumed, 0, 0.0)],
                             stored={MEMORY: rows * 100}, **more)  # fmt: skip


def seen(picture: Picture, name: str = "test", age: float = 0.0, **more: Any) -> News:
    """Return the news that this picture was read, and more that is known."""
    return News(Seen(name, WALL, "/logs/controller.log", picture, NOW - age), **more)


class FakeController:
    """Answers what a screen asks."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.fails: TransferQueueError | None = None
        self.samples = 3

    def request(self, request: Any, kind: type[Any]) -> Any:
        self.requests.append(request)
        if self.fails is not None:
            raise self.fails
        if isinstance(request, Explain):
            return Done(f"Task {request.task!r} waits for {request.count} samples; 3 available.")
        rows = np.arange(request.start, request.start + self.samples)
        produced = np.ones((self.samples, 2), np.int8)
        produced[1:, 1] = 0
        return SnapshotReply(
            True, 7, rows.tobytes(), ["prompt", "reward"], produced.tobytes(),
            {"train": np.eye(1, self.samples, dtype=np.int8).tobytes()}, [f"key-{row}" for row in rows.tolist()],
            [{"prompt": row} for row in rows.tolist()], 100 if request.start == 0 and self.samples > 3 else None,
        )  # fmt: skip

    def describe_sample(self, partition: str, index: int | None, key: str | None) -> SampleReport:
        if self.fails is not None:
            raise self.fails
        return SampleReport(
            partition, samples.LIVE, WALL, 1 if index is None else index, key, {"prompt": 4},
            fields=[SampleField("prompt", "tensor", "int64", [4], 32, 0, MEMORY, 1, -1, "abc", "rollout", 3, WALL,
                                "node-1", 17)],
            missing=["reward"], tasks=[SampleTask("train", samples.WAITING, ["reward"])],
            history=[SampleEvent(WALL, samples.PUT, "abc", "rollout", 3, ["prompt"], host="node-1", pid=17)],
            explanation="Sample 1 is missing the field 'reward'; it is not consumed by task 'train'.",
        )  # fmt: skip


class FakeSource:
    """Delivers what a test gives it."""

    def __init__(self) -> None:
        self.deliver: Callable[[News], None] = lambda news: None
        self.controller = FakeController()
        self.stopped = False

    def start(self, deliver: Callable[[News], None]) -> None:
        self.deliver = deliver

    def ask(self, question: Question, answer: Answer) -> None:
        try:
            answer(question(self.controller))  # type: ignore[arg-type]
        except TransferQueueError as error:
            answer(error)

    def stop(self) -> None:
        self.stopped = True


class TopPilot:
    """An application with keys to press and a screen to read."""

    def __init__(self, app: TopApp, source: FakeSource, pilot: Pilot[int]) -> None:
        self.app = app
        self.source = source
        self.pilot = pilot

    async def give(self, *news: News) -> None:
        for each in news:
            self.source.deliver(each)
        await self.pilot.pause()
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
        await self.pilot.pause()

    def lines(self) -> list[str]:
        return lines_of(self.app.export_screenshot())

    def text(self) -> str:
        return "\n".join(self.lines())

    def words(self) -> str:
        """Return the text with single spaces, as wrapped sentences are compared."""
        return " ".join(self.text().split())


def lines_of(picture: str) -> list[str]:
    """Return the lines of a picture in SVG."""
    found: dict[float, list[tuple[float, str]]] = defaultdict(list)
    body = picture[picture.index("-matrix") :]
    for x, y, text in re.findall(r'<text class="[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>', body):
        found[float(y)].append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = []
    for y in sorted(found):
        line = ""
        for x, text in sorted(found[y]):
            line = line.ljust(round(x / 12.2)) + text
        lines.append(line.rstrip())
    return lines


def run_top(
    program: Callable[[TopPilot], Awaitable[None]],
    *given: News,
    size: tuple[int, int] = (80, 24),
    every: float = 1.0,
    light: bool = False,
) -> None:
    """Run a program with an application that has received some news."""

    async def main() -> None:
        source = FakeSource()
        app = TopApp(source, every, light, lambda: NOW)
        async with app.run_test(size=size) as pilot:
            top = TopPilot(app, source, pilot)
            await top.give(*given)
            await program(top)
        assert source.stopped

    asyncio.run(asyncio.wait_for(main(), LIMIT))


def on_screen(*given: News, size: tuple[int, int] = (80, 24)) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a program, which `run_top` runs. A parameter `size` of the test replaces the size."""

    def test_of(program: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(program)
        def test(**arguments: Any) -> None:
            run_top(lambda top: program(top, **arguments), *given, size=arguments.get("size", size))

        _, *parameters = inspect.signature(program).parameters.values()
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return test_of


def empty_picture() -> Picture:
    """Return the picture of a system in which nothing has happened."""
    return make_picture(Recording(), SystemStatus([], {}))
