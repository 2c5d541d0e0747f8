"""The system's progress as Prometheus reads it. Pure text; `node/metrics_http.py` serves it."""

from __future__ import annotations

from collections.abc import Iterable

from transfer_queue.messages import SystemStatus

_HELP = {
    "tq_requests_total": ("counter", "Requests that the controller has had."),
    "tq_failures_total": ("counter", "Requests that were answered with an error."),
    "tq_dealt_rows_total": ("counter", "Samples handed out to tasks."),
    "tq_published_rows_total": ("counter", "Samples, or fields of them, that were put."),
    "tq_journal_bytes": ("gauge", "Bytes of the controller's journal and its snapshot."),
    "tq_journal_trouble": ("gauge", "1 while the journal cannot be written, so that nobody is answered."),
    "tq_rows": ("gauge", "Samples of a partition."),
    "tq_bytes": ("gauge", "Bytes of the values of a partition."),
    "tq_produced_rows": ("gauge", "Samples of a partition that have a field."),
    "tq_lost_rows": ("gauge", "Samples of a partition whose value of a field was lost and not put again."),
    "tq_consumed_rows": ("gauge", "Samples of a partition that a task has consumed."),
    "tq_claimed_rows": ("gauge", "Samples of a partition that a task has under a lease and has not acknowledged."),
    "tq_waiting_claims": ("gauge", "Claims of a task that wait for samples."),
    "tq_sampler_asked_total": ("counter", "Claims that a user's sampler has decided."),
    "tq_sampler_seconds_total": ("counter", "How long a user's sampler has held up the controller."),
    "tq_sampler_longest_seconds": ("gauge", "The longest that a user's sampler has held up the controller."),
    "tq_longest_wait_seconds": ("gauge", "How long the oldest waiting claim of a task has waited."),
}


def exposition(status: SystemStatus) -> str:
    """The text format of Prometheus, version 0.0.4."""
    samples: dict[str, list[tuple[dict[str, str], float]]] = {name: [] for name in _HELP}
    for name, value in status.counters.items():
        family = f"tq_{name}" if f"tq_{name}" in _HELP else f"tq_{name}_total"
        samples.setdefault(family, []).append(({}, value))
    for partition in status.partitions:
        labels = {"partition": partition.name}
        samples["tq_rows"].append((labels, partition.rows))
        samples["tq_bytes"].append((labels, partition.nbytes))
        for field in partition.fields:
            samples["tq_produced_rows"].append(({**labels, "field": field.name}, field.produced))
            samples["tq_lost_rows"].append(({**labels, "field": field.name}, field.lost))
        for task in partition.tasks:
            named = {**labels, "task": task.name}
            samples["tq_consumed_rows"].append((named, task.consumed))
            samples["tq_claimed_rows"].append((named, task.claimed))
            samples["tq_waiting_claims"].append((named, task.waiting))
            samples["tq_longest_wait_seconds"].append((named, task.longest_wait))
    for cost in status.samplers:
        labels = {"sampler": cost.name}
        samples["tq_sampler_asked_total"].append((labels, cost.asked))
        samples["tq_sampler_seconds_total"].append((labels, cost.seconds))
        samples["tq_sampler_longest_seconds"].append((labels, cost.longest))
    return "\n".join(line for name, found in samples.items() for line in _family(name, found)) + "\n"


def _family(name: str, samples: list[tuple[dict[str, str], float]]) -> Iterable[str]:
    kind, words = _HELP.get(name, ("counter", "A counter of the controller."))
    yield f"# HELP {name} {words}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value:g}" if inside else f"{name} {value:g}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
