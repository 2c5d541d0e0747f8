"""Faults that are planted in a state are found: saved ones also in a file, derived ones by the recount of tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import msgspec
import numpy as np
import pytest
from harness import Harness, column

from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.state import serialization
from transfer_queue.core.state.check import check_state
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.errors import CheckpointError
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import ClearRows
from transfer_queue.messages.system import RegisterSampler
from transfer_queue.sampler import PrioritySampler, RankAwareSampler
from transfer_queue.sampler.sampler_spec import spec_of
from transfer_queue.testing.state_recount import check_invariants


def full() -> Harness:
    """Return a harness whose state uses the tables in which faults are planted."""
    h = Harness()
    h.ask(RegisterSampler("t", *spec_of(RankAwareSampler())))
    h.ask(CreatePartition("p", 0, PartitionOptions(free_when=["held"])))
    keys = [f"k{n}" for n in range(8)]
    h.put(8, ("x", "y"), keys=keys, tags=[{"n": n} for n in range(8)], groups=list("aabbccdd"))
    h.put(2, ("x",))
    h.lease(2, "u")
    h.lease(2, "t", batch_index=0, dp_rank=0)
    h.claim(1, "held")
    h.unseen(1, "late")
    h.ask(ClearRows("p", column([0])))
    h.ask(TakeLock("p", ["a", "b"], 100.0))
    h.ask(TakeLock("p", ["c"], 100.0))
    h.claim(100, "late", wait=100.0)
    check_invariants(h.state)
    return h


def p(state: State) -> Partition:
    return state.partitions["p"]


def block_column(state: State, name: str, add: int) -> None:
    chunk = state.blocks.chunks[0]
    chunk.columns[name][np.flatnonzero(chunk.columns["live"])[0]] += add


def empty_block_inside(state: State) -> None:
    """The second block is empty, and begins inside of the first one; all sums are right."""
    columns, partition = state.blocks.chunks[0].columns, p(state)
    one, other = np.flatnonzero(columns["live"])
    gone = int(columns["nbytes"][other])
    columns["nbytes"][other], columns["offset"][other] = 0, columns["offset"][one] + 1
    partition.nbytes -= gone
    state.blocks.live_bytes -= gone


def extent(state: State) -> Any:
    return next(iter(state.blocks.extents.values()))


def lease(state: State) -> Any:
    return next(lease for lease in p(state).leases.by_token.values() if lease.batch is None)


def wrong_tags(state: State) -> None:
    chunk = p(state).rows.chunks[0]
    chunk._tags, chunk._packed = None, np.frombuffer(b"\xc1", "u1")


def same_position_twice(state: State) -> None:
    p(state).keys["k1"] = p(state).keys["k2"]


def one_lock_more(state: State) -> None:
    _, other = state.locks.by_token.values()
    state.locks.by_token[other.token] = msgspec.structs.replace(other, keys=["b"])


def members_of_two_groups(state: State) -> None:
    one, other, *_ = p(state).groups.declared.values()
    one.members[1], other.members[1] = other.members[1], one.members[1]


def dealt_number(state: State) -> None:
    dealt = p(state).rows.chunks[0].dealt["t"]
    dealt[np.flatnonzero(dealt)[0]] = 0


def unseen_row(state: State) -> None:
    batches = p(state).unseen_batches.by_token
    for token, batch in batches.items():
        batches[token] = msgspec.structs.replace(batch, rows=column([9]))


def set_at(array: np.ndarray, at: int, value: int) -> None:
    array[at] = value


Plant = Callable[[State], Any]
SAVED: dict[str, tuple[Plant, str]] = {
    "a counter of rows": (lambda s: setattr(p(s).rows, "count", 3), "7: p counts 3 rows"),
    "a counter of a chunk": (lambda s: setattr(p(s).rows.chunks[0], "living", 3), "miscounts its live rows as 3"),
    "a counter of a field": (lambda s: setattr(p(s).fields["x"], "live", 3), "counts 3 values, a recount gives"),
    "a counter of bytes": (lambda s: setattr(p(s), "nbytes", 3), "7: p miscounts its bytes"),
    "a counter of a task": (lambda s: p(s).tasks.update(held=4), "miscounts what it consumed"),
    "a counter of claims": (lambda s: p(s).claimed.update(u=4), "miscounts what it claimed"),
    "a counter of done rows": (lambda s: setattr(p(s), "done", 99), "99 rows of p are done"),
    "an index": (lambda s: set_at(p(s).rows.chunks[0].index, 2, 1), "2: the indexes of p do not ascend"),
    "an index to come": (lambda s: setattr(s, "next_index", 4), "2: a live index is not below the next one"),
    "a key": (same_position_twice, "the keys of p are not those of its rows"),
    "a reserved row": (lambda s: p(s).waiting.append(3), "the list of pre-allocated rows of p is wrong"),
    "tags": (wrong_tags, "the tags of .* cannot be decoded"),
    "a cleared row": (lambda s: set_at(p(s).rows.chunks[0].owner, 0, -1) or set_at(
        p(s).rows.chunks[0].consumed["u"], 0, 1), "1: a cleared row of .* still has something"),
    "a lost value": (lambda s: p(s).losses.counts.update(x=1), "7: p miscounts its lost values"),
    "the number of a block": (lambda s: setattr(s, "next_block", 1), "a block number is not below the next one"),
    "the uses of a block": (lambda s: block_column(s, "live", 1), "7: the live values of a block differ"),
    "the owner of a block": (lambda s: block_column(s, "owner", 1), "recorded as another partition's"),
    "the place of a block": (lambda s: block_column(s, "offset", 64), "two blocks overlap"),
    "an empty block in another one": (empty_block_inside, "two blocks overlap"),
    "the bytes of blocks": (lambda s: setattr(s.blocks, "live_bytes", 1), "7: the bytes of live blocks differ"),
    "a schema": (lambda s: block_column(s, "schema", 50), "a block has a schema that does not exist"),
    "the blocks of an extent": (lambda s: setattr(extent(s), "blocks", 9), "miscounts its blocks"),
    "the extent of a block": (lambda s: block_column(s, "extent", 70), "which does not exist"),
    "the length of an extent": (lambda s: setattr(extent(s), "length", 1), "7: the lengths of extents differ"),
    "the rows of a lease": (lambda s: setattr(lease(s), "rows", lease(s).rows[:1]), "claimed under no lease"),
    "a row of another lease": (lambda s: setattr(lease(s), "rows", np.arange(7, 10)), "has rows not claimed"),
    "the token of a lease": (lambda s: setattr(s, "next_token", 1), "the token of a lease is not below the next one"),
    "a dealt batch": (dealt_number, "disagree on the dealt batch of a row|claimed under no lease"),
    "the rows of a dealt batch": (
        lambda s: setattr(next(iter(p(s).dealt["t"].batches.values())), "live", 7), "miscounts its live rows"),
    "a batch that was not handed over": (unseen_row, "rows of batch .* are not consumed"),
    "the members of a group": (members_of_two_groups, "disagree on the group of a row"),
    "the cleared members of a group": (
        lambda s: setattr(next(iter(p(s).groups.declared.values())), "cleared", 0), "group a of p miscounts itself"),
    "a reference to a row": (
        lambda s: set_at(p(s).rows.chunks[0].held["held"], 8, 3), "7: p miscounts the references to its rows"),
    "a version": (lambda s: p(s).changes.newest.update({0: 0}), "has changed after its listed version"),
    "a lock": (one_lock_more, "9: two locks have the same key"),
}  # fmt: skip
"""What is saved: name -> the fault, and what the message says."""


def ready(state: State) -> Any:
    return next(iter(p(state).ready.values()))


def queue(state: State) -> Any:
    return state.waiting.claims["p"]["late"]


DERIVED: dict[str, tuple[Plant, str]] = {
    "the number of rows of all partitions": (lambda s: setattr(s.counted, "_sum", 77), "7: the number of rows of all"),
    "the total of a ready set": (lambda s: setattr(ready(s), "total", 77), "3: ready set .* miscounts"),
    "a row of a ready set": (lambda s: ready(s).bits[0].__setitem__(slice(None), False), "contains other rows"),
    "broken groups": (lambda s: setattr(p(s).groups, "broken", 3), "7: p counts 3 broken groups"),
    "cleared rows": (lambda s: setattr(p(s).changes, "count", 77), "7: p miscounts its clears"),
    "the key of a dealt batch": (lambda s: p(s).dealt["t"].by_key.update(
        {(3, 3): p(s).dealt["t"].by_key.pop((0, 0))}), "4: a dealt batch of t has another key"),
    "the leases of a batch": (lambda s: p(s).leases._of_batch.clear(), "is not listed with its batch"),
    "the bytes in units": (lambda s: s.blocks.stored[p(s).number].update({0: 64}), "7: the bytes of a partition in"),
    "the bytes of extents": (lambda s: s.blocks.leased_in.update({0: 3}), "7: the bytes of each unit differ"),
    "the used range of an extent": (lambda s: setattr(extent(s), "top", 1), "outside of the used range"),
    "the order of extents": (lambda s: s.blocks.spans[0].add((0, 999)), "unit 0 are not listed in order"),
    "the keys of locks": (lambda s: s.locks.of_key.pop(("p", "a")), "9: the locks by key"),
    "the wait of a claim": (lambda s: queue(s).wanted.update(z=(1, 1)), "7: the queue of p, late miscounts"),
    "the waits of a client": (lambda s: s.waiting.of_client.clear(), "7: the waiting requests of a client"),
    "a request that waits nowhere": (lambda s: s.waiting.claims.clear(), "a request waits in no queue, or in two"),
    "the index of rows": (lambda s: setattr(p(s).rows, "_firsts", [5]), "miscounts its live rows"),
    "the ranks of fields": (lambda s: p(s).field_ranks.names.add("x"), "has several ranks, or not"),
}  # fmt: skip
"""What is derived: name -> the fault, and what the message says."""


@pytest.fixture
def state() -> State:
    made = full().state
    harness.made.clear()  # no record says what this state has
    return made


@pytest.mark.parametrize("name", SAVED)
def test_a_fault_in_what_is_saved_is_found_in_tests_and_in_files(state: State, name: str) -> None:
    plant, words = SAVED[name]
    plant(state)
    with pytest.raises(BrokenInvariant, match=words):
        check_invariants(state)
    with pytest.raises(CheckpointError, match=f"contradicts itself: .*({words})"):
        serialization.load_untrusted(serialization.save_state(state))


@pytest.mark.parametrize("name", DERIVED)
def test_a_fault_in_what_is_derived_is_found_in_tests(state: State, name: str) -> None:
    plant, words = DERIVED[name]
    plant(state)
    with pytest.raises(BrokenInvariant, match=words):
        check_invariants(state)


def test_the_state_without_faults_is_sound(state: State) -> None:
    check_invariants(state)
    check_state(serialization.load_untrusted(serialization.save_state(state)))


def test_a_wrong_number_of_a_watched_tag_is_found_in_tests() -> None:
    h = Harness(PrioritySampler("n"))
    h.put(4, tags=[{"n": n} for n in range(4)])
    assert h.dealt(1) == [3]
    p(h.state).rows.chunks[0].numbers["n"][2] = 99
    with pytest.raises(BrokenInvariant, match="the column of tag 'n' of p differs from the tags"):
        check_invariants(h.state)
    harness.made.clear()
