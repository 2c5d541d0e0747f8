"""Reading from several units elsewhere: what their readings ask for at the same time is asked at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator

import pytest

from transfer_queue.client.data.remote_io import MIN_STREAM, REST, StreamCount, Streams, in_parallel
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
    assert answered(in_parallel([reading(0, 2), reading(1, 3), reading(2, 1)])) == ([[0, 1, 2], [0, 1], [1]], True)
    assert answered(in_parallel([])) == ([], True)
    assert answered(in_parallel([reading(0, 0), reading(1, 0, good=False)])) == ([], False)


def test_the_first_that_fails_ends_all() -> None:
    assert answered(in_parallel([reading(0, 3), reading(1, 1, good=False)])) == ([[0, 1]], False)


def test_one_alone_is_asked_alone() -> None:
    operation = in_parallel([reading(4, 1)])
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

    operation = in_parallel([reading(0, 2), patient()])
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


Network = Callable[[int], float]


def tried(count: StreamCount, network: Network, transfers: int) -> Counter[int]:
    """How many of these transfers had each number of streams, in a network with this rate for each number."""
    numbers: Counter[int] = Counter()
    for _ in range(transfers):
        numbers[count.number] += 1
        count.note(count.number, network(count.number))
    return numbers


def limited(flow: float, total: float) -> Network:
    """The rate of streams each of which has at most `flow`, and all together at most `total`."""
    return lambda streams: min(flow * streams, total)


@pytest.mark.parametrize(
    ("network", "most", "best"),
    [
        (limited(1, 100), 8, 8),
        (limited(1, 100), 1, 1),
        (limited(1, 100), 6, 4),
        (limited(1, 1), 8, 1),
        (limited(1, 1.1), 8, 1),
        (limited(1, 1.2), 8, 2),
        (limited(1, 4), 8, 4),
        (lambda streams: 1 / streams, 8, 1),
    ],
)
def test_streams_are_as_many_as_gain(network: Network, most: int, best: int) -> None:
    count = StreamCount(most)
    tried(count, network, 15)
    numbers = tried(count, network, 50 * REST)
    assert numbers[best] > 0.95 * numbers.total(), "others are tried rarely"
    assert set(numbers) <= {best // 2, best, 2 * best}


def test_the_number_of_streams_follows_the_network() -> None:
    count = StreamCount(8)
    for network, best in ((limited(1, 1), 1), (limited(1, 4), 4), (limited(2, 4), 2), (limited(1, 8), 8)):
        tried(count, network, 30 * REST)
        assert tried(count, network, 30 * REST).most_common(1)[0][0] == best


def test_a_slow_transfer_or_one_with_another_number_does_not_count() -> None:
    count = StreamCount(8)
    for _ in range(10):
        tried(count, limited(1, 4), 1)
        tried(count, lambda streams: 0.01, 2)
        count.note(7, 1000.0)
    assert count.number == 4


def test_streams_of_a_transfer() -> None:
    """Small ones have one, and those of several units share the limit."""
    streams = Streams(8, lambda: 0.0)
    for unit in range(3):
        for _ in range(20):
            number = streams.numbers({unit: 1 << 30})[unit]
            streams.note(unit, number, 1 << 30, 1 / number)
    large = 8 * MIN_STREAM
    assert streams.numbers({0: large, 5: large}) == {0: 4, 5: 1}
    assert streams.numbers({0: large, 1: large, 2: 10}) == {0: 2, 1: 2, 2: 1}
    assert streams.numbers({0: large}) == {0: 8}
    assert streams.numbers({0: 3 * MIN_STREAM - 1}) == {0: 2}
    assert streams.numbers({0: 0}) == {0: 1}
    assert streams.numbers({}) == {}
    for _ in range(20):
        streams.note(5, 1, MIN_STREAM, 1.0)
    assert streams.numbers({5: large}) == {5: 1}, "small transfers teach nothing"
