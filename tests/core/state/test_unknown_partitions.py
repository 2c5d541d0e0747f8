"""Errors and warnings about partitions that do not exist."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError, UnknownPartitionError
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import RankGone, ResetConsumption
from transfer_queue.messages.partitions import AwaitDone, Seal, SetGroupDemand, SetPolicyVersion
from transfer_queue.messages.puts import Drop
from transfer_queue.messages.queries import ShowRows


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
        [
            lambda name: SetGroupDemand(name, "t", 1),
            lambda name: SetPolicyVersion(name, 1),
            lambda name: ShowRows(name, ["x"]),
            lambda name: AwaitDone(name),
            lambda name: RankGone(name, "t", 0),
        ],
    )
    def test_errors_about_partitions_that_do_not_exist_have_one_text(self, h: Harness, request_of: Any) -> None:
        h.put(1, partition="train_0")
        with pytest.raises(UnknownPartitionError) as raised:
            h.ask(request_of("tarin_0"))
        assert str(raised.value) == (
            "partition 'tarin_0' does not exist (did you mean 'train_0'?). Pass the name of a partition that exists, "
            "or create this one first with create_partition"
        )

    def test_a_second_creation_with_other_settings_is_an_error_that_names_both(self, h: Harness) -> None:
        assert h.create("p", group_size=2, free_when=["t"])
        assert not h.create("p", group_size=2, free_when=["t"])
        assert not h.create("p")  # requests only defaults
        with pytest.raises(InvalidArgumentError, match=r"group_size: requested 4, but it was created with 2"):
            h.create("p", group_size=4)
        h.put(1, partition="q")
        with pytest.raises(InvalidArgumentError, match=r"producers: requested 3, but it was created with 1"):
            h.create("q", producers=3)
