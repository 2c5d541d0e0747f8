"""The protocol of a peer: a request is a JSON line with a question and a case, the reply a line with figures or null.

The module runs in the peer's own environment, which does not have this package. `benchmarks.harness.payloads` and
`stages`, which both sides use, import nothing of the package.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PROCESSES = 2  # of a peer's clients; each takes five seconds of processor time to start


def threads(work: Callable[[int], float], count: int) -> float:
    """Return the sum of the results of `count` threads; each calls `work` with its number."""
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(work, range(count)))


def team(known: list[Any], kind: Any, count: int) -> list[Any]:
    """Return `count` actors that are ready: the known ones, and new ones, which take seconds to start."""
    import ray

    known += [kind.remote() for _ in range(count - len(known))]
    ray.get([other.ready.remote() for other in known])
    return known[:count]


def serve(answers: dict[str, Callable[..., dict[str, float] | None]]) -> None:
    """Answer requests until stdin ends. Prints of the peer go to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        case: dict[str, Any] = json.loads(line)
        question = case.pop("question")
        reply: dict[str, Any]
        try:
            reply = {"figures": answers[question](**case) if question in answers else None}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(reply), file=replies, flush=True)
