"""A built-in sampler as plain values, and back."""

from __future__ import annotations

import inspect

import pytest

from transfer_queue.sampler import (
    BUILT_IN,
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue.sampler.sampler_spec import describe_spec, sampler_of, spec_of

EXAMPLES: list[BaseSampler] = [
    SequentialSampler(),
    RankAwareSampler(),
    RankAwareSampler(2, drop_last=True),
    GRPOGroupNSampler(),
    GRPOGroupNSampler(1),
    GRPOGroupNSampler(4, dp_size=2, drop_last=True),
    SeqlenBalancedSampler(),
    SeqlenBalancedSampler(dp_size=1),
    SeqlenBalancedSampler(2, 3, True),
    TokenBudgetSampler(64),
    TokenBudgetSampler(64, 2, 2, tag="n", drop_last=True),
    PrioritySampler(),
    PrioritySampler("score", inner=GRPOGroupNSampler(2), aging=0.5),
    FreshnessSampler(PrioritySampler(inner=RankAwareSampler(2)), max_staleness=1, tag="version"),
]


class Mine(SequentialSampler):
    """A user's sampler."""


class Newest(BaseSampler):
    """Another one."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return list(ready_indexes), list(ready_indexes)


def test_the_examples_have_every_built_in_sampler():
    assert {type(sampler) for sampler in EXAMPLES} == set(BUILT_IN.values())


@pytest.mark.parametrize("sampler", EXAMPLES, ids=lambda sampler: describe_spec(*spec_of(sampler)))
def test_a_sampler_comes_back_with_all_its_attributes(sampler):
    name, arguments = spec_of(sampler)
    again = sampler_of(name, arguments)
    assert attributes(again) == attributes(sampler)
    assert spec_of(again) == (name, arguments)
    assert attributes(eval(describe_spec(name, arguments))) == attributes(sampler)


def attributes(sampler: BaseSampler) -> dict:
    return {
        name: attributes(value) if isinstance(value, BaseSampler) else value
        for name, value in {**vars(sampler), "class": type(sampler)}.items()
    }


def test_different_configurations_have_different_specifications():
    specs = [spec_of(sampler) for sampler in EXAMPLES]
    assert len(set(specs)) == len(specs)


def test_an_argument_that_is_left_out_is_the_default():
    assert spec_of(RankAwareSampler()) == spec_of(RankAwareSampler(None, drop_last=False))
    assert spec_of(TokenBudgetSampler(8, tag="total_lengths")) == spec_of(TokenBudgetSampler(8))


@pytest.mark.parametrize("kind", BUILT_IN.values())
def test_a_built_in_sampler_keeps_each_argument_under_its_name(kind):
    sampler = next(sampler for sampler in EXAMPLES if type(sampler) is kind)
    for name in list(inspect.signature(kind.__init__).parameters)[1:]:
        assert hasattr(sampler, name)


@pytest.mark.parametrize("sampler", [Mine(), Newest(), PrioritySampler(inner=Newest()), PrioritySampler(inner=Mine())])
def test_a_users_sampler_has_none(sampler):
    assert spec_of(sampler) is None


def test_an_instance_with_a_sample_of_its_own_has_none():
    sampler = SequentialSampler()
    sampler.sample = lambda *args, **kwargs: ([], [])
    assert spec_of(sampler) is None
    assert spec_of(object()) is None
