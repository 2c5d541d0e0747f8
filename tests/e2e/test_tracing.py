"""Spans of puts, claims and gets: below the program's own spans, with what was asked for, and exported over OTLP."""

from __future__ import annotations

import asyncio
import gzip
import http.server
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
import warm
from tracing_program import put_one
from transfer_queue.client import tracing
from transfer_queue.client.tracing import Tracers, find_tracer
from transfer_queue.wire.buffers.jagged import bytes_of

OTEL = [name for name in os.environ if name.startswith("OTEL_")]


@pytest.fixture(scope="module")
def client() -> Iterator[tq.TransferQueueClient]:
    tq.init({"system": {"name": "traced"}}, attach="never", task="rollout", rank=3)
    yield tq.get_client()
    tq.close()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The spans that have ended, of a program that has set a tracer provider."""
    provider, found = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # `set_tracer_provider` works once in a process
    yield found
    provider.shutdown()


@pytest.fixture
def partition(client: tq.TransferQueueClient, request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name; each is there once."""
    found = exporter.get_finished_spans()
    assert len({span.name for span in found}) == len(found)
    return {span.name: span for span in found}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


# ---------------------------------------------------------------- of a program that has set a provider


def test_put_claim_and_get(client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str) -> None:
    with trace.get_tracer("mine").start_as_current_span("step") as mine:
        client.kv_batch_put(["a", "b"], partition, {"x": torch.zeros(2, 8), "name": ["one", "two"]})
        meta = client.get_meta(["x"], 2, partition, task_name="train", sampling_config={"dp_rank": 1})
        client.get_data(meta)
    found = spans(exporter)
    assert list(found) == ["tq.put", "tq.claim", "tq.get", "step"]
    assert attributes(found["tq.put"]).pop("tq.bytes") >= 64
    assert attributes(found["tq.put"]) | {"tq.bytes": 0, "tq.fields": set()} == {
        "tq.partition": partition, "tq.rows": 2, "tq.bytes": 0, "tq.fields": set(), "tq.task": "rollout",
    }  # fmt: skip
    assert set(attributes(found["tq.put"])["tq.fields"]) == {"x", "name"}
    assert attributes(found["tq.claim"]) == {
        "tq.partition": partition, "tq.task": "train", "tq.rank": 1, "tq.requested_rows": 2, "tq.rows": 2,
        "tq.fields": ("x",),
    }  # fmt: skip
    assert attributes(found["tq.get"]) == {
        "tq.partition": partition, "tq.rows": 2, "tq.bytes": 64, "tq.fields": ("x",),
    }  # fmt: skip
    kinds = {name: span.kind for name, span in found.items() if name != "step"}
    assert kinds == {"tq.put": SpanKind.PRODUCER, "tq.claim": SpanKind.CONSUMER, "tq.get": SpanKind.CLIENT}
    for name in kinds:
        parent = found[name].parent
        assert parent.span_id == mine.get_span_context().span_id
        assert found[name].status.status_code is StatusCode.UNSET


def test_bytes_of_objects_are_not_asked_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = NonTensorStack(*[{"a": number} for number in range(3)])
    monkeypatch.setattr(NonTensorStack, "values", lambda *args: pytest.fail("makes a TensorDict of each object"))
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged)
    inner = TensorDict({"y": torch.zeros(3, dtype=torch.int64), "o": objects}, [3])
    assert [bytes_of(each) for each in (objects, ragged, inner, torch.zeros(3, 2))] == [0, 12, 24, 24]


def test_one_call_that_claims_and_gets_has_both(
    client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str
) -> None:
    values = TensorDict({"x": torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)}, 2)
    meta = client.put(values, partition_id=partition)
    client.put(TensorDict({"y": torch.zeros(2)}, 2), meta)
    client.await_data(["x", "y"], 2, partition, "train")
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["tq.put", "tq.put", "tq.claim", "tq.get"]
    got = attributes(exporter.get_finished_spans()[-1])
    assert (got["tq.task"], got["tq.rows"], got["tq.bytes"]) == ("train", 2, 4 * 8 + 4 * 2)


def test_puts_of_a_hundred_tasks_are_below_the_spans_of_their_tasks(
    client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str
) -> None:
    async def one(number: int) -> None:
        with trace.get_tracer("mine").start_as_current_span("sample", attributes={"number": number}):
            await client.async_kv_put(f"{number}", f"{partition}-{number}", {"x": torch.zeros(4)})
            await client.async_kv_batch_get([f"{number}"], f"{partition}-{number}")

    async def everyone() -> None:
        await asyncio.gather(*map(one, range(100)))

    asyncio.run(everyone())
    found = exporter.get_finished_spans()
    mine = {span.context.span_id: span for span in found if span.name == "sample"}  # type: ignore[union-attr]
    assert len(mine) == 100
    for name in ("tq.put", "tq.get"):
        children = [span for span in found if span.name == name]
        assert len(children) == 100
        for span in children:
            parent = mine[span.parent.span_id]
            assert attributes(span)["tq.partition"] == f"{partition}-{attributes(parent)['number']}"
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time  # type: ignore[operator]


