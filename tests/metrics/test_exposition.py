"""Whatever a system has, its metrics are text that Prometheus reads, with each series in it once."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from prometheus_text import checked, value
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.reports.progress import FieldProgress, PartitionProgress, SamplerCost, TaskProgress, Timing
from transfer_queue.messages.reports.unit_reports import Measured, ServerMeasures, UnitMeasures
from transfer_queue.messages.storage import UnitStatusReply
from transfer_queue.metrics.exposition import LINES, exposition
from transfer_queue.metrics.samples import MAX_OF_A_PARTITION, JournalMeasures, Snapshot
from transfer_queue.metrics.timing import LOOP_BOUNDS, OTHER, WAIT_BOUNDS

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
odd = st.sampled_from(['a"b', "a\\b", "a\nb", "\\n", 'x="1"}', "", "ä\r", OTHER])
numbers = st.integers(0, 1 << 50)
times = st.floats(0, 1e9)


def server(requests: list[Timing] | None = None, waits: list[Timing] | None = None) -> ServerMeasures:
    return ServerMeasures(
        requests or [], waits or [], {"CapacityError": 2}, {"malformed": 1}, {"tick": 0.5}, 3, 4, 1.25, 1 << 40, 1.7e9
    )


def snapshot(
    partitions: list[PartitionProgress] | None = None,
    its: ServerMeasures | None = None,
    units: dict[int, Measured | None] | None = None,
    samplers: list[SamplerCost] | None = None,
    journal: JournalMeasures | None = None,
    series: Mapping[str, Mapping[tuple[str, ...], float]] | None = None,
    timings: Mapping[str, list[Timing]] | None = None,
) -> Snapshot:
    found = partitions or []
    counters = {"dealt_rows": 5.0, "published_rows": 123456789.0}
    infos = [UnitInfo(number, "u.sock", "/a", node="host-1") for number in units or {}]
    live = dict.fromkeys(units or {}, 7)
    return Snapshot(
        its or server(), counters, len(found), found, samplers or [], infos, units or {}, live, series or {}, journal,
        timings or {},
    )  # fmt: skip


def timings(bounds: tuple[float, ...]) -> st.SearchStrategy[Timing]:
    counts = st.lists(st.integers(0, 1000), min_size=len(bounds) + 1, max_size=len(bounds) + 1)

    def timing(counts: list[int], name: str, task: str) -> Timing:
        return Timing(name, counts, sum(c * b for c, b in zip(counts, (*bounds, 2 * bounds[-1]))), task)

    return st.builds(timing, counts, names | odd, names | odd)


fields = st.builds(FieldProgress, names | odd, numbers, st.just("f4"), numbers, numbers)
tasks = st.builds(TaskProgress, names | odd, numbers, numbers, times, numbers, numbers)
partitions = st.builds(
    PartitionProgress,
    name=names | odd, rows=numbers, reserved=numbers, sealed=st.booleans(), group_size=st.none(), nbytes=numbers,
    fields=st.lists(fields, max_size=4), tasks=st.lists(tasks, max_size=4),
    dropped=st.dictionaries(names | odd, numbers, max_size=2), waiting_puts=numbers,
)  # fmt: skip


@given(
    st.lists(partitions, max_size=4),
    st.lists(timings(LOOP_BOUNDS), max_size=3, unique_by=lambda t: t.name),
    st.lists(timings(WAIT_BOUNDS), max_size=3, unique_by=lambda t: (t.name, t.task)),
    st.dictionaries(st.tuples(names | odd, names | odd), numbers, max_size=3),
    st.lists(timings(WAIT_BOUNDS), max_size=3, unique_by=lambda t: t.task),
    st.booleans(),
)
def test_it_is_valid_whatever_things_are_called(
    partitions: list[PartitionProgress],
    requests: list[Timing],
    waits: list[Timing],
    pairs: dict[tuple[str, str], int],
    queues: list[Timing],
    compatible_names: bool,
) -> None:
    series = {
        "leases": pairs,
        "leases_granted": {k[:1]: v for k, v in pairs.items()},
        "acknowledged_rows": {k[1:]: v for k, v in pairs.items()},
        "redelivered_rows": pairs,
        "task_wait_seconds": pairs,
        "task_clients": {k[:1]: v for k, v in pairs.items()},
        "ready_rows": pairs,
    }
    measured = snapshot(partitions, server(requests, waits), series=series, timings={"queue": queues})
    found = checked("".join(exposition(measured, compatible_names)))
    assert ("tq_controller_uptime_seconds" in found) == compatible_names
    for timing in queues:
        assert value(found, "tq_queue_seconds_sum", **({"task": timing.task} if timing.task else {})) == timing.seconds
    assert found.get("tq_rows", {}) == _sums(partitions)
    for timing in requests:
        its = {"server": "controller", "type": timing.name}
        assert value(found, "tq_requests_total", **its) == sum(timing.counts)
        assert value(found, "tq_request_seconds_sum", **its) == timing.seconds


def _sums(partitions: list[PartitionProgress]) -> dict[tuple[tuple[str, str], ...], float]:
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for partition in partitions:
        key = (("partition", partition.name),)
        sums[key] = sums.get(key, 0) + partition.rows
    return sums


def test_numbers_are_told_to_the_last_digit() -> None:
    found = checked("".join(exposition(snapshot())))
    assert value(found, "tq_published_rows_total") == 123456789
    assert value(found, "tq_process_resident_bytes", server="controller") == 1 << 40


def test_a_partition_that_is_called_as_the_others_are_is_one_of_them() -> None:
    def one(rows: int, longest: float) -> PartitionProgress:
        return PartitionProgress(OTHER, rows, 0, False, None, 8, [], [TaskProgress("t", 0, 1, longest)])

    found = checked("".join(exposition(snapshot([one(3, 2.0), one(4, 1.0)]))))
    assert value(found, "tq_rows", partition=OTHER) == 7
    assert value(found, "tq_waiting_claims", partition=OTHER, task="t") == 2
    assert value(found, "tq_longest_wait_seconds", partition=OTHER, task="t") == 2.0


def test_fields_and_tasks_without_end_are_told_together() -> None:
    fields = [FieldProgress(f"f{number}", 1, "f4") for number in range(500)]
    tasks = [TaskProgress(f"t{number}", 1, 0, 0.0) for number in range(500)]
    pieces = list(exposition(snapshot([PartitionProgress("p", 1, 0, False, None, 8, fields, tasks)])))
    assert max(piece.count("\n") for piece in pieces) <= LINES + 2, "in pieces, between which others have their turn"
    found = checked("".join(pieces))
    assert len(found["tq_produced_rows"]) == len(found["tq_consumed_rows"]) == MAX_OF_A_PARTITION + 1
    assert value(found, "tq_produced_rows", partition="p", field=OTHER) == 500 - MAX_OF_A_PARTITION
    assert value(found, "tq_produced_rows", partition="p", field="f49") == 1


def test_what_partitions_have_in_each_tier() -> None:
    parts = [PartitionProgress(name, 1, 0, False, None, 8, [], [], stored={"memory": 3, "disk": 5}) for name in "pq"]
    stored = {("p", "disk"): 4, (OTHER, "store"): 2}
    found = checked("".join(exposition(snapshot(parts, series={"stored_values": stored}))))
    assert value(found, "tq_stored_bytes", partition="q", tier="disk") == 5
    assert value(found, "tq_stored_bytes", partition="p", tier="memory") == 3
    assert found["tq_stored_values"] == {
        (("partition", "p"), ("tier", "disk")): 4, (("partition", OTHER), ("tier", "store")): 2,
    }  # fmt: skip


def test_units_journal_and_samplers() -> None:
    space = UnitStatusReply(1000, 800, 500, 300, "disk", 200)
    answer = Measured(1, 0, server(), UnitMeasures(space, 4, 2, 1.5, True))
    commits = Timing("commit", [3] + [0] * len(LOOP_BOUNDS), 1e-5)
    journal = JournalMeasures(900, 20, 300, 60.0, commits, 2e-6, 1, True, False)
    found = checked(
        "".join(
            exposition(
                snapshot(units={0: answer, 1: None}, journal=journal, samplers=[SamplerCost("Mine", 2, 0.5, 0.25)])
            )
        )
    )
    up = {dict(labels).get("unit", "controller"): v for labels, v in found["tq_server_up"].items()}
    assert up == {"controller": 1, "0": 1, "1": 0}
    assert set(found["tq_arena_held_bytes"]) == {(("tier", "disk"), ("unit", "0"))}, (
        "nothing is known of one that does not reply"
    )
    for name, expected in (
        ("capacity_bytes", 1000), ("held_bytes", 800), ("leased_bytes", 500), ("live_bytes", 7), ("free_bytes", 300),
        ("largest_free_bytes", 200), ("extents", 4), ("waiting_leases", 2), ("longest_wait_seconds", 1.5),
    ):  # fmt: skip
        assert value(found, f"tq_arena_{name}", unit="0", tier="disk") == expected
    assert value(found, "tq_unit_draining", unit="0", tier="disk") == 1
    assert value(found, "tq_unit_info", unit="1", tier="memory", node="host-1") == 1
    assert value(found, "tq_failures_total", server="unit", unit="0", error="CapacityError") == 2
    assert value(found, "tq_journal_lag_records") == 20
    assert value(found, "tq_journal_trouble") == 1
    assert value(found, "tq_journal_commit_seconds_count") == 3
    assert value(found, "tq_sampler_seconds_total", sampler="Mine") == 0.5
