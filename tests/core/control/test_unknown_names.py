"""Unknown names: partitions that do not exist, and entries of a sampling_config that the sampler does not take."""

from __future__ import annotations

from typing import Any

import harness
import pytest
from harness import Harness

from transfer_queue.core.controller import Controller
from transfer_queue.errors import InvalidArgumentError, UnknownPartitionError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import Seal, SetGroupDemand, SetPolicyVersion
from transfer_queue.messages.puts import Drop
from transfer_queue.messages.queries import ShowRows
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


class TestPartitions:
    @pytest.mark.parametrize(
        ("request_of", "value"),
        [
            (lambda name: Drop(name, "bad", b"", ["g"]), 0),
            (lambda name: ResetConsumption(name), True),
            (lambda name: Seal(name), None),
        ],
    )
    def test_a_request_about_a_partition_that_does_not_exist_logs_a_warning(
        self, h: Harness, request_of: Any, value: object
    ) -> None:
        h.put(1, partition="train_0")
        known = h.ask(request_of("train_0"))
        unknown = h.ask(request_of("tarin_0"))
        assert isinstance(known, Done)
        assert isinstance(unknown, Done)
        assert (known.value, known.warning) == (value, None)
        assert unknown.value == value
        assert (unknown.warning or "").startswith("partition 'tarin_0' does not exist (did you mean 'train_0'?): ")

    def test_if_no_name_is_near_the_existing_ones_are_listed(self, h: Harness) -> None:
        assert "(no partition exists)" in h.ask(ResetConsumption("tarin_0")).warning
        for number in range(12):
            h.put(1, partition=f"p{number}")
        assert "(the partitions are: 'p0', 'p1'," in h.ask(ResetConsumption("validation")).warning
        assert h.ask(ResetConsumption("validation")).warning.endswith("'p9', ...): reset_consumption has no effect")

    def test_a_seal_still_makes_the_partition_and_logs_nothing_with_create(self, h: Harness) -> None:
        assert h.ask(Seal("p")).warning is not None
        assert h.ask(Seal("q", create=True)).warning is None
        assert all(h.state.partitions[name].sealed for name in ("p", "q"))

    @pytest.mark.parametrize(
        "request_of",
        [lambda n: SetGroupDemand(n, "t", 1), lambda n: SetPolicyVersion(n, 1), lambda n: ShowRows(n, ["x"])],
    )
    def test_errors_about_partitions_that_do_not_exist_name_the_nearest(self, h: Harness, request_of: Any) -> None:
        h.put(1, partition="train_0")
        with pytest.raises(UnknownPartitionError, match=r"'tarin_0' does not exist \(did you mean 'train_0'\?\)"):
            h.ask(request_of("tarin_0"))

    def test_a_second_creation_with_other_settings_is_an_error_that_names_both(self, h: Harness) -> None:
        assert h.create("p", group_size=2, free_when=["t"])
        assert not h.create("p", group_size=2, free_when=["t"])
        assert not h.create("p")  # requests only defaults
        with pytest.raises(InvalidArgumentError, match=r"group_size: requested 4, but it was created with 2"):
            h.create("p", group_size=4)
        h.put(1, partition="q")
        with pytest.raises(InvalidArgumentError, match=r"producers: requested 3, but it was created with 1"):
            h.create("q", producers=3)


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

    def test_in_a_strict_system_it_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(harness, "Controller", lambda *a, **k: Controller(*a, strict=True, **k))
        h = Harness()
        h.put(2)
        with pytest.raises(InvalidArgumentError, match="'dp_sise'"):
            h.result(h.claim(1, dp_sise=2), "r")
        assert h.dealt(1, dp_rank=0) == [0]
