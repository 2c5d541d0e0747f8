"""The warning about entries of a sampling_config that the sampler of a claim does not take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transfer_queue.core.samplers.user_sampler import AnySampler, UserSampler
from transfer_queue.names import did_you_mean
from transfer_queue.sampler.base import BaseSampler
from transfer_queue.sampler.sampler_wrapper import SamplerWrapper, built_in

TAKEN_BY_ALL = frozenset({"sampler", "task_name", "partition_id", "partition", "dp_rank", "dp_size", "batch_index"})
"""The entries that a loader passes to any sampler, and those that choose a sampler."""


def unused_entries_warning(sampler: AnySampler, sampling: Mapping[str, Any]) -> str | None:
    """Return a sentence about entries of a sampling_config that the sampler does not take; None if there are none.

    A user's sampler takes any entry.
    """
    if isinstance(sampler, UserSampler) or sampling.keys() <= TAKEN_BY_ALL:
        return None
    known = _accepted_entries(sampler)
    strange = [] if known is None else [name for name in sampling if name not in known]
    if known is None or not strange:
        return None
    described = [f"{name!r}{did_you_mean(name, sorted(known)).rstrip('?')}" for name in strange]
    return (
        f"sampling_config has entries that {type(sampler).__name__} does not take and that have no effect: "
        f"{', '.join(described)}. It takes: {', '.join(sorted(known - {'partition'}))}"
    )


def _accepted_entries(sampler: BaseSampler) -> frozenset[str] | None:
    """The entries that a sampler takes; None: any."""
    if not built_in(sampler):
        return None
    own = TAKEN_BY_ALL | frozenset(sampler.sampling_entries)
    if not isinstance(sampler, SamplerWrapper):
        return own
    inner = _accepted_entries(sampler.inner)
    return None if inner is None else own | inner
