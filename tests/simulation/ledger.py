"""The ledger of a run: what its clients have put, received, acknowledged, cleared and read.

Each sample has a number. Every value contains its sample, field and version and a filling that follows from these, so
that bytes of another sample or version are detected. Outcomes that are unknown, because a reply was lost, count as
possible and are decided by the contents of the system at the end.

A loaded checkpoint returns the ledger to its contents at the time when the checkpoint's state was taken. Requests that
were sent before the load and answered after it have unknown outcomes: each entry names the `epoch` in which its request
was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

HEAD = 3  # numbers at the start of a value that identify it
FIELDS = ("x", "y")

Batch = tuple[str, str, int, int]  # partition, task, dp_rank, batch_index


class LedgerError(AssertionError):
    """The system contradicts the ledger."""


def content(samples: Sequence[int], name: str, version: int, width: int) -> torch.Tensor:
    """Return the values of a field of these samples: i8 [samples, width]."""
    numbers = np.asarray(samples, "i8")
    return torch.from_numpy(_values(numbers, FIELDS.index(name), np.full(len(numbers), version, "i8"), width))


def _values(samples: np.ndarray, code: int, versions: np.ndarray, width: int) -> np.ndarray:
    values = np.empty((len(samples), width), "i8")
    values[:, 0], values[:, 1], values[:, 2] = samples, code, versions
    mixed = samples * 1_000_003 + code * 7_919 + versions * 104_729 + 1
    np.multiply.outer(mixed, np.arange(1, width - HEAD + 1), out=values[:, HEAD:])
    return values


def read(name: str, values: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the samples and versions that these values name. Raises LedgerError if their filling does not match."""
    if not len(values):  # the kind of a field is unknown while no row has it
        return [], []
    rows = values.numpy()
    samples, versions = rows[:, 0], rows[:, 2]
    expected = _values(samples, FIELDS.index(name), versions, rows.shape[1])
    wrong = np.flatnonzero((rows != expected).any(axis=1))
    if len(wrong):
        raise LedgerError(f"foreign bytes in field {name!r}: row {wrong[0]} reads {rows[wrong[0]][:8].tolist()}")
    return samples.tolist(), versions.tolist()


@dataclass
class Write:
    """A put of a value. who: The client. begun, ended: Positions in the order of all starts and ends; None: unknown."""

    who: str
    begun: int
    ended: int | None = None


@dataclass
class Sample:
    """One sample.

    there: Whether its put has succeeded; None: unknown.
    refused: Its put has certainly failed.
    index: Its global index; None until it is known.
    tried: For each field, the newest version that a client tried to put.
    flying: For each field, the puts of which one was or may become the last.
    sure: For each field, the oldest version that a read may return.
    cleared: It may be cleared.
    surely_cleared: It is cleared.
    clears: The number of clears that were sent and have not succeeded so far.
    acked: For each task, how often it was acknowledged.
    maybe: For each task, how often an acknowledgement was sent, with any outcome.
    """

    partition: str
    group: str | None
    keyed: bool = False
    there: bool | None = None
    refused: bool = False
    index: int | None = None
    tried: dict[str, int] = field(default_factory=dict)
    sure: dict[str, int] = field(default_factory=dict)
    flying: dict[str, dict[int, Write]] = field(default_factory=dict)
    cleared: bool = False
    surely_cleared: bool = False
    clears: int = 0
    acked: dict[str, int] = field(default_factory=dict)
    maybe: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Sample:
        """Return a copy of the parts that a load can restore."""
        return replace(self, sure=dict(self.sure), acked=dict(self.acked), maybe=dict(self.maybe))


@dataclass(frozen=True)
class Since:
    """The start of a read: its epoch, and the oldest version of each field that it may return."""

    epoch: int
    oldest: dict[str, dict[int, int]]


@dataclass(frozen=True)
class Cut:
    """The contents of the ledger when a checkpoint's state was taken."""

    samples: dict[int, Sample]
    batches: dict[Batch, tuple[int, ...]]
    reported: int


