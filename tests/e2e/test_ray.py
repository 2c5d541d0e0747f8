"""The Ray runtime: one cluster of this machine for all tests, and drivers in processes of their own."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

import transfer_queue as tq
from tests.server_processes import (  # Ray imports this module in workers, which find only this path
    server_process,
    until,
)
from transfer_queue.attachment import CURRENT
from transfer_queue.system_folder.paths import runtime_dir

SECONDS = 120.0
NAMED = "TransferQueueController"


def numbers(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count)}, [count])


def keys(count: int) -> list[str]:
    return [f"k{number}" for number in range(count)]


def read(count: int, partition: str = "p") -> list[int]:
    return list(tq.kv_batch_get(keys(count), partition)["x"].tolist())


def actor(name: str = NAMED, namespace: str = "transfer_queue") -> Any:
    """The handle, None where there is none."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def call(method: str, *arguments: object, name: str = NAMED) -> Any:
    return ray.get(getattr(actor(name), method).remote(*arguments), timeout=SECONDS)


def _is_of_python(process: psutil.Process) -> bool:
    """Whether it is one of those that multiprocessing keeps until its process ends, or has ended."""
    try:
        return any(part.startswith("from multiprocessing") for part in process.cmdline())
    except psutil.Error:
        return True


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """Its address. Its workers find this module, as a driver's script would be found."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        ray.init(
            address="local", num_cpus=2, resources={"accelerator": 1}, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip
    yield ray.get_runtime_context().gcs_address
    processes = [process for process in psutil.Process().children(recursive=True) if not _is_of_python(process)]
    ray.shutdown()
    for process in psutil.wait_procs(processes, timeout=SECONDS)[1]:  # workers end once they miss their raylet
        with contextlib.suppress(psutil.Error):
            process.kill()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """After a test no system lies in the runtime folder."""
    yield
    tq.close()
    until(lambda: not list(runtime_dir().iterdir()), "files of a system were left")
    assert "TQ_ADDRESS" not in os.environ


class Driver:
    """Another driver of the cluster. Its program has printed "ready", and waits until `end` is called."""

    def __init__(self, address: str, program: str, folder: Path) -> None:
        script = folder / "driver.py"
        script.write_text(textwrap.dedent(program))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "RAY_ADDRESS": address},
        )
        lines = []
        for line in self.process.stdout:
            if line == "ready\n":
                return
            lines.append(line)
        raise AssertionError("".join(lines))

    def end(self) -> str:
        """Let the program go on to its end, and return what it has printed since."""
        said, _ = self.process.communicate("go\n", timeout=SECONDS)
        assert self.process.returncode == 0, said
        return said


@ray.remote(num_cpus=0)
def reader(count: int) -> tuple[list[int], bool]:
    """A task of a worker, which never called `init`."""
    import transfer_queue

    return [*transfer_queue.kv_batch_get(keys(count), "p")["x"].tolist()], "transfer_queue" in sys.modules


@ray.remote(num_cpus=0)
class Worker:
    """An actor of a user's."""

    def start(self) -> tuple[int, bool]:
        """Calls `init`; the pid of the supervisor, and whether this process has started it."""
        system = self._system(tq.init({"timeouts": {"start": SECONDS}}))
        return system.description.pid, system.owned

    def _system(self, conf: object) -> Any:
        from transfer_queue.attachment import CURRENT

        return CURRENT.system

    def put(self, count: int) -> None:
        tq.kv_batch_put(keys(count), "p", numbers(count))

    def read_in_fork(self, count: int) -> list[int]:
        """What a forked child of this process reads."""
        torch.set_num_threads(1)
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(read(count)))
        child.start()
        assert ours.poll(SECONDS)
        found: list[int] = ours.recv()
        child.join()
        return found

    def close(self) -> None:
        tq.close()


