"""The second process of the self-test: gets what the first has put, and compares it.

Started with the folder of the system. Reads jobs from stdin, a JSON line each ({"kind", "partition", "nbytes",
"seed"}), answers each on stdout ({"seconds", "wrong": fields}); ends with its stdin, and so with the first process.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    """Works until there are no more jobs."""
    from transfer_queue.cli.doctor import payload
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.node.launcher import find

    system = find(sys.argv[1])
    if system is None:
        sys.exit(f"no system runs in {sys.argv[1]}")
    with TransferQueueClient(system) as client:
        for line in sys.stdin:
            job = json.loads(line)
            wanted = payload.make(job["kind"], job["nbytes"], job["seed"])
            keys = payload.keys(wanted)
            start = time.perf_counter()
            got = client.kv_batch_get(keys, job["partition"], layout="dense")
            seconds = time.perf_counter() - start
            print(json.dumps({"seconds": seconds, "wrong": payload.differences(got, wanted)}), flush=True)
            del got


if __name__ == "__main__":
    main()
