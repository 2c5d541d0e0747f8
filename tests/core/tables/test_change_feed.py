"""Watches of a partition: which changes are reported, to which clients, when, and at what cost."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from harness import Harness

from transfer_queue.core.queries import partition_view
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.core.tables.tags import ChunkTags, matching_rows
from transfer_queue.messages.claims import ResetConsumption
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.puts import ClearKeys, Publish, Reserve
from transfer_queue.messages.queries import ChangeReply, Watch

READY = {"status": "ready"}
Ext = msgspec.msgpack.Ext


def tag(h: Harness, partition: str = "p", **tags: dict[str, Any]) -> None:
    """Put tags under keys."""
    h.ask(Publish(partition, len(tags), keys=list(tags), tags=list(tags.values()), pre_allocate=0))


def watch(h: Harness, since: int | None = None, where: Any = None, wait: float | None = 10.0, name: str = "r") -> int:
    """Send a watch of client `name` and return its sequence number."""
    return h.send(Watch("p", since, where or {}, wait), name)


def told(h: Harness, sequence: int, name: str = "r") -> ChangeReply:
    """Return the reply to a watch, which must not be parked."""
    reply = h.result(sequence, name)
    assert isinstance(reply, ChangeReply), "the watch is still parked"
    return reply


def now(h: Harness, since: int | None = None, where: Any = None) -> ChangeReply:
    """Return the reply to a watch that does not wait."""
    reply = h.look(Watch("p", since, where or {}))
    assert isinstance(reply, ChangeReply)
    return reply


def numbers(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i8").tolist()


def tags_by_key(reply: ChangeReply) -> dict[str | None, dict[str, Any]]:
    keys = reply.keys or []
    return dict(zip(keys, reply.tags or [{} for _ in keys], strict=True))


# ---------------------------------------------------------------- what is reported


def test_a_later_watch_returns_what_has_changed_since(h: Harness) -> None:
    tag(h, a={"n": 1}, b={"n": 1})
    version = now(h).version
    assert now(h, version) == ChangeReply(version)
    tag(h, b={"n": 2})
    h.put(1, ["x"], rows=[0])
    reply = now(h, version)
    assert tags_by_key(reply) == {"b": {"n": 2}, "a": {"n": 1}}, "in order of change, although the rows are a, b"
    first, second = numbers(reply.versions)
    assert version < first < second == reply.version
    assert tags_by_key(now(h, first)) == {"a": {"n": 1}}


def test_reserved_rows_are_reported_once_they_have_a_key_tag_or_field(h: Harness) -> None:
    h.create(pre_allocate=2)
    h.ask(Reserve("p", 1, None, 0))
    assert not now(h).changed
    h.ask(Reserve("p", 1, ["a"], 0))
    assert tags_by_key(now(h)) == {"a": {}}
    version = now(h).version
    h.put(1, None, rows=[0], groups=["g"])
    assert not now(h, version).changed, "a group is neither a tag nor a field"
    h.put(1, rows=[0])
    assert numbers(now(h, version).rows) == [0]


def test_cleared_rows_are_reported_with_their_keys(h: Harness) -> None:
    tag(h, a=READY, b={}, c=READY)
    h.put(1)
    version = now(h).version
    h.ask(ClearKeys("p", ["a"]))
    h.clear([3])
    reply = now(h, version, READY)
    assert (numbers(reply.rows), numbers(reply.cleared), reply.cleared_keys) == ([], [0, 3], ["a", None])
    assert numbers(reply.cleared_versions) == [version + 1, version + 2]
    assert numbers(now(h, version + 1).cleared) == [3]
    assert numbers(now(h).cleared) == [], "a client without any state needs no clears"


def test_cleared_rows_that_were_never_reported_are_not_reported(h: Harness) -> None:
    h.create(pre_allocate=3)
    version = now(h).version
    h.clear([1])
    assert not now(h, version).changed


def test_a_reply_is_incomplete_if_clears_were_forgotten(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.core.tables.changes.MAX_CLEARED", 4)
    h.put(10)
    version = now(h).version
    h.clear([0, 1])
    h.clear([2, 3])
    assert now(h, version).complete
    h.clear([4])
    assert (now(h, version).complete, numbers(now(h, version).cleared)) == (False, [2, 3, 4])
    assert now(h, version + 1).complete
    h.clear([5, 6, 7, 8, 9])
    reply = now(h, version + 3)
    assert (reply.changed, reply.complete, reply.rows) == (True, False, b"")
    assert now(h).complete
    assert not now(h, reply.version).changed


def test_a_seal_is_reported_once(h: Harness) -> None:
    h.create(producers=2)
    version = now(h).version
    h.ask(Seal("p"))
    assert not now(h, version).changed
    h.ask(Seal("p"))
    reply = now(h, version)
    assert reply.changed
    assert reply.sealed
    assert now(h).changed
    assert now(h, reply.version) == ChangeReply(reply.version, sealed=True)


# ---------------------------------------------------------------- waiting


def test_an_event_that_changes_no_sample_answers_no_watch(h: Harness) -> None:
    tag(h, a={})
    h.put(2)
    sequence = watch(h, now(h).version)
    assert h.dealt(2) == [1, 2]
    h.ask(ResetConsumption("p"))
    assert h.parked(sequence, "r")


@pytest.mark.parametrize("begins", [True, False])
def test_a_clear_a_seal_and_a_drop_answer_waiting_watches(h: Harness, begins: bool) -> None:
    tag(h, a={}, b={})
    since = None if begins else now(h).version
    sequence = watch(h, since, READY)
    h.ask(ClearKeys("p", ["a"]))
    assert h.parked(sequence, "r") == begins, "a client that got no row need not know that one is gone"
    if not begins:
        assert told(h, sequence).cleared_keys == ["a"]
        sequence = watch(h, now(h).version, READY)
    h.ask(Seal("p"))
    assert told(h, sequence).sealed
    sequence = watch(h, now(h).version, READY)
    h.ask(ClearPartition("p"))
    assert told(h, sequence) == ChangeReply(-1, changed=True, dropped=True)


def test_a_wait_that_times_out_ends_with_an_empty_reply(h: Harness) -> None:
    unknown = watch(h, wait=5)
    assert h.controller.next_deadline() == 5
    h.tick(5)
    assert told(h, unknown) == ChangeReply(-1)
    tag(h, a={})
    sequence = watch(h, None, READY, wait=5)
    tag(h, b={})
    h.tick(10)
    assert told(h, sequence) == ChangeReply(h.state.partitions["p"].version)
    assert h.controller.context.measures.counters["failures"] == 0
    assert not h.state.waiting.watches


def test_a_watch_that_does_not_wait_is_answered_at_once(h: Harness) -> None:
    assert told(h, watch(h, wait=None)) == told(h, watch(h, wait=0.0)) == ChangeReply(-1)


def test_a_put_that_waited_for_capacity_is_reported(h: Harness) -> None:
    h = Harness(capacity=1)
    h.put(1)
    sequence = watch(h, None, READY)
    put = h.send(Publish("p", 1, keys=["a"], tags=[READY], pre_allocate=0, wait=10.0))
    assert h.reply(put) is None
    h.clear([0])
    assert tags_by_key(told(h, sequence)) == {"a": READY}


# ---------------------------------------------------------------- connections


def test_a_watch_that_a_replay_left_parked_is_answered_when_its_client_sends_it_again(h: Harness) -> None:
    sequences = [watch(h, where=where) for where in (READY, {"n": 1})]
    again = Harness()
    for record in h.records[1:]:
        again.controller.context.log.apply(record)
    again.take([])
    tag(again, a=READY)
    assert again.parked(sequences[0], "r"), "its client has not sent it again yet"
    again.client("r").sequence = sequences[-1]
    for sequence, where in zip(sequences, (READY, {"n": 1}), strict=True):
        again.send(Watch("p", None, where, 10.0), "r", sequence)
    assert tags_by_key(told(again, sequences[0])) == {"a": READY}
    assert again.parked(sequences[1], "r")
    tag(again, b={"n": 1})
    assert tags_by_key(told(again, sequences[1])) == {"b": {"n": 1}}


# ---------------------------------------------------------------- cost


def test_waiting_watches_read_only_the_rows_of_a_put(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    h.put(300, None, tags=[{"n": 0}] * 300)
    names = [f"r{i}" for i in range(50)]
    for name in names:
        watch(h, None, READY, name=name)
    looked: list[int] = []

    def counted(tags: ChunkTags | None, where: dict[str, Any], at: np.ndarray) -> np.ndarray:
        looked.append(len(at))
        return matching_rows(tags, where, at)

    monkeypatch.setattr(partition_view, "matching_rows", counted)
    for i in range(20):
        h.put(2, None, rows=[i, 299 - i], tags=[{"n": 1}] * 2)
    monkeypatch.undo()
    assert sum(looked) == 40
    assert all(h.parked(1, name) for name in names)


def test_chunks_without_changes_are_not_read(h: Harness) -> None:
    h.put(2 * CHUNK + 5)
    partition = h.state.partitions["p"]
    version = partition.version
    h.put(1, rows=[CHUNK + 7])
    kept = {key: partition.rows.chunks[key].changed for key in (0, 2)}
    for key in kept:
        partition.rows.chunks[key].changed = None  # type: ignore[assignment]
    positions, versions = partition.changes.changed_since(version)
    assert (positions.tolist(), versions.tolist()) == ([CHUNK + 7], [version + 1])
    for key, changed in kept.items():
        partition.rows.chunks[key].changed = changed
    assert len(partition.changes.changed_since(0)[0]) == 2 * CHUNK + 5


def test_the_versions_of_a_chunk_are_removed_with_it(h: Harness) -> None:
    h.put(CHUNK + 1)
    h.clear(range(CHUNK))
    assert list(h.state.partitions["p"].changes.newest) == [1]
    assert numbers(now(h).rows) == [CHUNK]


# ---------------------------------------------------------------- lists
