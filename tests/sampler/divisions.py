"""What holds of every division of positions into parts."""

import itertools


def assert_division(parts, n, k):
    """Each of the n positions is in one of k parts, which are sorted lists of ints, in order."""
    assert len(parts) == k
    assert all(parts)
    assert all(part == sorted(part) for part in parts)
    assert parts == sorted(parts)
    assert sorted(itertools.chain.from_iterable(parts)) == list(range(n))
    assert all(type(position) is int for part in parts for position in part)


def assert_capped(parts, lengths, cap):
    """No part of several positions is longer than the cap."""
    for part in parts:
        assert len(part) == 1 or sum(lengths[position] for position in part) <= cap


def heaviest(parts, lengths):
    return max(sum(lengths[position] for position in part) for part in parts)


# What no division takes as lengths.
BAD_LENGTHS = {
    "nan": [1, float("nan")],
    "infinite": [1, float("inf")],
    "negative": [1, -1],
    "text": [1, "2"],
    "none": [1, None],
    "no list": 7,
    "bool": [1, True],
    "nested": [[1], [2]],
}
