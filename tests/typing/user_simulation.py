"""Code of users who test their own against the simulated system, checked by mypy --strict and pyright; never run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import assert_type

import transfer_queue as tq
from transfer_queue.client._generated_methods import GeneratedMethods
from transfer_queue.dataloader.streaming_dataset import chunk_batch_fn, default_fetch_batch_fn
from transfer_queue.sampler import BaseSampler, RankAwareSampler
from transfer_queue.testing import Client, Cluster, Task


class Longest(BaseSampler):
    """Those with the largest tag first."""

    def sample(
        self, ready_indexes: Sequence[int], batch_size: int, *args: Any, partition: Any = None, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        tags: Mapping[int, Mapping[str, Any]] = partition.get_custom_meta(ready_indexes)
        rows = sorted(ready_indexes, key=lambda row: -int(tags[row].get("length", 0)))[:batch_size]
        return rows, rows


def fetch(
    tq_client: GeneratedMethods,
    data_fields: Sequence[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: Mapping[str, Any],
    batch_index: int,
) -> tuple[TensorDictBase | None, tq.BatchMeta]:
    return default_fetch_batch_fn(
        tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index
    )


def process(data: TensorDictBase, meta: tq.BatchMeta, micro_batch_size: int) -> Iterator[TensorDictBase]:
    for part, _ in chunk_batch_fn(data, meta, micro_batch_size):
        yield part


def simulate(folder: Path) -> None:
    with Cluster(folder, seed=3, sampler=RankAwareSampler(), conf={"controller": {"polling_mode": True}}) as cluster:
        writer, reader = cluster.client("writer"), cluster.client("reader")
        assert_type(writer, Client)
        meta = writer.put(TensorDict({"x": torch.zeros(4)}, batch_size=[4]), partition_id="p", group_ids=[1, 1, 2, 2])
        assert_type(meta, tq.BatchMeta)
        task = reader.start(reader.operations.get_meta(["x"], 4, "p", task_name="t", timeout=5))
        assert_type(task, Task[tq.BatchMeta])
        cluster.later(1.0, lambda: writer.seal("p"))
        cluster.run()
        cluster.advance(5)
        if task.done:
            assert_type(task.result().global_indexes, list[int])
        rows = reader.get_data(meta, layout="padded", timeout=3)
        assert_type(rows, TensorDict)
        dataset = tq.StreamingDataset(
            reader, 4, 2, ["x"], "p", "train", 0, fetch_batch_fn=fetch, process_batch_fn=process
        )
        for _ in dataset:
            dataset.reset()
        reader.close()
        cluster.check()


async def awaited(client: tq.TransferQueueClient) -> None:
    keyed = await client.async_kv_batch_put(["k"], "p", {"x": [1]}, tags=[{"n": tq.DELETE}], timeout=2)
    assert_type(keyed, tq.KVBatchMeta)
    assert_type(await client.async_kv_retrieve_keys([0], "p"), list[str | None])
    assert_type(await client.async_check_consumption_status("t", "p"), bool)
    indexes, status = await client.async_get_production_status(["x"], "p")
    assert_type(indexes, torch.Tensor | None)
    assert_type(status, torch.Tensor | None)
