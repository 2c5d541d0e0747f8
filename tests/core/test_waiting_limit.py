"""How many requests of one client may wait."""

import harness
import pytest

from transfer_queue.core.state import wait_queues
from transfer_queue.errors import CapacityError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queues, "MAX_WAITING", 3)


def test_one_more_than_may_wait_is_an_error_and_costs_the_others_nothing(h: harness.Harness) -> None:
    waits = [h.claim(1, wait=100.0) for _ in range(3)]
    refused = h.claim(1, wait=100.0)
    with pytest.raises(CapacityError, match="too many waiting requests: 3 of this client wait already"):
        h.result(refused, "r")
    assert all(h.parked(sequence) for sequence in waits)
    other = h.claim(1, name="another", wait=100.0)
    assert h.parked(other, "another")


def test_an_answered_request_frees_space(h: harness.Harness) -> None:
    waits = [h.claim(1, wait=100.0) for _ in range(3)]
    h.put(1)
    assert h.got(waits[0]) == [0]
    assert h.parked(h.claim(1, wait=100.0))


def test_who_does_not_wait_is_answered_as_ever(h: harness.Harness) -> None:
    for _ in range(3):
        h.claim(1, wait=100.0)
    assert h.dealt(1) == []


def test_their_bytes_are_bounded_too(h: harness.Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait_queues, "MAX_WAITING_BYTES", 3000)
    large = {"sampling": {"words": "x" * 2000}}
    waits = [h.claim(1, wait=100.0, **large), h.claim(1, wait=100.0)]
    refused = h.claim(1, wait=100.0, **large)
    with pytest.raises(CapacityError, match=r"have 2\d+ bytes already.* is 3000"):
        h.result(refused, "r")
    h.put(1)
    assert h.got(waits[0]) == [0]
    assert h.parked(h.claim(1, wait=100.0, **large)), "there is space again"
    other = h.claim(1, name="another", wait=100.0, sampling={"words": "x" * 4000})
    assert h.parked(other, "another"), "one that is larger may wait alone"
