"""`pack`: as few bins as first fit decreasing, within the cap, in multiples, even."""

import numpy as np
import pytest
from divisions import BAD_LENGTHS, assert_capped, assert_division
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance import pack
from transfer_queue.sampler.balance.capped_division import split

lists = st.lists(st.integers(0, 60), max_size=40)


def first_fit_decreasing(lengths, cap):
    """Return the number of bins of the textbook's method; a length above the cap is alone."""
    long = sum(length > cap for length in lengths)
    spaces = []
    for length in sorted((length for length in lengths if length <= cap), reverse=True):
        at = next((at for at, space in enumerate(spaces) if space >= length), None)
        if at is None:
            spaces.append(cap - length)
        else:
            spaces[at] -= length
    return long + len(spaces)


def assert_packed(bins, lengths, cap):
    assert_division(bins, len(lengths), len(bins))
    assert_capped(bins, lengths, cap)


@settings(max_examples=300)
@given(lengths=lists, cap=st.integers(1, 150), multiple=st.integers(1, 8))
def test_as_few_bins_as_first_fit_decreasing_in_a_multiple(lengths, cap, multiple):
    wanted = -(-first_fit_decreasing(lengths, cap) // multiple) * multiple
    if wanted > len(lengths):
        with pytest.raises(BalanceInputError, match=f"{wanted} for a multiple of {multiple}"):
            pack(lengths, cap, multiple)
        return
    bins = pack(lengths, cap, multiple)
    assert_packed(bins, lengths, cap)
    assert len(bins) == wanted


@given(lengths=st.lists(st.floats(0, 60), max_size=20), cap=st.floats(1, 150))
def test_fractions(lengths, cap):
    assert_packed(pack(lengths, cap), lengths, cap)


def loads(bins, lengths):
    return [sum(lengths[position] for position in each) for each in bins]


def test_loads_are_even():
    """First fit would leave 10, 10, 10, 2."""
    assert loads(pack([2] * 16, 10), [2] * 16) == [8, 8, 8, 8]
    # Longest first by itself would exceed the cap: 3 + 2 + 2 beside 3 + 2.
    assert sorted(loads(pack([3, 3, 2, 2, 2], 6), [3, 3, 2, 2, 2])) == [6, 6]


def test_the_fullest_bins_are_halved():
    """Bins of 3 + 4 + 2 and 4: the first into 4 + 2 and 3, then 4 and 2."""
    part_of = split(np.array([3.0, 4, 2, 4]), np.array([0, 0, 0, 1]), 4)
    assert sorted(part_of.tolist()) == [0, 1, 2, 3]
    three = split(np.array([3.0, 4, 2, 4]), np.array([0, 0, 0, 1]), 3)
    assert three[1] == three[2] != three[0]


def test_full_bins_are_evened_if_an_even_start_breaks_the_cap():
    lengths = [30, 30, 20, 20, 20, 15, 15, 15, 15, 5, 5]
    bins = pack(lengths, 60, 4)
    assert_packed(bins, lengths, 60)
    assert len(bins) == 4
    assert max(loads(bins, lengths)) - min(loads(bins, lengths)) <= 10


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("cap", [8192, 32768])
def test_at_size(cap, multiple):
    lengths = np.clip(np.exp(np.random.default_rng(3).normal(6.5, 1, 4096)), 16, cap).astype(int).tolist()
    bins = pack(lengths, cap, multiple)
    assert_packed(bins, lengths, cap)
    fewest = first_fit_decreasing(lengths, cap)
    assert len(bins) == -(-fewest // multiple) * multiple
    shared = loads([each for each in bins if len(each) > 1], lengths)
    assert min(shared) / max(shared) > (0.99 if cap == 32768 else 0.9)


def test_long_items_have_their_own_bin():
    assert pack([5, 99, 5, 70], 10) == [[0, 2], [1], [3]]
    assert pack([99, 70], 10, 2) == [[0], [1]]


def test_nothing():
    assert pack([], 10, 4) == []


@pytest.mark.parametrize(
    "arguments",
    [
        *((lengths, 5) for lengths in BAD_LENGTHS.values()),
        ([1], 0),
        ([1], float("inf")),
        ([1], None),
        ([1], True),
        ([1], 5, 0),
        ([1], 5, 1.5),
        ([1], 5, True),
        ([1, 2], 5, 3),
        ([2.0**53, 1.0], 5),
    ],
)
def test_bad_input(arguments):
    with pytest.raises(BalanceInputError):
        pack(*arguments)