def test_an_error_is_the_status_of_its_span(
    client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str
) -> None:
    with pytest.raises(tq.WaitTimeoutError):
        client.get_meta(["x"], 1, partition, task_name="train", timeout=0.01)
    client.seal(partition, create=True)
    with pytest.raises(tq.SealedError):
        client.kv_put("a", partition, {"x": torch.zeros(4)})
    found = spans(exporter)
    for name, error in (("tq.claim", "WaitTimeoutError"), ("tq.put", "SealedError")):
        span = found[name]
        assert span.status.status_code is StatusCode.ERROR
        assert (span.status.description or "").startswith(f"{error}: ")
        (event,) = span.events
        assert event.name == "exception"
        assert (event.attributes or {})["exception.type"] == f"transfer_queue.errors.{error}"


def test_a_claim_that_was_cancelled_says_so_and_is_not_an_error(
    client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str
) -> None:
    async def parked() -> bool:
        (found,) = (each for each in (await client.async_status()).partitions if each.name == partition)
        return any(task.waiting for task in found.tasks)

    async def cancelled() -> None:
        waiting = asyncio.create_task(client.async_get_meta(["x"], 1, partition, task_name="train", timeout=60))
        while not await parked():
            assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    client.create_partition(partition)
    asyncio.run(cancelled())
    span = spans(exporter)["tq.claim"]
    assert attributes(span)["tq.cancelled"] is True
    assert span.status.status_code is StatusCode.UNSET
    assert not span.events


def test_a_claim_at_the_end_of_a_partition(
    client: tq.TransferQueueClient, exporter: InMemorySpanExporter, partition: str
) -> None:
    client.seal(partition, create=True)
    assert client.await_batch(["x"], 1, partition, "train")[1]
    found = attributes(spans(exporter)["tq.claim"])
    assert (found["tq.rows"], found["tq.ended"]) == (0, True)


# ---------------------------------------------------------------- off


def test_without_a_provider_no_tracer_is_found() -> None:
    assert Tracers().find() is None


def test_a_provider_that_is_set_later_gets_the_next_spans(
    client: tq.TransferQueueClient, partition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.kv_put("a", partition, {"x": torch.zeros(4)})
    provider, found = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(found))
    with monkeypatch.context() as patch:
        patch.setattr(trace, "_TRACER_PROVIDER", provider)
        client.kv_put("b", partition, {"x": torch.zeros(4)})
    client.kv_put("c", partition, {"x": torch.zeros(4)})
    assert [span.name for span in found.get_finished_spans()] == ["tq.put"]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The module as at the start of a process, without variables of OpenTelemetry."""
    monkeypatch.setattr(tracing, "_made", [])
    for name in OTEL:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "trainer"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"},
        {"OTEL_TRACES_EXPORTER": "not-installed"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "not-installed"},
    ],
)
def test_variables_that_name_no_exporter(fresh: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        fresh.setenv(name, value)
    assert find_tracer()() is None


def test_the_variable_that_disables_opentelemetry(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("OTEL_SDK_DISABLED", "True")
    fresh.setenv("OTEL_TRACES_EXPORTER", "console")
    assert find_tracer()() is None


# ---------------------------------------------------------------- a real receiver


class Receiver(http.server.ThreadingHTTPServer):
    """An OTLP receiver. requests: what it has received."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                if handler.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert handler.path == "/v1/traces"
                self.requests.append(ExportTraceServiceRequest.FromString(body))
                handler.send_response(200)
                handler.end_headers()

            def log_message(handler, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def spans(self) -> list[tuple[str, str, dict[str, Any]]]:
        """Service, name and attributes of each."""
        return [
            (_plain(resource.resource.attributes)["service.name"], span.name, _plain(span.attributes))
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _plain(found: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in found}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run_program(partition: str, report: Path) -> list[str]:
    """The modules of OpenTelemetry that the program had imported after its put."""
    process = warm.process(put_one, partition, str(report))
    process.start()
    process.join()
    assert process.exitcode == 0
    return json.loads(report.read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize("service", ["", "trainer"])
def test_spans_go_where_the_environment_says(
    client: tq.TransferQueueClient, partition: str, receiver: Receiver, fresh: pytest.MonkeyPatch, service: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    fresh.setenv("TQ_SYSTEM", "traced")
    fresh.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server_port}")
    if service:
        fresh.setenv("OTEL_SERVICE_NAME", service)
    assert "opentelemetry.sdk.trace" in run_program(partition, tmp_path / "report")
    ((name, span, found),) = receiver.spans()
    assert (name, span) == (service or "transfer_queue", "tq.put")
    assert (found["tq.partition"], found["tq.rows"]) == (partition, 1)


def test_without_variables_nothing_is_imported(
    client: tq.TransferQueueClient, partition: str, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh.setenv("TQ_SYSTEM", "traced")
    assert run_program(partition, tmp_path / "report") == []
