"""Dealing by length: sums, groups, tags, uneven counts."""

import logging
from itertools import chain

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tagged import Partition, tagged

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import SeqlenBalancedSampler
from transfer_queue.wire.objects.object_values import encode_tag_value


def lengths_of(values):
    return tagged("total_lengths", dict(enumerate(values)))


@pytest.fixture(autouse=True)
def _records(caplog):
    caplog.set_level(logging.WARNING)


@given(
    size=st.integers(1, 3),
    dp_size=st.integers(1, 4),
    batch=st.integers(1, 6),
    spare=st.integers(0, 5),
    data=st.data(),
)
def test_shares(size, dp_size, batch, spare, data):
    """All ranks get complete groups, the first ones, each once; the same count if they divide evenly."""
    sampler, total = SeqlenBalancedSampler(size, dp_size), batch * dp_size
    ready = list(range(total + spare))
    values = data.draw(st.lists(st.integers(0, 999), min_size=len(ready), max_size=len(ready)))
    if total % size or total // size < dp_size:
        with pytest.raises(InvalidArgumentError):
            sampler.deal(ready, batch, batch_index=0, partition=lengths_of(values))
        return
    shares = sampler.deal(ready, batch, batch_index=0, partition=lengths_of(values))
    assert list(shares) == list(range(dp_size))
    assert all(sampled == consumed for sampled, consumed in shares.values())
    assert sorted(chain(*(sampled for sampled, _ in shares.values()))) == list(range(total))
    for sampled, _ in shares.values():
        assert sampled
        for start in range(0, len(sampled), size):
            first = sampled[start]
            assert first % size == 0
            assert sampled[start : start + size] == list(range(first, first + size))
    if (total // size) % dp_size == 0:
        assert {len(sampled) for sampled, _ in shares.values()} == {batch}


def test_only_the_dealt_rows_are_looked_up():
    partition = lengths_of([1] * 100)
    SeqlenBalancedSampler(1, 2).deal(range(100), 2, batch_index=0, partition=partition)
    assert partition.asked == 4


def test_samples_without_a_length_count_one():
    tags = Partition(
        {0: {"other": 9}, 1: {"total_lengths": None}, 2: {"total_lengths": 0.5}, 3: {"total_lengths": 1.5}}
    )
    shares = SeqlenBalancedSampler(1, 2).deal(range(4), 2, batch_index=0, partition=tags)
    assert [sampled for sampled, _ in shares.values()] == [[0, 1], [2, 3]]
    tags = Partition({0: None, 2: {"total_lengths": np.float32(0.5)}, 3: {"total_lengths": torch.tensor(2)}})
    shares = SeqlenBalancedSampler(1, 2).deal(range(4), 2, batch_index=0, partition=tags)
    assert sorted(3 in sampled and 2 in sampled for sampled, _ in shares.values()) == [False, True]


@pytest.mark.parametrize(
    "garbage",
    ["12", b"12", True, [1, 2], [], ["1"], float("nan"), float("inf"), -1, 10**400, 10**5000, -(10**400)],
    ids=type,
)
def test_an_invalid_length_names_its_row(garbage):
    sampler = SeqlenBalancedSampler(1, 2)
    with pytest.raises(InvalidArgumentError, match="row 5 must be a finite number"):
        sampler.sample([4, 5], 1, partition=tagged("total_lengths", {5: garbage}))
    assert sampler.save_checkpoint()["states"] == {}


ONE = {
    "list": [5],
    "tuple": (5,),
    "array": np.array([5]),
    "array of two dimensions": np.array([[5.0]]),
    "tensor": torch.tensor([5]),
    "float tensor": torch.tensor([[5.0]]),
    "list of a tensor": [torch.tensor(5)],
}


@pytest.mark.parametrize("travelling", [False, True], ids=["as it was put", "as it travels"])
@pytest.mark.parametrize("one", ONE.values(), ids=ONE)
def test_a_length_of_one_element_counts_as_its_number(one, travelling):
    if travelling:
        one = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_tag_value(one)))
    shares, expected = [
        SeqlenBalancedSampler(1, 2).deal(range(4), 2, batch_index=0, partition=lengths_of([length, 1, 1, 3]))
        for length in (one, 5)
    ]
    assert shares == expected


@pytest.mark.parametrize("more", [np.arange(2), torch.ones(2), (1, 2), torch.ones(100_000), {1: 2}], ids=type)
def test_an_encoded_value_of_several_elements_is_not_a_length(more):
    partition = lengths_of([msgspec.msgpack.decode(msgspec.msgpack.encode(encode_tag_value(more)))] * 2)
    with pytest.raises(InvalidArgumentError, match="row 0 must be a finite number"):
        SeqlenBalancedSampler(1, 2).deal(range(2), 1, batch_index=0, partition=partition)


def test_lengths_beyond_all_sums():
    with pytest.raises(InvalidArgumentError, match="sum"):
        SeqlenBalancedSampler(1, 2).deal(range(4), 2, batch_index=0, partition=lengths_of([1.5e308] * 4))


@pytest.mark.parametrize("partition", [None, lengths_of([1] * 6)], ids=["without", "with"])
def test_uneven_counts_are_logged(caplog, partition):
    shares = SeqlenBalancedSampler(2, 2).deal(range(6), 3, batch_index=0, partition=partition)
    assert sorted(len(sampled) for sampled, _ in shares.values()) == [2, 4]
    assert caplog.text.count("num_groups=3 is not divisible by dp_size=2") == 1


def test_even_counts_are_not_logged(caplog):
    SeqlenBalancedSampler(2, 2).deal(range(8), 4, batch_index=0, partition=lengths_of([5, 1, 1, 9, 30, 2, 2, 2]))
    assert caplog.records == []


def test_uneven_in_order():
    shares = SeqlenBalancedSampler(2, 4).deal(range(12), 3, batch_index=0)
    assert [sampled for sampled, _ in shares.values()] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]


def test_fewer_groups_than_ranks():
    sampler = SeqlenBalancedSampler(4, 4)
    with pytest.raises(InvalidArgumentError, match="a rank gets none"):
        sampler.validate(2, {"dp_rank": 0, "batch_index": 0})
    with pytest.raises(InvalidArgumentError, match="a rank gets none"):
        sampler.sample(range(8), 2)


def test_partition_id_overrides_that_of_the_partition():
    sampler = SeqlenBalancedSampler()
    sampler.sample([0, 1], 2, partition=lengths_of([1, 1]), partition_id="q", task_name="t")
    assert list(sampler.save_checkpoint()["balanced_cache"]) == [("q", "t", 0)]
