"""The same tests on every backend and both runtimes: what is put is got back, cleared, replaced, lost and told."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from server_processes import until
from transfer_queue.attachment import CURRENT
from transfer_queue.client.checkpoint.checkpoint_folder import STATE
from transfer_queue.client.data.store_io import StoredBlocks
from transfer_queue.config.settings import Settings
from transfer_queue.errors import CapacityError, CheckpointError, StorageKeyNotFoundError
from transfer_queue.messages.storage import UnitStatus, UnitStatusReply
from transfer_queue.net.calls import Request
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.node.system.launcher import start_local
from transfer_queue.system_folder.paths import runtime_dir

SECONDS = 60.0
MIB = 1 << 20
STORE_BYTES = 192 * MIB


@dataclass(frozen=True)
class Case:
    """conf: of the system. library: module that must be there. owner: the process that keeps the bytes, by its log.

    unit: the storage unit that knows what its store contains.
    """

    name: str
    conf: dict[str, Any] = field(default_factory=dict)
    ray: bool = False
    library: str = ""
    owner: str = ""
    unit: int = 0


MOONCAKE = {
    "backend": {
        "storage_backend": "MooncakeStore",
        "MooncakeStore": {"master_server_address": "127.0.0.1:0", "global_segment_size": STORE_BYTES},
    }
}
YUANRONG = {
    "backend": {
        "storage_backend": "Yuanrong",
        "Yuanrong": {
            "worker_port": 0,
            "metastore_port": 0,
            "worker_args": f"--shared_memory_size_mb {STORE_BYTES // MIB}",
        },
    }
}
RAY = {"backend": {"storage_backend": "RayStore", "RayStore": {"capacity": STORE_BYTES}}}
SIMPLE = {"backend": {"SimpleStorage": {"arena_bytes": STORE_BYTES}}}
TWO = {"backend": {"SimpleStorage": {"arena_bytes": STORE_BYTES // 2, "num_data_storage_units": 2}}}
SOME_FIELDS = {  # "scalar" and "empty" are in shared memory
    "backend": {
        "fields": {"[xdro]*": "MooncakeStore"},
        "MooncakeStore": MOONCAKE["backend"]["MooncakeStore"],
        "SimpleStorage": {"arena_bytes": STORE_BYTES},
    }
}
CASES = [
    Case("SimpleStorage", SIMPLE),
    Case("two units", TWO),
    Case("SimpleStorage on Ray", SIMPLE, ray=True),
    Case("MooncakeStore", MOONCAKE, library="mooncake", owner="store"),
    Case("MooncakeStore on Ray", MOONCAKE, ray=True, library="mooncake", owner="store"),
    Case("some fields in MooncakeStore", SOME_FIELDS, library="mooncake", owner="store", unit=1),
    Case("Yuanrong", YUANRONG, library="yr", owner="store"),
    Case("RayStore", RAY, ray=True, library="ray", owner="ray"),
]


@contextlib.contextmanager
def running(case: Case) -> Iterator[None]:
    if case.library:
        # a library that cannot be had here must be seen to be missing, not pass for a store that works
        assert importlib.util.find_spec(case.library), f"{case.name} needs {case.library}: pip install -e '.[dev]'"
    if case.ray:
        import ray

        memory = 2 * STORE_BYTES
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=memory,
        )
    try:
        tq.init({**case.conf, "runtime": "ray" if case.ray else "local"})
        yield
    finally:
        tq.close()
        if case.ray:
            ray.shutdown()


@pytest.fixture(scope="module", params=CASES, ids=[case.name for case in CASES])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with running(request.param):
        yield request.param


@pytest.fixture
def client(case: Case) -> Iterator[tq.TransferQueueClient]:
    found = tq.get_client()
    yield found
    for name in found.get_partition_list():
        found.clear_partition(name)
    until(lambda: leased(found) == 0, "nothing is leased once all is cleared")


def status(client: tq.TransferQueueClient) -> list[UnitStatusReply]:
    """Of each unit. What the client has leased and not filled goes back first."""
    state = client.storage_manager
    run_blocking(state.session, state.space.return_extents())
    found = []
    for unit in state.units.known:

        def ask(unit: int = unit) -> Any:
            return (yield Request(("unit", unit), UnitStatus()))

        found.append(run_blocking(state.session, ask()))
    return found


def leased(client: tq.TransferQueueClient, of: int | None = None) -> int:
    """Bytes that units (or one of them) have leased, or that a store has still to remove."""
    units = client.storage_manager.units.known.values()
    return sum(
        found.held if unit.store else found.leased
        for unit, found in zip(units, status(client), strict=True)
        if of in (None, unit.unit)
    )


def is_external(client: tq.TransferQueueClient) -> bool:
    return any(unit.store for unit in client.storage_manager.units.known.values())


def mixed(rows: int, seed: int = 0) -> TensorDict:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 50, (rows,), generator=random).tolist()
    return TensorDict(
        {
            "dense": torch.rand(rows, 7, generator=random),
            "scalar": torch.arange(rows) + seed,
            "ragged": torch.nested.as_nested_tensor(
                [torch.rand(n, generator=random) for n in lengths], layout=torch.jagged
            ),
            "object": NonTensorStack(*[{"n": n, "text": "x" * n} for n in lengths]),
            "empty": torch.zeros(rows, 0),
        },
        batch_size=rows,
    )


def rows_of(values: TensorDict, name: str) -> list[Any]:
    column = values.get(name)
    return column.tolist() if isinstance(column, NonTensorStack) else list(column.unbind(0))


def assert_same(found: TensorDict, wanted: TensorDict, at: list[int] | None = None) -> None:
    assert set(found.keys()) == set(wanted.keys())
    for name in wanted.keys():  # noqa: SIM118 - a TensorDict is no mapping to `in`
        expected = rows_of(wanted, name)
        expected = expected if at is None else [expected[row] for row in at]
        got = rows_of(found, name)
        assert len(got) == len(expected)
        for mine, other in zip(got, expected, strict=True):
            assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process, which attaches to the system by itself."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments], stdout=subprocess.PIPE, text=True
    )


def pid_of(server: str) -> int:
    if server == "ray":
        import ray

        return int(ray.get(keeper().process.remote(), timeout=SECONDS))
    system = CURRENT.system
    assert system is not None
    return int(re.findall(r"up, process (\d+)", Path(system.logs, f"{server}.log").read_text())[-1])


def keeper() -> Any:
    """Ray's handle of the actor that owns the blocks."""
    import ray

    (name,) = [
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["name"].startswith("TransferQueueKeeper")
    ]
    return ray.get_actor(name, namespace="transfer_queue")


