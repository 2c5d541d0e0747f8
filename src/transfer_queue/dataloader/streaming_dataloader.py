"""StreamingDataLoader: torch's DataLoader over a StreamingDataset, whose items are already batches."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from transfer_queue.dataloader.async_iteration import AsyncItems
from transfer_queue.dataloader.batch_fetcher import Batch
from transfer_queue.dataloader.streaming_dataset import Finish, LocalSource, StreamingDataset
from transfer_queue.dataloader.worker_processes import Workers, begin_worker, pin
from transfer_queue.errors import InvalidArgumentError


def identity(item: Any) -> Any:
    """Return the item. The items of a StreamingDataset are micro-batches, so nothing is left to collate."""
    return item


class _WorkerLoader(DataLoader):  # type: ignore[type-arg]
    """Torch's loader of whole batches, inside a StreamingDataLoader."""

    def check_worker_number_rationality(self) -> None:
        """Do nothing, because the outer loader has already warned."""


class StreamingDataLoader(DataLoader):  # type: ignore[type-arg]
    """Yield the items of a StreamingDataset, in the same order with any number of workers.

    The arguments are those of torch's DataLoader. Workers fetch whole batches ahead, and call `process_batch_fn` and
    `collate_fn`. The process that iterates cuts micro-batches and owns the position: `reset`, `step`, `get_buffer` and
    `state_dict` concern what it has received. Without `persistent_workers` the workers end with the iteration. Batches
    that they had fetched and of which no item was yielded go back: their samples are fetched again, by the next
    iteration or by another consumer. A rank-consistent sampler returns the same batches.

    `async for` yields the same items and does not block the event loop (docs/guides/notebooks.md). A cancelled wait
    loses no samples, and the same iterator continues it. Leaving the loop early keeps workers until the iterator is
    deleted; `contextlib.aclosing(aiter(loader))` ends them at once.

    Args:
        dataset: The dataset.
        num_workers: The number of worker processes; 0 fetches in this process. Default: 0.
        collate_fn: A function that is called with each item. Default: items are not changed.
        pin_memory: True to return items in page-locked memory, if there is an accelerator. Default: False.
        worker_init_fn: A function that each worker calls first, with its number. Default: none.
        multiprocessing_context: How workers are started; see torch's DataLoader. Default: torch's default.
        prefetch_factor: The number of batches that each worker fetches ahead. Default: 2.
        persistent_workers: True to keep the workers after an iteration. Default: False.
        pin_memory_device: The device for which memory is page-locked. Default: the accelerator.

    Example:
        >>> put = client.kv_batch_put(["a", "b"], "train_0", {"reward": torch.tensor([0.0, 1.0])})
        >>> client.seal("train_0")
        >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
        >>> for data, meta in tq.StreamingDataLoader(dataset):
        ...     print(data["reward"].tolist())
        [0.0]
        [1.0]
        >>> dataset.reset()
        >>> async for data, meta in tq.StreamingDataLoader(dataset):
        ...     print(data["reward"].tolist())
        [0.0]
        [1.0]
    """

    dataset: StreamingDataset
    """The dataset that it iterates over."""

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
        # the argument is passed only if it was given, because newer versions of torch warn about it
        self._device: dict[str, Any] = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        self._workers: Workers | None = None  # that outlive an iteration
        if dataset.device is not None and (num_workers or pin_memory):
            raise InvalidArgumentError(
                f"the dataset brings its items to {dataset.device} itself; leave out "
                f"{'num_workers, because worker processes cannot use it' if num_workers else 'pin_memory'}"
            )
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or identity,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **self._device,
        )

    def __iter__(self) -> Any:
        """Continue where the last iteration stopped. Workers start here, not with the first item."""
        self.dataset.check()
        self.dataset.learn_dp_size()
        pinning = self._can_pin()
        if not self.num_workers:
            return self.dataset.stream(LocalSource(), self._finish(pinning))
        workers = self._workers_for(pinning)
        workers.start(self.dataset)
        return self._receive_items(workers, self._finish(pinning))

    def __aiter__(self) -> AsyncItems:
        """Continue where the last iteration stopped, in an event loop.

        Workers start with the first wait, which finds the number of ranks before that.
        """
        self.dataset.check()
        pinning = self._can_pin()
        if not self.num_workers:
            return self.dataset.async_stream(LocalSource(), self._finish(pinning))
        workers = self._workers_for(pinning)
        return self.dataset.async_stream(
            workers, self._finish(pinning), lambda failed: self._end_workers(workers, failed)
        )

    def reset(self) -> None:
        """Go back to the first batch of the buffer. The buffered batches are replayed before new ones are fetched.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> tq.StreamingDataLoader(dataset).reset()
        """
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Continue with another partition, from its first batch. The buffer is emptied.

        Args:
            partition_id: The partition.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> tq.StreamingDataLoader(dataset).step("train_1")
            >>> dataset.partition_id
            'train_1'
        """
        self.dataset.step(partition_id)
        self._direct()

    def get_buffer(self) -> list[Batch]:
        """Return the whole batches that were received and are kept.

        Returns:
            The list `dataset.buffer` of (TensorDict, BatchMeta).

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> tq.StreamingDataLoader(dataset).get_buffer()
            []
        """
        return self.dataset.buffer

    def state_dict(self) -> dict[str, Any]:
        """Return the position: which item is next. See `StreamingDataset.state_dict`.

        Returns:
            The position, a small dict of plain values.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> tq.StreamingDataLoader(dataset).state_dict()["batch_index"]
            0
        """
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a position, also one that was saved with another number of workers.

        Args:
            state_dict: What `state_dict` returned.

        Raises:
            InvalidArgumentError: See `StreamingDataset.load_state_dict`.

        Example:
            >>> dataset = tq.StreamingDataset(None, 2, 1, ["reward"], "train_0", "update", dp_rank=0)
            >>> loader = tq.StreamingDataLoader(dataset)
            >>> loader.load_state_dict(loader.state_dict())
        """
        self.dataset.load_state_dict(state_dict)
        self._direct()

    def _direct(self) -> None:
        """Send persistent workers to the new position at once, so that they stop fetching for the old one."""
        if self._workers is not None:
            self._workers.direct(self.dataset, later=True)

    def _receive_items(self, workers: Workers, finish: Finish | None) -> Iterator[Any]:
        failed = False
        try:
            yield from self.dataset.stream(workers, finish)
        except Exception:
            failed = True
            raise
        finally:
            self._end_workers(workers, failed)

    def _workers_for(self, pinning: bool) -> Workers:
        """Return the workers that persist, or new ones."""
        workers = self._workers
        if workers is None:
            workers = Workers(self.num_workers, self._collate(), lambda twin: self._loader(twin, pinning))
        if self.persistent_workers:
            self._workers = workers
        return workers

    def _end_workers(self, workers: Workers, failed: bool) -> None:
        """End the workers at the end of an iteration, unless they persist."""
        if failed:
            self._workers = None  # the position of the other workers is not known
        if workers is not self._workers:
            workers.close()

    def _loader(self, dataset: StreamingDataset, pinning: bool) -> Any:
        return _WorkerLoader(
            dataset,
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=identity,
            pin_memory=pinning,
            worker_init_fn=functools.partial(begin_worker, self.worker_init_fn),
            multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor,
            **(self._device if pinning else {}),
        )

    def _collate(self) -> Finish | None:
        return None if self.collate_fn is identity else self.collate_fn

    def _finish(self, pinning: bool) -> Finish | None:
        """Return the function that is applied here to items that were not made in a worker; None if there is none."""
        collate = self._collate()
        if collate is None:
            return pin if pinning else None
        return (lambda item: pin(collate(item))) if pinning else collate

    def _can_pin(self) -> bool:
        """Return whether memory is to be page-locked and can be. Warns if it cannot, as torch does."""
        if not self.pin_memory:
            return False
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None or accelerator.type == "mps":
            warnings.warn(
                "'pin_memory' argument is set as true but there is no accelerator, so no memory is pinned",
                stacklevel=3,
            )
            return False
        return True
