"""The story of the golden journal: a simulated system in which everything happens that a record can say.

`tell` makes the files, in a folder `system` below the working directory, so that no path of a machine is in them.
`resume` starts a simulated system over such files, and `go_on` works with it. What both show is compared with what they
showed in the release that has made the files.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from golden_description import batch, change, described
from golden_internals import (
    CONTROLLER,
    Arena,
    FaultyCluster,
    Moved,
    Parked,
    Reading,
    Record,
    Unparked,
    arena_of,
    changes,
    departures,
    moves,
)
from tensordict import NonTensorStack, TensorDict

from transfer_queue.errors import TransferQueueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Cluster

MIB = 1 << 20
KIB = 1 << 10
FOLDER = Path("system")
LOST = ("unit", 1)  # whose arena is lost, and replaced
UNITS = 2
LATER = 1e9  # seconds after which a server that was killed would be started by itself

conf = {
    "backend": {
        "SimpleStorage": {
            "num_data_storage_units": UNITS,
            "offload": {"enabled": True, "path": "/disk", "capacity": 8 * MIB},
        }
    }
}


def rows(**columns: Any) -> TensorDict:
    """A TensorDict of these columns, as long as the first."""
    first = next(iter(columns.values()))
    count = first.size(0) if isinstance(first, torch.Tensor) else len(first)
    columns = {
        name: NonTensorStack(*column) if isinstance(column, list) else column for name, column in columns.items()
    }
    return TensorDict(columns, batch_size=[count])


def numbers(count: int, start: int = 0) -> TensorDict:
    return rows(x=torch.arange(start, start + count))


def wide(count: int, width: int, start: int = 0) -> TensorDict:
    """Rows of `width` numbers of 8 bytes."""
    return rows(x=torch.arange(start, start + count)[:, None].expand(count, width).contiguous())


def system() -> FaultyCluster:
    """A simulated system with a journal, in which nothing has happened but that the arena of one unit was lost."""
    return FaultyCluster(
        FOLDER, seed=14, sampler=GRPOGroupNSampler(), conf=conf, arena_bytes=4 * MIB, snapshot_every=10**9
    )


def lose_arena(cluster: FaultyCluster) -> None:
    cluster.lose(LOST, 0.1)
    cluster.advance(5.0)


@contextmanager
def little_is_spared() -> Iterator[None]:
    """Blocks are moved, and clients that left are forgotten, already where there are few."""
    with (
        patch.object(moves, "SPARE", 64 * KIB),
        patch.object(moves, "ORDER_BYTES", 256 * KIB),
        patch.object(departures, "MAX_DEPARTED", 2),
        patch.object(changes, "MAX_CLEARED", 200),
    ):
        yield


# ------------------------------------------------------------ what has happened


def tell(files: Path) -> dict[str, Any]:
    """Everything happens, in a folder that is made for it, and what is to be kept goes into another one.

    Gives what later readers need: the time, and versions of partitions from which the feed of changes is read.
    """
    with working_in(files.with_name(f"{files.name}.system")), little_is_spared():
        cluster = system()
        try:
            told = _tell(cluster)
        finally:
            cluster.close()
        files.mkdir()
        for path in [Path("journal"), Path("snapshot"), Path("checkpoint"), *arenas(cluster)]:
            shutil.copytree(path, files / path.name)
    return told


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Makes a folder and works in it."""
    folder.mkdir(parents=True)
    began = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(began)


def arenas(cluster: FaultyCluster) -> list[Path]:
    """The folders of the arenas that the storage units of a system have now."""
    return [place.arena.folder for place in cluster.places]


def _tell(cluster: FaultyCluster) -> dict[str, Any]:
    a, b = cluster.client("a"), cluster.client("b")
    _checkpoint(cluster, a)
    _units(cluster, a)
    _kinds(a)
    since = _feed(a)
    _limits(cluster, a, b)
    _groups(a, b)
    _leases(cluster, a, b)
    _waiting(cluster, a, b)
    _ends(a, b)
    _clients(cluster)
    a.drain_unit(0)
    cluster.advance(1.0)
    cluster.check()
    save(a, Path("checkpoint"))
    _last(cluster, a)
    return {"since": since, "seconds": cluster.clock.now, "records": len(cluster.records)}


