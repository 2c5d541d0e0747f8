"""A user's sampler as the core sees it: what it is asked, how its answers are checked against the state.

Built-in samplers are trusted. What a user's sampler gives is taken only if it is complete and right: rows that it was
offered, none of them twice. Otherwise its caller gets a `SamplerError`, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, Union

import msgspec
import numpy as np

from transfer_queue.core.asking import PartitionView
from transfer_queue.core.partition import Partition
from transfer_queue.core.ready import ReadySet
from transfer_queue.errors import SamplerError
from transfer_queue.messages import Claim
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.calls import SLACK, Begun, Facts, SamplerCall, SamplerRequest, answer, describe, errors_of
from transfer_queue.sampler.wrapper import ranked_tags

NONE = np.zeros(0, "i8")
Values = Callable[[Any], Any]
Key = tuple[int, int]
Column = np.ndarray


def copied(value: Any) -> Any:
    """A value of a message, in dicts and lists of its own."""
    if type(value) is dict:
        return {key: copied(entry) for key, entry in value.items()}
    return [copied(entry) for entry in value] if type(value) is list else value


class Runner(Protocol):
    """Carries out calls of one user's sampler."""

    @property
    def facts(self) -> Facts:
        """What is known of the sampler without a call."""

    def run(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> Any:
        """The sampler's answer. ready: the rows that it is offered."""

    def not_ready(self, rows: list[int]) -> None:
        """These rows of an answer are not ready. Raises RowsTakenError where they were when it was asked."""


class InlineRunner:
    """Calls the sampler at once, in this process. values: makes what was put out of what a message carries of it."""

    def __init__(self, sampler: BaseSampler, values: Values) -> None:
        self.facts = describe(sampler)
        self._sampler = sampler
        self._values = values

    def run(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> Any:
        """See `Runner`."""
        with errors_of(self._sampler):  # values of a class of the user's are made by its code
            request = msgspec.structs.replace(call.request, sampling=self._values(call.request.sampling))
        call = msgspec.structs.replace(call, request=request)
        offered: Sequence[int] = ()
        view = None
        if partition is not None:
            view = PartitionView(partition, self._values)
            offered = partition.offered(ready) if ready is not None else ()
        return answer(self._sampler, self.facts, call, offered, view)

    def not_ready(self, rows: list[int]) -> None:
        """See `Runner`: nothing has changed meanwhile."""


class Ask(Exception):
    """A user's sampler in a process of its own has to be asked before it is known what becomes of a claim."""

    def __init__(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> None:
        super().__init__()
        self.call = call
        self.partition = partition
        self.ready = ready

    @property
    def key(self) -> Hashable:
        """Calls of one claim with equal keys get one answer."""
        return self.call.kind, self.call.request.count, self.call.key, self.call.final


class RowsTakenError(Exception):
    """Rows that a sampler was offered were cleared or taken while it looked at them: it is asked again."""


class Answers:
    """What a sampler has answered so far, of one claim. offered: the rows that it was shown meanwhile."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Any] = {}
        self.offered: list[Column] = []


class HostedRunner:
    """Stands for a sampler in a process of its own. It knows answers that have come; others are to be asked for.

    Attributes:
        facts: As the process has said them.
        answers: Of the claim that is being decided, None where nothing was asked yet.
        orders: Calls for which nobody waits, to be made in this order.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.answers: Answers | None = None
        self.orders: list[SamplerCall] = []

    def run(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> Any:
        """See `Runner`. Raises Ask where the answer is not there."""
        if call.kind == "clear_cache":
            self.orders.append(call)
            return None
        ask = Ask(call, partition, ready)
        if self.answers is None or ask.key not in self.answers.by_key:
            raise ask
        found = self.answers.by_key[ask.key]
        if call.kind == "passes_over":
            self.answers.by_key[ask.key] = {}  # these rows are passed over now
        return found

    def not_ready(self, rows: list[int]) -> None:
        """See `Runner`."""
        if self.answers is not None and np.isin(rows, np.concatenate([NONE, *self.answers.offered])).all():
            raise RowsTakenError


class UserSampler:
    """A user's sampler. runner: calls it."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._batches: dict[tuple[str, str], int] = {}  # that it keeps of (partition, task)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.runner.facts.name

    @property
    def n_samples_per_prompt(self) -> int | None:
        """Samples of a group; None if it deals single samples."""
        return self.runner.facts.group_size

    def begin(self, claim: Claim) -> Begun:
        """Shows it a claim. Raises what it says to one that can never be right."""
        if not self.runner.facts.begins and claim.sampling.get("batch_index") is None:
            return Begun(None, False)
        begun: Begun = self.runner.run(SamplerCall("begin", request_of(claim)), None, None)
        return begun

    def remainder(self, claim: Claim, partition: Partition, ready: ReadySet) -> int:
        """The batch_size of a last deal."""
        return int(self.runner.run(SamplerCall("remainder", request_of(claim)), partition, ready))

    def passes_over(self, claim: Claim, partition: Partition, ready: ReadySet) -> dict[str, Column]:
        """The ready rows that the task shall never be dealt, by reason."""
        if not self.runner.facts.passes:
            return {}
        found = self.runner.run(SamplerCall("passes_over", request_of(claim)), partition, ready)
        passed = {reason: np.frombuffer(rows, "<i8") for reason, rows in found.items()}
        for rows in passed.values():
            self._check_offered(partition, ready, rows)
        return passed

    def deal(
        self, claim: Claim, partition: Partition, ready: ReadySet, count: int, key: Key | None, final: bool = False
    ) -> dict[int, tuple[Column, Column]]:
        """What it deals now, not yet checked: dp_rank -> (sampled, consumed), global indexes."""
        dealt = partition.dealt.get(claim.task)
        name = partition.name, claim.task
        kept = None
        if dealt is not None and self._batches.get(name, 0) > 2 * len(dealt.by_key) + SLACK:
            kept = list(dealt.by_key)
        request = request_of(claim, count)
        given = self.runner.run(SamplerCall("deal", request, key, kept, final), partition, ready)
        self._batches[name] = given.cached
        issued = {} if dealt is None or key is None else dealt.issued
        shares = {
            rank: (np.frombuffer(sampled, "<i8"), np.frombuffer(consumed, "<i8"))
            for rank, (sampled, consumed) in given.shares.items()
        }
        if key is None or self.runner.facts.deals:
            return shares
        # of what it keeps for other ranks some was dealt before
        return {rank: share for rank, share in shares.items() if rank == key[0] or key[1] not in issued.get(rank, ())}

    def clear_cache(self, partition: str) -> None:
        """Has it forget what it keeps of a partition."""
        for name in [name for name in self._batches if name[0] == partition]:
            del self._batches[name]
        self.runner.run(SamplerCall("clear_cache", SamplerRequest(partition, "", 0, {})), None, None)

    def save_checkpoint(self) -> bytes:
        """What it keeps, as msgpack."""
        saved: bytes = self.runner.run(SamplerCall("save_checkpoint", SamplerRequest("", "", 0, {})), None, None)
        return saved

    def load_checkpoint(self, state: bytes) -> None:
        """Replaces what it keeps by what `save_checkpoint` gave."""
        self.runner.run(SamplerCall("load_checkpoint", SamplerRequest("", "", 0, {}), state=state), None, None)

    # ------------------------------------------------------------ what it gave, checked

    def check(
        self,
        partition: Partition,
        ready: ReadySet,
        shares: Mapping[int, tuple[Column, Column]],
        key: Key | None,
        most: int,
    ) -> None:
        """Raises SamplerError unless this can be dealt.

        Args:
            ready: The rows that it was offered.
            key: The batch that was asked for, if it is to be kept.
            most: The largest batch_size.
        """
        sampled, consumed = (np.concatenate([NONE, *columns]) for columns in zip(*shares.values(), strict=True))
        self._check_numbers(sampled, consumed, most, len(shares))
        self._check_offered(partition, ready, np.concatenate([sampled, consumed]))
        for rank, (rows, taken) in shares.items() if key is not None else ():
            missing = np.setdiff1d(rows, taken)
            if len(missing):
                raise SamplerError(
                    f"{self.name} sampled the rows {missing[:5].tolist()} for dp_rank {rank} and did not give them as "
                    f"consumed, but a batch of a (dp_rank, batch_index) is its rank's alone: give all that is sampled "
                    f"as consumed; nothing was dealt"
                )

    def check_known(
        self, partition: Partition, ready: ReadySet, share: tuple[Column, Column], most: int, next_index: int
    ) -> Column:
        """The same of a batch that it has dealt before, as it says: rows may be consumed or cleared since.

        next_index: no row has this global index, or a larger one. Returns the rows that are still to be consumed.
        """
        self._check_numbers(*share, most, 1)
        sampled, consumed = (self._untaken(partition, ready, rows, next_index) for rows in share)
        self._check_offered(partition, ready, np.concatenate([sampled, consumed]))
        return consumed

    def _untaken(self, partition: Partition, ready: ReadySet, rows: Column, next_index: int) -> Column:
        """Those of these rows that live and were not given to the task before."""
        never = (rows < 0) | (rows >= next_index)
        if never.any():
            raise self._not_offered(rows[never].tolist())
        live = rows[partition.rows.positions_of(rows) >= 0]
        untaken: Column = live[partition.taken(ready.task, partition.rows.positions_of(live)) == 0]
        return untaken

    def _check_numbers(self, sampled: Column, consumed: Column, most: int, ranks: int) -> None:
        for rows, what in ((sampled, "sampled"), (consumed, "consumed")):
            found, counts = np.unique(rows, return_counts=True)
            if len(found) < len(rows):
                raise SamplerError(
                    f"{self.name} gave rows more than once as {what}, among them {found[counts > 1][:5].tolist()}; "
                    f"give each row once; nothing was dealt"
                )
        if len(sampled) > most * ranks:
            raise SamplerError(
                f"{self.name} sampled {len(sampled)} rows for {ranks} rank(s), and batch_size is {most}: give no more "
                f"than that; nothing was dealt"
            )

    def _check_offered(self, partition: Partition, ready: ReadySet, rows: Column) -> None:
        positions = partition.rows.positions_of(rows)
        if (positions >= 0).all() and ready.has_all(positions, partition.rows):
            return
        strange = [row for row, p in zip(rows.tolist(), positions.tolist(), strict=True) if p < 0 or p not in ready]
        self.runner.not_ready(strange)
        raise self._not_offered(strange)

    def _not_offered(self, rows: list[int]) -> SamplerError:
        return SamplerError(
            f"{self.name} gave {len(rows)} rows that it was not offered, among them {rows[:5]}; nothing was dealt"
        )


def request_of(claim: Claim, count: int | None = None) -> SamplerRequest:
    """A claim as its sampler sees it. count: of the deal, where it is another than the claim's."""
    sampling = {"task_name": claim.task, "partition_id": claim.partition, **claim.sampling}
    sampling.pop("partition", None)  # the view is given under this name
    return SamplerRequest(claim.partition, claim.task, claim.count if count is None else count, sampling)


def watched_tags(sampler: AnySampler) -> list[str]:
    """The tags by which a sampler, or one inside it, orders rows."""
    return sampler.runner.facts.tags if isinstance(sampler, UserSampler) else ranked_tags(sampler)


AnySampler = Union[BaseSampler, UserSampler]


def name_of(sampler: AnySampler) -> str:
    """The name of a sampler's class."""
    return sampler.name if isinstance(sampler, UserSampler) else type(sampler).__name__
