"""Put in one process, get in another: rates against this machine's memcpy, in one run.

    python benchmarks/between_processes.py

Prints a table and a JSON line. Contents are verified byte for byte. Warm: the first round of each is not counted.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from common import memcpy_rate, own_runtime_dir
from tensordict import TensorDict

ROUNDS = 7
SHAPES = {
    "9 fields x 1024 x 8192 f32 (288 MiB)": (1024, 9, 8192),
    "5 fields x 8192 x 128 f32 (20 MiB)": (8192, 5, 128),
    "3 fields x 64 x 64 f32 (48 KiB)": (64, 3, 64),
}


def table_of(rows: int, fields: int, width: int) -> TensorDict:
    """Columns whose values tell field and row."""
    base = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    return TensorDict({f"f{i}": base + i for i in range(fields)}, batch_size=[rows])


def reader(pipe) -> None:
    """Gets what it is told to, and says how long each took and whether the bytes are right."""
    import transfer_queue as tq

    while True:
        job = pipe.recv()
        if job is None:
            return
        keys, partition, shape = job
        start = time.perf_counter()
        got = tq.kv_batch_get(keys, partition)
        seconds = time.perf_counter() - start
        want = table_of(*shape)
        right = all(torch.equal(got[f"f{i}"].values().view_as(want[f"f{i}"]), want[f"f{i}"]) for i in range(shape[1]))
        del got
        pipe.send((seconds, right))


def measure(name: str, shape: tuple[int, int, int], pipe, memcpy: float) -> dict[str, object]:
    """Medians of one shape."""
    import transfer_queue as tq

    rows, fields, width = shape
    values, keys = table_of(*shape), [f"k{i}" for i in range(rows)]
    nbytes = rows * fields * width * 4
    puts, gets = [], []
    for round_ in range(ROUNDS + 1):
        partition = f"{name}-{round_}"
        start = time.perf_counter()
        tq.kv_batch_put(keys, partition, values)
        put = time.perf_counter() - start
        pipe.send((keys, partition, shape))
        get, right = pipe.recv()
        assert right, "the reader got other bytes"
        tq.get_client().clear_partition(partition)
        if round_:
            puts.append(put)
            gets.append(get)
    put, get = statistics.median(puts), statistics.median(gets)
    return {
        "what": name, "put_ms": put * 1e3, "get_ms": get * 1e3,
        "put_of_memcpy": nbytes / put / memcpy, "get_of_memcpy": nbytes / get / memcpy,
    }  # fmt: skip


def small_puts(count: int = 3000) -> dict[str, object]:
    """Single-row puts a second from one client, three small fields each."""
    import transfer_queue as tq

    row = {"prompt": torch.arange(16), "score": torch.tensor(0.5), "mask": torch.ones(16)}
    put: Callable[[int], object] = lambda i: tq.kv_put(f"s{i}", "small", row, {"n": i})  # noqa: E731
    for i in range(200):
        put(i)
    start = time.perf_counter()
    for i in range(200, 200 + count):
        put(i)
    return {"what": "single-row puts", "a_second": count / (time.perf_counter() - start)}


def scattered(rows: int = 8192) -> dict[str, object]:
    """Get of rows that were put one by one."""
    import transfer_queue as tq

    values = table_of(rows, 5, 128)
    for i in range(rows):
        tq.kv_put(f"k{i}", "scattered", values[i : i + 1])
    keys = [f"k{i}" for i in range(rows)]
    times = []
    for _ in range(4):
        start = time.perf_counter()
        tq.kv_batch_get(keys, "scattered")
        times.append(time.perf_counter() - start)
    return {"what": f"get of {rows} rows x 5 x 128 f32 put one by one", "get_ms": statistics.median(times[1:]) * 1e3}


def main() -> None:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        own_runtime_dir(folder)
        import transfer_queue as tq

        tq.init()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=reader, args=(theirs,), daemon=True)
        child.start()
        memcpy = memcpy_rate()
        results = [measure(name, shape, ours, memcpy) for name, shape in SHAPES.items()]
        ours.send(None)
        child.join()
        results += [small_puts(), scattered()]
        tq.close()
    print(f"memcpy {memcpy / 1e9:.1f} GB/s, one thread")
    for result in results:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in result.items()))
    print(json.dumps({"memcpy_bytes_a_second": memcpy, "results": results}))


if __name__ == "__main__":
    main()