def _last(cluster: FaultyCluster, a: Any) -> None:
    """What would not stay: pre-allocated rows, and extents of which a unit is yet to say that they are free.

    Then a snapshot is taken. Files of the journal are copied before it has replaced them, and after it.
    """
    with patch.dict(os.environ, TQ_PRE_ALLOC_SAMPLE_NUM="3"):
        a.put(numbers(1), partition_id="ahead")
    cluster.crash(LOST, LATER)
    a.clear_partition("large")
    a.clear_partition("sparse again")
    cluster.snapshot_every = 1
    a.create_partition("the last one")
    shutil.copytree(FOLDER / "journal", "journal", ignore=shutil.ignore_patterns(".*"))
    cluster.snapshot_every = 10**9
    cluster.advance(1.0)
    shutil.copytree(FOLDER / "journal", "snapshot")
    cluster.restart(LOST)
    cluster.run()
    cluster.check()


def save(client: Any, folder: Path) -> None:
    """What `tq.save_checkpoint` does, by a client of a simulated system."""
    cut = client.begin_checkpoint()
    client.save_storage_checkpoint(folder, cut=cut)
    client.save_controller_checkpoint(folder / "controller_state.pkl", cut=cut)
    assert client.end_checkpoint(cut)
    (folder / "metadata.json").write_text(json.dumps({"storage_saved": True, "user_metadata": {}}))


def load(client: Any, folder: Path) -> None:
    """What `tq.load_checkpoint` does after its checks."""
    client.load_storage_checkpoint(folder)
    client.load_controller_checkpoint(folder / "controller_state.pkl")


def _checkpoint(cluster: FaultyCluster, a: Any) -> None:
    """A loaded checkpoint, and a client that takes over what a dead one held in it."""
    a.create_partition("held", free_when=["use"])
    a.put(numbers(6), partition_id="held")
    a.put(numbers(2), partition_id="not loaded")
    holder, heir = cluster.client("holder"), cluster.client("heir")
    holder.await_batch(["x"], 2, "held", "use", timeout=0)
    save(a, Path("saved"))
    holder.die()
    a.clear_partition("not loaded")
    cluster.advance(1.0)
    load(a, Path("saved"))
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


def _kinds(a: Any) -> None:
    """Values and tags of every kind, under keys and without."""
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
    reserved = a.get_meta(["y"], 4, "kinds", mode="insert")
    a.put(rows(y=torch.arange(2) + 10), metadata=reserved.select_samples([0, 1]))
    many = {f"f{number}": torch.full((2,), number, dtype=torch.int16) for number in range(66)}
    a.put(rows(**many), partition_id="many fields")


def _feed(a: Any) -> dict[str, int]:
    """Changes after a version that a later reader asks from."""
    a.kv_batch_put(["one", "two", "three"], "feed", numbers(3), tags=[{"n": n} for n in range(3)])
    version = a.wait_for_change("feed", timeout=0).version
    a.kv_put("one", "feed", None, tag={"n": 10})
    a.kv_clear("two", "feed")
    a.kv_put("four", "feed", {"x": torch.tensor(4)})
    return {"feed": version}


def _groups(a: Any, b: Any) -> None:
    """Declared groups: dealt, dropped before all of them came, wanted, and promised."""
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
    a.clear_samples(BatchMeta([put.global_indexes[6]], ["groups"]))  # its group lacks it now