def test_init_starts_an_actor_and_close_ends_it() -> None:
    conf = tq.init({"controller": {"polling_mode": True}, "mine": {"kept": 1}})
    assert conf.controller.polling_mode is True
    tq.kv_batch_put(keys(3), "p", numbers(3))
    assert read(3) == [0, 1, 2]
    told = call("get_config")
    assert (told.mine.kept, told.system.folder) == (1, conf.system.folder)
    assert tq.init({"other": 1}) == conf
    process = psutil.Process(call("process"))
    tq.close()
    assert actor() is None
    assert not Path(conf.system.folder).exists()
    psutil.wait_procs([process], timeout=SECONDS)
    assert not process.is_running()
    tq.init()  # and anew, under the same name
    assert tq.kv_list() == {}


@ray.remote(num_cpus=0)
def attached_with(conf: dict[str, Any]) -> tuple[Any, list[str]]:
    """Return the result of `init` with this conf in another process, and its warnings."""
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transfer_queue")
    logger.addHandler(handler)
    try:
        return tq.init(conf), told
    finally:
        logger.removeHandler(handler)
        tq.close()


def test_a_process_that_attaches_is_warned_about_settings_that_differ_from_its_conf() -> None:
    conf = tq.init({"controller": {"polling_mode": True}, "ray": {"detached": True}})
    try:
        found, told = ray.get(attached_with.remote({"controller": {"polling_mode": False}}), timeout=SECONDS)
        assert found == conf
        assert len(told) == 1
        assert "controller.polling_mode: requested false, in force true" in told[0]
        assert "started by pid" in told[0]
        with pytest.raises(tq.StartError, match="attach is 'never'"):
            tq.init(attach="never")
    finally:
        CURRENT.system.stop()


def test_workers_attach_by_themselves() -> None:
    """Tasks, actors, and the children that an actor forks, without `init`."""
    tq.init()
    worker = Worker.remote()
    ray.get(worker.put.remote(5), timeout=SECONDS)
    assert read(5) == list(range(5))
    assert ray.get(reader.remote(5), timeout=SECONDS) == ([0, 1, 2, 3, 4], True)
    assert ray.get(worker.read_in_fork.remote(5), timeout=SECONDS) == list(range(5))
    ray.get(worker.close.remote(), timeout=SECONDS)  # who has not started it only leaves
    assert read(5) == list(range(5))


def _child(pipe: Any) -> None:
    pipe.send(read(2))


def test_a_spawned_child_needs_no_ray() -> None:
    """As the worker of a DataLoader: it finds the system by what it inherits."""
    tq.init()
    tq.kv_batch_put(keys(2), "p", numbers(2))
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(theirs,))
    child.start()
    assert ours.poll(SECONDS)
    assert ours.recv() == [0, 1]
    child.join()


def test_of_those_that_start_at_once_one_starts_and_all_have_the_same() -> None:
    workers = [Worker.remote() for _ in range(3)]
    found = ray.get([worker.start.remote() for worker in workers], timeout=SECONDS)
    assert len({pid for pid, _ in found}) == 1
    assert sorted(owned for _, owned in found) == [False, False, True]
    ray.get(workers[0].put.remote(2), timeout=SECONDS)
    assert read(2) == [0, 1]
    tq.close()
    for worker in workers:
        ray.get(worker.close.remote(), timeout=SECONDS)
    assert actor() is None


def test_another_driver_attaches_and_leaves(cluster: str, tmp_path: Path) -> None:
    """By RAY_ADDRESS, without `ray.init`; a class of its script deals from then on."""
    tq.init({"controller": {"polling_mode": True}})
    tq.kv_batch_put(keys(4), "p", numbers(4))
    program = """
        import transfer_queue as tq

        class LastFirst(tq.BaseSampler):
            def sample(self, ready_indexes, batch_size, *args, **kwargs):
                chosen = list(reversed(list(ready_indexes)))[:batch_size]
                return chosen, chosen

        print(tq.init({"mine": 1}))
        import ray
        actor = ray.get_actor("TransferQueueController", namespace="transfer_queue")
        ray.get(actor.register_sampler.remote(LastFirst()))
        print("ready", flush=True)
        input()
        tq.close()
    """
    driver = Driver(cluster, program, tmp_path)
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").global_indexes == [3, 2]
    driver.end()
    assert read(4) == [0, 1, 2, 3]
    server_process("controller").kill()  # its next process has the same sampler
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").global_indexes == [1, 0]


