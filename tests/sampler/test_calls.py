"""Samplers as migrating code calls them: by position or by keyword, with any partition, with a group size per claim."""

import logging
from unittest.mock import MagicMock, Mock

import pytest

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import (
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)

READY = list(range(16))
BUILD = {
    "sequential": SequentialSampler,
    "rank_aware": RankAwareSampler,
    "grpo": lambda: GRPOGroupNSampler(2),
    "seqlen": lambda: SeqlenBalancedSampler(2, 2),
    "budget": lambda: TokenBudgetSampler(1, 2, 2),
    "priority": lambda: PrioritySampler("tokens", GRPOGroupNSampler(2)),
    "freshness": lambda: FreshnessSampler(SeqlenBalancedSampler(2, 2), 1),
}
KEEPING = [name for name in BUILD if name != "sequential"]


def partition_of(kind=Mock, **tags):
    """A mock of a partition that answers as if each row had these tags."""
    partition = kind()
    partition.get_custom_meta.side_effect = lambda indexes: {index: dict(tags) for index in indexes}
    return partition


def who(batch_index=0, dp_rank=0):
    return {"dp_rank": dp_rank, "batch_index": batch_index, "partition": partition_of(total_lengths=1, tokens=2)}


def by_position(sampler, ready, batch_size, task, partition_id, *more, **caller):
    """Call a sampler with everything by position that its `sample` takes so."""
    caller = who() | caller
    ranked = (caller.pop("dp_rank"), caller.pop("batch_index")) if isinstance(sampler, RankAwareSampler) else ()
    return sampler(ready, batch_size, *ranked, task, partition_id, *more, **caller)


class TestByPosition:
    @pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
    def test_a_call_by_position_equals_one_by_keyword(self, build):
        positional, keyword = build(), build()
        for task in ("actor", "critic"):
            for partition_id in ("p", "q"):
                one = by_position(positional, READY, 4, task, partition_id)
                assert one == keyword.sample(READY, 4, task_name=task, partition_id=partition_id, **who())
        assert positional.save_checkpoint() == keyword.save_checkpoint()

    @pytest.mark.parametrize("name", KEEPING)
    def test_a_second_task_gets_a_batch_of_its_own(self, name):
        sampler = BUILD[name]()
        first = by_position(sampler, READY[:8], 4, "actor", "p")[0]
        second = by_position(sampler, READY[8:], 4, "critic", "p")[0]
        assert first
        assert second
        assert not set(first) & set(second)
        assert by_position(sampler, [], 4, "actor", "p")[0] == first

    @pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
    def test_more_arguments_by_position_are_ignored(self, build):
        expected = by_position(build(), READY, 4, "actor", "p")
        assert by_position(build(), READY, 4, "actor", "p", "more", 7) == expected

    def test_rank_aware_takes_rank_and_batch_index_before_the_names(self):
        sampler = RankAwareSampler()
        assert sampler.sample([4, 5, 6], 2, 1, 3, "t", "p") == ([4, 5], [4, 5])
        assert sampler.save_checkpoint()["states"] == {"p": {"t": {1: {3: [4, 5]}}}}

    @pytest.mark.parametrize("given", range(4))
    def test_rank_aware_without_one_of_the_four_is_a_type_error(self, given):
        with pytest.raises(TypeError, match="missing"):
            RankAwareSampler().sample(READY, 2, *(0, 0, "t")[:given])
        four = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
        del four[list(four)[given]]
        with pytest.raises(TypeError, match="missing"):
            RankAwareSampler().sample(READY, 2, **four)

    @pytest.mark.parametrize("missing", ["task_name", "partition_id"])
    @pytest.mark.parametrize("value", ["", None, 0])
    def test_rank_aware_needs_task_and_partition(self, missing, value):
        names = {"task_name": "t", "partition_id": "p", missing: value}
        with pytest.raises(InvalidArgumentError, match="needs task_name and partition_id"):
            RankAwareSampler().sample(READY, 2, **names, **who())

    def test_arguments_in_another_order_are_refused(self):
        with pytest.raises(InvalidArgumentError, match="task_name must be a str, got 0; the arguments of sample are"):
            GRPOGroupNSampler(2).sample(READY, 2, 0, 0)
        with pytest.raises(InvalidArgumentError, match="dp_rank must be an int, got a str"):
            RankAwareSampler().sample(READY, 2, "t", "p", "t", "p")
        with pytest.raises(InvalidArgumentError, match="dp_rank, batch_index, task_name, partition_id in this order"):
            RankAwareSampler().sample(READY, 2, "t", "p", 0, 0)


def test_a_balanced_sampler_is_a_sampler_of_groups():
    sampler = SeqlenBalancedSampler(4, 2)
    assert isinstance(sampler, GRPOGroupNSampler)
    assert (sampler.n_samples_per_prompt, sampler.dp_size) == (4, 2)
    assert SeqlenBalancedSampler().n_samples_per_prompt == GRPOGroupNSampler().n_samples_per_prompt == 1


class TestPartition:
    @pytest.mark.parametrize("kind", [Mock, MagicMock])
    @pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
    def test_a_sampler_reads_only_the_tags_of_a_mock(self, build, kind):
        given = partition_of(kind, total_lengths=3, tokens=3)
        sampled, consumed = by_position(build(), READY, 4, "t", "p", partition=given)
        assert sampled
        assert set(sampled) <= set(consumed) <= set(READY)

    def test_the_lengths_of_a_mock_count(self):
        partition = MagicMock()
        partition.get_custom_meta.return_value = {0: {"total_lengths": 9}, 1: {"total_lengths": 9}}
        sampler = SeqlenBalancedSampler(1, 2)
        shares = [sampler.sample(range(4), 2, "t", "p", dp_rank=rank, partition=partition)[0] for rank in range(2)]
        assert [len({0, 1} & set(share)) for share in shares] == [1, 1]

    def test_a_mock_without_a_name_names_no_partition(self):
        sampler = SeqlenBalancedSampler(1, 2)
        sampler.sample(range(4), 2, task_name="t", partition=partition_of(total_lengths=1))
        assert sampler.has_cached_result("", "t", {"dp_rank": 1, "batch_index": 0})