def _leases(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Leases that are acknowledged, given back, over, of a rank that is gone, and in force."""
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
    for _ in range(2):  # delivered twice without an ack: it is set aside
        again = lease(a, 1)
        assert a.nack(again)
        if not b.await_batch(fields, 1, "leased", "look", timeout=0)[0]:
            break
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
    assert b.ack(twice.select_samples([0]))  # of two replicas
    lease(b, 2, dp_rank=4, batch_index=0)


def _waiting(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Claims that wait, and are met together."""
    tasks = [
        client.start(client.operations.await_batch(["x"], 1, "awaited", "train", timeout=50.0)) for client in (a, b, a)
    ]
    cluster.run()
    cluster.client("c").put(numbers(4), partition_id="awaited")
    cluster.wait(lambda: all(task.done for task in tasks))


def _limits(cluster: FaultyCluster, a: Any, b: Any) -> None:
    """Policy versions, and the retention of rows, bytes and seconds."""
    a.create_partition("policy", max_staleness=1, rows_per_version=2)
    a.put(numbers(3), partition_id="policy")
    a.set_policy_version("policy", 3)
    a.create_partition("few", keep_rows=3)
    for start in range(3):
        a.put(numbers(2, start), partition_id="few")
    cluster.advance(math.ceil(cluster.clock.now) - cluster.clock.now)  # a time to which 3000 s are added exactly
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


def _ends(a: Any, b: Any) -> None:
    """Partitions that are sealed, begun again, and dropped."""
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
    """Blocks that are moved, repacked, put on disk and lost."""
    _repacked(cluster, a, "sparse")
    for number in range(14):  # more than goes into memory
        a.put(wide(4, 12 * KIB, 1000 * number), partition_id="large")
        cluster.advance(1.0)
    a.drain_unit(0)
    a.drain_unit(0, undo=True)
    cluster.advance(1.0)
    a.kv_batch_put(["l0", "l1"], "lost", rows(x=torch.arange(2), text=["a", "b"]), tags=[{"n": 0}, {"n": 1}])
    _damage_arena(cluster)
    lose_arena(cluster)
    a.kv_put("l1", "lost", {"x": torch.tensor(1)})  # what was lost is put again
    _repacked(cluster, a, "sparse again")


def _repacked(cluster: FaultyCluster, a: Any, partition: str) -> None:
    """Of each block few rows are left, which get blocks of their own."""
    before = _repacks(cluster)
    for number in range(8):
        meta = a.put(wide(64, 256, 1000 * number), partition_id=partition)
        a.clear_samples(meta.select_samples(range(2, 64)))
        cluster.advance(1.0)
    assert _repacks(cluster) > before


def _repacks(cluster: FaultyCluster) -> int:
    return sum(isinstance(record, Moved) and bool(record.repacked) for record in cluster.records)


def _damage_arena(cluster: FaultyCluster) -> None:
    """The arena of the first unit comes back without one of the extents that the system needs."""
    writer = cluster.client("writer")
    while not cluster.units[0].table.leased:
        writer.put(numbers(2), partition_id="damaged")
    unit = cluster.units[0]
    needed = next(extent for number, extent in cluster.controller.state.blocks.extents if number == 0)
    extent = unit.table.get(needed)
    assert extent is not None
    cluster.crash(("unit", 0), LATER)
    arena = Arena.reopen(arena_of(unit).folder)
    arena.extents.free(extent)
    arena.close()
    cluster.restart(("unit", 0))
    cluster.advance(5.0)


def _clients(cluster: FaultyCluster) -> None:
    """Clients that leave in order, that die while they have space, and that are forgotten."""
    for number in range(4):
        client = cluster.client(f"short-lived {number}")
        client.put(numbers(1, number), partition_id="visitors")
        client.call(client.leave()) if number % 2 else client.die()
        cluster.advance(1.0)


# ------------------------------------------------------------ records


def tag_of(kind: type[Any]) -> str:
    """How a record of this class is called in files."""
    return str(kind.__struct_config__.tag)


def journaled() -> set[str]:
    """The tags of all records that a journal can have: it leaves out who waits."""
    return {tag_of(kind) for kind in Record.__subclasses__()} - {tag_of(Parked), tag_of(Unparked)}


def tags_in(journal: Path) -> set[str]:
    """The tags of the records in the segments of a journal."""
    found = set()
    for path in journal.glob("segment-*"):
        for records in Reading(path, path.read_bytes(), last=True).frames():
            found |= {tag_of(type(record)) for record in records}
    return found


# ------------------------------------------------------------ over golden files


def resume(files: Path, journal: str, told: dict[str, Any]) -> FaultyCluster:
    """A simulated system over copies of arenas and a journal, in `system` below the working directory."""
    cluster = system()
    lose_arena(cluster)
    cluster.advance(told["seconds"] - cluster.clock.now)
    servers = [CONTROLLER, *(place.target for place in cluster.places)]
    for server in servers:
        cluster.crash(server, LATER)
    for name, path in [(journal, FOLDER / "journal"), *((path.name, path) for path in arenas(cluster))]:
        shutil.rmtree(path)
        shutil.copytree(files / name, path)
    for server in servers:
        cluster.restart(server)
    cluster.run()
    return cluster


def shown_over(files: Path, journal: str, told: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a system shows that goes on from a journal of this name, working in a new folder."""
    with working_in(folder):
        cluster = resume(files, journal, told)
        try:
            found = shown(cluster.client("later"), told["since"], cluster.advance)
            save(cluster.client("saver"), Path("saved"))
        finally:
            cluster.close()
        with loaded(Path("saved"), Path("again")) as (client, _):
            saved = described(client)["partitions"]
    before = found["then"]["partitions"]
    assert {name: entry["samples"] for name, entry in saved.items()} == {
        name: entry["samples"] for name, entry in before.items()
    }, "a checkpoint that was saved after the resumption has other samples"
    return found


def shown_loaded(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """What another system shows that has loaded the checkpoint."""
    with loaded(checkpoint, folder) as (client, cluster):
        return shown(client, {}, cluster.advance)


@contextmanager
def loaded(checkpoint: Path, folder: Path) -> Iterator[tuple[Any, Cluster]]:
    """A client of a new simulated system that has loaded a checkpoint, and that system."""
    with Cluster(folder, sampler=GRPOGroupNSampler()) as cluster:
        client = cluster.client("later")
        load(client, checkpoint)
        yield client, cluster
        cluster.check()


def shown(client: Any, since: dict[str, int], advance: Callable[[float], None] | None = None) -> dict[str, Any]:
    """What a client sees, at once and then while it goes on.

    since: versions of partitions, from which on changes are looked at. advance: lets time pass, where that can be done.
    """
    changes = {name: change(client.wait_for_change(name, version, timeout=0)) for name, version in since.items()}
    return {
        "now": described(client),
        "changes": changes,
        "steps": [[words, result] for words, result in _steps(client, advance)],
        "then": described(client),
    }


def outcome(function: Callable[[], Any]) -> Any:
    """What a call gives, or the name of the error that it raises."""
    try:
        return function()
    except TransferQueueError as error:
        return {"raises": type(error).__name__}


def _steps(client: Any, advance: Callable[[float], None] | None) -> Iterator[tuple[str, Any]]:
    """Goes on with what the story has left."""

    def claim(partition: str, task: str, size: int, lease: float | None = None, **config: int) -> Any:
        fields = ["y"] if partition == "kinds" else ["x"]
        return outcome(
            lambda: batch(client.await_batch(fields, size, partition, task, config or None, lease=lease, timeout=0))
        )

    for partition, task, size in (
        ("held", "use", 1), ("kinds", "train", 3), ("groups", "judge", 2), ("groups", "fresh", 2),
        ("awaited", "train", 1), ("begun again", "train", 4), ("begun again", "train", 3), ("freed", "one", 1),
        ("freed", "two", 3), ("few", "train", 3), ("leased", "look", 3), ("sealed", "fresh", 5),
    ):  # fmt: skip
        yield f"{task} claims {size} of {partition}", claim(partition, task, size)
    for partition, rank, number, size in (
        ("sealed", 0, 0, 2), ("sealed", 1, 1, 2), ("sealed", 0, 2, 2), ("groups", 0, 0, 2), ("groups", 1, 0, 2),
        ("read twice", 0, 0, 2), ("leased", 0, 0, 2), ("leased", 1, 0, 2), ("leased", 1, 1, 2), ("leased", 3, 0, 2),
    ):  # fmt: skip
        lease = 1000.0 if partition == "leased" else None
        given = claim(partition, "train", size, lease, dp_rank=rank, batch_index=number)
        yield f"rank {rank} claims batch {number} of {partition}", given
    yield "missing groups", outcome(lambda: client.wanted("groups", "train"))
    put = client.put(numbers(2, 500), partition_id="groups", group_ids=["g1", "g9"])
    yield "a late member of a dropped group", [put.global_indexes, outcome(lambda: client.wanted("groups", "train"))]
    yield "too much for the policy", outcome(lambda: client.put(numbers(8), partition_id="policy").global_indexes)
    yield "enough for the policy", outcome(lambda: client.put(numbers(7), partition_id="policy").global_indexes)
    yield "more than is kept", client.put(numbers(2, 70), partition_id="few").global_indexes
    yield "more of a sealed partition", outcome(lambda: client.put(numbers(1), partition_id="sealed").global_indexes)
    reserved = client.kv_retrieve_meta(["k0", "k3"], "kinds")
    client.put(rows(number=torch.tensor([100, 103])), metadata=reserved)
    client.kv_batch_put(["k2", "k9"], "kinds", rows(number=torch.tensor([102, 109])), tags=[{"new": 1}, {"new": 2}])
    client.kv_clear("k1", "kinds")
    client.clear_partition("not loaded")
    client.create_partition("new", group_size=2)
    yield "a new partition", client.put(numbers(4), partition_id="new", group_ids=["a", "b", "a", "b"]).global_indexes
    yield "its groups", claim("new", "train", 2)
    client.seal("begun again")
    yield "one more", claim("begun again", "train", 1)
    if advance is not None:
        advance(2000.0)
        for rank, number in ((4, 0), (0, 0), (7, 0), (8, 0)):
            given = claim("leased", "train", 2, 1000.0, dp_rank=rank, batch_index=number)
            yield f"rank {rank} claims batch {number} when all leases are over", given
        again = {"dp_rank": 8, "batch_index": 0}
        meta, _ = client.await_batch(["x"], 2, "leased", "train", again, lease=9.0, timeout=0)
        yield "acknowledged", [meta.global_indexes, client.ack(meta)]
