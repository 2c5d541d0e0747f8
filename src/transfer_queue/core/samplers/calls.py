"""Makes the calls of samplers with the view of a partition that they get, and checks the results of users' samplers.

The core trusts built-in samplers. It accepts the result of a user's sampler only if it is valid: rows that the sampler
was offered, none of them twice. Otherwise the claim fails with a `SamplerError`, and nothing changes.
`sampler.calls.sampler_calls` converts the errors of a user's sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Union

import numpy as np

from transfer_queue.core.state.partition import Partition
from transfer_queue.core.tables.ready_sets import ReadySet
from transfer_queue.errors import SamplerError, TransferQueueError
from transfer_queue.messages.claims import Claim
from transfer_queue.messages.tag_table import ABSENT
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.calls.call_messages import Begun, Facts, SamplerCall, SamplerRequest
from transfer_queue.sampler.calls.sampler_calls import SLACK, answer, describe, failure
from transfer_queue.sampler.numeric_tags import PartitionTags
from transfer_queue.sampler.sampler_wrapper import ranked_tags


class PartitionView(PartitionTags):
    """The read-only view of a partition for samplers.

    values: decodes a value of a message to the value that was put; None for samplers that read only numbers.
    """

    def __init__(self, partition: Partition, values: Callable[[Any], Any] | None = None) -> None:
        self._partition = partition
        self._values = values
        self.partition_id = partition.name
        self.group_size = partition.groups.size
        """The number of samples in a declared group; None if the partition does not declare it."""

    @property
    def policy_version(self) -> int:
        """The last version that `set_policy_version` has set; 0 at first."""
        return self._partition.policy_version

    def get_custom_meta(self, indexes: Sequence[int] | np.ndarray) -> dict[int, dict[str, Any]]:
        """Return {global index: tag} for those of these rows that exist."""
        wanted = np.asarray(indexes, "i8")
        positions = self._partition.rows.positions_of(wanted)
        is_live = positions >= 0
        tags = self._partition.tags_of(positions[is_live])
        live = wanted[is_live].tolist()
        if tags is None:
            return {i: {} for i in live}
        values = dict if self._values is None else self._values
        return {i: values(tag) for i, tag in zip(live, tags, strict=True)}

    def entries_of(self, rows: np.ndarray, name: str) -> list[Any]:
        """See `PartitionTags`."""
        entries: list[Any] = [None] * len(rows)
        for _, chunk, at, where in self._partition.rows.split(self._partition.rows.positions_of(rows)):
            if chunk.tags is None:
                continue
            column = chunk.tags.values(name, at)
            for place, value in zip(np.arange(len(rows))[where].tolist(), column, strict=True):
                if value is not ABSENT:
                    entries[place] = value
        values = self._values
        return entries if values is None else [values(value) for value in entries]


def call_sampler(sampler: BaseSampler, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a function of a built-in sampler. Converts its exceptions to errors of the tree, with their tracebacks."""
    try:
        return function(*arguments, **keywords)
    except TransferQueueError:
        raise
    except Exception as error:
        raise failure(type(sampler).__name__, error) from None


NONE = np.zeros(0, "i8")
Values = Callable[[Any], Any]
Key = tuple[int, int]
Column = np.ndarray


def copy_containers(value: Any) -> Any:
    """Return a copy of the dicts and lists of a value."""
    if type(value) is dict:
        return {key: copy_containers(entry) for key, entry in value.items()}
    return [copy_containers(entry) for entry in value] if type(value) is list else value