class TestWarnings:
    @pytest.fixture(autouse=True)
    def _records(self, caplog):
        caplog.set_level(logging.WARNING)

    def test_without_a_partition_the_split_is_equal_and_one_warning_is_logged(self, caplog):
        sampler = SeqlenBalancedSampler(1, 2)
        for batch in range(3):
            shares = [sampler.sample(range(4), 2, "t", "p", batch_index=batch, dp_rank=rank)[0] for rank in range(2)]
            assert shares == [[0, 1], [2, 3]]
        (record,) = caplog.records
        expected = "no partition object provided, falling back to equal-split without balancing"
        assert expected in record.getMessage()
        SeqlenBalancedSampler(1, 2).sample(range(4), 2)
        assert len(caplog.records) == 2, "each instance warns"

    def test_without_lengths_the_split_is_equal_and_one_warning_is_logged(self, caplog):
        sampler, partition = SeqlenBalancedSampler(1, 2), partition_of(other=1)
        for batch in range(3):
            assert sampler.sample(range(4), 2, "t", "p", batch_index=batch, partition=partition)[0] == [0, 1]
        (record,) = caplog.records
        assert "'total_lengths' is missing in 4 of the 4 samples" in record.getMessage()

    def test_a_missing_length_counts_as_1_and_one_warning_is_logged(self, caplog):
        sampler, partition = SeqlenBalancedSampler(1, 2), Mock()
        partition.get_custom_meta.return_value = {0: {"total_lengths": 3}, 3: {"total_lengths": 3}}
        for batch in range(3):
            share = sampler.sample(range(4), 2, "t", "p", batch_index=batch, partition=partition)[0]
            assert len({0, 3} & set(share)) == 1
        (record,) = caplog.records
        assert "missing in 2 of the 4 samples of a deal, first in row 1" in record.getMessage()

    def test_no_warning_is_logged_if_all_samples_have_lengths(self, caplog):
        SeqlenBalancedSampler(1, 2).sample(range(4), 2, "t", "p", partition=partition_of(total_lengths=2))
        assert not caplog.records


OPEN = {
    "grpo": GRPOGroupNSampler,
    "seqlen": SeqlenBalancedSampler,
    "budget": lambda: TokenBudgetSampler(100),
    "around": lambda: PrioritySampler("tokens", GRPOGroupNSampler()),
}
GIVEN = {
    "grpo": lambda: GRPOGroupNSampler(2),
    "seqlen": lambda: SeqlenBalancedSampler(2),
    "one": lambda: GRPOGroupNSampler(1),
    "budget": lambda: TokenBudgetSampler(100, 2),
    "around": lambda: PrioritySampler("tokens", GRPOGroupNSampler(2)),
}


class TestGroupSizePerClaim:
    @pytest.mark.parametrize("build", OPEN.values(), ids=OPEN)
    def test_a_sampler_without_a_size_takes_that_of_the_claim(self, build):
        sampler, ready = build(), [0, 2, 3, 4, 5, 7, 8]
        assert sorted(sampler.sample(ready, 4, "t", "p", **who(), n_samples_per_prompt=4)[0]) == [2, 3, 4, 5]
        assert sorted(sampler.sample(ready, 2, "u", "p", **who(), n_samples_per_prompt=2)[0]) == [2, 3]
        if not isinstance(sampler, TokenBudgetSampler):  # this one packs the remaining samples itself
            assert sampler.remainder(ready, n_samples_per_prompt=4, **who()) == 4
        with pytest.raises(InvalidArgumentError, match=r"must be a multiple of n_samples_per_prompt.*\(4\)"):
            sampler.validate(6, {"n_samples_per_prompt": 4, "dp_rank": 0, "batch_index": 0})

    @pytest.mark.parametrize("build", GIVEN.values(), ids=GIVEN)
    def test_a_sampler_with_another_size_refuses_and_names_both(self, build):
        sampler = build()
        config = {**who(), "n_samples_per_prompt": 4}
        words = rf"n_samples_per_prompt \(4\) must be equal to the sampler's, which is {sampler.n_samples_per_prompt}"
        with pytest.raises(InvalidArgumentError, match=words):
            sampler.sample(READY, 4, "t", "p", **config)
        with pytest.raises(InvalidArgumentError, match=words):
            sampler.validate(4, config)

    @pytest.mark.parametrize("build", GIVEN.values(), ids=GIVEN)
    def test_the_samplers_own_number_is_fine(self, build):
        sampler = build()
        config = {**who(), "n_samples_per_prompt": sampler.n_samples_per_prompt}
        sampler.validate(4, config)
        assert len(sampler.sample(READY, 4, "t", "p", **config)[0]) == 4

    @pytest.mark.parametrize("wrong", [0, -1, 1.5, "4"])
    def test_a_claim_with_an_invalid_size_is_refused(self, wrong):
        with pytest.raises(InvalidArgumentError, match="n_samples_per_prompt must be positive"):
            GRPOGroupNSampler().sample(READY, 4, n_samples_per_prompt=wrong)
