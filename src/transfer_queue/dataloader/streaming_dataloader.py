"""StreamingDataLoader: torch's DataLoader over a StreamingDataset, whose items are batches already."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from transfer_queue.dataloader.batch_fetcher import Batch
from transfer_queue.dataloader.pinned_memory import pinned
from transfer_queue.dataloader.streaming_dataset import Finish, Here, StreamingDataset
from transfer_queue.dataloader.worker_processes import Workers, begin_worker


def as_it_is(item: Any) -> Any:
    """The items of a StreamingDataset are micro-batches; nothing is left to collate."""
    return item


class _WorkerLoader(DataLoader):  # type: ignore[type-arg]
    """Torch's loader of whole batches, inside of a StreamingDataLoader."""

    def check_worker_number_rationality(self) -> None:
        """The outer loader has said it."""


class StreamingDataLoader(DataLoader):  # type: ignore[type-arg]
    """Yields what its dataset yields, the same sequence with any number of workers.

    Arguments are torch's. collate_fn is called with each item. Workers fetch whole batches ahead, and call
    process_batch_fn and collate_fn; the process that iterates cuts micro-batches, and owns the place: `reset`, `step`,
    `get_buffer` and `state_dict` are about what it has received. Without persistent_workers the workers end with the
    iteration. Batches that they had fetched, and that were not received, are asked for again by the next: a
    rank-consistent sampler gives the same ones, with other samplers they are lost.
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
        # torch is told only where it was asked for: newer ones warn of the argument
        self._device: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        self._workers: Workers | None = None  # that outlive an iteration
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **self._device,
        )

    def __iter__(self) -> Any:
        """Goes on where the last iteration was left. Workers start here, not with the first item."""
        self.dataset.check()
        self.dataset.learn_dp_size()
        pinning = self._can_pin()
        if not self.num_workers:
            return self.dataset.stream(Here(), self._finish(pinning))
        workers = self._workers
        if workers is None:
            workers = Workers(self.dataset, self.num_workers, self._collate(), lambda twin: self._loader(twin, pinning))
        if self.persistent_workers:
            self._workers = workers
        return self._received(workers, self._finish(pinning))

    def reset(self) -> None:
        """Goes back to the first batch of the buffer; what follows is what it keeps, then what is fetched."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Moves on to another partition; what was fetched is forgotten."""
        self.dataset.step(partition_id)
        self._direct()

    def get_buffer(self) -> list[Batch]:
        """The whole batches received, as far as the dataset keeps them."""
        return self.dataset.buffer

    def state_dict(self) -> dict[str, Any]:
        """The place: which item comes next, whatever workers have fetched ahead. See `StreamingDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes to a place that `state_dict` gave, also one of another number of workers."""
        self.dataset.load_state_dict(state_dict)
        self._direct()

    def _direct(self) -> None:
        """Tells workers that have outlived an iteration at once, so that they fetch no more of what was left."""
        if self._workers is not None:
            self._workers.direct(self.dataset, later=True)

    def _received(self, workers: Workers, finish: Finish | None) -> Iterator[Any]:
        try:
            yield from self.dataset.stream(workers, finish)
        except Exception:
            self._workers = None  # of the others nobody knows where they are
            workers.close()
            raise
        finally:
            if workers is not self._workers:
                workers.close()

    def _loader(self, dataset: StreamingDataset, pinning: bool) -> Any:
        return _WorkerLoader(
            dataset,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=as_it_is,
            pin_memory=pinning,
            worker_init_fn=functools.partial(begin_worker, self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor,
            **(self._device if pinning else {}),
        )

    def _collate(self) -> Finish | None:
        return None if self.collate_fn is as_it_is else self.collate_fn

    def _finish(self, pinning: bool) -> Finish | None:
        """What is done here with an item that no worker has made."""
        collate = self._collate()
        if collate is None:
            return pinned if pinning else None
        return (lambda item: pinned(collate(item))) if pinning else collate

    def _can_pin(self) -> bool:
        """Whether memory shall and can be pinned; a warning where it cannot, as torch gives it."""
        if not self.pin_memory:
            return False
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type == "mps":
            warnings.warn(
                "'pin_memory' argument is set as true but there is no accelerator for which memory is pinned; "
                "none will be",
                stacklevel=3,
            )
            return False
        return True
