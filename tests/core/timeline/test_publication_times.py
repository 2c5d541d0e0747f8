"""Times and policy versions of blocks, from bounded lists."""

import math

import pytest

from transfer_queue.core.timeline import event_ring
from transfer_queue.core.timeline.event_ring import PolicyHistory, PublicationTimes


@pytest.fixture
def times() -> PublicationTimes:
    return PublicationTimes()


class TestPublicationTimes:
    def test_a_block_has_the_time_at_which_it_was_put(self, times: PublicationTimes) -> None:
        for number, now in ((5, 1.0), (6, 1.0), (9, 3.0)):
            times.note(number, now)
        assert [times.time_of(number) for number in (5, 6, 8, 9, 20)] == [1.0, 1.0, 1.0, 3.0, 3.0]
        assert math.isnan(times.time_of(4))

    def test_copies_have_no_time(self, times: PublicationTimes) -> None:
        times.note(1, 1.0)
        times.note_copies(4)
        times.note_copies(6)
        times.note(8, 1.0)
        assert [times.time_of(number) for number in (1, 3, 8)] == [1.0, 1.0, 1.0]
        assert all(math.isnan(times.time_of(number)) for number in (4, 5, 7))

    def test_old_times_become_less_exact_and_never_wrong(self, times, monkeypatch) -> None:
        monkeypatch.setattr(event_ring, "MAX_CHECKPOINTS", 16)
        for number in range(1000):
            times.note(number, float(number))
        found = [times.time_of(number) for number in range(1000)]
        assert len(set(found)) <= 16
        assert found == sorted(found)
        assert all(time <= number for number, time in enumerate(found))
        assert found[-8:] == [float(number) for number in range(992, 1000)]
        assert found[0] == 0.0

    def test_copies_do_not_fill_memory(self, times, monkeypatch) -> None:
        monkeypatch.setattr(event_ring, "MAX_CHECKPOINTS", 16)
        for number in range(0, 1000, 2):
            times.note(number, float(number))
            times.note_copies(number + 1)
        found = {number: times.time_of(number) for number in range(1000)}
        known = {number: time for number, time in found.items() if not math.isnan(time)}
        assert len(set(known.values())) <= 16
        assert all(number % 2 == 0 and time <= number for number, time in known.items())


class TestPolicyHistory:
    def test_the_version_of_a_block(self) -> None:
        history = PolicyHistory()
        history.note("p", 0, 2, 10)
        history.note("p", 2, 5, 20)
        assert [history.version_at("p", block) for block in (1, 9, 10, 19, 20, 99)] == [0, 0, 2, 2, 5, 5]
        assert history.version_at("q", 1) is None
        history.forget("p")
        assert history.version_at("p", 20) is None

    def test_versions_before_the_start_are_not_known(self) -> None:
        history = PolicyHistory()
        history.note("p", 3, 4, 10)
        assert [history.version_at("p", block) for block in (9, 10)] == [None, 4]

    def test_it_is_bounded(self, monkeypatch) -> None:
        monkeypatch.setattr(event_ring, "MAX_VERSIONS", 8)
        monkeypatch.setattr(event_ring, "MAX_POLICIES", 3)
        history = PolicyHistory()
        for number in range(100):
            history.note("p", number, number + 1, number)
        assert history.version_at("p", 99) == 100
        assert history.version_at("p", 5) is None
        for number in range(100):
            history.note(f"p{number}", 0, 1, number)
        assert sum(history.version_at(f"p{number}", number) is not None for number in range(100)) == 3
