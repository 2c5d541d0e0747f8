"""OpenTelemetry spans of puts, claims and gets.

Spans go to the tracer provider that the program has set, below its own spans. If it has set none and the environment
names an exporter, they go there. Otherwise an operation runs as it is, and nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from tensordict import TensorDictBase

from transfer_queue.config import environment
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.puts import Publish
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.wire.blocks.encode import EncodedBlock
from transfer_queue.wire.buffers.jagged import bytes_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer, TracerProvider
logger = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Generator[Any, Any, T]

NAME = "transfer_queue"
"""The name of the tracer, and of the service if the environment does not name one."""
API = "opentelemetry.trace"
EXPORTERS = "opentelemetry_traces_exporter"
"""The group of entry points in which packages register exporters."""
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
"""OTEL_EXPORTER_OTLP_PROTOCOL -> the exporter that "otlp" stands for."""
MAX_NAMES = 32
"""Names of fields that a span has."""


class Tracers:
    """Finds the tracer that makes the spans of the operations of a client.

    Args:
        own: The provider that is used while the program has not set one; None: no spans are made.
    """

    def __init__(self, own: TracerProvider | None = None) -> None:
        self._own = None if own is None else own.get_tracer(NAME)
        self._provider: Any = None
        self._tracer: Tracer | None = None

    def find(self) -> Tracer | None:
        """Return the tracer for spans that begin now; None if no exporter would receive them."""
        api: Any = sys.modules.get(API)  # a program that traces has imported it
        if api is None:
            return None
        if getattr(api, "_TRACER_PROVIDER", api) is None:  # `get_tracer_provider` would take a microsecond to say so
            return self._own
        find = getattr(api, "get_tracer_provider", None)
        if find is None:  # another thread is importing it
            return None
        provider = find()
        if provider is not self._provider:
            self._provider = provider
            self._tracer = self._own if isinstance(provider, api.ProxyTracerProvider) else provider.get_tracer(NAME)
        return self._tracer


def trace_put(
    tracer: Tracer, operation: Operation[T], encoded: EncodedBlock | None, put: Publish, introduction: Introduce
) -> Operation[T]:
    """Return the put with a span.

    Args:
        tracer: The tracer.
        operation: The put.
        encoded: Its values; None if it has none.
        put: Its request without blocks.
        introduction: What the client has said of itself.
    """
    nbytes, schema = (0, []) if encoded is None else (encoded.nbytes, encoded.schema)
    attributes = {
        "tq.partition": put.partition, "tq.rows": put.count, "tq.bytes": nbytes,
        "tq.fields": [spec.name for spec in schema[:MAX_NAMES]],
        **_task(introduction.task or None),
    }  # fmt: skip
    return _traced(
        partial(tracer.start_span, "tq.put", kind=_api().SpanKind.PRODUCER, attributes=attributes), operation
    )


def trace_claim(tracer: Tracer, operation: Operation[ClaimReply], claim: Claim) -> Operation[ClaimReply]:
    """Return the claim with a span."""
    attributes = {
        "tq.partition": claim.partition, "tq.requested_rows": claim.count, "tq.fields": claim.fields[:MAX_NAMES],
        **_task(claim.task),
    }  # fmt: skip
    rank = claim.sampling.get("dp_rank")
    if type(rank) is int:
        attributes["tq.rank"] = rank
    start = partial(tracer.start_span, "tq.claim", kind=_api().SpanKind.CONSUMER, attributes=attributes)
    return _traced(start, operation, _describe_claimed)


def trace_get(tracer: Tracer, operation: Operation[T], partition: str, task: str | None) -> Operation[T]:
    """Return the get with a span. partition: the names, if there are several."""
    attributes = {"tq.partition": partition, **_task(task)}
    start = partial(tracer.start_span, "tq.get", kind=_api().SpanKind.CLIENT, attributes=attributes)
    return _traced(start, operation, _describe_values)


def _traced(
    start: Callable[[], Span], operation: Operation[T], describe: Callable[[Span, Any], None] | None = None
) -> Operation[T]:
    """Run an operation within a span, which begins with its first step. `describe` adds what its result says."""
    span = start()
    try:
        result = yield from operation
        if describe is not None and span.is_recording():
            describe(span, result)
        return result
    except Exception as error:
        span.record_exception(error)
        span.set_status(_api().Status(_api().StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        raise
    except BaseException:  # cancelled or interrupted, which is not an error
        span.set_attribute("tq.cancelled", True)
        raise
    finally:
        span.end()


def _describe_claimed(span: Span, reply: ClaimReply) -> None:
    span.set_attribute("tq.rows", len(reply.rows) // 8)
    if reply.ended:
        span.set_attribute("tq.ended", True)


def _describe_values(span: Span, values: TensorDictBase) -> None:
    span.set_attribute("tq.rows", values.batch_size[0] if values.batch_size else 0)
    names = [name if isinstance(name, str) else "::".join(name) for name in values.keys(True, True)]
    span.set_attribute("tq.fields", names[:MAX_NAMES])
    span.set_attribute("tq.bytes", sum(map(bytes_of, values.values())))


def _task(task: str | None) -> dict[str, Any]:
    return {"tq.task": task} if task else {}


def _api() -> Any:
    return sys.modules[API]


# ---------------------------------------------------------------- the environment

_lock = threading.Lock()
_made: list[Tracers] = []


def find_tracer() -> Callable[[], Tracer | None]:
    """Return the function that finds the tracer of this process: it returns None if OpenTelemetry is disabled."""
    if environment.otel_sdk_disabled():
        return _no_tracer
    with _lock:
        if not _made:
            _made.append(Tracers(_provider_of_environment()))
        return _made[0].find


def _no_tracer() -> None:
    """Return no tracer."""


def _after_fork() -> None:
    """In a forked child: a thread of the parent, which the child does not have, may hold the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _provider_of_environment() -> TracerProvider | None:
    """Return a provider for the exporters that the environment names; None if it names none, or without the SDK.

    It does not become the provider of the program, which may set its own one later.
    """
    names = environment.otel_traces_exporter()
    if names is None:
        endpoint = environment.otel_traces_endpoint() or environment.otel_endpoint()
        names = "" if endpoint is None else "otlp"
    exporters = [exporter for name in names.split(",") if (exporter := _exporter(name.strip())) is not None]
    if not exporters:
        return None
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = Resource.create({SERVICE_NAME: NAME})
    provider = TracerProvider(resource=resource)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(name: str) -> SpanExporter | None:
    if name in ("", "none"):
        return None
    if name == "otlp":
        protocol = environment.otel_traces_protocol() or environment.otel_protocol() or "http/protobuf"
        name = PROTOCOLS.get(protocol, protocol)
    entry_points = metadata.entry_points(group=EXPORTERS, name=name)
    try:
        return next(iter(entry_points)).load()()  # type: ignore[no-any-return]
    except StopIteration:
        logger.info(
            "the environment asks for traces (OTEL_*), but no installed package has the exporter %r, so no spans are "
            "exported to it: pip install 'transfer_queue[otel]'",
            name,
        )
    except Exception:
        logger.warning("the exporter of traces %r cannot be used, so no spans are exported to it", name, exc_info=True)
    return None
