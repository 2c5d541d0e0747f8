"""Ready rows ordered by a tag: the result of reading every row, after any change, without reading every row."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import pytest
from harness import DELETE, Harness, column
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.events import records as r
from transfer_queue.core.tables.complete_groups import Ranking
from transfer_queue.core.tables.ready_sets import ReadySets
from transfer_queue.core.tables.rows import CHUNK, RowTable
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.sampler.ready_views import ListedRows, RankKey, TaggedIndexes

UP = RankKey("n")
AGED = RankKey("n", aging=0.5)
DOWN = RankKey("n", sign=-1.0, missing=-math.inf)


def ready_of(h: Harness) -> ReadySets:
    partition = h.state.partitions["p"]
    return partition.sampler_view(partition.ready_set("t", ("x",)))


class Tags:
    """The tags of a partition, without the columns that the controller keeps."""

    def __init__(self, h: Harness) -> None:
        self.partition = h.state.partitions["p"]

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        positions = self.partition.rows.positions_of(np.array(indexes, "i8"))
        tags = self.partition.tags_of(positions)
        return dict(zip(indexes, tags, strict=True)) if tags is not None else {}


def consume(h: Harness, rows: list[int]) -> None:
    """Consume these rows for task t."""
    h.controller.context.log.apply(r.Dealt("p", "t", None, len(rows), [], column(rows)))


def compare(h: Harness, sizes: tuple[int, ...] = (2, 3)) -> None:
    """Compare the ready rows with the same rows as a list, whose tags are read one by one."""
    ready = ready_of(h)
    assert isinstance(ready, TaggedIndexes)
    listed = ListedRows(ready, Tags(h))
    for key in (UP, AGED, DOWN):
        assert list(ready.ranked(key)) == list(listed.ranked(key)), key
        for bound in (-2, 0, 1.5):
            assert ready.above(key, bound) == listed.above(key, bound), (key, bound)
        for size in sizes:
            assert list(ready.ranked_groups(key, size)) == list(listed.ranked_groups(key, size)), (key, size)
            spoiled = ready.spoiled(key, 1.5, size)
            assert set(listed.spoiled(key, 1.5, size)) <= set(spoiled)


tags = st.lists(st.one_of(st.none(), st.integers(-3, 3)), min_size=1, max_size=7)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), tags),
        st.tuples(st.just("reserve"), tags),
        st.tuples(st.just("tag"), st.integers(0, 40), st.integers(-3, 3) | st.just(DELETE)),
        st.tuples(st.just("replace"), st.integers(0, 40)),
        st.tuples(st.just("fill"), st.integers(0, 40)),
        st.tuples(st.just("clear"), st.integers(0, 40)),
        st.tuples(st.just("deal"), st.integers(1, 5)),
    ),
    max_size=25,
)


@differential(30, costly=True)
@given(steps, st.booleans())
def test_rankings_follow_every_change(sequence: list[Any], declared: bool) -> None:
    h = Harness()
    h.create()
    made = 0

    def live(row: int) -> bool:
        return bool(h.state.partitions["p"].rows.position_of(row) >= 0)

    for kind, *what in sequence:
        if kind in ("put", "reserve"):
            (values,) = what
            groups = [f"g{(made + i) // 2}" for i in range(len(values))] if declared else None
            given_tags = [{} if value is None else {"n": value, "m": 1} for value in values]
            fields = ("x",) if kind == "put" else ("other",)
            h.put(len(values), fields, tags=given_tags, groups=groups)
            made += len(values)
        elif kind == "deal":
            h.dealt(what[0])
        elif live(what[0]):
            row = what[0]
            if kind == "tag":
                h.ask(h.publish(1, None, rows=[row], tags=[{"n": what[1]}]))
            elif kind == "replace":
                h.ask(h.publish(1, None, rows=[row], tags=[{"m": 2}], replace_tags=True))
            elif kind == "fill":
                h.put(1, rows=[row])
            else:
                h.clear([row])
        compare(h)


def test_rankings_of_many_chunks_with_ties() -> None:
    h = Harness()
    h.put(7, partition="q")
    generator = np.random.default_rng(3)
    values = generator.integers(0, 50, 3 * CHUNK).tolist()
    h.put(len(values), tags=[{"n": value} if value else {} for value in values])
    compare(h)
    assert h.dealt(CHUNK + 5) is not None
    h.clear(range(7 + 2 * CHUNK, 7 + 2 * CHUNK + 50))
    h.put(CHUNK)
    compare(h)
    h.clear(range(7 + CHUNK, 7 + 2 * CHUNK + 1))
    compare(h)


def test_only_chunks_that_can_contain_the_highest_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    h = Harness()
    for value in (1, 3, 2, 3):
        h.put(CHUNK, tags=[{"n": value}] * CHUNK)
    ready = ready_of(h)
    assert list(islice(ready.ranked(UP), 3)) == [CHUNK, CHUNK + 1, CHUNK + 2]
    looked: list[int] = []
    keys = Ranking._keys
    rows: RowTable = h.state.partitions["p"].rows

    def counted(self: Ranking, bits: Any, chunk: Any) -> Any:
        looked.append(next(number for number, one in rows.chunks.items() if one is chunk))
        return keys(self, bits, chunk)

    monkeypatch.setattr(Ranking, "_keys", counted)
    assert next(ready.ranked(UP)) == CHUNK
    assert looked == [1], "chunks that are not needed and did not change are not read"
    assert ready.above(UP, 5) == []
    assert looked == [1]
    h.ask(h.publish(1, None, rows=[2 * CHUNK + 7], tags=[{"n": 9}]))
    assert next(ready.ranked(UP)) == 2 * CHUNK + 7
    assert looked == [1, 2, 2, 1, 3], "the chunk that changed, then those that can contain the first 32 rows"


def test_a_tag_that_is_not_a_number_is_an_error(h: Harness) -> None:
    h.put(3, tags=[{"n": 1}, {"n": "high"}, {}])
    ready = ready_of(h)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"tag 'n' of row 1 must be a number, got 'high' \(str\)"):
            next(ready.ranked(UP))
    with pytest.raises(InvalidArgumentError, match="row 1"):
        ready.above(DOWN, 0)
    h.ask(h.publish(1, None, rows=[1], tags=[{"n": 5}]))
    assert list(ready.ranked(UP)) == [1, 0, 2]
    h.ask(h.publish(2, None, rows=[0, 2], tags=[{"n": True}, {"n": None}]))
    with pytest.raises(InvalidArgumentError, match="row 0 must be a number, got True"):
        next(ready.ranked(UP))
    h.clear([0])
    assert list(ready.ranked(UP)) == [1, 2]


def test_groups_by_order_with_a_row_above_the_bound_are_returned_completely(h: Harness) -> None:
    """A group is returned completely, with members that are not ready yet or are put later."""
    h.put(3, tags=[{"n": 5}, {"n": 0}, {"n": 5}])
    h.put(1, ("other",))
    h.put(2, tags=[{"n": 0}, {"n": 5}])
    ready = ready_of(h)
    assert ready.spoiled(DOWN, -1, 2) == [0, 1, 4, 5]
    assert ready.spoiled(DOWN, -1, 4) == [0, 1, 2, 3, 4, 5]
    assert ready.spoiled(DOWN, -1, 1) == [1, 4]
    consume(h, [4, 5])
    assert ready.spoiled(DOWN, -1, 3) == [0, 1, 2]
    assert ready.orphans(3) == [], "row 3 is not ready"
    h.put(1, rows=[3])
    ready = ready_of(h)
    assert ready.orphans(3) == [3], "rows 3 to 5 are a group of which others are consumed"
    assert ready.orphans(4) == ready.orphans(1) == []
    h.put(3, tags=[{"n": 5}] * 3)
    ready = ready_of(h)
    assert ready.orphans(4) == [6, 7], "rows that joined the group of 4 and 5 later"
    assert ready.orphans(4) == [6, 7], "as long as they exist"
    h.clear([6])
    assert ready.orphans(4) == [7]
    h.clear([1])
    h.put(1, rows=[0])
    ready = ready_of(h)
    assert ready.orphans(2) == [0, 7], "for whatever reason the other members are gone"


def test_declared_groups_with_a_row_above_the_bound_are_returned_completely(h: Harness) -> None:
    h.put(3, tags=[{"n": 0}, {"n": 5}, {"n": 5}], groups=["a", "b", "a"])
    ready = ready_of(h)
    assert ready.spoiled(DOWN, -1, 3) == [0, 2]
    assert ready.orphans(3) == []
    consume(h, [0, 2])
    assert ready.spoiled(DOWN, -1, 3) == []
    h.put(2, tags=[{"n": 5}] * 2, groups=["a", "b"])
    ready = ready_of(h)
    assert ready.orphans(3) == [3]
    h.put(1)
    h.ask(h.publish(1, None, rows=[5], tags=[{"n": 0}]))
    ready = ready_of(h)
    assert ready.spoiled(DOWN, -1, 3) == [5], "a row without a group is returned by itself"
    h.clear([1])
    h.put(1, groups=["b"])
    ready = ready_of(h)
    assert ready.orphans(3) == [3, 4, 6], "for whatever reason the other members are gone"


def test_a_partition_that_is_created_again_has_new_columns(h: Harness) -> None:
    h.put(2, tags=[{"n": 1}, {"n": 2}])
    assert list(ready_of(h).ranked(UP)) == [1, 0]
    h.ask(ClearPartition("p"))
    h.put(2, tags=[{"n": 1}, {"n": 2}])
    assert list(ready_of(h).ranked(UP)) == [3, 2]