def until_restarted(process: int) -> None:
    """Waits for the actor to have another process than this one."""
    handle = actor()

    def again() -> bool:
        try:
            return bool(ray.get(handle.process.remote(), timeout=SECONDS) != process)
        except ray.exceptions.RayError:
            return False

    until(again, "the actor was not restarted")


def test_a_killed_actor_is_restarted_and_takes_its_system_over() -> None:
    tq.init({"ray": {"restart_seconds": SECONDS}})
    tq.kv_batch_put(keys(3), "p", numbers(3))
    process = call("process")
    supervisor = ray.get(Worker.remote().start.remote(), timeout=SECONDS)[0]
    os.kill(process, signal.SIGKILL)
    tq.kv_batch_put(["late"], "p", numbers(1, 9))  # nobody needs the actor for that
    until_restarted(process)
    assert call("list_partitions") == ["p"]
    assert read(3) == [0, 1, 2]
    assert ray.get(Worker.remote().start.remote(), timeout=SECONDS) == (supervisor, False)
    ended = [psutil.Process(call("process")), psutil.Process(supervisor)]
    tq.close()
    assert not psutil.wait_procs(ended, timeout=SECONDS)[1]


def test_the_actor_writes_no_warning() -> None:
    """Ray prints what an actor writes to stderr on the terminal of the driver."""
    tq.init()
    written = Path(os.readlink(f"/proc/{call('process')}/fd/2")).read_text("utf-8")
    assert [line for line in written.splitlines() if "Warning" in line] == []


