"""The application: the page, its files, the stream, and the answers to questions. Only GET, only JSON and files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from transfer_queue.errors import TransferQueueError, WaitTimeoutError
from transfer_queue.live.answers import ExplainAnswer, Problem
from transfer_queue.live.payload import LiveView, to_json
from transfer_queue.live.serving.hub import Hub, Viewer
from transfer_queue.live.snapshot import PageAnswers, encode_snapshot, file_name, take_snapshot
from transfer_queue.live.view.opened_bands import MAX_OPENED_LANES
from transfer_queue.messages.reports.overview import MAX_COLUMNS

PAGE = Path(__file__).parent.parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
    ".json": "application/json",
}  # fmt: skip
COLUMNS = 256
LONGEST_NAME = 1024
MAX_QUESTIONS = 32  # that wait at a time

logger = logging.getLogger(__name__)


Ask = Callable[[Callable[[], Response]], Awaitable[Response]]


class _BadRequest(Exception):
    """A parameter is missing or not allowed."""


def build_app(hub: Hub, questions: PageAnswers, page: Path = PAGE) -> Starlette:
    """Return the application without its guard."""
    pages = Pages(hub, questions, page)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        running = asyncio.create_task(hub.run())
        try:
            yield
        finally:
            running.cancel()
            hub.close()

    routes = [
        Route("/", pages.index, methods=["GET"]),
        Route("/static/{path:path}", pages.file, methods=["GET"]),
        Route("/api/live", pages.live, methods=["GET"]),
        Route("/api/snapshot", pages.snapshot, methods=["GET"]),
        Route("/api/matrix", partial(pages.ask, pages.matrix), methods=["GET"]),
        Route("/api/lanes", partial(pages.ask, pages.lanes, ask=hub.ask), methods=["GET"]),
        Route("/api/sample", partial(pages.ask, pages.sample), methods=["GET"]),
        Route("/api/explain", partial(pages.ask, pages.explain), methods=["GET"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


class Pages:
    """The handlers."""

    def __init__(self, hub: Hub, questions: PageAnswers, page: Path) -> None:
        self._hub = hub
        self._questions = questions
        self._thread = ThreadPoolExecutor(1, "live-questions")
        self._waiting = 0
        files = sorted(path for path in page.rglob("*") if path.is_file() and path.suffix in TYPES)
        # Only files that exist at the start can be served, so that a path cannot lead to any other file.
        self._files = {path.relative_to(page).as_posix(): path for path in files}

    async def index(self, request: Request) -> Response:
        """Answer `/`."""
        return self._serve("index.html", request)

    async def file(self, request: Request) -> Response:
        """Answer `/static/...`."""
        return self._serve(request.path_params["path"], request)

    def _serve(self, name: str, request: Request) -> Response:
        path = self._files.get(name)
        if path is None:
            return problem(404, f"file {name[:200]!r} does not exist")
        data = path.read_bytes()
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=TYPES[path.suffix], headers=headers)

    async def live(self, request: Request) -> Response:
        """Answer `/api/live`: the stream."""
        viewer = self._hub.join()
        if viewer is None:
            return problem(503, "this page is open 8 times already; close one of them")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(_events(self._hub, viewer), media_type="text/event-stream", headers=headers)

    def matrix(self, request: Request) -> Response:
        """Answer `/api/matrix`."""
        first, last = _number(request, "from", 0), _number(request, "to", None)
        columns = _number(request, "columns", COLUMNS) or COLUMNS
        partition = _name(request, "partition")
        answer = self._questions.matrix(partition, first or 0, last, min(columns, MAX_COLUMNS))
        if answer is None:
            return problem(404, f"partition {partition[:200]!r} does not exist")
        headers = {"etag": f'"{answer.epoch}"', "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return Response(to_json(answer), media_type="application/json", headers=headers)

    def lanes(self, request: Request) -> Response:
        """Answer `/api/lanes`. The thread that computes the views answers, because it has the recording."""
        task, first = _name(request, "task"), _number(request, "from", 0) or 0
        count = _number(request, "count", MAX_OPENED_LANES) or MAX_OPENED_LANES
        after = request.query_params.get("after", "")
        _check_length(after)
        page = self._hub.source.lanes(task, first, count, after)
        if page is None:
            return problem(404, f"no ranks of the task {task[:200]!r} are joined to a line")
        return _json(page)

    def sample(self, request: Request) -> Response:
        """Answer `/api/sample`."""
        partition, index, key = _name(request, "partition"), _number(request, "index", None), None
        if index is None:
            key = _name(request, "key")
        answer = self._questions.sample(partition, index, key)
        if answer is None:
            named = f"index {index}" if key is None else f"key {key[:200]!r}"
            return problem(404, f"partition {partition[:200]!r} has no sample with {named}")
        return _json(answer)

    def explain(self, request: Request) -> Response:
        """Answer `/api/explain`."""
        partition, index = _name(request, "partition"), _number(request, "index", None)
        key = request.query_params.get("key") if index is None else None
        task = request.query_params.get("task")
        for each in (key, task):
            _check_length(each)
        return _json(ExplainAnswer(self._questions.explain(partition, index, key, task)))

    async def snapshot(self, request: Request) -> Response:
        """Answer `/api/snapshot`: a file of what the page shows."""
        view = await self._hub.complete_view()

        def answer(request: Request) -> Response:
            snapshot = take_snapshot(msgspec.json.decode(view, type=LiveView), self._questions)
            disposition = f'attachment; filename="{file_name(snapshot)}"'
            headers = {"content-disposition": disposition, "cache-control": "no-store"}
            return Response(encode_snapshot(snapshot), media_type="application/gzip", headers=headers)

        return await self.ask(answer, request)

    async def ask(self, answer: Callable[[Request], Response], request: Request, *, ask: Ask | None = None) -> Response:
        """Answer a question, in the thread of questions unless `ask` calls it in another one."""
        if self._waiting >= MAX_QUESTIONS:
            return problem(503, "too many questions wait for the controller; try again")
        self._waiting += 1
        try:
            if ask is not None:
                return await ask(partial(answer, request))
            return await asyncio.get_running_loop().run_in_executor(self._thread, answer, request)
        except _BadRequest as error:
            return problem(400, str(error))
        except WaitTimeoutError:
            return problem(503, "the controller does not reply: it is being restarted, or is overloaded")
        except (TransferQueueError, OSError) as error:
            return problem(503, str(error)[:1000])
        except Exception:
            logger.exception("a question of the live page failed: %s", request.url.path)
            return problem(500, "the question could not be answered; the log of this process says why")
        finally:
            self._waiting -= 1


async def _events(hub: Hub, viewer: Viewer) -> AsyncIterator[bytes]:
    try:
        async for event in viewer.events():
            yield event
    finally:
        hub.leave(viewer)


def _json(part: object) -> Response:
    return Response(to_json(part), headers={"cache-control": "no-store"}, media_type="application/json")


def problem(status: int, message: str, **headers: str) -> Response:
    """Return the answer to a question that cannot be answered."""
    return Response(to_json(Problem(message)), status, {**headers, "cache-control": "no-store"}, "application/json")


def _check_length(text: str | None) -> None:
    if text is not None and len(text) > LONGEST_NAME:
        raise _BadRequest(f"a name has at most {LONGEST_NAME} characters, got {len(text)}")


def _name(request: Request, parameter: str) -> str:
    value = request.query_params.get(parameter)
    if value is None:
        raise _BadRequest(f"the parameter {parameter} is missing")
    _check_length(value)
    return value


def _number(request: Request, parameter: str, default: int | None) -> int | None:
    text = request.query_params.get(parameter)
    if text is None or text == "":
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise _BadRequest(f"{parameter} must be a whole number from 0 to 10**18 - 1, got {text[:50]!r}")
    return int(text)
