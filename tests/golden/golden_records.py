"""The scenario of the golden journal: a simulated system in which every kind of record and every column occurs."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
from golden_internals import (
    RECORDS,
    Arena,
    FaultyCluster,
    Introduce,
    JournalRecord,
    Moved,
    Parked,
    Reading,
    Unparked,
    arena_of,
    change_feed,
    departures,
    migration_planner,
)
from golden_systems import (
    FOLDER,
    KIB,
    LOST,
    NEVER,
    arenas,
    load,
    lose_arena,
    numbers,
    rows,
    save,
    system,
    wide,
    working_in,
)

from transfer_queue.dataloader.batch_fetcher import claiming
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import RankAwareSampler
from transfer_queue.wire.objects.object_values import DELETE


@contextmanager
def low_limits() -> Iterator[None]:
    """Lower the limits from which on blocks are moved, and departed clients and cleared rows are forgotten."""
    with (
        patch.object(migration_planner, "SPARE", 64 * KIB),
        patch.object(migration_planner, "ORDER_BYTES", 256 * KIB),
        patch.object(departures, "MAX_DEPARTED", 2),
        patch.object(change_feed, "MAX_CLEARED", 200),
    ):
        yield


# ------------------------------------------------------------ the scenario


def make_files(files: Path) -> dict[str, Any]:
    """Run the scenario, and copy its journal (before and after a snapshot), arenas and checkpoint into a new folder.

    Returns:
        seconds: the virtual time of the end. since: for some partitions a version from which on changes can be read.
        records: the number of records.
    """
    with working_in(files.with_name(f"{files.name}.system")), low_limits():
        cluster = system()
        try:
            facts = _run(cluster)
        finally:
            cluster.close()
        files.mkdir()
        for path in [Path("journal"), Path("snapshot"), Path("checkpoint"), *arenas(cluster)]:
            shutil.copytree(path, files / path.name)
    return facts


def _run(cluster: FaultyCluster) -> dict[str, Any]:
    a, b = cluster.client("a"), cluster.client("b")
    _checkpoint(cluster, a)
    _units(cluster, a)
    put_kinds(a)
    _very_many_fields(a)
    _equal_values(a)
    _tag_columns(a)
    _together(cluster, a, b)
    since = _feed(a)
    _limits(cluster, a, b)
    _groups(a, b)
    _leases(cluster, a, b)
    _locks(a, b)
    _waiting(cluster, a, b)
    _rounds(a, b)
    _ends(a, b)
    _clients(cluster)
    a.drain_unit(0)
    cluster.advance(1.0)
    cluster.check()
    save(a, Path("checkpoint"))
    _last(cluster, a)
    return {"since": since, "seconds": cluster.clock.now, "records": len(cluster.records)}


def _last(cluster: FaultyCluster, a: Any) -> None:
    """States that do not last: pre-allocated rows, and free extents that a unit has not confirmed because it is down.

    Then the controller takes a snapshot. The journal is copied before and after the snapshot replaces older segments.
    """
    with patch.dict(os.environ, TQ_PRE_ALLOC_SAMPLE_NUM="3"):
        a.put(numbers(1), partition_id="ahead")
    cluster.crash(LOST, NEVER)
    a.clear_partition("large")
    a.clear_partition("sparse again")
    cluster.run()
    cluster.snapshot_every = 1  # the next event that is recorded
    a.create_partition("the last one")
    shutil.copytree(FOLDER / "journal", "journal", ignore=shutil.ignore_patterns(".*"))
    cluster.snapshot_every = 10**9
    cluster.advance(1.0)
    shutil.copytree(FOLDER / "journal", "snapshot")
    cluster.restart(LOST)
    cluster.run()
    cluster.check()


def _checkpoint(cluster: FaultyCluster, a: Any) -> None:
    """Load a checkpoint; a client takes over the rows that a dead client held when it was saved.

    One of its partitions is then loaded once more, into the running system.
    """
    a.create_partition("held", free_when=["use"])
    a.put(numbers(6), partition_id="held")
    a.put(numbers(2), partition_id="not loaded")
    holder, heir = cluster.client("holder"), cluster.client("heir")
    holder.await_batch(["x"], 2, "held", "use", timeout=0)
    cluster.run()  # until the controller knows that the batch was handed over
    save(a, Path("saved"))
    holder.die()
    a.clear_partition("not loaded")
    cluster.advance(1.0)
    load(a, Path("saved"))
    a.clear_partition("not loaded")
    a.load_samples(Path("saved"), "not loaded")
    heir.await_batch(["x"], 1, "held", "use", timeout=0)
    finished, _ = heir.await_batch(["x"], 1, "held", "use", hold=True, timeout=0)
    heir.finish(finished, "use")
    heir.await_batch(["x"], 1, "held", "use", hold=True, timeout=0)


def ragged(*lengths: int) -> torch.Tensor:
    made = [torch.full((length,), length, dtype=torch.float32) for length in lengths]
    return torch.nested.nested_tensor(made, layout=torch.jagged)


OBJECTS: list[Any] = [None, "text", b"\0bytes", {"nested": [1, {"deep": 2.5}], "tuple": (1, "a")}]
TAGS: list[dict[str, Any]] = [
    {"int": 1, "big": 1 << 62, "float": 0.5, "bool": True, "none": None},
    {"text": "ä", "bytes": b"\xff", "list": [1, [2]], "dict": {"a": {"b": 1}}},
    {"tuple": (1, "b"), "complex": 1 + 2j, "infinite": float("inf")},
    {},
]


def put_kinds(a: Any) -> None:
    """Put values and tags of every kind, with and without keys."""
    half = torch.tensor([[0.5, -1.5], [float("nan"), float("inf")], [0.0, -0.0], [3.0, 4.0]], dtype=torch.bfloat16)
    columns = rows(
        number=torch.arange(4),
        half=half,
        ragged=ragged(1, 3, 0, 2),
        nested=torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(1, 3), torch.ones(1, 1), torch.ones(2, 2)]),
        object=OBJECTS,
        text=["a", "", "ä", "b" * 40],
    )
    a.kv_batch_put(["k0", "k1", "k2", "k3"], "kinds", columns, tags=TAGS)
    a.kv_batch_put(["k1", "k2"], "kinds", rows(late=torch.zeros(2, 2, dtype=torch.uint8)))
    a.kv_batch_put(["k4"], "kinds", rows(number=torch.tensor([2.5])))  # another dtype than the field's
    a.kv_batch_put(["k5"], "kinds", rows(number=torch.tensor([6])), tags=[{"to be": "cleared"}])
    a.kv_clear("k5", "kinds")
    a.put(rows(y=torch.arange(3)), partition_id="kinds")
    a.put(rows(ranks=[torch.ones(2), torch.ones(()), torch.ones(1, 3)]), partition_id="ranks")
    reserved = a.get_meta(["y"], 4, "kinds", mode="insert")
    a.put(rows(y=torch.arange(2) + 10), metadata=reserved.select_samples([0, 1]))
    many = {f"f{number}": torch.full((2,), number, dtype=torch.int16) for number in range(66)}
    a.put(rows(**many), partition_id="many fields")


def _very_many_fields(a: Any) -> None:
    """Put so many fields that the controller prepares the put in steps."""
    many = {f"f{number:04}": torch.full((1,), number, dtype=torch.int16) for number in range(2100)}
    a.put(rows(**many), partition_id="very many fields")


def _equal_values(a: Any) -> None:
    """Put values that were put before, of a field whose values are hashed."""
    values = torch.arange(3.0)[:, None].expand(3, 1024).contiguous()
    a.kv_batch_put(["one", "two", "three"], "equal", rows(hashed=values))
    a.kv_batch_put(["four", "five"], "equal", rows(hashed=values[1:] * torch.tensor([[1.0], [7.0]])))


def _tag_columns(a: Any) -> None:
    """Put enough rows with tags of the same names that the tags are sent as columns, and update some of them."""
    keys = [f"t{number}" for number in range(10)]
    tags = [{"n": n, "status": "new", "mixed": OBJECTS[n % 4], "float": n / 7, "gone": n} for n in range(10)]
    a.kv_batch_put(keys, "tag columns", numbers(10), tags=tags)
    changes = [{"status": "done", "float": None if n else -0.0, "gone": DELETE} for n in range(9)]
    a.kv_batch_put(keys[:9], "tag columns", tags=changes)


def _feed(a: Any) -> dict[str, int]:
    """Change rows after a version; returns the version."""
    a.kv_batch_put(["one", "two", "three"], "feed", numbers(3), tags=[{"n": n} for n in range(3)])
    version = a.wait_for_change("feed", timeout=0).version
    a.kv_put("one", "feed", None, tag={"n": 10})
    a.kv_clear("two", "feed")
    a.kv_put("four", "feed", {"x": torch.tensor(4)})
    return {"feed": version}


def _groups(a: Any, b: Any) -> None:
    """Use declared groups: dealt, dropped before all members have come, wanted, and promised."""
    a.create_partition("groups", group_size=2)
    groups = ["g0", "g0", "g1", "g2", "g2", "g3", "g3", "g4", "g4"]
    put = a.put(numbers(9), partition_id="groups", group_ids=groups)
    a.drop("groups", ["g1", "g4"], reason="unfit")  # one of g1 has not come
    late = a.put(numbers(1, 100), partition_id="groups", group_ids=["g0b"])
    b.await_batch(["x"], 2, "groups", "train", {"dp_rank": 0, "batch_index": 0}, timeout=0)
    b.await_batch(["x"], 2, "groups", "judge", timeout=0)
    a.want("groups", 6, "train")
    a.want("groups", 3, "judge")
    a.want("groups", 0, "judge")
    assert b.wanted("groups", "train", most=2) == 2
    a.clear_samples(late)
    a.clear_samples(BatchMeta([put.global_indexes[6]], ["groups"]))  # a member of a group that stays


def _leases(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Use leases: acknowledged, given back, expired, of a rank that is gone, shared by two replicas, and in force."""
    a.put(numbers(2), partition_id="unseen")
    claiming(a).await_batch(["x"], 1, "unseen", "train", timeout=0)  # it is not handed over
    a.create_partition("leased", max_deliveries=2)
    a.put(numbers(16), partition_id="leased")
    fields = ["x"]

    def lease(client: Any, size: int, seconds: float = 1000.0, **more: Any) -> BatchMeta:
        meta, _ = client.await_batch(fields, size, "leased", "train", more or None, lease=seconds, timeout=0)
        assert len(meta) == size
        return meta

    acknowledged = lease(a, 3)
    assert a.ack(acknowledged.select_samples([0, 1]))
    assert a.nack(acknowledged.select_samples([2]))
    assert a.nack(lease(a, 1))  # the same row, which is set aside after its second delivery
    b.await_batch(fields, 2, "leased", "look", timeout=0)
    kept = lease(a, 2, dp_rank=0, batch_index=0)
    assert a.ack(kept.select_samples([0]))
    lease(a, 2, dp_rank=1, batch_index=0)
    assert a.declare_rank_gone("leased", "train", 1) == 2
    over = lease(b, 1, 2.0, dp_rank=2, batch_index=0)
    b.pause_renewals()
    cluster.advance(5.0)
    assert not b.ack(over)
    b.pause_renewals(False)
    for client in (a, b):
        twice, _ = client.await_batch(
            fields, 2, "leased", "train", {"dp_rank": 3, "batch_index": 0}, lease=1000.0, replicas=2, timeout=0
        )
    assert b.ack(twice.select_samples([0]))  # the other replica has not acknowledged it
    lease(b, 2, dp_rank=4, batch_index=0)


