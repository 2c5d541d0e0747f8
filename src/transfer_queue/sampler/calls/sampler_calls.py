"""Makes the calls of a user's sampler, and converts its results and its errors.

User code runs only in `answer` and `describe`, in the controller or in a process of its own. They convert everything
that it returns to plain numbers, and everything that it raises to errors of the tree. A process of its own sees the
partition through `RemotePartition`.
"""

from __future__ import annotations

import operator
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast, overload

import msgspec
import numpy as np

from transfer_queue.errors import InvalidArgumentError, SamplerError, SamplerValueError, TransferQueueError
from transfer_queue.sampler.base import BaseSampler, RankConsistentSampler
from transfer_queue.sampler.calls.call_messages import (
    Begun,
    Facts,
    Given,
    Question,
    SamplerCall,
    SamplerRequest,
    Shown,
    ViewReply,
)
from transfer_queue.sampler.numeric_tags import PartitionTags
from transfer_queue.sampler.ready_views import ListedRows, RankKey
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper, built_in, dealer, ranked_tags

SLACK = 64  # batches that a sampler may keep although the controller has dropped them
MOST = 2**62  # ranks and batch indexes are less than this
EMPTY = "nothing was dealt"


class NotTheSamplers(BaseException):
    """Ends a call of a sampler for a reason other than its own error. `except Exception` in a sampler misses it."""


def describe(sampler: BaseSampler) -> Facts:
    """Return the facts about this sampler that the controller keeps."""
    with errors_of(sampler):
        kind = type(sampler)
        inner = dealer(sampler)
        ranked = inner is not None or isinstance(sampler, RankConsistentSampler)
        caches = kind.has_cached_result is not BaseSampler.has_cached_result
        return Facts(
            name=kind.__name__,
            built_in=built_in(sampler),
            ranked=ranked,
            deals=inner is not None,
            finally_=inner is not None and bool(inner.deals_finally),
            begins=ranked or caches or kind.validate is not BaseSampler.validate,
            passes=kind.passes_over is not BaseSampler.passes_over,
            wants_list=bool(getattr(sampler, "wants_list", True)),
            group_size=_group_size(sampler),
            tags=[tag for tag in ranked_tags(sampler) if isinstance(tag, str)],
        )


def answer(
    sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any,
    values: Callable[[Any], Any] = lambda value: value,
) -> Any:  # fmt: skip
    """Call a sampler. Raises SamplerError for every failure.

    Args:
        sampler: The sampler.
        facts: The facts about it.
        call: The call.
        ready: The ready rows.
        view: Its `partition`.
        values: Decodes the sampling_config of a message, which may run the user's code. Default: it is decoded.
    """
    with errors_of(sampler):
        request = msgspec.structs.replace(call.request, sampling=values(call.request.sampling))
        call = msgspec.structs.replace(call, request=request)
        return CALLS[call.kind][0](sampler, facts, call, ready, view)


