"""Reading from several units elsewhere: what their readings ask for at the same time is asked at once."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from transfer_queue.client.data.remote_io import fetch_parallel
from transfer_queue.errors import UnitLostError
from transfer_queue.messages.base import Done
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.storage import UnitStatus, UnitStatusReply
from transfer_queue.net.calls import CONTROLLER, Call, Request, Together
from transfer_queue.testing.cluster import Cluster

Reading = Generator[Call, AnyReply, bool]


def reading(unit: int, rounds: int, good: bool = True) -> Reading:
    for number in range(rounds):
        reply = yield Request(("unit", unit), UnitStatus(), timeout=float(number))
        assert reply == Done((unit, number))
    return good


def answered(operation: Reading) -> tuple[list[list[int]], bool]:
    """The units that were asked in each round, and what it came to."""
    rounds = []
    try:
        call = next(operation)
        while True:
            assert isinstance(call, Together), "several are asked together"
            rounds.append([each.target[1] for each in call.calls])
            for each in call.calls:
                assert each.timeout is not None
                each.outcome = Done((each.target[1], int(each.timeout)))
            call = operation.send(Done())
    except StopIteration as stop:
        return rounds, stop.value


def test_a_round_asks_all_that_have_more_to_ask() -> None:
    assert answered(fetch_parallel([reading(0, 2), reading(1, 3), reading(2, 1)])) == ([[0, 1, 2], [0, 1], [1]], True)
    assert answered(fetch_parallel([])) == ([], True)
    assert answered(fetch_parallel([reading(0, 0), reading(1, 0, good=False)])) == ([], False)


def test_the_first_that_fails_ends_all() -> None:
    assert answered(fetch_parallel([reading(0, 3), reading(1, 1, good=False)])) == ([[0, 1]], False)


def test_one_alone_is_asked_alone() -> None:
    operation = fetch_parallel([reading(4, 1)])
    assert next(operation).target == ("unit", 4)
    with pytest.raises(StopIteration) as end:
        operation.send(Done((4, 0)))
    assert end.value.value is True


def test_an_error_is_that_of_its_own_reading() -> None:
    def patient() -> Reading:
        try:
            yield Request(("unit", 1), UnitStatus())
        except UnitLostError:
            yield Request(("unit", 2), UnitStatus())
        return True

    operation = fetch_parallel([reading(0, 2), patient()])
    first = next(operation)
    first.calls[0].outcome, first.calls[1].outcome = Done((0, 0)), UnitLostError("gone")
    second = operation.send(Done())
    assert [call.target[1] for call in second.calls] == [0, 2]
    second.calls[0].outcome = UnitLostError("gone, too")
    second.calls[1].outcome = Done()
    with pytest.raises(UnitLostError, match="gone, too"):
        operation.send(Done())


def test_the_simulation_makes_calls_at_once_too(cluster: Cluster) -> None:
    def asking(calls: list[Call]) -> Generator[Call, AnyReply, None]:
        yield Together(calls)

    client = cluster.client("c")
    client.get_partition_list()  # so that it knows the unit
    calls = [Request(("unit", 0), UnitStatus()), Request(CONTROLLER, ListPartitions())]
    client.call(asking(calls))
    assert isinstance(calls[0].outcome, UnitStatusReply)
    assert calls[1].outcome == Done([])