def _locks(a: Any, b: Any) -> None:
    """Lock keys: released, and in force until the end; also keys and a partition that do not exist."""
    with a.kv_lock(["k0", "none"], "kinds") as lock:
        a.kv_put("k0", "kinds", None, tag={"locked": True}, fence=lock)
    b.kv_lock(["k1", "k2"], "kinds", lease=1e6).__enter__()
    b.kv_lock("later", "not made yet", lease=1e6).__enter__()


def _together(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Let two clients put at the same moment, so that the controller decides their puts together."""
    for client in (a, b):
        client.put(numbers(1), partition_id="together")  # in an extent that the controller knows afterwards
    tasks = [client.start(client.operations.put(numbers(2), partition_id="together")) for client in (a, b)]
    cluster.wait(lambda: all(task.done for task in tasks))


def _waiting(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Let equal claims wait until one put satisfies all of them."""
    tasks = [
        client.start(client.operations.await_batch(["x"], 1, "awaited", "train", timeout=50.0)) for client in (a, b, a)
    ]
    cluster.run()
    cluster.client("c").put(numbers(4), partition_id="awaited")
    cluster.wait(lambda: all(task.done for task in tasks))


def _limits(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Use the partitions with limits: policy versions, retention of rows, bytes and seconds, rows freed by tasks."""
    a.create_partition("policy", max_staleness=1, rows_per_version=2)
    a.put(numbers(3), partition_id="policy")
    a.set_policy_version("policy", 3)
    a.await_batch(["x"], 1, "policy", "train", timeout=0)
    a.create_partition("queue", max_rows=2, order="lifo", free_when=["get"])
    a.put(numbers(2), partition_id="queue")
    a.await_batch(["x"], 1, "queue", "get", timeout=0)
    a.report_done("queue")
    a.create_partition("few", keep_rows=3)
    for start in range(3):
        a.put(numbers(2, start), partition_id="few")
    a.create_partition("small", keep_bytes=200)
    for start in range(3):
        a.put(numbers(2, start), partition_id="small")
    cluster.advance(math.ceil(cluster.clock.now) - cluster.clock.now)  # 3000 s can be added to it without rounding
    a.create_partition("young", keep_seconds=3000.0)
    a.put(numbers(2), partition_id="young")
    cluster.advance(2000.0)
    a.put(numbers(2, 2), partition_id="young")
    cluster.advance(1500.0)
    a.create_partition("freed", free_when=["one", "two"])
    a.put(numbers(5), partition_id="freed")
    for task in ("one", "two"):
        first, _ = a.await_batch(["x"], 2, "freed", task, timeout=0)
        a.finish(first, task)
    b.await_batch(["x"], 1, "freed", "one", timeout=0)
    a.create_partition("read twice", free_when=["one"], replicas=2)
    a.put(numbers(3), partition_id="read twice")
    first, _ = a.await_batch(["x"], 2, "read twice", "one", {"dp_rank": 0, "batch_index": 0}, timeout=0)
    a.finish(first, "one")


def _rounds(a: Any, b: Any) -> None:
    """Deal a round for three ranks with the sampler of a task; one of them never asks."""
    a.register_task_sampler("rounds", RankAwareSampler(dp_size=3))
    a.put(numbers(6), partition_id="rounds")
    for rank in range(2):
        b.await_batch(["x"], 2, "rounds", "rounds", {"dp_rank": rank, "batch_index": 0}, timeout=0)


def _ends(a: Any, b: Any) -> None:
    """Seal, reset and drop partitions."""
    a.create_partition("sealed", producers=2)
    a.put(numbers(5), partition_id="sealed")
    for rank in range(2):
        a.await_batch(["x"], 2, "sealed", "train", {"dp_rank": rank, "batch_index": 0}, timeout=0)
    a.seal("sealed")
    b.seal("sealed")
    a.await_batch(["x"], 2, "sealed", "train", {"dp_rank": 0, "batch_index": 1}, timeout=0)
    a.put(numbers(4), partition_id="begun again")
    a.await_batch(["x"], 3, "begun again", "train", timeout=0)
    a.reset_consumption("begun again", "train")
    a.await_batch(["x"], 1, "begun again", "train", timeout=0)
    dropped = a.put(numbers(2), partition_id="dropped")
    a.clear_samples(dropped.select_samples([0]))
    a.clear_partition("dropped")
    once = a.put(rows(only=torch.zeros(1, 3, dtype=torch.float64)), partition_id="begun again")
    a.clear_samples(once)


def _units(cluster: FaultyCluster, a: Any) -> None:
    """Let blocks be moved, repacked, put on disk and lost."""
    _repacked(cluster, a, "sparse")
    for number in range(14):  # more than the memory holds
        a.put(wide(4, 12 * KIB, 1000 * number), partition_id="large")
        cluster.advance(1.0)
    a.drain_unit(0)
    a.drain_unit(0, undo=True)
    cluster.advance(1.0)
    a.kv_batch_put(["l0", "l1"], "lost", rows(x=torch.arange(2), text=["a", "b"]), tags=[{"n": 0}, {"n": 1}])
    _damage_arena(cluster)
    lose_arena(cluster)
    a.kv_put("l1", "lost", {"x": torch.tensor(1)})  # a value that was lost
    _repacked(cluster, a, "sparse again")


def _repacked(cluster: FaultyCluster, a: Any, partition: str) -> None:
    """Clear most rows of several blocks, until the system moves the remaining rows to new blocks."""
    before = _repacks(cluster)
    for number in range(8):
        meta = a.put(wide(64, 256, 1000 * number), partition_id=partition)
        a.clear_samples(meta.select_samples(range(2, 64)))
        cluster.advance(1.0)
    assert _repacks(cluster) > before


def _repacks(cluster: FaultyCluster) -> int:
    return sum(isinstance(record, Moved) and bool(record.repacked) for record in cluster.records)


def _damage_arena(cluster: FaultyCluster) -> None:
    """Restart the first unit with an arena that lacks an extent with values."""
    writer = cluster.client("writer")
    while not cluster.units[0].table.leased:
        writer.put(numbers(2), partition_id="damaged")
    unit = cluster.units[0]
    needed = next(extent for number, extent in cluster.controller.state.blocks.extents if number == 0)
    extent = unit.table.get(needed)
    assert extent is not None
    cluster.crash(("unit", 0), NEVER)
    arena = Arena.reopen(arena_of(unit).folder)
    arena.extents.free(extent)
    arena.close()
    cluster.restart(("unit", 0))
    cluster.advance(5.0)


def _clients(cluster: FaultyCluster) -> None:
    """Let clients that have introduced themselves leave and die, until the controller forgets the first ones."""
    for number in range(4):
        client = cluster.client(f"short-lived {number}")
        client.call(client.operations._introduce(Introduce("visit", number)))
        client.put(numbers(1, number), partition_id="visitors")
        client.call(client.leave()) if number % 2 else client.die()
        cluster.advance(1.0)


# ------------------------------------------------------------ records


def tag_of(kind: type[Any]) -> str:
    """The tag of a class of records in files."""
    return str(kind.__struct_config__.tag)


def journaled() -> set[str]:
    """The tags of all records that this build writes into a journal: all but those of waiting requests."""
    return {tag_of(kind) for kind in RECORDS} - {tag_of(Parked), tag_of(Unparked)}


def known() -> set[str]:
    """The tags of all records that a journal can contain, which an earlier build may have written."""
    return {tag_of(kind) for kind in get_args(JournalRecord)}


def tags_in(journal: Path) -> set[str]:
    """The tags of the records in the segments of a journal."""
    found = set()
    for path in journal.glob("segment-*"):
        for records in Reading(path, path.read_bytes(), last=True).frames():
            found |= {tag_of(type(record)) for record in records}
    return found
