"""Train with TRL through the queue: generators, rewards and the trainer run in separate processes, on any machine.

The trainer's process uses `TransferQueueRolloutWorker` (with `AsyncGRPOTrainer`) or `QueueRollouts` (as `rollout_func`
of `GRPOTrainer`). A generator's process runs `generate_rollouts` with an `Engine`, and a process of the reward stage
`score_rollouts`. Names are imported at their first use: generators and reward stages do not need TRL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue.integrations.trl.producers import Completion, Engine, generate_rollouts, score_rollouts
    from transfer_queue.integrations.trl.rollout_function import QueueRollouts
    from transfer_queue.integrations.trl.rollout_worker import TransferQueueRolloutWorker
    from transfer_queue.integrations.trl.transformers_engine import TransformersEngine

_WHERE = {
    "Completion": "producers",
    "Engine": "producers",
    "generate_rollouts": "producers",
    "score_rollouts": "producers",
    "QueueRollouts": "rollout_function",
    "TransferQueueRolloutWorker": "rollout_worker",
    "TransformersEngine": "transformers_engine",
}

__all__ = [
    "Completion",
    "Engine",
    "QueueRollouts",
    "TransferQueueRolloutWorker",
    "TransformersEngine",
    "generate_rollouts",
    "score_rollouts",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
