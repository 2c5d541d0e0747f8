"""Long clears are done in steps, with other requests in between, and are answered once, at the end."""

from __future__ import annotations

import pytest
from harness import Harness, column

from transfer_queue.core.puts import partitions
from transfer_queue.errors import InvalidArgumentError, StaleMetadataError
from transfer_queue.messages.base import Done
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, ClearRows


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "STEP", 4)


def left(h: Harness) -> int:
    """Return the number of live rows of the partition."""
    return h.state.partitions["p"].rows.count


def test_rows_are_cleared_in_steps_with_other_requests_in_between(h: Harness) -> None:
    rows = h.put(12)
    cleared = h.send(ClearRows("p", column(reversed(rows[:10]))))
    assert h.reply(cleared) is None
    h.tick(0.0)
    assert left(h) == 8
    assert h.dealt(2, name="r") == rows[:2], "what is not cleared yet is there"
    h.put(1, name="v")
    assert h.finish_jobs() == 2
    assert h.reply(cleared) == Done()
    assert left(h) == 3


def test_keys_are_cleared_in_steps(h: Harness) -> None:
    keys = [f"k{n}" for n in range(9)]
    h.put(9, keys=keys)
    cleared = h.send(ClearKeys("p", [*keys, "unknown"]))
    assert h.finish_jobs() == 3
    assert h.reply(cleared) == Done()
    assert not h.state.partitions["p"].keys


def test_a_partition_exists_until_the_last_step(h: Harness) -> None:
    h.put(5)
    dropped = h.send(ClearPartition("p"))
    h.tick(0.0)
    assert left(h) == 1
    h.put(1, name="v")
    h.finish_jobs()
    assert h.reply(dropped) == Done()
    assert "p" not in h.state.partitions


def test_a_partition_created_again_in_between_is_not_cleared(h: Harness) -> None:
    h.put(5)
    dropped = h.send(ClearPartition("p"))
    while "p" in h.state.partitions:
        h.ask(ClearRows("p", column(range(4))), "v")
        h.ask(ClearPartition("p"), "v")
    h.put(6, name="v")
    assert h.finish_jobs() == 1
    assert h.reply(dropped) == Done()
    assert left(h) == 6


def test_a_repeated_request_is_answered_once_on_its_new_connection(h: Harness) -> None:
    rows = h.put(9)
    request = ClearRows("p", column(rows))
    cleared = h.send(request)
    h.tick(0.0)
    old = h.clients["w"].peer
    h.connect("w")
    h.disconnect("w", old)
    assert h.send(request, sequence=cleared) == cleared
    h.finish_jobs()
    assert h.reply(cleared) == Done()
    h.connect("w")
    h.send(request, sequence=cleared)
    assert h.reply(cleared) == Done(), "it is kept"


def test_a_clear_is_finished_after_its_client_disconnects(h: Harness) -> None:
    rows = h.put(9)
    h.send(ClearRows("p", column(rows)), "gone")
    h.disconnect("gone")
    h.finish_jobs()
    assert not left(h)
    assert "gone" not in h.state.clients


def test_an_invalid_column_is_refused_before_any_row_is_cleared(h: Harness) -> None:
    rows = h.put(9)
    with pytest.raises(InvalidArgumentError, match="contains no global indexes"):
        h.ask(ClearRows("p", column(rows) + b"x"))
    assert left(h) == 9


def test_a_load_of_a_checkpoint_ends_a_clear(h: Harness) -> None:
    rows = h.put(9)
    cleared = h.send(ClearRows("p", column(rows), epoch=0))
    h.tick(0.0)
    h.state.epoch += 1
    h.finish_jobs()
    h.state.epoch -= 1
    with pytest.raises(StaleMetadataError):
        h.result(cleared)
    assert left(h) == 5
