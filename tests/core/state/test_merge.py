"""A saved partition is added to a state that does not have it, and to one that has it, with the same contents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import OBJECT, Harness, column, tensor, through_file
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.events import records as r
from transfer_queue.core.state.check import check_state
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.restore import check_merge, merge_state
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.puts import Publish, Reserve
from transfer_queue.sampler import PrioritySampler
from transfer_queue.testing.state_recount import check_invariants

WIDE = [f"f{number}" for number in range(64)]
"""Many fields."""


def merged(h: Harness, exists: bool, watched: list[str] | None = None) -> State:
    """A new state to which the partition of a harness was added. exists: the state has an empty partition before."""
    state = State()
    state.watched = watched or []
    for unit in h.state.units.values():
        state.add_unit(unit)
    if exists:
        apply_record(state, r.PartitionMade("p", h.state.partitions["p"].options))
    state.next_index, state.next_block = 1000, 77
    loaded = through_file(h.state)
    check_state(loaded)
    for tag in state.watched:
        loaded.partitions["p"].rows.watch(tag)
    check_merge(state, loaded)
    merge_state(state, loaded)
    check_invariants(state)
    return state


def contents(state: State) -> dict[str, Any]:
    """What is known of the rows, in order, and of the partition, whatever their positions are."""
    partition = state.partitions["p"]
    positions = partition.rows.live_positions()
    place = {position: at for at, position in enumerate(positions.tolist())}
    names = {number: group.name for number, group in partition.groups.declared.items()}
    numbers = partition.groups.groups_of(positions, 1).tolist() if partition.groups.explicit else []
    return {
        "keys": {key: place[position] for key, position in partition.keys.items()},
        "key of rows": partition.keys_of(positions),
        "tags": partition.tags_of(positions),
        "values": {name: _values(partition, name, positions) for name in partition.fields},
        "fields": {name: field.to_tree() for name, field in partition.fields.items() if field.live},
        "groups": [names.get(number) for number in numbers],
        "members": {g.name: [place[member] for member in g.members] for g in partition.groups.declared.values()},
        "consumed": {task: partition.consumption_states(task, positions).tolist() for task in partition.tasks},
        "tasks": dict(partition.tasks),
        "skipped": {
            task: {reason: [place[p] for p in rows.tolist()] for reason, rows in partition.passed.rows_of(task).items()}
            for task in partition.tasks
        },
        "lost": {name: partition.losses.events_of(name, positions).tolist() for name in partition.losses.counts},
        "changed": partition.changes.changed_since(0)[0].tolist() == positions.tolist(),
        "numbers": [partition.rows.count, partition.nbytes, partition.freed, partition.waiting],
        "watched": {
            tag: np.nan_to_num(np.concatenate([c.numbers[tag][c.alive == 1] for c in partition.rows.chunks.values()]))
            .tolist()
            for tag in partition.rows.watched
        },
        "blocks": [state.blocks.live_bytes, sorted(state.blocks.extents), len(state.blocks.schemas.number)],
    }  # fmt: skip


def _values(partition: Partition, name: str, positions: np.ndarray) -> list[Any]:
    """The block and the row in the block of each value; None for a row that has none."""
    columns = (column.tolist() for column in partition.blocks_of(name, positions))
    return [(block, slot) if block else None for block, slot in zip(*columns, strict=True)]


def check_same(h: Harness, watched: list[str] | None = None) -> State:
    """Check that the contents do not depend on whether the partition existed. Return the state in which it did not."""
    made, there = merged(h, False, watched), merged(h, True, watched)
    assert contents(made) == contents(there)
    positions = made.partitions["p"].rows.live_positions()
    assert (np.diff(made.partitions["p"].rows.indexes_of(positions)) > 0).all()
    assert made.next_index >= 1000 + len(positions)
    assert through_file(made).snapshot() == made.snapshot()
    return made


@pytest.mark.parametrize("fields", [("x",), {"x": tensor(), "y": OBJECT}, WIDE])
def test_rows_of_several_chunks_with_keys_and_tags(h: Harness, fields: Any) -> None:
    count = CHUNK + 5
    tags = [{"n": i, "s": "a"} if i % 3 else {} for i in range(count)]
    h.put(count, fields, keys=[f"k{i}" for i in range(count)], tags=tags)
    h.clear([1, 2, CHUNK + 1])
    made = check_same(h).partitions["p"]
    assert made.keys["k3"] == 3
    assert made.tags_of(np.array([4, CHUNK])) == [{"n": 4, "s": "a"}, {"n": CHUNK, "s": "a"}]


def test_rows_are_put_after_those_that_were_taken_over(h: Harness) -> None:
    h.put(3, keys=["a", "b", "c"], tags=[{"n": 1}] * 3)
    state = merged(h, False)
    keys = [f"k{i}" for i in range(40)]
    apply_record(state, r.SamplesPut("p", [r.WriterPart("w", 40)], state.next_index, 40, keys, None, [{"n": 2}] * 40))
    first = column([state.next_index - 43])
    apply_record(state, r.SamplesPut("p", [r.WriterPart("w", 1)], tags=[{"m": 3}], rows=first))
    check_invariants(state)
    partition = state.partitions["p"]
    assert partition.tags_of(np.array([0, 1, 42])) == [{"n": 1, "m": 3}, {"n": 1}, {"n": 2}]
    assert partition.keys_of(np.array([0, 42])) == ["a", "k39"]


def test_rows_that_are_pre_allocated_are_not_taken_over(h: Harness) -> None:
    h.create(pre_allocate=4)
    h.ask(Reserve("p", 1, ["a"], 0))
    made = check_same(h).partitions["p"]
    assert list(made.keys.values()) == [0]
    assert made.rows.count == 1


def test_groups_are_taken_over_without_their_cleared_members(h: Harness) -> None:
    rows = h.put(6, groups=["g", "g", "h", "h", "i", "i"])
    h.clear([rows[0], rows[4], rows[5]])
    groups = check_same(h).partitions["p"].groups
    assert {name: (group.members, group.cleared) for name, group in groups.by_name.items()} == {
        "g": ([1], 0),
        "h": ([2, 3], 0),
    }


def test_a_partition_without_groups_any_more_has_none(h: Harness) -> None:
    h.clear(h.put(2, groups=["g", "g"]))
    h.put(2)
    assert not check_same(h).partitions["p"].groups.explicit


def test_watched_tags_are_taken_over() -> None:
    h = Harness(PrioritySampler("n"))
    rows = h.put(5, tags=[{"n": i} for i in range(5)])
    h.clear(rows[:2])
    check_same(h, ["n"])
    check_same(h, ["n", "m"])


def test_fields_whose_values_are_all_lost(h: Harness) -> None:
    h.put(1)
    h.put(1, WIDE)
    h.controller.context.log.apply(r.ExtentsLost(h.unit, column([h.clients["w"].extent]), "now"))
    made = check_same(h)
    assert made.partitions["p"].losses.counts == dict.fromkeys(["x", *WIDE], 1)


STEPS = st.one_of(
    st.tuples(
        st.just("put"),
        st.sampled_from([1, 2, 5, 40]),
        st.sampled_from(
            [
                ("x",),
                {"x": tensor(), "y": OBJECT},
                {"x": tensor(shape=()), "f1": tensor()},
                {"x": tensor(shape=(2, 2))},
                WIDE,
                None,
            ]
        ),
        st.booleans(),
        st.booleans(),
        st.sampled_from([None, 2, 3]),
    ),
    st.tuples(st.just("clear"), st.integers(0, 50), st.integers(1, 3)),
    st.tuples(st.just("claim"), st.sampled_from(["t", "u"]), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(0, 50)),
    st.tuples(st.just("reserve"), st.integers(1, 3)),
    st.tuples(st.just("lose"), st.integers(1, 6)),
)


@differential(40, costly=True)
@given(st.lists(STEPS, min_size=1, max_size=10), st.sampled_from([0, 3]), st.sampled_from([0, 0, 0, CHUNK - 8]))
def test_any_partition(steps: list[tuple[Any, ...]], pre_allocate: int, first: int) -> None:
    h, names = Harness(), 0
    h.create(pre_allocate=pre_allocate)
    if first:
        h.put(first)
    for step in steps:
        partition = h.state.partitions["p"]
        rows = partition.rows.indexes_of(partition.rows.first_positions()).tolist()
        if step[0] == "put":
            _, count, fields, keyed, tagged, size = step
            keys = [f"k{names + i}" for i in range(count)] if keyed else None
            tags = [{"n": names + i} if i % 2 else {} for i in range(count)] if tagged or fields is None else None
            groups = [f"g{(names + i) // size}" for i in range(count)] if size and not keyed else None
            names += count
            h.ask(h.publish(count, fields, keys=keys, tags=tags, groups=groups) if fields is not None
                  else Publish("p", count, keys=keys, tags=tags, groups=groups, pre_allocate=0))  # fmt: skip
        elif step[0] == "clear":
            h.clear(rows[step[1] :: step[2]])
        elif step[0] == "claim":
            h.dealt(step[2], task=step[1], fields=["x"])
        elif step[0] == "skip" and step[1] < len(rows):
            h.controller.context.log.apply(r.PassedOver("p", "t", column(rows[step[1] : step[1] + 1]), "filtered"))
        elif step[0] == "reserve":
            h.ask(Reserve("p", step[1], [f"r{names + i}" for i in range(step[1])], 0))
            names += step[1]
        elif step[0] == "lose":
            h.controller.context.log.apply(r.ExtentsLost(h.unit, column([step[1]]), "now"))
    check_same(h)
