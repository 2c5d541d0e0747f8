"""Names, values, sizes and tables for people: bounded, and as HTML without anything that a value could inject."""

from __future__ import annotations

import math
from typing import Any

import pytest

from html_checks import HOSTILE, BrokenRepr, check_html
from transfer_queue import display
from transfer_queue.display import GroupHeading, HtmlPage, HtmlTable, ProgressCell, SizeCell, table_of


class LongRepr:
    def __repr__(self) -> str:
        return "long\n" * 100_000


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_text_stays_text_everywhere(evil: str) -> None:
    rows: list[Any] = [GroupHeading(evil, evil), [evil, evil, ProgressCell(1, 2)]]
    page = HtmlPage(evil, evil, [evil], [evil], [HtmlTable([evil, evil, evil], rows, evil)])
    found = check_html(page.html())
    assert len(page.html()) < 12_000
    if evil.startswith("<script"):
        assert found.text.count(evil) == 12
    assert "\x1b" not in page.html()
    assert "\u202e" not in page.html()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (1023.99 * 2**20, "1.0 GiB"),
     (5 << 40, "5.0 TiB"), (3 << 50, "3,072.0 TiB")],
)  # fmt: skip
def test_sizes_have_units(nbytes: float, text: str) -> None:
    assert display.size_text(nbytes) == text


def test_texts_are_shortened_in_the_middle() -> None:
    assert display.short_text("abcdefghij", 10) == "abcdefghij"
    assert display.short_text("abcdefghijk", 7) == "abcd…jk"
    assert len(display.short_text("x" * 1000)) == display.MAX_CHARACTERS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"step": 1}, "{'step': 1}"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, ...]"),
        (BrokenRepr(), None),
        (LongRepr(), None),
        (10**10_000, None),
        ({"a": {"b": {"c": {"d": {}}}}}, "{'a': {'b': {'c': {...}}}}"),
        ("x" * 1000, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_repr_of_any_value_is_one_short_line(value: Any, text: str | None) -> None:
    found = display.short_repr(value)
    assert len(found) <= display.MAX_CHARACTERS
    assert "\n" not in found
    assert text is None or found == text


def test_a_value_that_contains_itself() -> None:
    value: list[Any] = []
    value.append(value)
    assert display.short_repr(value) == "[[[[...]]]]"[: len(display.short_repr(value))]


def test_lists_say_how_many_names_are_left_out() -> None:
    assert display.listed([]) == "[]"
    assert display.listed(["a", "b"]) == "['a', 'b']"
    assert display.listed(map(str, range(1004))) == "['0', '1', '2', '3', ... 1,000 more]"
    assert display.listed_names(map(str, range(14)), 3) == "0, 1, 2, … 11 more"
    assert display.listed_names([]) == "none"


def test_a_table_says_how_many_rows_are_left_out() -> None:
    read: list[int] = []

    def rows() -> Any:
        for number in range(1000):
            read.append(number)
            yield [number, "text"]

    table = table_of(["number", "text"], rows(), 1000, "sample", 5)
    assert check_html(table.html()).text.endswith("4text… 995 more samples")
    assert len(read) <= 6
    assert table_of(["number"], [[1], [2]], 3, "sample", 2).left == "1 more sample"
    assert table_of(["number"], [[1], [2]], 2, "sample", 2).left == ""


def test_numbers_and_their_header_are_on_the_right() -> None:
    table = HtmlTable(["name", "rows", "bytes", "done"], [["a", 5, SizeCell(2048), ProgressCell(1, 0)]])
    parts = [part for part in table.html().split("<t") if part.startswith(("h ", "d "))]
    assert ["right" in part for part in parts] == [False, True, True, True] * 2
    assert check_html(table.html()).text == "namerowsbytesdonea52.0 KiB1 / 0"


def test_empty_tables_are_left_out() -> None:
    assert check_html(HtmlPage("Title", tables=[HtmlTable(["a"], [])]).html()).names == {"div", "b"}


def test_a_time_that_no_clock_shows_is_unknown() -> None:
    assert display.time_of_day(math.inf) == "an unknown time"