def kill(server: str) -> None:
    """Kills a server, and waits until another is up in its place."""
    before = pid_of(server)
    os.kill(before, signal.SIGKILL)

    def another() -> bool:
        try:
            return pid_of(server) != before
        except Exception as error:
            if server != "ray":
                raise
            return isinstance(error, (SystemExit, KeyboardInterrupt))

    until(another, f"the {server} is there anew")


@pytest.mark.parametrize(
    ("conf", "program"),
    [(MOONCAKE, "mooncake_master"), (YUANRONG, "datasystem_worker"), (RAY, "raylet")],
    ids=["MooncakeStore", "Yuanrong", "RayStore"],
)
def test_nothing_outlives_a_system_that_is_killed_whole(conf: dict[str, Any], program: str) -> None:
    """The servers of a store end with the process that has started them, however that ends; the next start works."""
    code = """
        import sys, time, json, torch, transfer_queue as tq
        conf = json.loads(sys.argv[1])
        if "RayStore" in conf["backend"]:
            import ray
            ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
        runtime = "ray" if "RayStore" in conf["backend"] else "local"
        tq.init({**conf, "runtime": runtime, "system": {"name": "doomed"}})
        tq.kv_put("k", "p", {"x": torch.arange(100000)})
        assert tq.kv_batch_get(["k"], "p")["x"].numel() == 100000
        print("up", tq.interface._TQ_CONTROLLER.description.pid, flush=True)
        time.sleep(600)
    """
    starter = python(code, json.dumps(conf))
    assert starter.stdout is not None
    said = next(line for line in starter.stdout if line.startswith("up "))
    roots = [psutil.Process(int(said.split()[1])), psutil.Process(starter.pid)]
    processes = list(dict.fromkeys(each for root in roots for each in [*root.children(recursive=True), root]))
    processes = [each for each in processes if each.status() != psutil.STATUS_ZOMBIE]
    assert any(program.startswith(process.name()) for process in processes)
    mapped = {each.path for process in processes for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    for process in processes:
        if not program.startswith(process.name()):
            process.kill()
    starter.communicate()
    until(lambda: not any(process.is_running() for process in processes), "all processes end")
    with running(Case("again", {**conf, "system": {"name": "doomed"}}, ray=conf is RAY)):  # sweeps what was left
        client = tq.get_client()
        meta = client.put(mixed(5), partition_id="p")
        assert_same(client.get_data(meta), mixed(5))
    assert list(runtime_dir().iterdir()) == []
    assert [path for path in mapped if Path(path).exists()] == []


# ---------------------------------------------------------------- values


def test_what_is_put_is_got_back(client: tq.TransferQueueClient) -> None:
    data = mixed(40)
    meta = client.put(data, partition_id="p")
    assert_same(client.get_data(meta), data)
    some = [39, 0, 17, 17, 3]
    parts = client.get_data(meta.select_samples(some[:3]))
    assert_same(parts, data, some[:3])
    dense = client.get_data(meta.select_fields(["dense"]), layout="dense")
    assert torch.equal(dense["dense"], data["dense"])


def test_many_small_puts_come_back_together(client: tq.TransferQueueClient) -> None:
    metas = [client.put(mixed(3, seed), partition_id="p") for seed in range(0, 60, 3)]
    found = client.get_data(tq.BatchMeta.concat(metas))
    assert found["scalar"].tolist() == list(range(60))
    texts = [value["text"] for seed in range(0, 60, 3) for value in mixed(3, seed).get("object").tolist()]
    assert [value["text"] for value in found.get("object").tolist()] == texts
    assert_same(client.get_data(metas[7]), mixed(3, 21))


def test_a_large_put(client: tq.TransferQueueClient) -> None:
    data = TensorDict({"x": torch.rand(64, 4, MIB // 16)}, batch_size=64)  # 64 MiB
    meta = client.put(data, partition_id="p")
    found = client.get_data(meta, layout="dense")
    assert torch.equal(found["x"], data["x"])
    found = client.get_data(meta.select_samples([5, 60]), layout="dense")
    assert torch.equal(found["x"], data["x"][[5, 60]])


def test_coroutines(client: tq.TransferQueueClient) -> None:
    async def both(data: TensorDict) -> None:
        assert_same(await client.async_get_data(await client.async_put(data, partition_id="p")), data)

    async def main() -> None:
        await asyncio.gather(*[both(mixed(10, seed)) for seed in range(4)])

    asyncio.run(main())


# ---------------------------------------------------------------- space


def test_what_is_cleared_is_free(client: tq.TransferQueueClient) -> None:
    for _ in range(5):
        meta = client.put(TensorDict({"x": torch.rand(16, MIB)}, batch_size=16), partition_id="p")  # 64 MiB
        assert leased(client) >= 64 * MIB
        client.clear_samples(meta)
        until(lambda: leased(client) == 0, "the space of what was cleared")
        with pytest.raises(StorageKeyNotFoundError):
            client.get_data(meta)


def test_a_full_store(client: tq.TransferQueueClient) -> None:
    block = TensorDict({"x": torch.rand(8, 4 * MIB // 4)}, batch_size=8)  # 32 MiB
    metas = [client.put(block, partition_id="p") for _ in range(3)]

    def fill() -> None:
        while len(metas) <= STORE_BYTES // (32 * MIB):
            metas.append(client.put(block, partition_id="p"))

    with pytest.raises(CapacityError, match="clear samples"):
        fill()
    assert torch.equal(client.get_data(metas[-1], layout="dense")["x"], block["x"])
    client.clear_samples(metas[0])
    metas.append(client.put(block, partition_id="p", timeout=SECONDS))
    assert torch.equal(client.get_data(metas[-1], layout="dense")["x"], block["x"])


# ---------------------------------------------------------------- checkpoints


def found_in(client: tq.TransferQueueClient, partition: str, fields: list[str]) -> tq.BatchMeta:
    return client.get_meta(fields, None, partition, mode="force_fetch")


def put_all_kinds(client: tq.TransferQueueClient) -> TensorDict:
    """Many small blocks, one of several pieces, and rows with keys and tags; the large one's values."""
    for seed in range(0, 90, 3):
        client.put(mixed(3, seed), partition_id="small")
    large = TensorDict({"x": torch.rand(5, 5 * MIB // 4)}, batch_size=5)  # 25 MiB
    client.put(large, partition_id="large")
    keys = [f"k{n}" for n in range(6)]
    client.kv_batch_put(keys, "kv", mixed(6), tags=[{"of": key} for key in keys])
    client.get_meta(["scalar"], 2, "kv", task_name="t")
    return large


def assert_all_kinds(client: tq.TransferQueueClient, large: TensorDict) -> None:
    names = list(mixed(1).keys())
    small = found_in(client, "small", names)
    assert small.size == 90
    for at in range(0, 90, 3):
        assert_same(client.get_data(small[at : at + 3]), mixed(3, at))
    assert client.get_data(small)["scalar"].tolist() == list(range(90))
    (values,) = client.get_data(found_in(client, "large", ["x"]), layout="dense").values()
    assert torch.equal(values, large["x"])
    assert client.kv_list("kv")["kv"] == {f"k{n}": {"of": f"k{n}"} for n in range(6)}
    assert_same(client.kv_batch_get(["k4", "k1"], "kv"), mixed(6), [4, 1])
    assert int(client.get_consumption_status("t", "kv")[1].sum()) == 2


def save(client: tq.TransferQueueClient, folder: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    """What `tq.save_checkpoint` does, by any client. meanwhile: between the cut and the copy."""
    cut = client.begin_checkpoint()
    meanwhile()
    client.save_storage_checkpoint(folder, cut=cut)
    client.save_controller_checkpoint(folder / STATE, cut=cut)
    assert client.end_checkpoint(cut)


def load(client: tq.TransferQueueClient, folder: Path) -> None:
    client.load_storage_checkpoint(folder)
    client.load_controller_checkpoint(folder / STATE)


def test_checkpoints(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    large = put_all_kinds(client)
    for _ in range(2):  # the second links to the files of the first
        tq.save_checkpoint(tmp_path / "one")
        client.clear_partition("large")
        client.put(mixed(5), partition_id="small")
        tq.load_checkpoint(tmp_path / "one")
        assert_all_kinds(client, large)
    before = leased(client)
    client.clear_samples(found_in(client, "large", ["x"]))
    client.clear_samples(found_in(client, "small", ["scalar"])[10:80])
    if is_external(client):  # in an arena small blocks lie beside the large one
        until(lambda: leased(client) <= before - 25 * MIB, "the space of what was loaded and cleared")
    left = found_in(client, "small", ["scalar"])
    assert client.get_data(left)["scalar"].tolist() == [*range(10), *range(80, 90)]


def test_checkpoints_between_backends(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    """What is saved here is loaded by a system of SimpleStorage, and the other way round."""
    config = {"settings": Settings.from_config(SIMPLE).to_json()}
    large = put_all_kinds(client)
    save(client, tmp_path / "here", meanwhile=lambda: client.clear_partition("large"))
    other = start_local(f"other-{uuid.uuid4().hex[:8]}", config)
    try:
        with tq.TransferQueueClient(other) as elsewhere:
            load(elsewhere, tmp_path / "here")
            assert_all_kinds(elsewhere, large)
            elsewhere.put(mixed(7), partition_id="more")
            save(elsewhere, tmp_path / "there")
    finally:
        other.stop()
    load(client, tmp_path / "there")
    assert_all_kinds(client, large)
    assert_same(client.get_data(found_in(client, "more", list(mixed(7).keys()))), mixed(7))


def test_a_checkpoint_without_space(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    """It must fit beside what there is; where it does not, nothing of it stays."""
    block = TensorDict({"x": torch.rand(8, MIB)}, batch_size=8)  # 32 MiB
    metas = [client.put(block, partition_id="p", timeout=SECONDS) for _ in range(4)]
    tq.save_checkpoint(tmp_path / "full")
    before = leased(client)
    with pytest.raises(CapacityError):
        tq.load_checkpoint(tmp_path / "full")
    until(lambda: leased(client) == before, "what was written of the checkpoint is freed")
    assert torch.equal(client.get_data(metas[3], layout="dense")["x"], block["x"])


def test_a_store_that_dies_in_the_middle_of_a_save(
    case: Case, client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save fails in words, and the checkpoint before it stays as it was."""
    if not case.owner:
        return  # as below
    data = mixed(12)
    client.put(data, partition_id="p")
    tq.save_checkpoint(tmp_path / "one")
    lost = client.put(data, partition_id="q")
    pieces = StoredBlocks.pieces

    def killing(self: StoredBlocks, offset: Any, nbytes: Any) -> Iterator[list[memoryview]]:
        kill(case.owner)
        return pieces(self, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(StoredBlocks, "pieces", killing)
        with pytest.raises(CheckpointError, match=f"missing in the store of storage unit {case.unit}"):
            tq.save_checkpoint(tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    until(lambda: not client.check_production_status(["dense"], "p"), "what was lost is told")
    tq.save_checkpoint(tmp_path / "two")
    client.put(data, metadata=lost)
    tq.load_checkpoint(tmp_path / "one")
    assert client.get_partition_list() == ["p"]
    assert_same(client.get_data(found_in(client, "p", list(data.keys()))), data)
    tq.load_checkpoint(tmp_path / "two")
    assert not client.check_production_status(["dense"], "p")


# ---------------------------------------------------------------- deaths

WRITER = """
    import sys, torch, transfer_queue as tq
    from tensordict import TensorDict
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(1000)}, batch_size=1000), partition_id="p")
    print("put", flush=True)
    while True:
        client.put(TensorDict({"x": torch.rand(8, 100000)}, batch_size=8), partition_id="q")
"""


def test_a_killed_writer(client: tq.TransferQueueClient) -> None:
    writer = python(WRITER)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "put\n"
    until(lambda: "q" in client.get_partition_list(), "the writer goes on")
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    meta = client.get_meta(["x"], None, "p", mode="force_fetch", task_name="t")
    assert client.get_data(meta)["x"].tolist() == list(range(1000))


def test_a_forked_child(case: Case, client: tq.TransferQueueClient) -> None:
    """Libraries of stores do not work in one: it is told so, and does not hang."""
    meta = client.put(TensorDict({"x": torch.arange(6)}, batch_size=6), partition_id="p")
    assert client.get_data(meta)["x"].tolist() == list(range(6))
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)
            said = str(client.get_data(meta)["x"].tolist())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        said = file.read()
    os.waitpid(child, 0)
    if case.library:
        assert said.startswith("StartError: ")
        assert "spawn" in said
    else:
        assert said == str(list(range(6)))


@pytest.mark.parametrize("server", ["unit-0", "controller"])
def test_a_killed_server(client: tq.TransferQueueClient, server: str) -> None:
    data = mixed(20)
    meta = client.put(data, partition_id="p")
    kill(server)
    assert_same(client.get_data(meta), data)
    other = client.put(data, partition_id="p")
    assert_same(client.get_data(other), data)


def test_what_is_lost_with_its_owner_is_told(case: Case, client: tq.TransferQueueClient) -> None:
    if not case.owner:
        return  # the arena of a unit has no owner that could die: see test_a_killed_server
    data = mixed(12)
    metas = [client.put(data, partition_id="p") for _ in range(3)]
    assert_same(client.get_data(metas[0]), data)
    kill(case.owner)
    with pytest.raises(StorageKeyNotFoundError, match=f"lost with storage unit {case.unit}"):
        client.get_data(metas[0])
    until(lambda: not client.check_production_status(["dense"], "p"), "all that was lost is not produced any more")
    until(lambda: leased(client, case.unit) == 0, "lost blocks take no space")
    assert f"lost with storage unit {case.unit}" in client.explain("p", metas[2].global_indexes[0])
    client.put(data, metadata=metas[1])
    assert_same(client.get_data(metas[1]), data)
