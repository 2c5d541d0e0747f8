"""Values that a controller or a unit counts under a name become samples without further code."""

from __future__ import annotations

from transfer_queue.messages.reports.unit_reports import Measured, ServerMeasures, UnitMeasures
from transfer_queue.messages.storage import UnitStatusReply
from transfer_queue.metrics.samples import Snapshot, counter_of_controller, counter_of_units, series

SERVER = ServerMeasures([], [], {}, {}, {}, 0, 0, 0.0, 0, 0.0)


def unit(number: int, counters: dict[str, float]) -> Measured:
    space = UnitStatusReply(1, 1, 0, 1, "disk")
    return Measured(1, number, SERVER, UnitMeasures(space, 0, 0, 0.0, False, counters))


SNAPSHOT = Snapshot(
    server=SERVER, counters={"merged": 3.0}, count=0, partitions=[], samplers=[], infos=[],
    units={0: unit(0, {"refused": 2.0}), 1: unit(1, {}), 2: None}, live={}, series={"late": {("p", "t"): 5.0}},
    journal=None,
)  # fmt: skip


def test_a_counter_of_the_controller_has_no_labels_and_is_0_before_the_first_event() -> None:
    assert list(counter_of_controller("merged")(SNAPSHOT)) == [((), 3.0)]
    assert list(counter_of_controller("split")(SNAPSHOT)) == [((), 0)]


def test_a_counter_of_units_has_a_sample_for_each_unit_that_answered() -> None:
    assert list(counter_of_units("refused")(SNAPSHOT)) == [(("0", "disk"), 2.0), (("1", "disk"), 0)]


def test_a_series_has_a_sample_for_each_of_its_keys() -> None:
    assert list(series("late")(SNAPSHOT)) == [(("p", "t"), 5.0)]
    assert list(series("early")(SNAPSHOT)) == []
