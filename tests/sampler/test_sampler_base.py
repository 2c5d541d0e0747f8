"""What all samplers have in common: state, checkpoints, pickling, and the calls of the controller."""

import copy
import pickle

import numpy as np
import pytest

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from transfer_queue.sampler.base import RankConsistentSampler, overrides_sample

WHO = {"dp_rank": 1, "batch_index": 2, "task_name": "t", "partition_id": "p"}
BUILD = {
    "sequential": SequentialSampler,
    "rank_aware": RankAwareSampler,
    "grpo": lambda: GRPOGroupNSampler(2),
    "seqlen": lambda: SeqlenBalancedSampler(2, 2),
}
every_built_in = pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
every_rank_consistent = pytest.mark.parametrize("build", list(BUILD.values())[1:], ids=list(BUILD)[1:])


class Newest(BaseSampler):
    """A user's sampler that does not call the base's __init__."""

    def __init__(self, most=3):
        self.most = most

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        rows = list(ready_indexes)[::-1][: min(batch_size, self.most)]
        self._states["calls"] = self._states.get("calls", 0) + 1
        return rows, rows


class OwnSample(GRPOGroupNSampler):
    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return [], []


class OwnDeal(GRPOGroupNSampler):
    pass


def test_state_without_base_init():
    one, two = Newest(), Newest(most=1)
    assert one([1, 2, 3], 2) == ([3, 2], [3, 2])
    assert one.save_checkpoint() == {"states": {"calls": 1}}
    assert two.save_checkpoint() == {"states": {}}


def test_constructors_take_nothing_unknown():
    with pytest.raises(TypeError):
        SequentialSampler(1)
    with pytest.raises(TypeError):
        RankAwareSampler(size=2)


@pytest.mark.parametrize("duplicate", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy], ids=["pickle", "copy"])
@pytest.mark.parametrize("build", [*BUILD.values(), Newest], ids=[*BUILD, "user"])
def test_pickles(build, duplicate):
    sampler = build()
    sampler.sample(list(range(8)), 2, **WHO)
    saved = sampler.save_checkpoint()
    twin = duplicate(sampler)
    assert type(twin) is type(sampler)
    assert vars(twin) == vars(sampler)
    twin.clear_cache("p")
    assert sampler.save_checkpoint() == saved


def test_a_cached_result_of_a_user_is_found():
    sampler = Newest()
    sampler.load_checkpoint({"states": {"mine": 1, "p": {"t": {1: {2: [5]}}}}})
    assert sampler.has_cached_result("p", "t", WHO)
    assert not sampler.has_cached_result("p", "t", {**WHO, "batch_index": 3})
    assert not sampler.has_cached_result("p", "t", None)
    assert not sampler.has_cached_result("mine", "t", WHO)


@every_built_in
def test_without_a_valid_config_there_is_no_cached_result(build):
    assert not build().has_cached_result("p", "t", None)
    assert not build().has_cached_result("p", "t", {"dp_rank": -1, "batch_index": "x"})


@every_built_in
def test_checkpoint_is_a_copy(build):
    sampler = build()
    sampler.sample(list(range(8)), 2, **WHO)
    saved = sampler.save_checkpoint()
    before = copy.deepcopy(saved)
    sampler.clear_cache("p")
    assert saved == before
    twin = build()
    twin.load_checkpoint(saved)
    twin.clear_cache("p")
    assert saved == before


@every_built_in
@pytest.mark.parametrize("state", [None, {}, [], {"states": 1}], ids=str)
def test_no_checkpoint(build, state):
    sampler = build()
    sampler.sample(list(range(8)), 2, **WHO)
    before = copy.deepcopy(vars(sampler))
    with pytest.raises(InvalidArgumentError, match="save_checkpoint"):
        sampler.load_checkpoint(state)
    assert vars(sampler) == before


@every_built_in
def test_numpy_indexes_become_ints(build):
    sampled, consumed = build().sample(np.arange(8), 2, **{**WHO, "dp_rank": np.int64(1)})
    assert all(type(index) is int for index in sampled + consumed)
    assert len(sampled) == 2


@every_built_in
def test_callers_may_change_returned_lists(build):
    """Changing a result changes neither the other list nor what is cached."""
    sampler = build()
    sampled, consumed = sampler.sample(list(range(8)), 2, **WHO)
    expected = list(sampled)
    sampled.clear()
    assert consumed == expected
    again, _ = sampler.sample(list(range(8)), 2, **WHO)
    assert again == expected


@every_built_in
def test_negative_batch_size(build):
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        build().sample(list(range(8)), -1, **WHO)
    with pytest.raises(InvalidArgumentError, match="batch_size"):
        build().validate(-1, WHO)


