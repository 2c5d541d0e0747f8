"""StreamingDataLoader: torch's DataLoader over a StreamingDataset, whose items are batches already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from transfer_queue.dataloader.streaming_dataset import Batch, StreamingDataset


def _as_it_is(item: Any) -> Any:
    """The items of a StreamingDataset are micro-batches; nothing is left to collate."""
    return item


class StreamingDataLoader(DataLoader):  # type: ignore[type-arg]
    """Yields what its dataset yields.

    Arguments are torch's. collate_fn is called with each item. `reset`, `step` and `get_buffer` are the dataset's.
    """

    dataset: StreamingDataset

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        if num_workers:
            dataset.share()
        # torch is told only where it was asked for: newer ones warn of the argument
        device: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **device,
        )

    def reset(self) -> None:
        """The next iteration replays what was fetched, then goes on fetching."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Moves on to another partition; what was fetched is forgotten."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """The whole batches fetched."""
        return self.dataset.buffer