def test_init_says_that_another_system_holds_the_name(
    cluster: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The servers of a killed actor continue for `ray.restart_seconds`, but they are not found by name."""
    first = tq.init({"ray": {"restart_seconds": SECONDS}})
    tq.kv_batch_put(keys(3), "p", numbers(3))
    ray.kill(actor())
    until(lambda: actor() is None, "the name was not freed")
    program = """
        import os
        import transfer_queue as tq
        os.environ.pop("TQ_ADDRESS")  # of the process that started it
        print(tq.init())
        tq.kv_put("other", "q", {"x": 1})
        print("ready", flush=True)
        input()
        tq.close()
    """
    driver = Driver(cluster, program, tmp_path)
    starter = CURRENT.system.describe()
    assert list(tq.kv_list()) == ["p"]
    caplog.clear()
    second = tq.init()
    warnings = [record.getMessage() for record in caplog.records if record.name == "transfer_queue.interface"]
    assert warnings == [
        f"the system {starter} has lost its actor, and another system holds the name {NAMED}; init attaches to another "
        f"one or starts one"
    ]
    assert second.system.folder != first.system.folder
    assert list(tq.kv_list()) == ["q"]
    assert not Path(first.system.folder).exists()
    driver.end()


def test_init_says_that_the_actor_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    first = tq.init({"ray": {"restart_seconds": SECONDS}})
    tq.kv_batch_put(keys(3), "p", numbers(3))
    ray.kill(actor())
    until(lambda: actor() is None, "the name was not freed")
    assert tq.init().system.folder != first.system.folder
    assert f"has lost its actor {NAMED}, so it ends with its samples; init" in caplog.text
    assert list(tq.kv_list()) == []
    assert not Path(first.system.folder).exists()


def test_the_death_of_a_driver_ends_its_system(cluster: str, tmp_path: Path) -> None:
    program = """
        import transfer_queue as tq
        tq.init({"system": {"name": "lost"}, "ray": {"restart_seconds": 0.5}})
        print("ready", flush=True)
        input()
    """
    driver = Driver(cluster, program, tmp_path)
    assert call("list_partitions", name=f"{NAMED}-lost") == []
    driver.process.kill()
    driver.process.communicate()
    until(lambda: actor(f"{NAMED}-lost") is None, "the actor outlives its driver")


def test_a_detached_system_outlives_its_driver(cluster: str, tmp_path: Path) -> None:
    program = """
        import transfer_queue as tq
        tq.init({"ray": {"detached": True}})
        tq.kv_put("k0", "p", {"x": 7})
        tq.close()
        print("ready", flush=True)
        input()
    """
    Driver(cluster, program, tmp_path).end()
    assert tq.kv_batch_get("k0", "p")["x"].tolist() == [7]
    tq.close()
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    command = [sys.executable, "-W", "ignore", "-m", "transfer_queue.cli", "stop"]
    stopped = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.startswith("stopped: ")
    assert actor() is None


def test_what_ray_lacks_is_said() -> None:
    conf = {"ray": {"actor_options": {"resources": {"accelerator": 5}}}, "timeouts": {"start": 3}}
    with pytest.raises(tq.StartError, match=r"ask for 5 accelerator \(there are 1\): ask for less"):
        tq.init(conf)
    assert actor() is None
    conf["ray"]["actor_options"]["resources"]["accelerator"] = 1
    conf["timeouts"]["start"] = SECONDS
    tq.init(conf)
    assert ray.available_resources().get("accelerator", 0) == 0


class Broken(tq.BaseSampler):
    """One that the controller cannot make."""

    def __init__(self) -> None:
        raise ArithmeticError("made wrongly")

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        return [], []


def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    conf = OmegaConf.create({}, flags={"allow_objects": True})
    conf.controller = {"sampler": Broken}
    with pytest.raises(tq.StartError, match="made wrongly"):
        tq.init(conf)
    assert actor() is None


class Doubling(tq.BaseSampler):
    """One with an argument, which travels as an instance."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> tuple[list[int], list[int]]:
        chosen = [index for index in ready_indexes if index >= self.first][:batch_size]
        return chosen, chosen


def test_tasks_have_samplers_of_their_own() -> None:
    """An instance of the script and a name travel with the configuration; the system's sampler may be replaced."""
    conf = OmegaConf.create({"controller": {"polling_mode": True}}, flags={"allow_objects": True})
    conf.controller.task_samplers = {"second*": Doubling(2), "first": "SequentialSampler"}
    config = tq.init(conf)
    tq.kv_batch_put(keys(4), "p", numbers(4))
    client = tq.get_client()
    assert client.get_meta(["x"], 2, "p", task_name="second half").global_indexes == [2, 3]
    assert call("get_config").controller.task_samplers["second*"].first == 2
    call("register_sampler", Doubling(1))
    assert client.get_meta(["x"], 2, "p", task_name="first").global_indexes == [0, 1]
    assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == [1, 2]
    tq.StreamingDataset(config, 2, 2, ["x"], "p", "dataset", 0, sampler=tq.RankAwareSampler(dp_size=1))
    key = {"dp_rank": 0, "batch_index": 0}
    assert client.get_meta(["x"], 2, "p", task_name="dataset", sampling_config=key).global_indexes == [0, 1]


def test_a_sampler_that_cannot_be_used_is_refused() -> None:
    tq.init({"controller": {"polling_mode": True}})
    with pytest.raises(tq.SamplerError, match="made wrongly"):
        call("register_sampler", Broken)
    tq.kv_batch_put(keys(2), "p", numbers(2))
    assert tq.get_client().get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 1]