def _begin(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> Begun:
    request = call.request
    sampler.validate(request.count, request.sampling)
    if facts.ranked:
        key = _key(sampler, cast(RankConsistentSampler, sampler).deal_key(request.sampling))
        if key is not None or facts.deals:
            return Begun(key, False)
    return Begun(None, bool(sampler.has_cached_result(request.partition, request.task, request.sampling)))


def _remainder(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> int:
    return max(0, min(MOST, _whole(sampler.remainder(ready, **call.request.sampling, partition=view))))


def _passes_over(
    sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any
) -> dict[str, bytes]:
    passed = sampler.passes_over(ready, **call.request.sampling, partition=view)
    if not isinstance(passed, Mapping):
        raise SamplerError(
            f"{_name(sampler)}.passes_over must return a dict from reasons to rows, but returned {passed!r:.200}; "
            f"nothing was skipped"
        )
    try:
        return {str(reason): _column(rows) for reason, rows in passed.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplerError(
            f"{_name(sampler)}.passes_over must return a dict from reasons to lists of global indexes, but returned "
            f"{passed!r:.200} ({error}); nothing was skipped"
        ) from None


def _deal(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> Given:
    request, key = call.request, call.key
    if facts.deals:
        return _by_deal(sampler, request, ready, view, call.final)
    ranked = sampler if isinstance(sampler, RankConsistentSampler) else None
    if ranked is not None and call.kept is not None:
        ranked.keep_only(request.partition, request.task, set(call.kept))
    given = list(ready) if facts.wants_list else ready
    own_share = _share(sampler, "sample", sampler(given, request.count, **request.sampling, partition=view))
    if ranked is None or key is None or not own_share[0]:
        return Given({0 if key is None else key[0]: own_share})
    return _with_others(ranked, request, key, own_share)


def _clear_cache(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> None:
    sampler.clear_cache(call.request.partition)


def _save_checkpoint(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> bytes:
    state = sampler.save_checkpoint()
    try:
        encoded = msgspec.msgpack.encode(state)
        msgspec.msgpack.decode(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise SamplerError(
            f"the value that {_name(sampler)}.save_checkpoint() returned cannot be saved: {error}; return only dicts, "
            f"lists, text, bytes and numbers"
        ) from error
    return encoded


def _load_checkpoint(sampler: BaseSampler, facts: Facts, call: SamplerCall, ready: Sequence[int], view: Any) -> None:
    sampler.load_checkpoint(msgspec.msgpack.decode(call.state))


CALLS: dict[str, tuple[Callable[[BaseSampler, Facts, SamplerCall, Sequence[int], Any], Any], Any]] = {
    "begin": (_begin, Begun),
    "remainder": (_remainder, int),
    "passes_over": (_passes_over, dict[str, bytes]),
    "deal": (_deal, Given),
    "clear_cache": (_clear_cache, None),
    "save_checkpoint": (_save_checkpoint, bytes),
    "load_checkpoint": (_load_checkpoint, None),
}
"""Kind of a call -> the function that makes it, and the type of its result."""


def _by_deal(sampler: BaseSampler, request: SamplerRequest, ready: Sequence[int], view: Any, final: bool) -> Given:
    more = {"final": True} if final else {}
    dealing = cast("RankConsistentSampler | SamplerWrapper", sampler)
    shares = dealing.deal(ready, request.count, **request.sampling, partition=view, **more)
    if not isinstance(shares, Mapping):
        raise SamplerError(
            f"{_name(sampler)}.deal must return a dict from dp_ranks to shares, but returned {shares!r:.200}; {EMPTY}"
        )
    return Given({_rank(sampler, rank): _share(sampler, "deal", share) for rank, share in shares.items()})


def _with_others(
    sampler: RankConsistentSampler, request: SamplerRequest, key: tuple[int, int], own_share: tuple[bytes, bytes]
) -> Given:
    """Return all shares of the deal that a user's `sample` has just made.

    It returns the share of one rank. A sampler that deals to all ranks at once keeps the others' shares in `_states`.
    """
    kept = sampler._states.get(request.partition, {}).get(request.task, {})
    shares = {key[0]: own_share}
    for rank, batches in kept.items():
        if rank != key[0] and isinstance(batches, dict) and key[1] in batches:
            shares[_rank(sampler, rank)] = _share(sampler, "sample", sampler._share(batches[key[1]]))
    return Given(shares, sum(len(batches) for batches in kept.values()))


# --- results of a sampler, as numbers


def _share(sampler: BaseSampler, method: str, outcome: Any) -> tuple[bytes, bytes]:
    """Return (sampled, consumed) as columns. Raises SamplerError if they are not lists of global indexes."""
    try:
        sampled, consumed = outcome
        return _column(sampled), _column(consumed)
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplerError(
            f"{_name(sampler)}.{method} must return (sampled, consumed), two lists of global indexes, but returned "
            f"{outcome!r:.200} ({error}); {EMPTY}"
        ) from None


def _column(rows: Any) -> bytes:
    """Return global indexes as i8. Raises TypeError, ValueError or OverflowError if they are not global indexes."""
    if isinstance(rows, (str, bytes, Mapping)):
        raise TypeError(f"a {type(rows).__name__} is not a list of global indexes")
    return np.array([_whole(row) for row in rows], "i8").tobytes()


def _whole(value: Any) -> int:
    """Return an integer of any type as an int. A bool and a float are not integers."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{value!r} is a bool, not an int")
    return operator.index(value)


def _key(sampler: BaseSampler, key: Any) -> tuple[int, int] | None:
    if key is None:
        return None
    try:
        rank, batch = (_whole(part) for part in key)
    except (TypeError, ValueError):
        rank = batch = -1
    if not (0 <= rank < MOST and 0 <= batch < MOST):
        raise SamplerError(
            f"{_name(sampler)}.deal_key must return None or (dp_rank, batch_index), two ints greater than or equal to "
            f"0, but returned {key!r:.200}; {EMPTY}"
        )
    return rank, batch


def _rank(sampler: BaseSampler, rank: Any) -> int:
    key = _key(sampler, (rank, 0))
    assert key is not None
    return key[0]


def _group_size(sampler: BaseSampler) -> int | None:
    size = getattr(sampler, "n_samples_per_prompt", None)
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < MOST else None


def _name(sampler: BaseSampler) -> str:
    return type(sampler).__name__


# --- errors


@contextmanager
def errors_of(sampler: BaseSampler) -> Iterator[None]:
    """Convert exceptions of user code, SystemExit included, to errors of the tree.

    KeyboardInterrupt and `NotTheSamplers` are raised as they are.
    """
    try:
        yield
    except (KeyboardInterrupt, NotTheSamplers):
        raise
    except TransferQueueError as error:
        if isinstance(error, InvalidArgumentError) and not isinstance(error, RuntimeError):
            raise SamplerValueError(str(error)) from None
        raise
    except BaseException as error:
        raise failure(_name(sampler), error) from None


def failure(name: str, error: BaseException) -> SamplerError:
    """Return the error for the caller of a sampler that raised `error`. For a ValueError it is a ValueError, too."""
    kind = SamplerValueError if isinstance(error, ValueError) else SamplerError
    try:
        message = str(error)
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    except BaseException:  # the __str__ of the error may raise one, too
        message, trace = "(it cannot be shown)", ""
    return kind(f"the sampler {name} raised {type(error).__name__}: {message}\n{trace}")


# ---------------------------------------------------------------- partitions in another process
# A call contains the first ready rows. The sampler process requests further rows, tags and groups when the sampler
# reads them. The controller replies from its state at that time, and also checks the result of the sampler against it.

PAGE = 8192  # rows in one message
FIRST_GROUPS = 256  # groups in the first request; each further one has 8 times as many


Asks = Callable[[Question], ViewReply]


class RowsChanged(NotTheSamplers):
    """Rows that the sampler was offered are not ready any more, so its call is repeated."""


class RemotePartition(PartitionTags):
    """The `partition` argument of a sampler. values: decodes a value of a message to the value that was put."""

    def __init__(self, shown: Shown, asks: Asks, values: Callable[[Any], Any]) -> None:
        self.partition_id = shown.partition
        self.group_size = shown.group_size
        self.policy_version = shown.policy_version
        self._asks = asks
        self._values = values

    def get_custom_meta(self, indexes: Sequence[int]) -> dict[int, dict[str, Any]]:
        """See `PartitionTags`."""
        wanted = np.asarray(indexes, "i8")
        tags: dict[int, dict[str, Any]] = {}
        for start in range(0, len(wanted), PAGE):
            reply = self._asks(Question("tags", wanted[start : start + PAGE].tobytes()))
            tags.update((row, self._values(tag)) for row, tag in reply.tags.items())
        return tags

    def entries_of(self, rows: np.ndarray, name: str) -> list[Any]:
        """See `PartitionTags`."""
        tags = self.get_custom_meta(rows.tolist())
        return [tags.get(row, {}).get(name) for row in rows.tolist()]


class RemoteReady(Sequence[int]):
    """The ready rows, ascending, which are read in pages."""

    def __init__(self, shown: Shown, asks: Asks, partition: RemotePartition) -> None:
        self._total = shown.total
        self._pages = [np.frombuffer(shown.rows, "<i8")]
        self._known = len(self._pages[0])
        self._after = shown.after
        self._asks = asks
        self._partition = partition

    def __len__(self) -> int:
        return self._total

    def _read(self, count: int) -> np.ndarray:
        """Return the first `count` rows."""
        while self._known < count:
            if self._after < 0:
                raise RowsChanged
            reply = self._asks(Question("rows", after=self._after))
            self._after = reply.after
            self._pages.append(np.frombuffer(reply.rows, "<i8")[: self._total - self._known])
            self._known += len(self._pages[-1])
        if len(self._pages) > 1:
            self._pages = [np.concatenate(self._pages)]
        return self._pages[0][:count]

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            start, stop, step = at.indices(self._total)
            if step < 0 or start >= stop:
                return self._read(self._total)[at].tolist()  # type: ignore[no-any-return]
            return self._read(stop)[start:stop:step].tolist()  # type: ignore[no-any-return]
        place = at + self._total if at < 0 else at
        if not 0 <= place < self._total:
            raise IndexError(f"ready row {at} of {self._total}")
        return int(self._read(place + 1)[place])

    def __iter__(self) -> Iterator[int]:
        done = 0
        while done < self._total:
            rows = self._read(max(done + 1, min(self._known, self._total)))
            yield from rows[done:].tolist()
            done = len(rows)

    def __contains__(self, row: object) -> bool:
        rows = self._read(self._total)
        at = bisect_left(rows, row) if isinstance(row, int) else len(rows)
        return at < len(rows) and bool(rows[at] == row)

    def whole_groups(self, size: int) -> Iterator[list[int]]:
        """See `sampler.base.ReadyIndexes`."""
        seen: set[int] = set()
        count = FIRST_GROUPS
        while True:
            reply = self._asks(Question("groups", count=count, size=size))
            groups = np.frombuffer(reply.rows, "<i8").reshape(-1, size).tolist()
            for group in groups:
                if group[0] not in seen:
                    seen.add(group[0])
                    yield group
            if len(groups) < count:
                return
            count *= 8

    def ranked(self, key: RankKey) -> Iterator[int]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).ranked(key)

    def ranked_groups(self, key: RankKey, size: int) -> Iterator[list[int]]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).ranked_groups(key, size)

    def above(self, key: RankKey, bound: float) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return ListedRows(self, self._partition).above(key, bound)

    def spoiled(self, key: RankKey, bound: float, size: int) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return self._ask_rows(
            Question("spoiled", size=size, key=(key.tag, key.sign, key.missing, key.aging), bound=bound)
        )

    def orphans(self, size: int) -> list[int]:
        """See `ready_views.TaggedIndexes`."""
        return self._ask_rows(Question("orphans", size=size))

    def _ask_rows(self, question: Question) -> list[int]:
        return np.frombuffer(self._asks(question).rows, "<i8").tolist()  # type: ignore[no-any-return]
