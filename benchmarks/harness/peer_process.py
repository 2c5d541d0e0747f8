"""The peers: other systems, each measured by a process in its own environment (`tools/make_peers`)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PEERS = {"Ray": ("ray", "ray_store"), "TransferQueue 0.1.11": ("transferqueue", "old_queue")}
END_SECONDS = 60.0


class Peer:
    """The process of one peer, which is started at the first measurement."""

    def __init__(self, name: str) -> None:
        folder, module = PEERS[name]
        self._name = name
        self._command = [str(ROOT / ".peers" / folder / "bin" / "python"), "-m", f"benchmarks.peers.{module}"]
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, question: str, case: dict[str, Any]) -> dict[str, float] | None:
        """Return the figures of the peer; None if it does not support the case, or fails (with a message on stderr)."""
        if self._process is None:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("TQ_")}
            environment["PYTHONPATH"] = str(ROOT)  # also for the processes that Ray starts
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"question": question, **case}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "it ended"}
        if "error" in reply:
            print(f"{self._name} cannot answer {question} {str(case)[:80]}: {reply['error']}", file=sys.stderr)
            if not line:
                self.close()
        figures: dict[str, float] | None = reply.get("figures")
        return figures

    def close(self) -> None:
        """Ends it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.communicate(timeout=END_SECONDS)
            process.kill()
            process.wait()


@contextlib.contextmanager
def peers() -> Iterator[dict[str, Peer]]:
    """Yield all peers by name, and end their processes afterwards."""
    made = {name: Peer(name) for name in PEERS}
    try:
        yield made
    finally:
        for peer in made.values():
            peer.close()
