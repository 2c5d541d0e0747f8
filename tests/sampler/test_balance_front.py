"""`balance`: counts, costs and caps; `imbalance`; bad input."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from divisions import BAD_LENGTHS, assert_capped, assert_division, heaviest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import BalanceInputError
from transfer_queue.sampler.balance import (
    balance,
    get_seqlen_balanced_partitions,
    imbalance,
    karmarkar_karp,
    linear,
    quadratic,
)
from transfer_queue.sampler.balance.division import greedy_rows

integers = st.integers(0, 500)
attention = quadratic(1, 1 / 1024)
costs = st.sampled_from([linear, attention, quadratic(0, 1), lambda lengths: 1 / (1 + lengths)])


@st.composite
def problems(draw, values=integers, most=30):
    """(lengths, parts)."""
    lengths = draw(st.lists(values, min_size=1, max_size=most))
    return lengths, draw(st.integers(1, len(lengths)))


def fewest(lengths, cap):
    """Return the minimum number of parts under the cap, by trying all divisions; a length above it is alone."""

    def search(rest, sums):
        if not rest:
            return len(sums)
        places = [at for at, load in enumerate(sums) if load + rest[0] <= cap]
        tried = [search(rest[1:], [*sums[:at], sums[at] + rest[0], *sums[at + 1 :]]) for at in places]
        return min([*tried, search(rest[1:], [*sums, rest[0]])])

    return search(sorted(lengths, reverse=True), [])


@given(problem=problems(values=st.one_of(integers, st.floats(0, 1e9))), cost=costs, equal=st.booleans())
def test_every_position_once_and_counts(problem, cost, equal):
    lengths, k = problem
    parts = balance(lengths, k, equal_counts=equal, cost=cost)
    assert_division(parts, len(lengths), k)
    if equal:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert balance(lengths, k, equal_counts=equal, cost=cost) == parts


@given(problem=problems())
def test_defaults_give_the_usual_partition(problem):
    lengths, k = problem
    assert balance(lengths, k) == get_seqlen_balanced_partitions(lengths, k, False)
    if len(lengths) % k == 0:
        assert balance(lengths, k, equal_counts=True) == get_seqlen_balanced_partitions(lengths, k, True)


def test_the_extra_item_moves_if_that_helps():
    """Sum 112 over counts of 3 and 4; exchanges of one for one from any start end at 59."""
    lengths = [26, 28, 2, 19, 17, 3, 17]
    parts = balance(lengths, 2, equal_counts=True)
    assert sorted(map(len, parts)) == [3, 4]
    assert heaviest(parts, lengths) == 56


def test_the_last_short_row_goes_to_the_lightest():
    assert greedy_rows(np.array([5.0, 1, 1]), 2).tolist() == [0, 1, 1]


@settings(max_examples=300)
@given(
    problem=problems(values=st.one_of(st.integers(0, 60), st.floats(0, 60))),
    cap=st.integers(1, 200),
    cost=costs,
    equal=st.booleans(),
)
def test_a_cap_is_never_exceeded(problem, cap, cost, equal):
    lengths, k = problem
    try:
        parts = balance(lengths, k, equal_counts=equal, cost=cost, max_tokens=cap)
    except BalanceInputError:
        return  # `test_a_refusal_is_right`
    assert_division(parts, len(lengths), k)
    assert_capped(parts, lengths, cap)
    if equal:
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7), cap=st.integers(5, 30), data=st.data())
def test_a_refusal_is_right(lengths, cap, data):
    """The number in the message is at most the true one, and it says "cannot" only if that is true."""
    needed = fewest(lengths, cap)
    k = data.draw(st.integers(1, len(lengths)))
    try:
        parts = balance(lengths, k, max_tokens=cap)
    except BalanceInputError as error:
        message = str(error)
    else:
        assert k >= needed
        assert_capped(parts, lengths, cap)
        return
    least = int(message.split("at least ")[1].split()[0])
    assert least <= needed
    if "cannot" in message:
        assert k < least
    else:
        assert message.startswith("found no way")


def test_few_lengths_are_divided_if_possible():
    """The search fails for about one in 200,000 tight instances."""
    generator = np.random.default_rng(4)
    for _ in range(300):
        lengths, cap = generator.integers(1, 21, generator.integers(3, 8)).tolist(), int(generator.integers(5, 31))
        assert_capped(balance(lengths, fewest(lengths, cap), max_tokens=cap), lengths, cap)


def test_an_error_says_how_many_parts_are_enough():
    """9 + 7 + 13 and 17 + 4 + 4 + 4 would be 29 each."""
    with pytest.raises(BalanceInputError, match=r"found no way .* at least 2 parts are needed.* 3 parts are enough"):
        balance([13, 4, 9, 7, 4, 4, 17], 2, max_tokens=29)
    assert_capped(balance([13, 4, 9, 7, 4, 4, 17], 3, max_tokens=29), [13, 4, 9, 7, 4, 4, 17], 29)


def test_a_refusal_names_the_number():
    with pytest.raises(BalanceInputError, match=r"2 parts of at most 10 tokens .* at least 3 parts are needed"):
        balance([6, 6, 6, 1], 2, max_tokens=10)
    with pytest.raises(BalanceInputError, match=r"at least 3 parts are needed \(1 of the lengths"):
        balance([50, 6, 6], 2, max_tokens=10)
    lengths = [9, 5, 4, 3, 3, 3]  # 9 leaves no space for a second one
    assert_capped(balance(lengths, 3, max_tokens=9), lengths, 9)
    with pytest.raises(BalanceInputError, match=r"in equal counts .* at least 3 parts are needed"):
        balance(lengths, 3, equal_counts=True, max_tokens=9)


def test_a_length_above_the_cap_has_its_own_part():
    assert [3] in balance([1, 2, 3, 500, 4], 2, max_tokens=100)
    assert balance([7, 500, 3, 600, 1], 4, max_tokens=10) == [[0], [1], [2, 4], [3]]
    assert balance([500, 3, 4], 2, equal_counts=True, max_tokens=10) == [[0], [1, 2]]
    with pytest.raises(BalanceInputError, match=r"position 0 .* its own part"):
        balance([500, 3, 4, 2, 1, 1], 3, equal_counts=True, max_tokens=10)


def test_a_cap_that_only_an_uneven_division_keeps():
    """Longest first and exchanges end above it; first fit keeps it."""
    lengths = [18, 5, 6, 6, 6, 8, 20, 11, 1]
    assert heaviest(balance(lengths, 3), lengths) > 28
    for cost in (linear, attention):
        parts = balance(lengths, 3, cost=cost, max_tokens=28)
        assert_division(parts, 9, 3)
        assert_capped(parts, lengths, 28)


def test_a_cap_on_tokens_is_none_on_costs():
    lengths = drawn(1)[:512]
    cap = int(lengths.sum() / 8 * 1.02)
    free = balance(lengths, 8, cost=attention)
    capped = balance(lengths, 8, cost=attention, max_tokens=cap)
    assert max(lengths[part].sum() for part in free) > cap
    assert_capped(capped, lengths, cap)
    assert imbalance(attention(lengths), capped) < imbalance(attention(lengths), balance(lengths, 8))


def test_fractions_of_tokens_count_as_one():
    assert balance([1.5, 1.5, 1, 1], 2, max_tokens=3.9) == [[0, 2], [1, 3]]
    with pytest.raises(BalanceInputError, match="at least 3"):
        balance([1.5, 1.5, 1, 1], 2, max_tokens=2.9)


# --- quality


def drawn(seed, kind="lognormal", n=8192):
    """Lengths as they occur. With equal counts 63 others share the part of the longest, hence the bounds there."""
    generator = np.random.default_rng(seed)
    if kind == "lognormal":
        lengths = np.exp(generator.normal(6.5, 1, n))
    elif kind == "bimodal":
        lengths = np.where(generator.random(n) < 0.9, generator.normal(300, 50, n), generator.normal(12000, 1000, n))
    else:
        lengths = 200 * (1 + generator.pareto(1.2, n))
    return np.clip(lengths, 16, 32768).astype(int).astype(float)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("equal", "bound"), [(True, 1.001), (False, 1.0001)])
def test_quality_at_size(equal, bound, seed):
    lengths = drawn(seed)
    parts = balance(lengths, 128, equal_counts=equal)
    assert_division(parts, 8192, 128)
    assert imbalance(lengths, parts) <= bound


@pytest.mark.parametrize("kind", ["bimodal", "pareto"])
@pytest.mark.parametrize("cost", [linear, attention], ids=["linear", "quadratic"])
@pytest.mark.parametrize(("equal", "bound"), [(True, 1.02), (False, 1.001)])
def test_quality_of_other_lengths(kind, cost, equal, bound):
    lengths = drawn(0, kind)
    assert imbalance(cost(lengths), balance(lengths, 128, equal_counts=equal, cost=cost)) <= bound


@pytest.mark.parametrize("equal", [True, False])
def test_a_quadratic_cost_is_better_balanced_by_itself(equal):
    lengths = drawn(0)
    by_cost = balance(lengths, 128, equal_counts=equal, cost=attention)
    by_tokens = balance(lengths, 128, equal_counts=equal)
    assert imbalance(attention(lengths), by_cost) <= (1.02 if equal else 1.001)
    assert imbalance(attention(lengths), by_tokens) > 1.1


# --- costs and imbalance


def test_costs():
    assert quadratic(2, 0.5)(np.array([0.0, 1, 10])).tolist() == [0, 2.5, 70]
    assert linear(np.array([3.0, 4])).tolist() == [3, 4]
    assert pickle.loads(pickle.dumps(attention)) == attention


def test_imbalance():
    assert imbalance([1, 2, 3], [[0, 1], [2]]) == 1.0
    assert imbalance([1, 2, 3], [[0], [1, 2]]) == 5 / 3
    assert imbalance([10, 1], [[0], [1]]) == 1.0  # nothing can be below the largest item
    assert imbalance([0, 0], [[0], [1]]) == 1.0


@pytest.mark.parametrize("parts", [[], [[0]], [[0, 1], [1]], [[0, 2]], [[0, 1, 2]], 7, [0, 1], [["0", 1]]])
def test_imbalance_of_an_invalid_division(parts):
    with pytest.raises(BalanceInputError, match="each of the 2 positions once"):
        imbalance([1, 2], parts)


@pytest.mark.parametrize("lengths", [torch.tensor([5, 1, 4]), list(torch.tensor([5.0, 1.0, 4.0])), np.array([5, 1, 4])])
def test_lengths_of_tensors_and_arrays(lengths):
    assert get_seqlen_balanced_partitions(lengths, 2, False) == get_seqlen_balanced_partitions([5, 1, 4], 2, False)
    assert karmarkar_karp(lengths, 2, False) == karmarkar_karp([5, 1, 4], 2, False)


# --- bad input

BAD = {
    "empty": (([], 1), {}),
    "too few": (([1], 2), {}),
    "no parts": (([1, 2], 0), {}),
    "parts are no int": (([1, 2], 1.0), {}),
    "parts are a bool": (([1, 2], True), {}),
    **{name: ((lengths, 1), {}) for name, lengths in BAD_LENGTHS.items()},
    "a tensor of a bool": (([torch.tensor(True), 1], 1), {}),
    "tensor of rank 2": ((torch.ones(2, 2), 1), {}),
    "array of rank 2": ((np.ones((2, 2)), 1), {}),
    "no cost": (([1, 2], 1), {"cost": "linear"}),
    "a negative cost": (([1, 2], 1), {"cost": lambda lengths: -lengths}),
    "a cost too few": (([1, 2], 1), {"cost": lambda lengths: lengths[1:]}),
    "a cost for all": (([1, 2], 1), {"cost": lambda lengths: float(lengths.sum())}),
    "a cost beyond range": (([1e200, 2], 1), {"cost": attention}),
    "no tokens": (([1, 2], 1), {"max_tokens": 0}),
    "tokens below 0": (([1, 2], 1), {"max_tokens": -5}),
    "tokens are nan": (([1, 2], 1), {"max_tokens": float("nan")}),
    "tokens are text": (([1, 2], 1), {"max_tokens": "9"}),
    "tokens are a bool": (([1, 2], 1), {"max_tokens": True}),
    "tokens beyond counting": (([2.0**53, 1.0], 1), {"max_tokens": 9}),
}


@pytest.mark.parametrize(("arguments", "options"), BAD.values(), ids=BAD)
def test_bad_input(arguments, options):
    with pytest.raises(BalanceInputError) as caught:
        balance(*arguments, **options)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("coefficients", [(0, 0), (-1, 1), (1, float("nan")), ("1", 1), (True, 1), (1, float("inf"))])
def test_bad_coefficients(coefficients):
    with pytest.raises(BalanceInputError, match="coefficients"):
        quadratic(*coefficients)


def test_a_cost_cannot_change_the_lengths():
    def zero(lengths):
        lengths[:] = 0
        return lengths

    assert_capped(balance([9, 1, 9, 1], 2, cost=zero, max_tokens=10), [9, 1, 9, 1], 10)


def test_without_asserts():
    """The same under python -O."""
    lines = [
        "from transfer_queue.errors import BalanceInputError",
        "from transfer_queue.sampler.balance import balance, imbalance, pack, quadratic",
        "from transfer_queue.sampler.balance import get_seqlen_balanced_partitions as usual, karmarkar_karp as plain",
        "print(balance([4, 3, 2, 1], 2, max_tokens=5), pack([4, 3, 2, 1], 5))",
        "print(sorted(usual([4, 3, 2, 1], 2, True)), sorted(plain([4, 3, 2, 1], 2, True)))",
        "nan = float('nan')",
        "bad = [(balance, [1], 2), (balance, [], 1), (balance, [nan], 1), (balance, [-1], 1), (balance, [1], 1.5),",
        "       (pack, [nan], 5), (pack, [1], 0), (pack, [1], 5, 2), (pack, 'x', 5),",
        "       (quadratic, 0, 0), (imbalance, [1, 2], [[0]])]",
        "bad += [(f, *b, False) for f in (usual, plain) for b in (([1], 2), ([], 1), ([nan], 1))]",
        "bad += [(f, [1, 2, 3], 2, True) for f in (usual, plain)]",
        "for f, *arguments in bad:",
        "    try: print('none', f(*arguments))",
        "    except BalanceInputError: print('raised')",
    ]
    done = subprocess.run(
        [sys.executable, "-O", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.stdout.splitlines() == ["[[0, 3], [1, 2]] [[0, 3], [1, 2]]"] * 2 + ["raised"] * 19, done.stderr
