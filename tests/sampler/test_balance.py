"""Partitioning of lengths: postconditions, quality, input errors."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from divisions import BAD_LENGTHS, assert_division, heaviest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance import get_seqlen_balanced_partitions, karmarkar_karp

METHODS = [get_seqlen_balanced_partitions, karmarkar_karp]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)

integers = st.integers(0, 40_000)
floats = st.floats(0, 1e12)
few_values = st.sampled_from([0, 1, 7])
anything = st.one_of(integers, floats, few_values)


@st.composite
def problems(draw, values=anything, most=40):
    """(lengths, k, equal_size) that can be partitioned."""
    equal = draw(st.booleans())
    if equal:
        k, each = draw(st.integers(1, 8)), draw(st.integers(1, most // 8))
        n = k * each
    else:
        n = draw(st.integers(1, most))
        k = draw(st.integers(1, n))
    return draw(st.lists(values, min_size=n, max_size=n)), k, equal


def optimum(lengths, k, equal):
    """Return the smallest possible largest sum, by trying all divisions."""
    best = None
    for part_of in itertools.product(range(k), repeat=len(lengths) - 1):
        counts, sums = [0] * k, [0] * k
        for part, length in zip((0, *part_of), lengths, strict=True):
            counts[part] += 1
            sums[part] += length
        if min(counts) > 0 and (not equal or max(counts) == min(counts)) and (best is None or max(sums) < best):
            best = max(sums)
    return best


@every_method
@given(problem=problems())
def test_postconditions(method, problem):
    lengths, k, equal = problem
    parts = method(*problem)
    assert_division(parts, len(lengths), k)
    if equal:
        assert {len(part) for part in parts} == {len(lengths) // k}
    assert method(*problem) == parts


@given(problem=problems(values=integers))
def test_number_types_do_not_matter(problem):
    lengths, k, equal = problem
    expected = get_seqlen_balanced_partitions(lengths, k, equal)
    for same in (np.array(lengths), np.array(lengths, "f4"), tuple(lengths), [Fraction(x) for x in lengths]):
        assert get_seqlen_balanced_partitions(same, k, equal) == expected


def test_mean_distance_from_the_optimum():
    generator = np.random.default_rng(5)
    for n, k, equal in [(6, 2, True), (8, 2, True), (8, 4, True), (6, 3, True), (7, 2, False), (7, 3, False)]:
        ratios = []
        for _ in range(20):
            lengths = generator.integers(1, 1000, n).tolist()
            found = heaviest(get_seqlen_balanced_partitions(lengths, k, equal), lengths)
            ratios.append(found / optimum(lengths, k, equal))
        assert np.mean(ratios) <= 1.01, (n, k, equal)


def test_one_giant():
    """One length above all others together: the other parts share the others evenly if counts are free."""
    parts = get_seqlen_balanced_partitions([1000, *[10] * 12], 4, False)
    assert sorted(sum([1000, *[10] * 12][position] for position in part) for part in parts) == [40, 40, 40, 1000]


def test_a_search_without_progress_ends():
    assert get_seqlen_balanced_partitions([3] * 6, 3, True) == karmarkar_karp([3] * 6, 3, True)
    assert sorted(map(len, get_seqlen_balanced_partitions([0] * 7, 3, False))) == [2, 2, 3]


BAD = {
    "empty": ([], 1, False),
    "too few": ([1], 2, False),
    "no parts": ([1, 2], 0, False),
    "negative parts": ([1, 2], -1, True),
    "parts are no int": ([1, 2], 1.5, False),
    "uneven": ([1, 2, 3], 2, True),
    **{name: (lengths, 1, False) for name, lengths in BAD_LENGTHS.items()},
    "a huge int": ([1, 10**400], 1, False),
    "a huge sum": ([1.5e308, 1.5e308], 1, False),
    "array of rank 2": (np.ones((2, 2)), 1, False),
    "array of bool": (np.ones(2, bool), 1, False),
}


@every_method
@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_bad_input(method, arguments):
    with pytest.raises(BalanceInputError) as caught:
        method(*arguments)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, AssertionError)


def test_bad_input_names_the_position():
    with pytest.raises(BalanceInputError, match="position 2 is -4"):
        get_seqlen_balanced_partitions([1, 2, -4], 1, False)
    with pytest.raises(BalanceInputError, match="position 1 is a str"):
        get_seqlen_balanced_partitions([1, "2"], 1, False)
