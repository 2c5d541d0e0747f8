"""A persisted column is one declaration in its table, from which everything else follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import tree_through_file

from transfer_queue.core.columns.kinds import per_row, rows_of
from transfer_queue.core.columns.schema import (
    BrokenInvariant,
    Count,
    Persisted,
    array_of,
    counter,
    map_of,
    part,
    parts_of,
    scalar,
)


class Job(msgspec.Struct, eq=False):
    number: Count
    name: str
    rows: np.ndarray


class Before(Persisted):
    """A chunk of rows in an earlier release."""

    size: int = counter(3)
    capacity: int = counter()
    alive: np.ndarray = per_row("u1", most=1)
    seen: dict[str, np.ndarray] = per_row("u2", by_name=True, cleared=True, most=7)


class Now(Before):
    """The same table with one more column, which is declared here and nowhere else."""

    score: np.ndarray = per_row("i4", fill=-1, least=-1, most=100, cleared=True)


class Table(Persisted):
    """A table with columns of several kinds."""

    total: int = counter(1)
    label: str = scalar(str, "none")
    by_name: dict[str, int] = map_of(str, Count)
    tried: dict[str, dict[int, np.ndarray]] = map_of(str, map_of(Count, array_of("<u2", length=4)))
    jobs: dict[int, Job] = rows_of(Job, key="jobs", array="rows", by="number")
    chunks: dict[int, Now] = parts_of(Count, Now)
    one: Now = part(Now)

    def __init__(self) -> None:
        super().__init__()
        self.one = Now()


def chunk(kind: type[Any] = Now, capacity: int = 3) -> Any:
    made = kind()
    made.capacity = capacity
    made.alive = np.array([1, 1, 0], "u1")
    made.seen = {"t": np.array([1, 2, 0], "u2")}
    if kind is Now:
        made.score = np.array([50, -1, -1], "i4")
    return made


def table() -> Table:
    made = Table()
    made.total, made.label = 5, "some"
    made.by_name["a"] = 1
    made.tried["t"] = {0: np.array([0, 3, 0, 0], "u2")}
    made.jobs[7] = Job(7, "seven", np.array([4, 5]))
    made.chunks[2] = chunk()
    made.one = chunk()
    return made


def test_the_initial_values_are_the_declared_ones() -> None:
    made = Table()
    assert (made.total, made.label, made.by_name, made.tried, made.jobs, made.chunks) == (1, "none", {}, {}, {}, {})
    assert len(made.one.score) == 0
    assert made.one.score.dtype == np.dtype("i4")


def test_a_column_is_saved_and_restored() -> None:
    one, again = table(), Table()
    again.restore(tree_through_file(one.to_tree()))
    assert again.to_comparable() == one.to_comparable()
    assert again.jobs[7].name == "seven"
    assert again.jobs[7].rows.tolist() == [4, 5]
    assert again.chunks[2].score.tolist() == [50, -1, -1]
    again.check_columns("t")


@pytest.mark.parametrize("name", [column.name for column in Table.declared_columns()])
def test_every_column_is_compared(name: str) -> None:
    one, other = table().to_comparable(), Table().to_comparable()
    assert one[name] != other[name]
    assert table().to_comparable() == one


def test_a_changed_number_of_the_added_column_is_compared() -> None:
    one, other = table(), table()
    other.chunks[2].score[0] = 51
    assert one.to_comparable() != other.to_comparable()


def test_a_column_by_name_without_values_equals_a_missing_one() -> None:
    one, other = chunk(), chunk()
    one.size = other.size = 3
    other.seen["later"] = np.zeros(3, "u2")
    assert one.to_comparable() == other.to_comparable()


def test_a_tree_without_the_added_column_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="required field `score`"):
        Now().restore(chunk(Before).to_tree())


@pytest.mark.parametrize(
    ("path", "to", "words"),
    [
        (("chunks", 2, "score"), np.zeros(3, "i8"), r"Expected a column of <i4, got a column of int64 - at `\$.chunks"),
        (("one", "score"), [1, 2, 3], r"Expected a column of <i4, got list - at `\$.one.score`"),
        (("total",), -1, r"Expected `int` >= 0 - at `\$.total`"),
        (("label",), 3, r"Expected `str`, got `int` - at `\$.label`"),
        (("tried", "t", 0), np.zeros(3, "u2"), "Expected a column of <u2 with 4 entries, got 3 of uint16"),
        (("jobs", 0), ["seven", 7], r"jobs"),
        (("more",), 1, "unknown field `more`"),
    ],
)
def test_a_tree_of_another_form_is_refused(path: tuple[Any, ...], to: Any, words: str) -> None:
    tree = tree_through_file(table().to_tree())
    at = tree
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = to
    with pytest.raises(msgspec.ValidationError, match=words):
        Table().restore(tree)


def set_score(at: int, to: int) -> Callable[[Table], None]:
    def change(table: Table) -> None:
        table.chunks[2].score[at] = to

    return change


def shorten(table: Table) -> None:
    table.one.score = table.one.score[:2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_score(0, 101), r"score of t.chunks\[2\] has numbers from -1 to 101, .* at least -1 and at most 100"),
        (set_score(0, -2), "has numbers from -2"),
        (set_score(2, 5), r"a cleared row of t.chunks\[2\] still has something: score"),
        (shorten, "score of t.one is 2 long, not 3"),
    ],
)
def test_impossible_numbers_are_refused(change: Callable[[Table], None], words: str) -> None:
    made = table()
    change(made)
    with pytest.raises(BrokenInvariant, match=words):
        made.check_columns("t")


def test_two_entries_with_the_same_key_are_refused() -> None:
    tree = table().to_tree()
    tree["jobs"] *= 2
    tree["rows"] = {"ends": np.array([2, 4]), "values": np.arange(4)}
    with pytest.raises(ValueError, match="2 entries have 1 distinct keys"):
        Table().restore(tree)
