"""The ledger of a run: what was put, handed out, acknowledged and cleared, as its clients saw it, and what they read.

A sample has a number of its own. Every value says whose it is: sample, field, version and a filling that follows from
these, so that bytes of another sample, or of another version, are known at sight. What nobody can tell, because an
answer was lost, counts as possible and is settled by what the system says in the end.

A checkpoint that is loaded takes the ledger back to what it was when the checkpoint's state was cut. What was asked for
before the load and answered after it counts as something that nobody can tell: whoever enters an outcome says in which
`epoch` he has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

HEAD = 3  # numbers of a value that say whose it is
FIELDS = ("x", "y")

Batch = tuple[str, str, int, int]  # partition, task, dp_rank, batch_index


class LedgerError(AssertionError):
    """The system contradicts the ledger."""


def content(samples: Sequence[int], name: str, version: int, width: int) -> torch.Tensor:
    """The values of a field of these samples: i8 [samples, width]."""
    numbers = np.asarray(samples, "i8")
    return torch.from_numpy(_values(numbers, FIELDS.index(name), np.full(len(numbers), version, "i8"), width))


def _values(samples: np.ndarray, code: int, versions: np.ndarray, width: int) -> np.ndarray:
    values = np.empty((len(samples), width), "i8")
    values[:, 0], values[:, 1], values[:, 2] = samples, code, versions
    mixed = samples * 1_000_003 + code * 7_919 + versions * 104_729 + 1
    np.multiply.outer(mixed, np.arange(1, width - HEAD + 1), out=values[:, HEAD:])
    return values


def read(name: str, values: torch.Tensor) -> tuple[list[int], list[int]]:
    """The samples and versions that these values say they are. Raises LedgerError where they are not."""
    if not len(values):  # of a field whose kind is not known while no row has it
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
    """A put of a value. who: did it. begun, ended: in the order of all beginnings and ends; None: nobody has heard."""

    who: str
    begun: int
    ended: int | None = None


@dataclass
class Sample:
    """One sample. there: its put has succeeded (None: nobody can tell). refused: it has certainly failed. index: its
    global index, once known.

    tried: of each field, the newest version that was tried. flying: of each field, the puts of which one was the last,
    or may yet be. sure: of each field, the oldest version that a read may give. cleared: it may be gone;
    surely_cleared: it is. acked, maybe: of each task, how often it was acknowledged, and was to be acknowledged,
    whatever came of it.
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
    acked: dict[str, int] = field(default_factory=dict)
    maybe: dict[str, int] = field(default_factory=dict)

    def copy(self) -> Sample:
        """What of it a load can bring back."""
        return replace(self, sure=dict(self.sure), acked=dict(self.acked), maybe=dict(self.maybe))


@dataclass(frozen=True)
class Since:
    """When a read began: in which epoch, and the oldest versions of each field that it may give."""

    epoch: int
    oldest: dict[str, dict[int, int]]


@dataclass(frozen=True)
class Cut:
    """What the ledger held when a checkpoint's state was cut."""

    samples: dict[int, Sample]
    batches: dict[Batch, tuple[int, ...]]


