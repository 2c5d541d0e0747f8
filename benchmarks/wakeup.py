"""From a put's return in one process to the yield of a waiting loader in another.

    python benchmarks/wakeup.py

Prints median, 99th percentile and worst of the waits, beside an empty round trip to the controller in the same run,
and a JSON line. The clocks of the two processes are one clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time

import torch
from common import own_runtime_dir
from tensordict import TensorDict

BATCHES = 200
ROWS = 8


def consumer(pipe) -> None:
    """A waiting loader; sends the time of each yield."""
    import transfer_queue as tq

    dataset = tq.StreamingDataset(None, ROWS, ROWS, ["x", "y"], "wake", "train", 0)
    loader = tq.StreamingDataLoader(dataset)
    pipe.send("ready")
    for data, _ in loader:
        pipe.send((time.monotonic(), int(data["y"][0])))


def main() -> None:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        own_runtime_dir(folder)
        import transfer_queue as tq

        tq.init()
        client = tq.get_client()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=consumer, args=(theirs,), daemon=True)
        child.start()
        ours.recv()
        waits = []
        for i in range(BATCHES):
            while not any(t.waiting for p in client.status().partitions for t in p.tasks) and i:
                pass  # the next wait must have begun; this asks the controller, and does not sleep
            values = TensorDict({"x": torch.randn(ROWS, 64), "y": torch.full((ROWS,), i)}, batch_size=[ROWS])
            client.put(values, partition_id="wake")
            returned = time.monotonic()
            yielded, which = ours.recv()
            assert which == i
            waits.append((yielded - returned) * 1e3)
        trips = []
        for _ in range(500):
            start = time.monotonic()
            client.get_partition_list()
            trips.append((time.monotonic() - start) * 1e3)
        client.seal("wake")
        child.join(20)
        tq.close()
    waits, trips = sorted(waits), sorted(trips)
    result = {
        "wait_ms_median": waits[len(waits) // 2], "wait_ms_p99": waits[int(len(waits) * 0.99)],
        "wait_ms_worst": waits[-1], "round_trip_ms_median": trips[len(trips) // 2],
    }  # fmt: skip
    print("\n".join(f"{name:24} {value:.3f}" for name, value in result.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
