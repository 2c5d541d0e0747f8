"""Trees with a correct checksum and wrong content: each is refused with a message, or is a valid state."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import Harness, column

from transfer_queue.core import checkpoints
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.columns.kinds import pack_texts
from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import Controller
from transfer_queue.core.state import serialization
from transfer_queue.errors import CheckpointError
from transfer_queue.messages.claims import Claim, ResetConsumption
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.locks import ListLocks, ReleaseLock, TakeLock
from transfer_queue.messages.partitions import ClearPartition, CreatePartition, Seal
from transfer_queue.messages.puts import ClearRows, CloseExtents
from transfer_queue.messages.queries import ListKeys, Lookup
from transfer_queue.messages.system import Status
from transfer_queue.sampler import SequentialSampler

SEEDS = 400
NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2,
    7,
    1 << 20,
    1 << 40,
    (1 << 62) + 1,
    1 << 63,
    2.5,
    float("nan"),
    True,
    None,
    "text",
    b"",
    [],
    {},
)


def rich() -> Harness:
    """Return a harness whose state uses every table."""
    h = Harness()
    h.ask(CreatePartition("p", 0, PartitionOptions(free_when=["held"], keep_seconds=100.0)))
    keys = [f"k{n}" for n in range(6)]
    rows = h.put(6, ("x", "y"), keys=keys, tags=[{"n": n} for n in range(6)], groups=list("aabbcc"))
    h.put(6, ("x",), rows=None, groups=list("ddeeff"))
    h.claim(2, "t", batch_index=0, dp_rank=0)
    h.lease(2, "u")
    h.claim(2, "held")
    h.ask(ClearRows("p", column(rows[4:5])))
    h.create("q", pre_allocate=3)
    h.put(2, ("z",), "q", keys=["a", "b"])
    h.ask(Seal("q"))
    h.ask(TakeLock("q", ["a", "later"], 100.0))
    h.ask(TakeLock("p", ["k"], 100.0), "r")
    h.tick(1.0)
    return h


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Iterate over (container, key) of every node of a tree."""
    if isinstance(tree, dict):
        places: list[Any] = list(tree)
    elif isinstance(tree, list):
        places = list(range(len(tree)))
    else:
        return
    for place in places:
        yield tree, place
        yield from nodes(tree[place])


def mutated(tree: Any, choose: random.Random) -> str:
    """Change one node of a tree, and return a description of the change."""
    container, place = choose.choice(list(nodes(tree)))
    value = container[place]
    if isinstance(value, np.ndarray) and len(value) and choose.random() < 0.8:
        at = choose.randrange(len(value))
        fresh = value.copy()
        kind = np.iinfo(value.dtype)
        fresh[at] = choose.choice(
            [0, 1, 2, 3, int(value[at]) + (1 if value[at] < kind.max else -1), kind.min, kind.max]
        )
        container[place] = choose.choice([fresh, fresh, fresh[:-1], np.concatenate([fresh, fresh]), fresh.astype("f8")])
        return f"{place!r}: row {at} of {value.dtype}"
    how = choose.randrange(4)
    if how == 0 and isinstance(container, dict):
        del container[place]
    elif how == 1 and isinstance(container, dict):
        container[choose.choice([*container, "other", -1, 1 << 40])] = value
    elif how == 2 and isinstance(container, list):
        container.insert(choose.randrange(len(container) + 1), value)
    elif isinstance(value, int) and choose.random() < 0.5:
        container[place] = value + choose.choice([-1, 1])
    else:
        container[place] = choose.choice(NUMBERS)
    return f"{place!r}: {value!r:.40} in {type(container).__name__}"