class Ledger:
    """See the module.

    samples: The samples by number.
    by_index: The numbers by global index.
    batches: The global indexes of each batch.
    reads: The number of values that were read.
    acks: For each task, the number of acknowledgements that make a sample consumed. Default: 1.
    epoch: The number of checkpoints that were loaded.
    """

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self.by_index: dict[int, int] = {}
        self.batches: dict[Batch, tuple[int, ...]] = {}
        self.groups: dict[str, set[int]] = {}
        self.acks: dict[str, int] = {}
        self.reads = 0
        self.epoch = 0
        self._owners: dict[tuple[str, str, int], Batch] = {}  # (partition, task, global index) -> its batch
        self._ticks = 0
        self._cuts: dict[float, Cut] = {}
        self._reports = self._reported = 0  # that samples are done: those sent, and those surely counted

    # ------------------------------------------------------------ checkpoints

    def cut(self, time: float) -> None:
        """Record that a checkpoint's state was taken at this time."""
        self._cuts[time] = Cut(
            {number: each.copy() for number, each in self.samples.items()}, dict(self.batches), self._reported
        )

    def loaded(self, time: float) -> None:
        """Record that the state of this time was loaded."""
        cut = self._cuts[time]
        self.epoch += 1
        self._reported = cut.reported
        for number, now in self.samples.items():
            then = cut.samples.get(number)
            if then is None:  # its put had not begun; if it is still in flight, it may be applied later
                now.there = None if now.there is None else False
                now.sure, now.acked, now.maybe = {}, {}, {}
                continue
            now.there = False if now.refused else then.there
            # a clear or a put that is in flight may be applied later
            now.cleared = then.cleared or now.clears > 0
            now.surely_cleared = then.surely_cleared
            now.sure, now.acked, now.maybe = dict(then.sure), dict(then.acked), dict(then.maybe)
        self.batches = dict(cut.batches)
        self._owners = {(key[0], key[1], index): key for key, rows in self.batches.items() for index in rows}

    # ------------------------------------------------------------ puts

    def new(self, partition: str, count: int, group: str | None = None, keyed: bool = False) -> list[int]:
        """Return numbers for samples that will be put. keyed: Each sample has a key."""
        first = len(self.samples)
        numbers = list(range(first, first + count))
        for number in numbers:
            self.samples[number] = Sample(partition, group, keyed)
        if group is not None:
            self.groups.setdefault(group, set()).update(numbers)
        return numbers

    def trying(self, numbers: Iterable[int], names: Iterable[str], version: int, who: str) -> int:
        """Record that a put of a version of these fields starts; return the epoch."""
        for number in numbers:
            sample = self.samples[number]
            for name in names:
                sample.tried[name] = max(version, sample.tried.get(name, 0))
                sample.flying.setdefault(name, {})[version] = Write(who, self._tick())
        return self.epoch

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def put(
        self, numbers: Sequence[int], indexes: Sequence[int], names: Iterable[str], version: int, who: str, epoch: int
    ) -> None:
        """Record that a put of these samples has succeeded."""
        for number, index in zip(numbers, indexes, strict=True):
            sample = self.samples[number]
            if epoch != self.epoch:
                self._same(number, index)
                continue
            sample.there = True
            self._name(number, index)
        self.wrote(numbers, names, version, who, epoch)

    def wrote(self, numbers: Iterable[int], names: Iterable[str], version: int, who: str, epoch: int) -> None:
        """Record that a put of fields of existing samples has succeeded.

        No earlier put of `who` will be applied any more, and no put that had ended before this one began was the last.
        """
        for number in numbers if epoch == self.epoch else ():
            sample = self.samples[number]
            for name in names:
                write = sample.flying[name][version]
                write.ended = self._tick()
                flying = sample.flying[name] = {
                    v: w for v, w in sample.flying[name].items()
                    if not (w.who == who and v < version) and not (w.ended is not None and w.ended < write.begun)
                }  # fmt: skip
                sample.sure[name] = min(flying)

    def refused(self, numbers: Iterable[int]) -> None:
        """Record that a put of new samples has certainly failed."""
        for number in numbers:
            self.samples[number].there, self.samples[number].refused = False, True

    def clearing(self, numbers: Iterable[int]) -> int:
        """Record that a clear of these samples starts; return the epoch."""
        for number in numbers:
            self.samples[number].cleared = True
            self.samples[number].clears += 1
        return self.epoch

    def cleared(self, numbers: Iterable[int], epoch: int) -> None:
        """Record that a clear of these samples has succeeded. epoch: The result of `clearing`."""
        for number in numbers:
            self.samples[number].clears -= 1
            if epoch == self.epoch:
                self.samples[number].surely_cleared = True

    # ------------------------------------------------------------ reads

    def before(self, numbers: Iterable[int], names: Iterable[str] = FIELDS) -> Since:
        """Return the versions that a read of these samples that starts now may return."""
        known = list(numbers)
        return Since(self.epoch, {name: {n: self.samples[n].sure.get(name, 0) for n in known} for name in names})

    def seen(self, indexes: Sequence[int] | None, data: Any, since: Since | None = None) -> list[int]:
        """Check values that were read from these rows (None: by key); return the numbers of their samples."""
        numbers: list[int] = []
        current = since is None or since.epoch == self.epoch
        for name in FIELDS:
            if data.get(name, None) is None:
                continue
            numbers, versions = read(name, data[name])
            self.reads += len(numbers)
            if indexes is not None:
                if len(numbers) != len(indexes):
                    raise LedgerError(f"{len(numbers)} rows of {name!r} were read, but {len(indexes)} were requested")
                for number, index in zip(numbers, indexes, strict=True):
                    (self._name if current else self._same)(number, index)
            for number, version in zip(numbers, versions, strict=True):
                oldest = since.oldest.get(name, {}).get(number, 0) if since is not None and current else 0
                newest = self.samples[number].tried.get(name, 0)
                if not oldest <= version <= newest:
                    raise LedgerError(
                        f"sample {number} reads as version {version} of {name!r}, {oldest} to {newest} were put"
                    )
        return numbers

    def named(self, number: int, index: int) -> None:
        """Record that a sample's tag was read at this global index."""
        self._same(number, index)

    def _name(self, number: int, index: int) -> None:
        self._same(number, index)
        if self.samples[number].there is False:
            raise LedgerError(f"sample {number} is there, and its put was refused, or a loaded state has it not")

    def _same(self, number: int, index: int) -> None:
        """Check that a global index always names the same sample, also after a load."""
        if number not in self.samples:
            raise LedgerError(f"global index {index} reads as sample {number}, which was never put")
        sample = self.samples[number]
        # a key that a load has removed and that is put again is another row
        is_new_row = sample.index is None or (sample.keyed and self.epoch > 0)
        if (sample.index != index and not is_new_row) or self.by_index.get(index, number) != number:
            raise LedgerError(
                f"foreign bytes: sample {number} at global index {index}, which is of {self.by_index.get(index)}; "
                f"its own is {sample.index}"
            )
        sample.index = index
        self.by_index[index] = number

    # ------------------------------------------------------------ batches and acks

    def whole(self, numbers: Sequence[int]) -> None:
        """Check a batch of a group sampler: it contains only complete groups."""
        got = set(numbers)
        for group in sorted({str(self.samples[number].group) for number in numbers}):
            if not self.groups[group] <= got:
                raise LedgerError(f"group {group} was split: {sorted(self.groups[group] - got)} are not in {numbers}")

    def dealt(self, key: Batch, indexes: Sequence[int], epoch: int) -> None:
        """Check a rank-consistent batch: it is the same as in earlier fetches, and no row of it is in another batch."""
        if epoch != self.epoch:
            return
        before = self.batches.setdefault(key, tuple(indexes))
        if before != tuple(indexes):
            raise LedgerError(f"batch {key} was {list(before)} and is {list(indexes)} now")
        for index in indexes:
            owner = self._owners.setdefault((key[0], key[1], index), key)
            if owner != key:
                raise LedgerError(f"global index {index} was dealt in batch {owner} and is in {key} now")

    def rank_gone(self, partition: str, task: str, dp_rank: int) -> None:
        """Record that a rank will be declared gone: other ranks may get its samples, and must acknowledge them."""
        for key in [key for key in self.batches if key[:3] == (partition, task, dp_rank)]:
            for index in self.batches.pop(key):
                del self._owners[partition, task, index]
                sample = self.samples.get(self.by_index.get(index, -1))
                if sample is not None and sample.acked.get(task, 0) < self.acks.get(task, 1):
                    sample.acked.pop(task, None)

    def acked(self, task: str, numbers: Iterable[int], epoch: int) -> None:
        """Record an acknowledgement. Acknowledgements beyond the needed number do not count."""
        for number in numbers if epoch == self.epoch else ():
            sample = self.samples[number]
            sample.acked[task] = sample.acked.get(task, 0) + 1
            if sample.acked[task] > self.acks.get(task, 1):
                raise LedgerError(f"sample {number} was acknowledged {sample.acked[task]} times for {task!r}")

    def maybe_acked(self, task: str, numbers: Iterable[int]) -> int:
        """Record that an acknowledgement will be sent; return the epoch."""
        for number in numbers:
            sample = self.samples[number]
            sample.maybe[task] = sample.maybe.get(task, 0) + 1
        return self.epoch

    # ------------------------------------------------------------ done samples

    def reporting(self) -> int:
        """Record that a report of a done sample will be sent; return the epoch."""
        self._reports += 1
        return self.epoch

    def reported(self, epoch: int) -> None:
        """Record that it has succeeded."""
        if epoch == self.epoch:
            self._reported += 1

    @property
    def done(self) -> tuple[int, int]:
        """The smallest and the largest number of done samples that the system may have."""
        return self._reported, self._reports

    # ------------------------------------------------------------ the end

    def settle(self, there: dict[str, set[int]], consumed: dict[tuple[str, str], set[int]]) -> None:
        """Compare the ledger with the contents of the system at the end.

        Args:
            there: The samples of each partition.
            consumed: The consumed samples of each (partition, task).

        Raises:
            LedgerError: A sample is lost, or exists although it was cleared, or acknowledgements have no effect.
        """
        for number, sample in self.samples.items():
            lives = number in there.get(sample.partition, ())
            if sample.there and not sample.cleared and not lives:
                raise LedgerError(f"sample {number} is lost: it was put and not cleared, but does not exist")
            if lives and (sample.there is False or sample.surely_cleared):
                raise LedgerError(f"sample {number} exists, but was refused or cleared")
        for (partition, task), numbers in consumed.items():
            needed = self.acks.get(task, 1)
            for number, sample in self.samples.items():
                if sample.partition != partition or number not in there.get(partition, ()):
                    continue
                done = number in numbers
                if sample.acked.get(task, 0) >= needed and not done:
                    raise LedgerError(f"sample {number} was acknowledged for {task!r}, but is not consumed")
                if done and sample.maybe.get(task, 0) < needed:
                    raise LedgerError(f"sample {number} is consumed by {task!r}, but has too few acknowledgements")
