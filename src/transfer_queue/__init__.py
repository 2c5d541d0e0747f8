"""TransferQueue: a streaming data system between the tasks of LLM post-training.

    import transfer_queue as tq

    tq.init()
    tq.kv_put(key="a", partition_id="train_0", fields={"prompt": torch.tensor([1, 2])})
    tq.close()

Names are imported at their first use (PEP 562) and are plain module attributes from then on: a process that only serves
metadata imports this package without torch. `_WHERE` has the module of each name.
"""

from __future__ import annotations

import errno
import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transfer_queue import errors
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.client.buffered_puts import BufferedPuts
    from transfer_queue.client.conversion.change_events import PartitionChange, SampleChange, SampleLoss
    from transfer_queue.client.key_lock import KVLock
    from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
    from transfer_queue.dataloader.streaming_dataset import StreamingDataset
    from transfer_queue.errors import StorageKeyNotFoundError, TransferQueueError
    from transfer_queue.interface import (
        async_kv_batch_get,
        async_kv_batch_get_by_meta,
        async_kv_batch_put,
        async_kv_clear,
        async_kv_list,
        async_kv_lock,
        async_kv_lock_list,
        async_kv_put,
        async_kv_update,
        close,
        get_client,
        get_live_address,
        get_metrics_endpoint,
        init,
        kv_batch_get,
        kv_batch_get_by_meta,
        kv_batch_put,
        kv_clear,
        kv_list,
        kv_lock,
        kv_lock_list,
        kv_put,
        kv_update,
        load_checkpoint,
        save_checkpoint,
    )
    from transfer_queue.messages.locks import LockEntry
    from transfer_queue.messages.reports.timeline import Verdict
    from transfer_queue.metadata import BatchMeta, KVBatchMeta
    from transfer_queue.queues import LifoQueue, PriorityQueue, Queue
    from transfer_queue.sampler import (
        BaseSampler,
        FreshnessSampler,
        GRPOGroupNSampler,
        PrioritySampler,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
        TokenBudgetSampler,
    )
    from transfer_queue.storage.arena.arena_views import is_view
    from transfer_queue.summary_logger import SummaryLogger, log_stats
    from transfer_queue.wire.objects.object_values import DELETE

__version__ = "0.2.0"  # the only definition; pyproject.toml reads it here

__all__ = [
    "DELETE",
    "BaseSampler",
    "BatchMeta",
    "BufferedPuts",
    "FreshnessSampler",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "KVLock",
    "LifoQueue",
    "LockEntry",
    "PartitionChange",
    "PriorityQueue",
    "PrioritySampler",
    "Queue",
    "RankAwareSampler",
    "SampleChange",
    "SampleLoss",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "SummaryLogger",
    "TokenBudgetSampler",
    "TransferQueueClient",
    "TransferQueueError",
    "Verdict",
    "__version__",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_lock",
    "async_kv_lock_list",
    "async_kv_put",
    "async_kv_update",
    "close",
    "errors",
    "get_client",
    "get_live_address",
    "get_metrics_endpoint",
    "init",
    "is_view",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_lock",
    "kv_lock_list",
    "kv_put",
    "kv_update",
    "load_checkpoint",
    "log_stats",
    "save_checkpoint",
]

# The modules of names that are not functions of `interface`.
_WHERE = {
    "BaseSampler": "sampler",
    "BatchMeta": "metadata",
    "BufferedPuts": "client.buffered_puts",
    "DELETE": "wire.objects.object_values",
    "FreshnessSampler": "sampler",
    "GRPOGroupNSampler": "sampler",
    "KVBatchMeta": "metadata",
    "KVLock": "client.key_lock",
    "LifoQueue": "queues",
    "LockEntry": "messages.locks",
    "PartitionChange": "client.conversion.change_events",
    "PriorityQueue": "queues",
    "PrioritySampler": "sampler",
    "Queue": "queues",
    "RankAwareSampler": "sampler",
    "SampleChange": "client.conversion.change_events",
    "SampleLoss": "client.conversion.change_events",
    "SeqlenBalancedSampler": "sampler",
    "SequentialSampler": "sampler",
    "StorageKeyNotFoundError": "errors",
    "StreamingDataLoader": "dataloader.streaming_dataloader",
    "StreamingDataset": "dataloader.streaming_dataset",
    "SummaryLogger": "summary_logger",
    "TokenBudgetSampler": "sampler",
    "TransferQueueClient": "client",
    "TransferQueueError": "errors",
    "Verdict": "messages.reports.timeline",
    "is_view": "storage.arena.arena_views",
    "log_stats": "summary_logger",
}

# Names that work but that `dir()`, completion and the reference do not show. All exceptions work, too; they are shown
# in `errors`.
_NOT_SHOWN = {"AsyncTransferQueueClient": "client", "consumed_by": "client.conversion.arguments"}

# Modules that users reach as attributes of the package, without importing them.
_MODULES = frozenset(
    {"client", "controller", "dataloader", "errors", "interface", "metadata", "queues", "sampler", "utils"}
)


def _find(name: str) -> Any:
    """Return the object of a public name. Imports its module."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in __all__:
        module = _WHERE.get(name, "interface")
    else:
        module = "errors" if name.endswith("Error") else _NOT_SHOWN.get(name, "")
    owner = importlib.import_module(f"{__name__}.{module}") if module else None
    if not hasattr(owner, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(owner, name)


def __getattr__(name: str) -> Any:
    try:
        value = _find(name)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        # no module that has more to say can be imported
        advice = f"this process has reached its open-file limit of {os.sysconf('SC_OPEN_MAX')}: raise `ulimit -n`"
        raise OSError(error.errno, f"transfer_queue.{name} cannot be imported: {error.strerror}; {advice}") from error
    # From now on it is a plain attribute, which code may replace and restore.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
