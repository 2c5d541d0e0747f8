"""The replies that are kept for retries, compared with a model that keeps a set of finished sequence numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.columns.kinds import IntervalSet
from transfer_queue.core.state.state import ReplyCache
from transfer_queue.messages.base import Done

sequences = st.integers(1, 30)
runs = st.tuples(sequences, sequences)


@given(st.lists(st.tuples(sequences, st.integers(0, 30), st.lists(runs, max_size=4)), max_size=25))
def test_a_reply_is_kept_until_its_sequence_is_finished(requests: list[tuple[int, int, list[tuple[int, int]]]]) -> None:
    kept, finished, replies = ReplyCache(), set[int](), set[int]()
    for sequence, acknowledged, told in requests:
        finished.update(range(1, acknowledged + 1))
        for first, last in told:
            finished.update(range(first, last + 1))
        kept.advance(acknowledged, told)
        assert all(kept.is_finished(each) == (each in finished) for each in range(1, 32))
        if not kept.is_finished(sequence):
            kept.replies[sequence] = Done(sequence)
            replies.add(sequence)
        replies -= finished
        assert set(kept.replies) == replies


@given(st.lists(runs, max_size=8), runs)
def test_gaps_are_the_missing_parts_of_a_range(there: list[tuple[int, int]], asked: tuple[int, int]) -> None:
    intervals, first, last = IntervalSet(), *asked
    for run in there:
        intervals.add(*run)
    gaps = intervals.gaps(first, last)
    missing = [each for each in range(first, last + 1) if each not in intervals]
    assert [each for start, end in gaps for each in range(start, end + 1)] == missing
    assert all(start <= end for start, end in gaps)