@every_built_in
def test_a_valid_request_is_accepted(build):
    assert build().validate(4, WHO) is None


@pytest.mark.parametrize("name", ["dp_rank", "batch_index"])
@pytest.mark.parametrize("value", [-1, "0", 1.0, [0]], ids=str)
@every_rank_consistent
def test_ranks_and_batches_are_natural_numbers(build, name, value):
    with pytest.raises(InvalidArgumentError, match=name):
        build().validate(4, {**WHO, name: value})
    with pytest.raises(InvalidArgumentError, match=name):
        build().sample(list(range(8)), 4, **{**WHO, name: value})


@pytest.mark.parametrize("name", ["dp_rank", "batch_index"])
def test_rank_and_batch_are_required_by_the_system(name):
    config = {key: value for key, value in WHO.items() if key != name}
    with pytest.raises(InvalidArgumentError, match=name):
        RankAwareSampler().validate(4, config)


def test_without_batch_index_a_balanced_deal_is_for_its_caller():
    """No other rank could fetch its share, so the batch is as large as that of one rank."""
    sampler = SeqlenBalancedSampler(2, 2)
    assert sampler.validate(2, {"task_name": "t", "partition_id": "p"}) is None
    assert sampler.deal(list(range(8)), 2, task_name="t") == {0: ([0, 1], [0, 1])}
    assert sampler.deal([0, 1], 2, task_name="t", dp_rank=1) == {0: ([0, 1], [0, 1])}


def test_deal_key():
    nobody = {"task_name": "t", "partition_id": "p"}
    assert RankAwareSampler().deal_key(WHO) == (1, 2)
    assert GRPOGroupNSampler().deal_key(WHO) == (1, 2)
    assert GRPOGroupNSampler().deal_key(nobody) is None
    assert GRPOGroupNSampler().deal_key({**nobody, "dp_rank": 1}) is None
    assert GRPOGroupNSampler().deal_key({**nobody, "dp_rank": None, "batch_index": 0}) is None
    assert SeqlenBalancedSampler(1, 2).deal_key(nobody) is None
    assert SeqlenBalancedSampler(1, 2).deal_key({**nobody, "batch_index": 3}) == (0, 3)
    assert SeqlenBalancedSampler(1, 2).deal_key(WHO) == (1, 2)


def test_remainder():
    """The batch size of a last deal after a seal: for each rank if shares are kept, complete groups only."""
    ready = [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert SequentialSampler().remainder(ready) == RankAwareSampler().remainder(ready, **WHO) == 9
    assert GRPOGroupNSampler(2).remainder(ready) == 8
    assert GRPOGroupNSampler(4).remainder(ready) == 8
    assert GRPOGroupNSampler(5).remainder(ready) == 5
    assert SeqlenBalancedSampler(2, 2).remainder(ready, **WHO) == 4
    assert SeqlenBalancedSampler(2, 3).remainder(ready, **WHO) == 2
    assert SeqlenBalancedSampler(2, 5).remainder(ready, **WHO) == 0
    assert SeqlenBalancedSampler(2, 3).remainder(ready, task_name="t") == 8
    assert Newest().remainder([]) == 0


@every_rank_consistent
def test_a_deal_changes_nothing(build):
    sampler, ready = build(), list(range(8))
    before = sampler.save_checkpoint()
    shares = sampler.deal(ready, 2, **WHO)
    assert shares == sampler.deal(ready, 2, **WHO)
    assert shares[1] == build().sample(ready, 2, **WHO)
    assert sampler.save_checkpoint() == before
    assert ready == list(range(8))


@every_rank_consistent
def test_a_deal_that_cannot_be_met_is_empty_and_one_of_nothing_is_met(build):
    assert build().deal([0], 2, **WHO) == {}
    assert build().deal([], 0, **WHO)[1] == ([], [])


def test_deal_without_a_rank():
    assert GRPOGroupNSampler(2).deal([0, 1, 2, 3], 2, task_name="t") == {0: ([0, 1], [0, 1])}
    assert GRPOGroupNSampler(2).deal([0, 1, 2, 3], 2, task_name="t", dp_rank=3) == {0: ([0, 1], [0, 1])}


def test_which_class_defines_sample():
    assert not any(overrides_sample(build()) for build in BUILD.values())
    assert not overrides_sample(OwnDeal(2))
    assert overrides_sample(OwnSample(2))
    assert overrides_sample(Newest())
    patched = GRPOGroupNSampler(2)
    patched.sample = lambda *args, **kwargs: ([], [])
    assert overrides_sample(patched)


def test_rank_consistent_is_abstract():
    with pytest.raises(TypeError):
        RankConsistentSampler()
