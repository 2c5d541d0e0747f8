"""External stores on a Ray cluster of three nodes, each in a network namespace with an address of its own.

    make namespaces            needs root and the command `ip`; a few minutes

Each backend has a system on all three nodes, one after the other. A worker on one node puts values and a worker on
another gets them: 64 MiB and small rows, with the checksum of every value, beside a raw TCP stream of 64 MiB between
the same two namespaces. Then the store server of the second node is killed (kill -9) while workers write and read, and
then that of the first node, which has the master or the metastore. Every value must be read as it was put, or be named
as lost; the time until a loss is named is printed, and a new value must be readable from every node afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from network_namespaces import (
    SECONDS,
    Namespace,
    Process,
    end_at_signals,
    namespaces,
    obstacle,
    receive_raw,
    send_raw,
)

from transfer_queue.system_folder.paths import SystemFolder

MIB = 1 << 20
LARGE = 64 * MIB
TURNS = 9
SMALL_TURNS = 60
RAY_PORT = 6379
STORE_BYTES = 512 * MIB
BACKENDS: dict[str, dict[str, Any]] = {
    "SimpleStorage": {"SimpleStorage": {"arena_bytes": STORE_BYTES}},
    "MooncakeStore": {"MooncakeStore": {"master_server_address": "localhost:0", "global_segment_size": STORE_BYTES}},
    "Yuanrong": {
        "Yuanrong": {
            "worker_port": 0,
            "metastore_port": 0,
            "worker_args": f"--shared_memory_size_mb {STORE_BYTES // MIB} --node_timeout_s 4 --node_dead_timeout_s 8",
        }
    },
}


@contextlib.contextmanager
def ray_cluster(nodes: list[Namespace], folder: str) -> Iterator[str]:
    """A node of Ray's in each namespace; the address of the cluster."""
    started: list[subprocess.Popen[bytes]] = []
    address = f"{nodes[0].address}:{RAY_PORT}"
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        for node in nodes:
            head = node is nodes[0]
            place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false", f"--temp-dir={folder}/ray"]
            command = [
                sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2",
                f"--node-ip-address={node.address}", f"--object-store-memory={128 * MIB}",
                *(place if head else [f"--address={address}"]),
            ]  # fmt: skip
            with open(f"{folder}/node-{node.number}.log", "wb") as log:
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        preexec_fn=node.enter,
                        env=environment,
                        start_new_session=True,
                    )
                )
            until_up(started[-1], Path(log.name))
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for node in nodes:
            node.kill_processes()
        for process in started:
            process.wait()
        for left in Path(folder).glob("ray-*"):  # of systems whose supervisors were killed with all else
            SystemFolder(left).remove()


def until_up(process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until a node of Ray's is up. Two that start at once would take the same names of log files."""
    limit = time.monotonic() + SECONDS
    while "Ray runtime started" not in (said := log.read_text("utf-8", "replace")):
        assert process.poll() is None, said
        assert time.monotonic() < limit, said
        time.sleep(0.1)


# ---------------------------------------------------------------- the driver, a process in the first namespace


def connect(address: str) -> None:
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def start(backend: str, addresses: list[str]) -> list[str]:
    """Starts a system, and a worker on each node; what the nodes' stores say where they are."""
    import ray

    import transfer_queue as tq

    limit = time.monotonic() + SECONDS
    while len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) < len(addresses):
        assert time.monotonic() < limit, "nodes are missing"
        time.sleep(0.2)
    tq.init({
        "runtime": "ray", "timeouts": {"start": SECONDS}, "ray": {"restart_seconds": 5},
        "backend": {"storage_backend": backend, **BACKENDS[backend]},
    })  # fmt: skip
    ids = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    kind = ray.remote(num_cpus=0)(Worker)
    _workers[:] = [
        kind.options(scheduling_strategy=strategy(ids[address], soft=False)).remote() for address in addresses
    ]
    return [str(ray.get(worker.where.remote(), timeout=SECONDS)) for worker in _workers]


def stop() -> None:
    import ray

    import transfer_queue as tq

    for worker in _workers:
        ray.kill(worker)
    _workers.clear()
    tq.close()


def ask(at: int, what: str, *arguments: Any) -> Any:
    """What a worker answers."""
    import ray

    return ray.get(getattr(_workers[at], what).remote(*arguments), timeout=SECONDS)


def begin_ask(at: int, what: str, *arguments: Any) -> None:
    """Asks a worker, whose answer `end_ask` gives."""
    _asked.append(getattr(_workers[at], what).remote(*arguments))


def end_ask() -> Any:
    import ray

    return ray.get(_asked.pop(), timeout=SECONDS)


_workers: list[Any] = []
_asked: list[Any] = []