class Ledger:
    """samples: by number. by_index: their numbers. batches: the global indexes of each. reads: of how many values.

    acks: how many of each task make a sample consumed, where it is not one. epoch: how many checkpoints were loaded.
    """

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self.by_index: dict[int, int] = {}
        self.batches: dict[Batch, tuple[int, ...]] = {}
        self.groups: dict[str, set[int]] = {}
        self.acks: dict[str, int] = {}
        self.reads = 0
        self.epoch = 0
        self._owners: dict[tuple[str, str, int], Batch] = {}  # (partition, task, global index) -> the batch it is of
        self._ticks = 0
        self._cuts: dict[float, Cut] = {}

    # ------------------------------------------------------------ checkpoints

    def cut(self, time: float) -> None:
        """A checkpoint's state is cut at this time."""
        self._cuts[time] = Cut({number: each.copy() for number, each in self.samples.items()}, dict(self.batches))

    def loaded(self, time: float) -> None:
        """The state that was cut at this time is the state now."""
        cut = self._cuts[time]
        self.epoch += 1
        for number, now in self.samples.items():
            then = cut.samples.get(number)
            if then is None:  # its put had not begun; if it is under way still, it may come yet
                now.there = None if now.there is None else False
                now.sure, now.acked, now.maybe = {}, {}, {}
                continue
            now.there = False if now.refused else then.there
            # what is under way may be carried out yet: a clear, or a put of a version
            now.cleared = then.cleared or (now.cleared and not now.surely_cleared)
            now.surely_cleared = then.surely_cleared
            now.sure, now.acked, now.maybe = dict(then.sure), dict(then.acked), dict(then.maybe)
        self.batches = dict(cut.batches)
        self._owners = {(key[0], key[1], index): key for key, rows in self.batches.items() for index in rows}

    # ------------------------------------------------------------ puts

    def new(self, partition: str, count: int, group: str | None = None, keyed: bool = False) -> list[int]:
        """Numbers for samples that are about to be put. keyed: each under a key of its own."""
        first = len(self.samples)
        numbers = list(range(first, first + count))
        for number in numbers:
            self.samples[number] = Sample(partition, group, keyed)
        if group is not None:
            self.groups.setdefault(group, set()).update(numbers)
        return numbers

    def trying(self, numbers: Iterable[int], names: Iterable[str], version: int, who: str) -> int:
        """A version of fields of these samples is about to be put; the epoch."""
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
        """A put of these samples has succeeded."""
        for number, index in zip(numbers, indexes, strict=True):
            sample = self.samples[number]
            if epoch != self.epoch:
                self._same(number, index)
                continue
            sample.there = True
            self._name(number, index)
        self.wrote(numbers, names, version, who, epoch)

    def wrote(self, numbers: Iterable[int], names: Iterable[str], version: int, who: str, epoch: int) -> None:
        """A put of values of samples that were there has succeeded: no earlier one of `who` will be carried out, and
        none that had ended before this began was the last.
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
        """A put of new samples has certainly failed."""
        for number in numbers:
            self.samples[number].there, self.samples[number].refused = False, True

    def clearing(self, numbers: Iterable[int]) -> int:
        """They are about to be cleared; the epoch."""
        for number in numbers:
            self.samples[number].cleared = True
        return self.epoch

    def cleared(self, numbers: Iterable[int], epoch: int) -> None:
        """They are."""
        for number in numbers if epoch == self.epoch else ():
            self.samples[number].surely_cleared = True

    # ------------------------------------------------------------ reads

    def before(self, numbers: Iterable[int], names: Iterable[str] = FIELDS) -> Since:
        """What a read of these samples that begins now may give."""
        known = list(numbers)
        return Since(self.epoch, {name: {n: self.samples[n].sure.get(name, 0) for n in known} for name in names})

    def seen(self, indexes: Sequence[int] | None, data: Any, since: Since | None = None) -> list[int]:
        """Values were read of these rows (None: of keys); the numbers of their samples."""
        numbers: list[int] = []
        current = since is None or since.epoch == self.epoch
        for name in FIELDS:
            if data.get(name, None) is None:
                continue
            numbers, versions = read(name, data[name])
            self.reads += len(numbers)
            if indexes is not None:
                if len(numbers) != len(indexes):
                    raise LedgerError(f"{len(numbers)} rows of {name!r} were read where {len(indexes)} were asked for")
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
        """The sample's tag says that it is at this global index."""
        self._same(number, index)

    def _name(self, number: int, index: int) -> None:
        self._same(number, index)
        if self.samples[number].there is False:
            raise LedgerError(f"sample {number} is there, and its put was refused, or a loaded state has it not")

    def _same(self, number: int, index: int) -> None:
        """A global index names one sample for ever, also beyond a load."""
        if number not in self.samples:
            raise LedgerError(f"global index {index} reads as sample {number}, which was never put")
        sample = self.samples[number]
        # a key that is put again after a load that has taken it away is another row
        anew = sample.index is None or (sample.keyed and self.epoch > 0)
        if (sample.index != index and not anew) or self.by_index.get(index, number) != number:
            raise LedgerError(
                f"foreign bytes: sample {number} at global index {index}, which is of {self.by_index.get(index)}; "
                f"its own is {sample.index}"
            )
        sample.index = index
        self.by_index[index] = number

    # ------------------------------------------------------------ batches and acks

    def whole(self, numbers: Sequence[int]) -> None:
        """A batch of a group sampler: no group is in it in part."""
        got = set(numbers)
        for group in sorted({str(self.samples[number].group) for number in numbers}):
            if not self.groups[group] <= got:
                raise LedgerError(f"group {group} was split: {sorted(self.groups[group] - got)} are not in {numbers}")

    def dealt(self, key: Batch, indexes: Sequence[int], epoch: int) -> None:
        """A rank-consistent batch: it is what it was for all who asked before, and no row of it is in another."""
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
        """A rank is about to be declared gone: its batches may be anybody's, and all who get them must acknowledge."""
        for key in [key for key in self.batches if key[:3] == (partition, task, dp_rank)]:
            for index in self.batches.pop(key):
                del self._owners[partition, task, index]
                sample = self.samples.get(self.by_index.get(index, -1))
                if sample is not None and sample.acked.get(task, 0) < self.acks.get(task, 1):
                    sample.acked.pop(task, None)

    def acked(self, task: str, numbers: Iterable[int], epoch: int) -> None:
        """They were acknowledged, each as often as it is needed at the most."""
        for number in numbers if epoch == self.epoch else ():
            sample = self.samples[number]
            sample.acked[task] = sample.acked.get(task, 0) + 1
            if sample.acked[task] > self.acks.get(task, 1):
                raise LedgerError(f"sample {number} was acknowledged {sample.acked[task]} times for {task!r}")

    def maybe_acked(self, task: str, numbers: Iterable[int]) -> int:
        """They are about to be acknowledged; the epoch."""
        for number in numbers:
            sample = self.samples[number]
            sample.maybe[task] = sample.maybe.get(task, 0) + 1
        return self.epoch

    # ------------------------------------------------------------ the end

    def settle(self, there: dict[str, set[int]], consumed: dict[tuple[str, str], set[int]]) -> None:
        """What the system says in the end. there: of each partition, the samples. consumed: of each (partition, task).

        Raises:
            LedgerError: a sample is lost, or came back; one was acknowledged and is not consumed, or the other way.
        """
        for number, sample in self.samples.items():
            lives = number in there.get(sample.partition, ())
            if sample.there and not sample.cleared and not lives:
                raise LedgerError(f"sample {number} is lost: it was put, nobody cleared it, and it is not there")
            if lives and (sample.there is False or sample.surely_cleared):
                raise LedgerError(f"sample {number} is there, and was refused or cleared")
        for (partition, task), numbers in consumed.items():
            needed = self.acks.get(task, 1)
            for number, sample in self.samples.items():
                if sample.partition != partition or number not in there.get(partition, ()):
                    continue
                done = number in numbers
                if sample.acked.get(task, 0) >= needed and not done:
                    raise LedgerError(f"sample {number} was acknowledged for {task!r}, which has not consumed it")
                if done and sample.maybe.get(task, 0) < needed:
                    raise LedgerError(f"sample {number} is consumed by {task!r}, and too few have acknowledged it")