def plain(tree: Any) -> Any:
    """Return a tree as it is read from a file: tuples are lists, and arrays are copies."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [plain(value) for value in tree]
    return tree.copy() if isinstance(tree, np.ndarray) else tree


def lived_in(tree: Any) -> None:
    """Run a controller with the state of a tree. Requests may fail only with errors of this package."""
    core = Controller(CoreConfig(SequentialSampler()), restored=serialization.load_untrusted(copy.deepcopy(tree)))
    core.on_connect("c", 1)
    requests: list[Any] = [ListKeys(), Status(), ListLocks(), TakeLock("q", ["a"], 1.0, 5.0), ReleaseLock("q", 1)]
    for name, partition in list(core.state.partitions.items()):
        rows = partition.rows.indexes_of(partition.rows.live_positions())
        requests.append(Lookup(name, rows.tobytes(), fields=list(partition.fields)))
        requests.append(Claim(name, "t", ["x"], 2, {"dp_rank": 0, "batch_index": 0}))
        requests.append(Claim(name, "new", ["x"], 1, wait=5.0))
        requests.append(CloseExtents(list(core.state.blocks.extents)))
        requests.append(ClearRows(name, rows[:3].tobytes(), core.state.epoch))
        requests.append(Seal(name))
        requests.append(ResetConsumption(name, "t"))
    requests += [ClearPartition(name) for name in core.state.partitions]
    for sequence, request in enumerate(requests, 1):
        core.handle("c", 1, RequestEnvelope(sequence, sequence - 1, request), 2.0)
        core.next_deadline()
    core.tick(1000.0)
    core.on_disconnect("c", 1, 1000.0)
    assert not core.state.row_count


@pytest.fixture(scope="module")
def tree() -> Any:
    return plain(serialization.save_state(rich().state))


def test_the_unchanged_tree_is_valid(tree: Any) -> None:
    lived_in(tree)


@pytest.mark.parametrize("part", range(4))
def test_a_tree_with_one_change_is_refused_or_valid(tree: Any, part: int) -> None:
    """Either it is refused with a message, or a controller can use it until all rows are cleared."""
    refused = 0
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        changed = copy.deepcopy(tree)
        what = mutated(changed, random.Random(seed))
        try:
            serialization.load_untrusted(changed)
        except CheckpointError:
            refused += 1
            continue
        try:
            lived_in(changed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {what} leads to {error!r}") from error
    assert refused > SEEDS // 16


def change(tree: Any, *path: Any, to: Any) -> Any:
    """Return the tree with another value at one place."""
    changed = copy.deepcopy(tree)
    at = changed
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    return changed


P = ("partitions", "p")
CHUNK = (*P, "rows", "chunks", 0)
BLOCKS = ("blocks", "chunks", 0, "columns")


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("next_index",), "seven", r"Expected `int`, got `str` - at `\$.next_index`"),
        (("next_block",), -1, ">= 0"),
        ((*CHUNK, "size"), -5, "size"),
        ((*CHUNK, "size"), 1 << 40, "<= 4096"),
        ((*CHUNK, "capacity"), 1 << 60, "<= 4096"),
        ((*CHUNK, "index"), np.zeros(16, "i4"), "Expected a column of <i8, got a column of int32"),
        ((*CHUNK, "field", "x", 0), np.full(16, 99, "i8"), "cleared row|block that does not exist"),
        ((*CHUNK, "field", "x", 1), np.full(16, 99, "i4"), "row that its block does not have"),
        ((*BLOCKS, "nbytes"), np.full(16, -1, "i8"), "wrong nbytes|recount"),
        ((*P, "number"), 1 << 40, "made after the newest change"),
        ((*P, "keys"), ["k"] * 5, "keys"),
        ((*P, "keys"), pack_texts(["k"] * 5), "keys"),
        ((*P, "keys", "values"), np.full(9, 0xC1, "u1"), "split|malformed"),
        ((*P, "keys", "ends"), np.array([-1], "i8"), "split"),
        ((*P, "options", 1), 0, "producers must be positive"),
        ((*P, "births", "marks"), [[float("nan"), 0.0, 1]], "times"),
        ((*P, "tasks"), {}, "task that p does not know"),
        ((*P, "leases", "leases", 0, 3), float("inf"), "inf seconds"),
        (("draining",), [9], "unit that is drained does not exist"),
        (("later",), 1, "unknown field `later`"),
    ],
)
def test_the_error_names_what_is_wrong(tree: Any, path: tuple[Any, ...], to: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        serialization.load_untrusted(change(tree, *path, to=to))


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("format", 2, "loads states of format 1, got 2"),
        ("time", "noon", "Expected `float`"),
        ("time", float("inf"), "float"),
        ("sampler", {"name": "S"}, "missing required field"),
        ("sampler", {"name": "S", "state": b"\xc1"}, "malformed|invalid|MessagePack"),
        ("state", {}, "does not know the form of the saved state"),
        ("more", 1, "unknown field"),
    ],
)
def test_wrong_content_around_the_state_is_refused(tree: Any, name: str, to: Any, words: str) -> None:
    """It is refused before the state changes."""
    h = rich()
    before = h.state.snapshot()
    whole = {"format": 1, "time": 0.0, "sampler": None, "origin": "o", "state": tree, name: to}

    def load() -> None:
        apply_record(h.state, checkpoints.record_of(h.controller.context, checkpoints.build_saved_state(whole)))

    with pytest.raises(CheckpointError, match=words):
        load()
    assert h.state.snapshot() == before