class InlineRunner:
    """Calls the sampler in this process. values: decodes a value of a message to the value that was put."""

    def __init__(self, sampler: BaseSampler, values: Values) -> None:
        self.facts = describe(sampler)
        """The facts about the sampler that need no call."""
        self._sampler = sampler
        self._values = values

    def run(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> Any:
        """Return the sampler's answer. ready: the rows that it is offered."""
        view = None if partition is None else PartitionView(partition, self._values)
        offered = () if partition is None or ready is None else partition.sampler_view(ready)
        return answer(self._sampler, self.facts, call, offered, view, self._values)

    def report_unready(self, rows: list[int]) -> None:
        """Rows of an answer are not ready, and nothing has changed meanwhile."""


class Ask(Exception):
    """The decision of a claim needs a call of a user's sampler that runs in a process of its own."""

    def __init__(
        self, runner: HostedRunner, call: SamplerCall, partition: Partition | None, ready: ReadySet | None
    ) -> None:
        super().__init__()
        self.runner = runner
        self.call = call
        self.partition = partition
        self.ready = ready

    @property
    def key(self) -> Hashable:
        """Identifies the call: calls of one claim with equal keys get one answer."""
        return self.call.kind, self.call.request.count, self.call.key, self.call.final


class RowsTakenError(Exception):
    """Rows that a sampler was offered were cleared or dealt during its call: the call is repeated."""


class Answers:
    """The answers of a sampler for one claim so far."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Any] = {}
        """`Ask.key` -> answer."""
        self.offered: list[Column] = []
        """The rows that the sampler was offered for these answers."""


class HostedRunner:
    """Represents a sampler in a process of its own. Returns answers that have arrived, and raises `Ask` for others."""

    def __init__(self, facts: Facts, pattern: str = "") -> None:
        self.facts = facts
        """The facts that the process has reported."""
        self.pattern = pattern
        """The tasks that use the sampler, as in the configuration; "" for the system's sampler."""
        self.answers: Answers | None = None
        """The answers for the claim that is being decided; None before its first call."""
        self.orders: list[SamplerCall] = []
        """Calls whose result is not needed, in the order in which they are made."""

    def run(self, call: SamplerCall, partition: Partition | None, ready: ReadySet | None) -> Any:
        """Return the sampler's answer. Raises Ask if it has not arrived."""
        if call.kind == "clear_cache":
            self.orders.append(call)
            return None
        ask = Ask(self, call, partition, ready)
        if self.answers is None or ask.key not in self.answers.by_key:
            raise ask
        given = self.answers.by_key[ask.key]
        if call.kind == "passes_over":
            self.answers.by_key[ask.key] = {}  # these rows are skipped now
        return given

    def report_unready(self, rows: list[int]) -> None:
        """Rows of an answer are not ready. Raises RowsTakenError if they were ready when the sampler was called."""
        if self.answers is not None and np.isin(rows, np.concatenate([NONE, *self.answers.offered])).all():
            raise RowsTakenError


class UserSampler:
    """A user's sampler."""

    def __init__(self, runner: InlineRunner | HostedRunner) -> None:
        self.runner = runner
        """Makes the calls."""
        self._batches: dict[tuple[str, str], int] = {}  # how many batches it keeps, by (partition, task)

    @property
    def name(self) -> str:
        """The name of its class."""
        return self.runner.facts.name

    @property
    def n_samples_per_prompt(self) -> int | None:
        """The number of samples in a group; None if it deals single samples."""
        return self.runner.facts.group_size

    def begin(self, claim: Claim) -> Begun:
        """Return its first answer about a claim. Raises its error if the claim can never be met."""
        if not self.runner.facts.begins and claim.sampling.get("batch_index") is None:
            return Begun(None, False)
        begun: Begun = self.runner.run(SamplerCall("begin", request_of(claim)), None, None)
        return begun

    def remainder(self, claim: Claim, partition: Partition, ready: ReadySet) -> int:
        """Return the batch_size of a last deal."""
        return int(self.runner.run(SamplerCall("remainder", request_of(claim)), partition, ready))

    def passes_over(self, claim: Claim, partition: Partition, ready: ReadySet) -> dict[str, Column]:
        """Return the ready rows that the task skips, by reason."""
        if not self.runner.facts.passes:
            return {}
        skipped = self.runner.run(SamplerCall("passes_over", request_of(claim)), partition, ready)
        passed = {reason: np.frombuffer(rows, "<i8") for reason, rows in skipped.items()}
        for rows in passed.values():
            self._check_offered(partition, ready, rows)
        return passed

    def deal(
        self, claim: Claim, partition: Partition, ready: ReadySet, count: int, key: Key | None, final: bool = False
    ) -> dict[int, tuple[Column, Column]]:
        """Return its deal, not yet checked: dp_rank -> (sampled, consumed), global indexes."""
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
        # some of the shares that it keeps for other ranks were dealt before
        return {rank: share for rank, share in shares.items() if rank == key[0] or key[1] not in issued.get(rank, ())}

    def clear_cache(self, partition: str) -> None:
        """Make it forget what it keeps of a partition."""
        for name in [name for name in self._batches if name[0] == partition]:
            del self._batches[name]
        self.runner.run(SamplerCall("clear_cache", SamplerRequest(partition, "", 0, {})), None, None)

    # ------------------------------------------------------------ checks of its results

    def check(
        self,
        partition: Partition,
        ready: ReadySet,
        shares: Mapping[int, tuple[Column, Column]],
        key: Key | None,
        most: int,
    ) -> None:
        """Raise SamplerError unless this can be dealt.

        Args:
            partition: The partition.
            ready: The rows that it was offered.
            shares: What each rank gets: the rows that are sampled, and those that are consumed.
            key: The requested batch, if it is to be kept.
            most: The largest batch_size.
        """
        sampled, consumed = (np.concatenate([NONE, *columns]) for columns in zip(*shares.values(), strict=True))
        self._check_numbers(sampled, consumed, most, len(shares))
        self._check_offered(partition, ready, np.concatenate([sampled, consumed]))
        for rank, (rows, taken) in shares.items() if key is not None else ():
            missing = np.setdiff1d(rows, taken)
            if len(missing):
                raise SamplerError(
                    f"{self.name} sampled the rows {missing[:5].tolist()} for dp_rank {rank} and did not return them "
                    f"as consumed, but no other rank may get rows of a (dp_rank, batch_index): return all sampled rows "
                    f"as consumed, too; nothing was dealt"
                )

    def check_known(
        self, partition: Partition, ready: ReadySet, share: tuple[Column, Column], most: int, next_index: int
    ) -> Column:
        """Check a batch that it reports as dealt before, whose rows may have been consumed or cleared since then.

        next_index: no row has this global index, or a larger one. Returns the rows that must still be consumed.
        """
        self._check_numbers(*share, most, 1)
        sampled, consumed = (self._undealt_rows(partition, ready, rows, next_index) for rows in share)
        self._check_offered(partition, ready, np.concatenate([sampled, consumed]))
        return consumed

    def _undealt_rows(self, partition: Partition, ready: ReadySet, rows: Column, next_index: int) -> Column:
        """Return those of these rows that live and were not dealt to the task before."""
        never = (rows < 0) | (rows >= next_index)
        if never.any():
            raise self._not_offered_error(rows[never].tolist())
        live = rows[partition.rows.positions_of(rows) >= 0]
        untaken: Column = live[partition.consumption_states(ready.task, partition.rows.positions_of(live)) == 0]
        return untaken

    def _check_numbers(self, sampled: Column, consumed: Column, most: int, ranks: int) -> None:
        for rows, what in ((sampled, "sampled"), (consumed, "consumed")):
            distinct, counts = np.unique(rows, return_counts=True)
            if len(distinct) < len(rows):
                raise SamplerError(
                    f"{self.name} returned rows more than once as {what}, among them "
                    f"{distinct[counts > 1][:5].tolist()}; return each row once; nothing was dealt"
                )
        if len(sampled) > most * ranks:
            raise SamplerError(
                f"{self.name} sampled {len(sampled)} rows for {ranks} rank(s), but batch_size is {most}: return at "
                f"most {most} rows for each rank; nothing was dealt"
            )

    def _check_offered(self, partition: Partition, ready: ReadySet, rows: Column) -> None:
        positions = partition.rows.positions_of(rows)
        if (positions >= 0).all() and ready.has_all(positions, partition.rows):
            return
        unready = [row for row, p in zip(rows.tolist(), positions.tolist(), strict=True) if p < 0 or p not in ready]
        self.runner.report_unready(unready)
        raise self._not_offered_error(unready)

    def _not_offered_error(self, rows: list[int]) -> SamplerError:
        return SamplerError(
            f"{self.name} returned {len(rows)} rows that it was not offered, among them {rows[:5]}; return only rows "
            f"of ready_indexes; nothing was dealt"
        )


def request_of(claim: Claim, count: int | None = None) -> SamplerRequest:
    """Return the request of a claim to its sampler. count: the size of the deal. Default: that of the claim."""
    sampling = {"task_name": claim.task, "partition_id": claim.partition, **claim.sampling}
    sampling.pop("partition", None)  # the sampler gets its view of the partition under this name
    return SamplerRequest(claim.partition, claim.task, claim.count if count is None else count, sampling)


def watched_tags(*samplers: AnySampler) -> list[str]:
    """Return the tags by which samplers, or those inside them, order rows."""
    tag_lists = (each.runner.facts.tags if isinstance(each, UserSampler) else ranked_tags(each) for each in samplers)
    return list(dict.fromkeys(tag for tags in tag_lists for tag in tags))


AnySampler = Union[BaseSampler, UserSampler]


def name_of(sampler: AnySampler) -> str:
    """Return the name of a sampler's class."""
    return sampler.name if isinstance(sampler, UserSampler) else type(sampler).__name__
