"""A loader whose controller is killed and started again: a pause, and every row once."""

from __future__ import annotations

import pytest
from test_restarts import SECONDS, kill

import transfer_queue as tq
from server_processes import started
from simulated import numbers
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset

ROWS, BATCH, MICRO = 48, 4, 2


@pytest.mark.parametrize(("delivery", "workers"), [("at_most_once", 0), ("at_least_once", 1)])
def test_a_pause_and_every_row_once(delivery: str, workers: int) -> None:
    """The controller dies while a batch is held, while one is fetched ahead, and before the end is told."""
    with started("loader", controller={"sampler": "SequentialSampler"}) as config:
        client = tq.get_client()
        client.put(numbers(ROWS // 2), partition_id="p")
        dataset = StreamingDataset(
            config, BATCH, MICRO, ["x"], "p", "train", 0, delivery=delivery, lease_seconds=float(SECONDS)
        )
        seen: list[int] = []
        for count, (data, meta) in enumerate(StreamingDataLoader(dataset, num_workers=workers)):
            seen += data["x"].tolist()
            if delivery == "at_least_once":
                assert set(meta.deliveries) == {1}, "nothing was delivered before"
            if count in (2, 5, 8):
                kill()
            if count == 7:
                client.put(numbers(ROWS // 2, ROWS // 2), partition_id="p")
                client.seal("p")
                kill()
        assert sorted(seen) == list(range(ROWS))
        assert len(seen) == ROWS
        (progress,) = client.status().partitions[0].tasks
        assert (progress.consumed, progress.claimed, progress.consumed_ever) == (ROWS, 0, ROWS)