def test_a_registered_rank_sampler_that_forwards_by_position() -> None:
    class Forwarding(tq.RankAwareSampler):
        def sample(self, ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().sample(
                ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id, *args, **kwargs
            )

    tq.init()
    call("register_sampler", Forwarding())
    tq.kv_batch_put(keys(4), "p", numbers(4))
    client = tq.get_client()
    for rank, expected in [(0, [0, 1]), (1, [2, 3]), (0, [0, 1])]:
        meta = client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": rank, "batch_index": 0})
        assert meta.global_indexes == expected


def test_systems_side_by_side(cluster: str, tmp_path: Path) -> None:
    program = """
        import transfer_queue as tq
        tq.init({"system": {"name": "%s"}, "ray": {"namespace": "%s"}})
        tq.kv_put("k0", "p", {"x": %d})
        print("ready", flush=True)
        input()
        print(tq.kv_batch_get("k0", "p")["x"].tolist())
    """
    tq.init()
    tq.kv_put("k0", "p", {"x": 0})
    drivers = []
    for number, (name, namespace) in enumerate([("a", "transfer_queue"), ("a", "mine")]):
        folder = tmp_path / str(number)
        folder.mkdir()
        drivers.append(Driver(cluster, program % (name, namespace, number + 1), folder))
    assert [driver.end().strip() for driver in drivers] == ["[1]", "[2]"]
    assert tq.kv_batch_get("k0", "p")["x"].tolist() == [0]


def test_a_snapshot_in_pages() -> None:
    """Of more rows than fit into a page, with rows that are cleared, and a task that has consumed some."""
    tq.init({"controller": {"polling_mode": True}})
    count = 9000
    tq.kv_batch_put(keys(count), "p", numbers(count), [{"n": number} for number in range(count)])
    tq.kv_batch_put(["k7"], "p", TensorDict({"y": torch.ones(1)}, [1]))
    tq.kv_clear(["k3", "k8000"], "p")
    taken = tq.get_client().get_meta(["x"], 5000, "p", task_name="t").global_indexes
    snapshot = call("get_partition_snapshot", "p")
    assert snapshot.total_samples_num == count - 2
    assert snapshot.keys_mapping == {f"k{n}": n for n in range(count) if n not in (3, 8000)}
    assert snapshot.custom_meta[8999] == {"n": 8999}
    assert 3 not in snapshot.global_indexes
    x, y = (snapshot.field_name_mapping[name] for name in ("x", "y"))
    expected = torch.ones(count, dtype=torch.int8)
    expected[[3, 8000]] = 0
    assert torch.equal(snapshot.production_status[:, x], expected)
    assert snapshot.production_status[:, y].nonzero().tolist() == [[7]]
    assert snapshot.consumption_status["t"].nonzero().flatten().tolist() == taken
    assert call("get_partition_snapshot", "unknown") is None


def test_ray_that_was_shut_down_first(cluster: str, tmp_path: Path) -> None:
    program = """
        import ray, transfer_queue as tq
        ray.init()
        conf = tq.init({"system": {"name": "last"}})
        ray.shutdown()
        print("ready", flush=True)
        input()
        tq.close()
        import pathlib
        print(pathlib.Path(conf.system.folder).exists())
    """
    assert Driver(cluster, program, tmp_path).end().split()[-1] == "False"


def test_workers_find_a_local_system_where_ray_has_none() -> None:
    """By its name, as their node has it. What a worker found before, and has ended, is forgotten."""
    for start in (0, 5):
        conf = tq.init({"runtime": "local"})
        assert (actor(), Path(conf.system.folder).name) == (None, "default")
        tq.kv_batch_put(keys(2), "p", numbers(2, start))
        assert ray.get(reader.remote(2), timeout=SECONDS) == ([start, start + 1], True)
        tq.close()


@pytest.mark.parametrize("example", ["collocated", "streamed"])
def test_the_examples_learn(cluster: str, example: str) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "on_ray" / f"{example}.py"
    command = [sys.executable, "-W", "ignore", str(script), "--steps", "4"]
    environment = {**os.environ, "RAY_ADDRESS": cluster}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=2 * SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
    first, last = map(float, run.stdout.splitlines()[-1].removeprefix("reward: ").split(" -> "))
    assert last > first + 0.1
