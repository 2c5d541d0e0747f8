"""Copies of blocks of other nodes: when they are fetched, which readers wait, and when they are freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.errors import ProtocolError
from transfer_queue.messages.storage import CacheBlocks
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.unit.extent_pool import ArenaPool
from transfer_queue.storage.unit.remote_block_cache import IDLE_SECONDS, READER_SECONDS, SHARE, RemoteBlockCache
from transfer_queue.storage.unit.unit_effects import Effect, Fetch, SendReply

CAPACITY = 8 << 20
BLOCK = 128 << 10


class Harness:
    def __init__(self, folder: Path) -> None:
        self.arena = Arena.create(folder / "arena", CAPACITY)
        self.pool = ArenaPool(self.arena)
        self.kept = RemoteBlockCache(self.pool, lambda nbytes: self.pool.lease(0, nbytes, 0), self.release)

    def release(self, extents: object) -> None:
        for number in list(extents):  # type: ignore[call-overload]
            extent = self.pool.table.get(number)
            if extent is None or self.kept.is_filling(number):
                continue
            self.kept.forget(number)
            self.pool.free(extent)

    def ask(self, reader: str, blocks: list[int], now: float = 0.0, peer: int = 1, nbytes: int = BLOCK) -> list[Effect]:
        columns = ([9] * len(blocks), [64 * block for block in blocks], blocks, [nbytes] * len(blocks))
        request = CacheBlocks(*(np.array(column, "<i8").tobytes() for column in columns), {9: "host:1"})
        return self.kept.handle_request(reader, peer, 5, request, now)

    @property
    def leased(self) -> int:
        return self.pool.table.leased


@pytest.fixture
def h(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.arena.close()


def places(effect: Effect) -> list[int]:
    return list(np.frombuffer(effect.reply.offsets, "<i8").tolist())


def fetch_of(effects: list[Effect]) -> Fetch:
    (effect,) = effects
    return effect


def test_a_single_reader_has_to_read_by_itself(h: Harness) -> None:
    (answer,) = h.ask("one", [1, 2])
    assert places(answer) == [-1, -1]
    (again,) = h.ask("one", [1, 2])
    assert places(again) == [-1, -1]
    assert not h.leased


def test_all_readers_wait_for_one_fetch_of_the_same_blocks(h: Harness) -> None:
    h.ask("one", [1])
    fetch = fetch_of(h.ask("two", [1, 2], peer=2))
    assert [(block[0], block[2]) for block in fetch.wanted] == [(9, 1), (9, 2)]
    assert h.ask("one", [2], peer=1) == []
    for number, view in enumerate(fetch.into):
        view[:] = bytes([number + 1]) * len(view)
    answers = h.kept.end_fetch(fetch.number, {0, 1}, 1.0)
    assert [answer.peer for answer in answers if isinstance(answer, SendReply)] == [2, 1]
    first, second = places(answers[0])
    assert (places(answers[1]), h.arena.memory[first], h.arena.memory[second]) == ([second], 1, 2)
    (known,) = h.ask("three", [2, 1], 2.0)
    assert places(known) == [second, first]


def test_blocks_that_could_not_be_fetched_have_no_copy(h: Harness) -> None:
    h.ask("one", [1])
    fetch = fetch_of(h.ask("two", [1, 2]))
    (answer,) = h.kept.end_fetch(fetch.number, {1}, 1.0)
    assert places(answer)[0] == -1
    other = fetch_of(h.ask("two", [3]))
    (answer,) = h.kept.end_fetch(other.number, set(), 1.0)
    assert places(answer) == [-1]
    assert h.pool.table.get(other.number) is None


def test_a_reader_that_is_gone_stops_counting(h: Harness) -> None:
    h.ask("one", [1])
    (answer,) = h.ask("two", [1], READER_SECONDS + 1)
    assert places(answer) == [-1]


def test_older_copies_are_freed_for_newer_ones_and_for_writers(h: Harness) -> None:
    h.ask("one", [0])
    most = CAPACITY // SHARE // BLOCK
    for block in range(1, 2 * most):
        fetch = fetch_of(h.ask("two", [block]))
        h.kept.end_fetch(fetch.number, {0}, float(block))
        assert h.kept.nbytes <= CAPACITY // SHARE
    (answer,) = h.ask("two", [1, 2 * most - 1], nbytes=0)
    old, new = places(answer)
    assert old == -1 < new
    assert h.kept.free_copies()
    assert not h.leased
    assert not h.kept.free_copies()


def test_blocks_larger_than_the_share_of_copies_are_not_fetched(h: Harness) -> None:
    h.ask("one", [1])
    (answer,) = h.ask("two", [1], nbytes=CAPACITY)
    assert places(answer) == [-1]


def test_an_extent_of_a_fetch_in_progress_is_freed_at_its_end(h: Harness) -> None:
    h.ask("one", [1])
    fetch = fetch_of(h.ask("two", [1]))
    h.release([fetch.number])
    assert h.leased
    (answer,) = h.kept.end_fetch(fetch.number, {0}, 1.0)
    assert places(answer) == [-1]
    assert not h.leased


def test_copies_that_are_not_read_are_freed(h: Harness) -> None:
    h.ask("one", [1])
    fetch = fetch_of(h.ask("two", [1]))
    assert h.kept.next_deadline() is None
    h.kept.end_fetch(fetch.number, {0}, 1.0)
    assert h.kept.next_deadline() == 1.0 + IDLE_SECONDS
    h.kept.free_idle(IDLE_SECONDS)
    assert h.leased
    h.ask("one", [1], 20.0)
    h.kept.free_idle(1.0 + IDLE_SECONDS)
    assert h.leased
    h.kept.free_idle(20.0 + IDLE_SECONDS)
    assert not h.leased


def test_a_reader_that_is_gone_gets_no_reply(h: Harness) -> None:
    h.ask("one", [1])
    fetch = fetch_of(h.ask("two", [1], peer=2))
    h.kept.drop_requests(2)
    assert h.kept.end_fetch(fetch.number, {0}, 1.0) == []


def test_columns_of_different_lengths_are_refused(h: Harness) -> None:
    for units, offsets in ((bytes(8), bytes(16)), (bytes(7), bytes(7))):
        with pytest.raises(ProtocolError):
            h.kept.handle_request("one", 1, 1, CacheBlocks(units, offsets, offsets, offsets, {}), 0.0)


@given(st.data())
@differential(30)
def test_a_copy_contains_its_block_while_its_generation_is_valid(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """This holds for any order of requests, arrivals, failures and evictions."""
    h = Harness(tmp_path_factory.mktemp("kept"))
    told: list[tuple[int, int, int]] = []  # (block, place, generation) of each returned copy
    asked: dict[int, list[int]] = {}  # connection -> the blocks that it waits for
    coming: list[Fetch] = []

    def take(effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Fetch):
                coming.append(effect)
                continue
            generations = np.frombuffer(effect.reply.generations, "<i8").tolist()
            blocks = asked.pop(effect.peer)
            told.extend(each for each in zip(blocks, places(effect), generations, strict=True) if each[1] >= 0)

    def check() -> None:
        for block, offset, generation in told:
            if h.pool.generation(offset) == generation:
                assert h.arena.memory[offset] == h.arena.memory[offset + BLOCK - 1] == block

    for now in range(data.draw(st.integers(4, 25))):
        what = data.draw(st.sampled_from(["ask", "ask", "ask", "come", "come", "way", "idle"]))
        if what == "ask":
            blocks = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
            asked[now] = blocks
            take(h.ask(data.draw(st.sampled_from("ab")), blocks, float(now), peer=now))
        elif what == "come" and coming:
            fetch = coming.pop(data.draw(st.integers(0, len(coming) - 1)))
            good = data.draw(st.sets(st.integers(0, len(fetch.wanted) - 1)))
            for at in good:
                fetch.into[at][:] = bytes([fetch.wanted[at][2]]) * len(fetch.into[at])
            take(h.kept.end_fetch(fetch.number, good, float(now)))
        elif what == "way":
            h.kept.free_copies()
        elif what == "idle":
            h.kept.free_idle(now + IDLE_SECONDS * data.draw(st.integers(0, 1)))
        check()
    h.arena.close()
