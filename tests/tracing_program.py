"""A program that puts a sample and knows nothing of OpenTelemetry."""

from __future__ import annotations

import atexit
import json
import sys
from pathlib import Path

import torch

import transfer_queue as tq


def put_one(partition: str, report: str) -> None:
    """Write into the report which modules of OpenTelemetry were imported when the put had ended."""
    tq.init(attach="require")
    tq.kv_put("a", partition, {"x": torch.zeros(4)})
    Path(report).write_text(json.dumps(sorted(name for name in sys.modules if name.startswith("opentelemetry"))))
    tq.close()
    atexit._run_exitfuncs()  # a forked process skips them
