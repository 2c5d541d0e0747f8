"""Code as users write it, checked by mypy --strict and pyright under `make types`; it is never run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from typing_extensions import assert_type

import transfer_queue as tq
from transfer_queue.sampler import BaseSampler
from transfer_queue.utils.logging_utils import get_logger

logger = get_logger(__name__)


def start_and_stop() -> None:
    config = tq.init({"controller": {"polling_mode": True}})
    tq.init(config)
    assert_type(tq.get_live_address(), str | None)
    assert_type(tq.get_metrics_endpoint(), str | None)
    assert_type(tq.close(), None)
    assert_type(tq.__version__, str)


def key_value() -> None:
    meta = tq.kv_put("a", "train_0", fields={"x": torch.zeros(3)}, tag={"n": 1, "old": tq.DELETE})
    assert_type(meta, tq.KVBatchMeta)
    assert_type(meta.keys, list[str])
    tq.kv_batch_put(["a", "b"], "train_0", fields=TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2]))
    assert_type(tq.kv_batch_get("a", "train_0", select_fields="x"), TensorDict)
    assert_type(tq.kv_batch_get_by_meta(meta), TensorDict)
    for tags in tq.kv_list("train_0").values():
        for key, tag in tags.items():
            assert_type(key, str)
            assert_type(tag, dict[str, Any])
    assert_type(tq.kv_list(where={"n": 1}), dict[str, dict[str, dict[str, Any]]])
    tq.kv_clear(["a"], "train_0")


def updates_and_locks() -> None:
    changed = tq.kv_update("a", "train_0", "n", lambda old: {"n": old["n"] + 1}, empty={"n": 0}, tag={"step": 1})
    assert_type(changed, dict[str, Any] | None)
    tq.kv_update("a", "train_0", ["n"], lambda old: None, timeout=5)
    with tq.kv_lock(["a", "b"], "train_0", timeout=10, lease=30) as lock:
        assert_type(lock, tq.KVLock)
        assert_type(lock.token, int)
        assert_type(lock.held, bool)
        tq.kv_put("a", "train_0", {"n": 1}, fence=lock)
        tq.kv_batch_put(["a", "b"], "train_0", tags=[{}, {}], fence=lock.token)
    assert_type(tq.kv_lock_list(), list[tq.LockEntry])
    assert_type(tq.kv_lock_list("train_0")[0].held, bool)


async def updates_and_locks_in_a_loop() -> None:
    async with tq.async_kv_lock("a", "train_0") as lock:
        changed = await tq.async_kv_update("a", "train_0", "n", lambda old: old, fence=lock)
        assert_type(changed, dict[str, Any] | None)
    async with tq.kv_lock("a", "train_0"):
        assert_type(await tq.async_kv_lock_list(), list[tq.LockEntry])


def waits(run: Any) -> None:
    client = tq.get_client()
    assert_type(client.status().verdict, tq.Verdict)
    assert_type(client.verdict().stage, str | None)
    assert_type(client.stats(), dict[str, float])
    with tq.SummaryLogger(run, every=10.0) as logger, tq.SummaryLogger(log_dir="runs/x"):
        assert_type(logger.log(3), dict[str, float])


def changes() -> None:
    client = tq.get_client()
    change = client.wait_for_change("train_0", where={"status": "ready"}, timeout=5)
    assert_type(change, tq.PartitionChange)
    while change and not change.dropped:
        assert_type(change.keys, list[str | None])
        change = client.wait_for_change("train_0", change.version)
    for event in client.subscribe("train_0", {"status": "ready"}, since=change.version):
        assert_type(event, tq.SampleChange)
        assert_type(event.tag, dict[str, Any])


async def changes_awaited() -> None:
    client = tq.get_client()
    assert_type(await client.async_wait_for_change("train_0"), tq.PartitionChange)
    async for event in client.async_subscribe("train_0"):
        assert_type(event.global_index, int)


async def key_value_awaited() -> None:
    meta = await tq.async_kv_put("a", "train_0", tag={"n": 1})
    assert_type(meta, tq.KVBatchMeta)
    assert_type(await tq.async_kv_batch_get(["a"], "train_0"), TensorDict)


def metadata() -> None:
    client = tq.get_client()
    assert_type(client, tq.TransferQueueClient)
    meta = client.put(TensorDict({"x": torch.zeros(2)}, batch_size=[2]), partition_id="train_0")
    assert_type(meta, tq.BatchMeta)
    assert_type(meta.global_indexes, list[int])
    for part in meta.chunk(2):
        client.put(TensorDict({"y": torch.zeros(part.size)}, batch_size=[part.size]), metadata=part)
    wanted = client.get_meta(["x", "y"], 2, "train_0", task_name="train", sampling_config={"dp_rank": 0})
    assert_type(client.get_data(wanted), TensorDict)
    assert_type(client.check_production_status(["x"], "train_0"), bool)
    client.clear_samples(meta)


async def metadata_awaited() -> None:
    client = tq.get_client()
    meta = await client.async_get_meta(["x"], None, "train_0", mode="force_fetch")
    assert_type(await client.async_get_data(meta), TensorDict)


def whole_batch(data: TensorDict, meta: tq.BatchMeta, micro_batch_size: int) -> Iterator[tuple[TensorDict, int]]:
    yield data, meta.size


def loader(config: DictConfig) -> None:
    dataset = tq.StreamingDataset(config, 8, 4, ["x"], "train_0", "train", 0, process_batch_fn=whole_batch)
    for _ in tq.StreamingDataLoader(dataset):
        logger.info("a micro-batch")
    dataset.reset()
    dataset.step("train_1")


class Newest(BaseSampler):
    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        rows = list(ready_indexes)[-batch_size:]
        return rows, rows


def errors() -> None:
    try:
        tq.init({"controller": {"sampler": Newest}})
    except tq.StartError as error:
        assert_type(error, tq.StartError)
    except (tq.StorageKeyNotFoundError, tq.WaitTimeoutError) as error:
        logger.warning("%s", error)
