"""The warning about entries of a sampling_config that the sampler does not take."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SequentialSampler,
)


class Mine(BaseSampler):
    """A user's sampler, which takes any entry."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


def told(sampler: BaseSampler, /, **sampling: Any) -> str | None:
    """The warning with the reply to a claim of two rows."""
    h = Harness(sampler)
    h.put(4, tags=[{"policy_version": 1}] * 4)
    return h.result(h.claim(2, **sampling), "r").warning


class TestSamplingConfig:
    def test_an_entry_that_the_sampler_does_not_take_is_named_with_the_nearest_one(self) -> None:
        words = told(RankAwareSampler(), dp_rank=0, batch_index=0, dp_sise=2)
        assert words is not None
        assert "RankAwareSampler does not take" in words
        assert "'dp_sise'; did you mean 'dp_size'" in words

    @pytest.mark.parametrize(
        ("sampler", "entries"),
        [
            (SequentialSampler(), {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}),
            (SequentialSampler(), {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": 2}),
            (RankAwareSampler(), {"dp_rank": 0, "batch_index": 0, "dp_size": 1}),
            (GRPOGroupNSampler(2), {"dp_rank": 0, "batch_index": 0, "n_samples_per_prompt": 2}),
            (FreshnessSampler(SequentialSampler(), 5), {"policy_version": 2}),
            (PrioritySampler(inner=FreshnessSampler(GRPOGroupNSampler(2), 5)), {"policy_version": 1, "dp_size": 1}),
            (Mine(), {"anything": 1}),
            (PrioritySampler(inner=Mine()), {"anything": 1}),
        ],
    )
    def test_entries_that_a_sampler_takes_log_no_warning(self, sampler: BaseSampler, entries: dict[str, Any]) -> None:
        assert told(sampler, **entries) is None

    def test_a_claim_that_gets_no_rows_logs_the_warning_too(self) -> None:
        h = Harness()
        assert "'n_sampels'" in h.result(h.claim(1, n_sampels=2), "r").warning
        parked = h.claim(1, n_sampels=2, wait=5.0)
        h.put(1)
        assert "'n_sampels'" in h.result(parked, "r").warning

    def test_in_a_strict_system_it_is_an_error(self) -> None:
        h = Harness(strict=True)
        h.put(2)
        with pytest.raises(InvalidArgumentError, match="'dp_sise'"):
            h.result(h.claim(1, dp_sise=2), "r")
        assert h.dealt(1, dp_rank=0) == [0]