class Worker:
    """A process on some node, which finds the system by itself."""

    def where(self) -> str:
        import transfer_queue as tq

        return str({kind: its.options for kind, its in tq.get_client().storage_manager.system.stores.items()})

    def put_large(self, seed: int) -> tuple[Any, int, float]:
        """Metadata, checksum, and seconds."""
        import zlib

        import torch
        from tensordict import TensorDict

        import transfer_queue as tq

        values = torch.randint(0, 1 << 40, (16, LARGE // 128), generator=torch.Generator().manual_seed(seed))
        data = TensorDict({"x": values}, [16])
        client = tq.get_client()
        begun = time.perf_counter()
        meta = client.put(data, partition_id="large")
        seconds = time.perf_counter() - begun
        return meta, zlib.crc32(values.numpy()), seconds

    def get_large(self, meta: Any) -> tuple[int, float]:
        """Checksum, and seconds."""
        import zlib

        import transfer_queue as tq

        client = tq.get_client()
        begun = time.perf_counter()
        found = client.get_data(meta, layout="dense")["x"]
        seconds = time.perf_counter() - begun
        return zlib.crc32(found.contiguous().numpy()), seconds

    def put_small(self, seed: int) -> tuple[list[Any], float]:
        """Metadata of many puts of 64 rows of 3 x 64 float32, and the median of their seconds."""
        import torch
        from tensordict import TensorDict

        import transfer_queue as tq

        client, metas, taken = tq.get_client(), [], []
        for turn in range(SMALL_TURNS):
            data = TensorDict({"x": torch.full((64, 3, 64), float(seed + turn))}, [64])
            begun = time.perf_counter()
            metas.append(client.put(data, partition_id="small"))
            taken.append(time.perf_counter() - begun)
        return metas, statistics.median(taken)

    def get_small(self, metas: list[Any], seed: int) -> float:
        """The median of the seconds for each."""
        import transfer_queue as tq

        client, taken = tq.get_client(), []
        for turn, meta in enumerate(metas):
            begun = time.perf_counter()
            found = client.get_data(meta, layout="dense")["x"]
            taken.append(time.perf_counter() - begun)
            assert bool((found == seed + turn).all())
        return statistics.median(taken)

    def put_numbered(self, first: int, count: int) -> list[int]:
        """Puts 1 MiB under the key of each number; those whose puts succeeded."""
        import torch

        import transfer_queue as tq
        from transfer_queue.errors import CapacityError, ConnectionLostError

        done = []
        for number in range(first, first + count):
            with contextlib.suppress(ConnectionLostError, CapacityError):  # the store is down, or has less space
                tq.kv_put(str(number), "run", {"x": torch.full((1 << 17,), number)})
                done.append(number)
        return done

    def read_numbered(self, numbers: list[int]) -> dict[int, str]:
        """Which of these numbers are lost, and what the error of each says. All others are as they were put."""
        import transfer_queue as tq
        from transfer_queue.errors import ConnectionLostError, StorageKeyNotFoundError

        lost = {}
        limit = time.monotonic() + SECONDS / 2
        for number in numbers:
            while True:
                try:
                    got = tq.kv_batch_get([str(number)], "run")["x"]
                    assert bool((got.values() == number).all()), f"the value of {number} is not the one that was put"
                except StorageKeyNotFoundError as error:
                    if "lost with storage unit" not in str(error):
                        raise
                    lost[number] = str(error)
                except ConnectionLostError:  # the store cannot say yet
                    if time.monotonic() > limit:
                        raise
                    continue
                break
        return lost

    def servers(self) -> list[tuple[str, bool, int, int]]:
        """Address, whether it runs, process and number of ends of each store server."""
        import transfer_queue as tq

        return [(its.host, its.up, its.process, its.ends) for its in tq.get_client().status().stores]

    def lost_rows(self) -> int:
        """How many values the status names as lost."""
        import transfer_queue as tq

        return sum(field.lost for its in tq.get_client().status().partitions for field in its.fields)

    def clear(self, partition: str) -> None:
        import transfer_queue as tq

        tq.get_client().clear_partition(partition)


# ---------------------------------------------------------------- a store server is killed


def kill_server(driver: Process, nodes: list[Namespace], at: int, first: int) -> None:
    """Kills the store server of a node while the others write; checks all values, and that all goes on."""
    host, count = nodes[at].address, 12
    early = [driver.call(ask, worker, "put_numbered", first + 100 * worker, count) for worker in range(3)]
    pid = next(process for where, _, process, _ in driver.call(ask, 0, "servers") if where == host)
    before = {where: ends for where, _, _, ends in driver.call(ask, 0, "servers")}
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    driver.call(begin_ask, 1 if at != 1 else 2, "put_numbered", first + 300, count)
    told = wait(lambda: any(w == host and ends > before[w] for w, _, _, ends in driver.call(ask, 0, "servers")), begun)
    back = wait(lambda: all(up for _, up, _, _ in driver.call(ask, 0, "servers")), begun)
    during = driver.call(end_ask)
    numbers = [number for some in (*early, during) for number in some]
    lost = [driver.call(ask, worker, "read_numbered", numbers) for worker in range(3)]
    assert lost[0].keys() == lost[1].keys() == lost[2].keys()
    for said in lost[0].values():
        assert f"server on node {host}" in said, said
    assert driver.call(ask, 0, "lost_rows") >= len(lost[0])
    missed = set(lost[0]) | {first + 300 + n for n in range(count)} - set(during)
    for number in sorted(missed):  # lost values, and those whose puts have failed, are put again
        wait(lambda number=number: driver.call(ask, 2, "put_numbered", number, 1), begun)
    lost_again = driver.call(ask, 1, "read_numbered", [*numbers, *missed])
    assert not lost_again, f"put again: {sorted(missed)}; lost now: {lost_again}"
    driver.call(ask, 0, "clear", "run")
    print(
        f"  killed on {host}: reported after {told:.1f} s, all servers up after {back:.1f} s; of {len(numbers)} values "
        f"{len(lost[0])} lost and named, {count - len(during)} puts failed meanwhile; all put again and read",
        flush=True,
    )


def wait(condition: Callable[[], Any], begun: float) -> float:
    """Waits for a condition; the seconds since `begun`."""
    while not condition():
        assert time.monotonic() - begun < SECONDS
        time.sleep(0.05)
    return time.monotonic() - begun


# ---------------------------------------------------------------- the figures


def measure(driver: Process, nodes: list[Namespace]) -> dict[str, float]:
    """Medians in milliseconds of what goes from the second node to the third, raw streams in between."""
    sender, receiver = Process(nodes[1]), Process(nodes[2])
    sender.begin(send_raw, nodes[1].address, LARGE, TURNS)
    taken: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        taken.setdefault(name, []).append(seconds * 1e3)

    for turn in range(TURNS + 1):
        if turn:  # the first turn warms up
            note("raw", receiver.call(receive_raw, nodes[1].address, LARGE))
        meta, put, seconds = driver.call(ask, 1, "put_large", turn)
        for name in ("get", "again"):
            got, took = driver.call(ask, 2, "get_large", meta)
            assert got == put, "the value that was read is not the one that was put"
            if turn:
                note(name, took)
        if turn:
            note("put", seconds)
        driver.call(ask, 1, "clear", "large")
    for turn in range(3):
        metas, seconds = driver.call(ask, 1, "put_small", turn)
        took = driver.call(ask, 2, "get_small", metas, turn)
        if turn:
            note("small put", seconds)
            note("small get", took)
        driver.call(ask, 1, "clear", "small")
    sender.result()
    sender.end()
    receiver.end()
    return {name: statistics.median(each) for name, each in taken.items()}


def table(figures: dict[str, dict[str, float]]) -> str:
    """The figures as a table of Markdown."""
    lines = [
        "| | raw TCP | put 64 MiB | get from another node | again | put 64 x 3 x 64 float32 | get from another node |",
        "|---|---|---|---|---|---|---|",
    ]
    for backend, its in figures.items():
        rate = f"{its['get']:.0f} ({LARGE / its['get'] / 1e6:.2f} GB/s)"
        lines.append(
            f"| {backend} | {its['raw']:.0f} | {its['put']:.0f} | {rate} | {its['again']:.0f} | "
            f"{its['small put']:.1f} | {its['small get']:.1f} |"
        )
    return "\n".join(lines)


def each_backend(backends: list[str], nodes: list[Namespace], folder: str, run: Callable[[Process, str], None]) -> None:
    """Runs something with a system of each backend on all nodes."""
    for backend in backends:
        with ray_cluster(nodes, folder) as address:
            driver = Process(nodes[0])
            driver.call(connect, address)
            places = driver.call(start, backend, [node.address for node in nodes])
            for node, place in zip(nodes, places, strict=True):
                assert backend == "SimpleStorage" or node.address in place, f"{node.address} uses {place}"
            run(driver, backend)
            driver.call(stop)
            driver.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one; may be repeated")
    given = parser.parse_args()
    if obstacle():
        print(f"{obstacle()}: nothing was shown", file=sys.stderr)
        return 2
    end_at_signals()
    figures: dict[str, dict[str, float]] = {}

    def run(driver: Process, backend: str) -> None:
        print(f"{backend}:", flush=True)
        figures[backend] = measure(driver, nodes)
        for at in (1, 0) if backend != "SimpleStorage" else ():
            kill_server(driver, nodes, at, 1000 * at)

    with tempfile.TemporaryDirectory(prefix="tq-") as folder, namespaces(3) as nodes:
        os.environ["TQ_RUNTIME_DIR"] = folder
        # Ray's nodes and drivers share the token of this run, and not one that another program may change.
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        each_backend(given.backend or list(BACKENDS), nodes, folder, run)
    print("\nBetween two network namespaces of one machine, medians in milliseconds:\n")
    print(table(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
