"""From a put's return in one process to the event in another, and lists by tag over many keys.

    python benchmarks/watch.py

Prints median, 99th percentile and worst of the waits beside an empty round trip to the controller in the same run,
the time of `kv_list` of one key in a thousand and of all, and a JSON line. The clocks of the two processes are one
clock (CLOCK_MONOTONIC).
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time

from common import own_runtime_dir

CHANGES = 300
KEYS = 100_000
LISTS = 5


def follower(pipe) -> None:
    """Sends the time of each event."""
    import transfer_queue as tq

    for event in tq.get_client().subscribe("watch", {"status": "ready"}):
        pipe.send((time.monotonic(), event.key))


def measured(call) -> float:
    """Milliseconds of the best of some calls."""
    best = float("inf")
    for _ in range(LISTS):
        start = time.monotonic()
        call()
        best = min(best, (time.monotonic() - start) * 1e3)
    return best


def main() -> None:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        own_runtime_dir(folder)
        import transfer_queue as tq

        tq.init()
        client = tq.get_client()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=follower, args=(theirs,), daemon=True)
        child.start()
        waits, trips = [], []
        for i in range(CHANGES + 1):
            tq.kv_put(f"k{i}", "watch", tag={"status": "ready"})
            returned = time.monotonic()
            told, key = ours.recv()
            assert key == f"k{i}"
            waits.append(max(0.0, (told - returned) * 1e3))
            start = time.monotonic()  # meanwhile the follower asks anew
            client.get_partition_list()
            trips.append((time.monotonic() - start) * 1e3)
        client.clear_partition("watch")
        child.join(20)
        keys = [f"k{i}" for i in range(KEYS)]
        for first in range(0, KEYS, 10_000):
            part = range(first, first + 10_000)
            tags = [{"status": "ready" if i % 1000 == 0 else "running", "n": i} for i in part]
            tq.kv_batch_put(keys[first : first + 10_000], "list", tags=tags)
        where = {"status": "ready"}
        assert len(tq.kv_list("list", where=where)["list"]) == KEYS // 1000
        some, everything = measured(lambda: tq.kv_list("list", where=where)), measured(lambda: tq.kv_list("list"))
        tq.close()
    waits, trips = sorted(waits[1:]), sorted(trips)  # the first waited for the other process to start
    result = {
        "event_ms_median": waits[len(waits) // 2], "event_ms_p99": waits[int(len(waits) * 0.99)],
        "event_ms_worst": waits[-1], "round_trip_ms_median": trips[len(trips) // 2],
        f"list_{KEYS}_by_tag_ms": some, f"list_{KEYS}_ms": everything,
    }  # fmt: skip
    print("\n".join(f"{name:24} {value:.3f}" for name, value in result.items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
