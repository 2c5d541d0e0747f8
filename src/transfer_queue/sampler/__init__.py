"""Samplers: they decide which of the ready samples form the next batch.

A sampler gets the indexes of ready samples. It returns those that it deals and those that are consumed with them.
Samplers import numpy and the errors of the package; only `factory` knows the configuration.
"""

from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.freshness_sampler import FreshnessSampler
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.priority_sampler import PrioritySampler
from transfer_queue.sampler.rank_aware_sampler import RankAwareSampler
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from transfer_queue.sampler.sequential_sampler import SequentialSampler
from transfer_queue.sampler.token_budget_sampler import TokenBudgetSampler

__all__ = [
    "BUILT_IN",
    "BaseSampler",
    "FreshnessSampler",
    "GRPOGroupNSampler",
    "PrioritySampler",
    "RankAwareSampler",
    "SamplerWrapper",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "TokenBudgetSampler",
]

BUILT_IN: dict[str, type[BaseSampler]] = {
    kind.__name__: kind
    for kind in (
        SequentialSampler,
        RankAwareSampler,
        GRPOGroupNSampler,
        SeqlenBalancedSampler,
        TokenBudgetSampler,
        PrioritySampler,
        FreshnessSampler,
    )
}
"""The samplers that `controller.sampler` may name without an import path."""
