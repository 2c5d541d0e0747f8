"""The ring keeps the newest events, in order, at any position and capacity."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.timeline.event_ring import EventRing
from transfer_queue.timeline.events import EVENT


def filled(capacity: int, count: int) -> EventRing:
    ring = EventRing(capacity)
    for number in range(count):
        ring.append(float(number), float(number), 1, 0, number, 7, number)
    return ring


@given(capacity=st.integers(1, 9), count=st.integers(0, 40), back=st.integers(0, 9), most=st.integers(0, 12))
def test_reading(capacity: int, count: int, back: int, most: int) -> None:
    ring = filled(capacity, count)
    assert ring.first == max(0, count - capacity)
    position = max(ring.first, count - back)
    events = np.frombuffer(ring.read(position, most), EVENT)
    assert events["rows"].tolist() == list(range(position, min(count, position + most)))
    assert events["time"].tolist() == events["rows"].tolist()


@given(capacity=st.integers(1, 9), count=st.integers(0, 40), time=st.floats(-2, 42))
def test_a_position_by_time(capacity: int, count: int, time: float) -> None:
    ring = filled(capacity, count)
    found = ring.position_at(time)
    later = [number for number in range(ring.first, count) if number >= time]
    assert found == (later[0] if later else count)


@pytest.mark.parametrize("spread", [1, 1 << 25])
def test_the_numbers_in_a_column(spread: int) -> None:
    ring = EventRing(4)
    assert ring.numbers_in("lane") == set()
    for number in range(6):
        ring.append(0.0, 0.0, 1, 0, number * spread, 0, 0)
    assert ring.numbers_in("lane") == {2 * spread, 3 * spread, 4 * spread, 5 * spread}
    assert ring.numbers_in("partition") == {0}


def test_an_empty_ring() -> None:
    ring = EventRing(0)
    assert (ring.first, ring.end, ring.read(0, 10), ring.position_at(1.0)) == (0, 0, b"", 0)
    assert ring.numbers_in("lane") == set()
