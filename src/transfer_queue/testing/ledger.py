"""The ledger of a run: what was put, handed out, acknowledged and cleared, as its clients saw it, and what they read.

A sample has a number of its own. Every value says whose it is: sample, field, version and a filling that follows from
these, so that bytes of another sample, or of another version, are known at sight. What nobody can tell, because an
answer was lost, counts as possible and is settled by what the system says in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    rows = values.numpy()
    samples, versions = rows[:, 0], rows[:, 2]
    expected = _values(samples, FIELDS.index(name), versions, rows.shape[1])
    wrong = np.flatnonzero((rows != expected).any(axis=1))
    if len(wrong):
        raise LedgerError(f"foreign bytes in field {name!r}: row {wrong[0]} reads {rows[wrong[0]][:8].tolist()}")
    return samples.tolist(), versions.tolist()


@dataclass
class Sample:
    """One sample. there: its put has succeeded (None: nobody can tell). index: its global index, once known.

    tried, sure: of each field, the newest version that was tried, and that has succeeded. cleared: it may be gone;
    surely_cleared: it is. handed, acked, maybe: of each task, how often it was handed out, acknowledged, and
    was to be acknowledged, whatever came of it.
    """

    partition: str
    group: str | None
    there: bool | None = None
    index: int | None = None
    tried: dict[str, int] = field(default_factory=dict)
    sure: dict[str, int] = field(default_factory=dict)
    cleared: bool = False
    surely_cleared: bool = False
    handed: dict[str, int] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    maybe: dict[str, int] = field(default_factory=dict)


class Ledger:
    """samples: by number. by_index: their numbers. batches: the global indexes of each. reads: of how many values."""

    def __init__(self) -> None:
        self.samples: dict[int, Sample] = {}
        self.by_index: dict[int, int] = {}
        self.batches: dict[Batch, tuple[int, ...]] = {}
        self.groups: dict[str, set[int]] = {}
        self.reads = 0

    def new(self, partition: str, count: int, group: str | None = None) -> list[int]:
        """Numbers for samples that are about to be put."""
        first = len(self.samples)
        numbers = list(range(first, first + count))
        for number in numbers:
            self.samples[number] = Sample(partition, group)
        if group is not None:
            self.groups.setdefault(group, set()).update(numbers)
        return numbers

    def trying(self, numbers: Iterable[int], names: Iterable[str], version: int) -> None:
        """A version of fields of these samples is about to be put."""
        for number in numbers:
            for name in names:
                self.samples[number].tried[name] = version

    def put(self, numbers: Sequence[int], indexes: Sequence[int], names: Iterable[str], version: int) -> None:
        """A put of these samples has succeeded."""
        for number, index in zip(numbers, indexes, strict=True):
            self.samples[number].there = True
            self._name(number, index)
            for name in names:
                self.samples[number].sure[name] = version

    def refused(self, numbers: Iterable[int]) -> None:
        """A put of new samples has certainly failed."""
        for number in numbers:
            self.samples[number].there = False

    def clearing(self, numbers: Iterable[int]) -> None:
        """They are about to be cleared."""
        for number in numbers:
            self.samples[number].cleared = True

    def cleared(self, numbers: Iterable[int]) -> None:
        """They are."""
        for number in numbers:
            self.samples[number].surely_cleared = True

    def before(self, numbers: Iterable[int], name: str) -> dict[int, int]:
        """The oldest versions that a read which begins now may give."""
        return {number: self.samples[number].sure.get(name, 0) for number in numbers}

    def seen(
        self, indexes: Sequence[int] | None, data: Any, since: dict[str, dict[int, int]] | None = None
    ) -> list[int]:
        """Values were read of these rows (None: of keys); the numbers of their samples. since: as `before` said."""
        numbers: list[int] = []
        for name in FIELDS:
            if data.get(name, None) is None:
                continue
            numbers, versions = read(name, data[name])
            self.reads += len(numbers)
            if indexes is not None:
                if len(numbers) != len(indexes):
                    raise LedgerError(f"{len(numbers)} rows of {name!r} were read where {len(indexes)} were asked for")
                for number, index in zip(numbers, indexes, strict=True):
                    self._name(number, index)
            for number, version in zip(numbers, versions, strict=True):
                oldest = (since or {}).get(name, {}).get(number, 0)
                newest = self.samples[number].tried.get(name, 0)
                if not oldest <= version <= newest:
                    raise LedgerError(
                        f"sample {number} reads as version {version} of {name!r}, {oldest} to {newest} were put"
                    )
        return numbers

    def _name(self, number: int, index: int) -> None:
        if number not in self.samples:
            raise LedgerError(f"global index {index} reads as sample {number}, which was never put")
        sample = self.samples[number]
        if sample.there is False:
            raise LedgerError(f"sample {number} is there, and its put was refused")
        if sample.index not in (None, index) or self.by_index.get(index, number) != number:
            raise LedgerError(
                f"foreign bytes: sample {number} at global index {index}, which is of {self.by_index.get(index)}; "
                f"its own is {sample.index}"
            )
        sample.index = index
        self.by_index[index] = number

    def whole(self, numbers: Sequence[int]) -> None:
        """A batch of a group sampler: no group is in it in part."""
        got = set(numbers)
        for group in sorted({str(self.samples[number].group) for number in numbers}):
            if not self.groups[group] <= got:
                raise LedgerError(f"group {group} was split: {sorted(self.groups[group] - got)} are not in {numbers}")

    def dealt(self, key: Batch, indexes: Sequence[int]) -> None:
        """A rank-consistent batch: it is what it was for all who asked before."""
        before = self.batches.setdefault(key, tuple(indexes))
        if before != tuple(indexes):
            raise LedgerError(f"batch {key} was {list(before)} and is {list(indexes)} now")

    def handed(self, task: str, numbers: Iterable[int]) -> None:
        """A claim was answered with these samples."""
        for number in numbers:
            sample = self.samples[number]
            sample.handed[task] = sample.handed.get(task, 0) + 1

    def acked(self, task: str, numbers: Iterable[int]) -> None:
        """They were acknowledged, for the first time."""
        for number in numbers:
            sample = self.samples[number]
            sample.acked[task] = sample.acked.get(task, 0) + 1
            if sample.acked[task] > 1:
                raise LedgerError(f"sample {number} was acknowledged twice for {task!r}")

    def maybe_acked(self, task: str, numbers: Iterable[int]) -> None:
        """They are about to be acknowledged."""
        for number in numbers:
            sample = self.samples[number]
            sample.maybe[task] = sample.maybe.get(task, 0) + 1

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
            for number, sample in self.samples.items():
                if sample.partition != partition or number not in there.get(partition, ()):
                    continue
                done = number in numbers
                if sample.acked.get(task) and not done:
                    raise LedgerError(f"sample {number} was acknowledged for {task!r}, which has not consumed it")
                if done and not sample.maybe.get(task):
                    raise LedgerError(f"sample {number} is consumed by {task!r}, and nobody has acknowledged it")
