"""What does a viewer of the live page cost the controller, the page's process and the network?

A simulated system of 1,024 ranks in four tasks and 1,000 partitions, in which each rank does something every second, is
looked at every second as `tq live` does it. Then a partition of a million rows is counted for the matrix.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any, TypeVar, cast

from benchmarks.harness.core_driver import Core, claim
from benchmarks.harness.report import Row, Scale
from transfer_queue.client.control_client import ControlClient
from transfer_queue.core.events.effects import Send
from transfer_queue.errors import WaitTimeoutError
from transfer_queue.live.answers import LanesAnswer
from transfer_queue.live.payload import SystemInfo, to_json
from transfer_queue.live.questions.questions import MatrixCounter
from transfer_queue.live.reading.system_reader import SystemReader
from transfer_queue.live.serving.hub import Hub
from transfer_queue.live.view.view_maker import Parts, ViewMaker
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.reports.overview import MeasureServers
from transfer_queue.messages.reports.timeline import Introduce, TimelineReply
from transfer_queue.timeline.recording import Recording

QUESTION = "What does a viewer of the live page cost?"
NOTE = "Requests to the controller are measured in its core, without decoding and sockets."
TASKS = {"rollout": 512, "reference": 128, "reward": 128, "train": 256}
VIEWER = "viewer"
MATRIX_FIELDS = {"train": ["x", "y", "z"], "reward": ["x"]}

T = TypeVar("T")


class CoreClient:
    """A client of a simulated core, which measures what its requests cost the core."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.times: list[float] = []
        """The processor seconds of each request."""

    def request(self, request: AnyRequest, kind: type[T], timeout: float | None = None) -> T:
        """Make a request."""
        if isinstance(request, MeasureServers):
            raise WaitTimeoutError("a core has no servers")
        took, effects = self._core.send(request, VIEWER)
        self.times.append(took)
        (reply,) = (effect.reply for effect in effects if isinstance(effect, Send))
        return cast(T, reply)

    def read_timeline(self, recording: Recording, timeout: float | None = None) -> None:
        """See `ControlClient.read_timeline`."""
        recording.add(self.request(recording.request(), TimelineReply))
        while not recording.caught_up:
            recording.add(self.request(recording.request(), TimelineReply))


class CoreSource:
    """Shows a core, for a hub."""

    def __init__(self, client: CoreClient) -> None:
        self._maker = ViewMaker(SystemReader(cast(ControlClient, client)), SystemInfo("simulated", 0.0, "", "", False))
        self.seconds: list[float] = []
        """The processor seconds of each view, those of the core included."""

    def make(self) -> tuple[float, Parts]:
        """See `hub.Source`."""
        began = time.thread_time()
        made = self._maker.make()
        self.seconds.append(time.thread_time() - began)
        return made

    def full_parts(self) -> Parts:
        """See `hub.Source`."""
        return self._maker.full_parts()

    def lanes(self, task: str, first: int, count: int, after: str) -> LanesAnswer | None:
        """See `hub.Source`."""
        return self._maker.lanes(task, first, count, after)

    def renewed(self) -> bool:
        """See `hub.Source`."""
        return self._maker.renewed

    def describe_end(self) -> str:
        """See `hub.Source`."""
        return ""

    def find_successor(self) -> bool:
        """See `hub.Source`."""
        return False

    def forget(self) -> None:
        """See `hub.Source`."""


def run(scale: Scale) -> list[Row]:
    """Run all measurements."""
    core = Core(units=4)
    _prepare(core, scale.pick(1000, 50))
    return [*asyncio.run(_look(core, scale.pick(60, 5), scale.pick(30, 5))), *_count(scale.pick(1_000_000, 20_000))]


def _prepare(core: Core, partitions: int) -> None:
    for number in range(partitions):
        core.publish(100, f"train_{number}")
    peer = 10
    for task, ranks in TASKS.items():
        for rank in range(ranks):
            core.controller.on_connect(f"{task}-{rank}", peer)
            core.send(Introduce(task, rank, f"node-{rank // 8}", 1000 + rank), f"{task}-{rank}")
            peer += 1


def _second(core: Core, second: int) -> None:
    """Let each rank do something: put a row, or claim one, which waits now and then."""
    partition = f"step_{second // 20}"
    works = [(task, rank) for task, ranks in TASKS.items() for rank in range(ranks)]
    for number, (task, rank) in enumerate(works):
        core.now += 1.0 / len(works)
        if task == "rollout":
            core.publish(1, partition, f"{task}-{rank}", unit=rank % 4)
        elif (number + second) % 3:
            fields = ("x",) if task == "reference" else ("x", "y") if task == "reward" else ("x", "y", "z")
            core.send(claim(task, fields, partition, batch=2, wait=0.5), f"{task}-{rank}")
        core.controller.tick(core.now)


async def _look(core: Core, before: int, views: int) -> list[Row]:
    client = CoreClient(core)
    source = CoreSource(client)
    hub = Hub(source)
    viewer = hub.join()
    assert viewer is not None
    stream = viewer.events()
    for second in range(before):
        _second(core, second)
    await hub._step()
    full = len(await stream.__anext__())
    source.seconds.clear()
    client.times.clear()
    sizes, requests = [], []
    for second in range(before, before + views):
        _second(core, second)
        first = len(client.times)
        await hub._step()
        requests.append(sum(client.times[first:]))
        sizes.append(len(await stream.__anext__()))
    hub.close()
    return [
        Row("size of a delta, median", statistics.median(sizes) / 1024, "KiB", target=20,
            more={"largest KiB": max(sizes) / 1024}),
        Row("size of a full view", full / 1024, "KiB"),
        Row("controller, for a view each second", 1e3 * statistics.mean(requests), "ms", target=10,
            more={"longest request ms": 1e3 * max(client.times)}),
        Row("process of the page, for a view", 1e3 * (statistics.mean(source.seconds) - statistics.mean(requests)),
            "ms"),
    ]  # fmt: skip


def _count(rows: int) -> list[Row]:
    core = Core()
    core.fill(rows)
    for task in MATRIX_FIELDS:
        core.send(claim(task, batch=64), task)
    client = CoreClient(core)
    counter = MatrixCounter(cast(ControlClient, client))
    answer: Any = counter.answer("p", 0, None, 1024, MATRIX_FIELDS)
    pages, total, longest = len(client.times), sum(client.times), max(client.times)
    client.times.clear()
    counter.answer("p", 0, None, 1024, MATRIX_FIELDS)
    return [
        Row(f"matrix of {rows:,} rows, all requests", 1e3 * total, "ms",
            more={"requests": pages, "bytes": len(to_json(answer))}),
        Row("longest of these requests", 1e3 * longest, "ms", target=5),
        Row("the same again, unchanged", 1e3 * sum(client.times), "ms"),
    ]  # fmt: skip
