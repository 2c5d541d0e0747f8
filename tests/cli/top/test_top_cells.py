"""Bars, strips and numbers have the requested width for all values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from transfer_queue.cli.top import cells
from transfer_queue.cli.top.cells import BarPart
from transfer_queue.timeline.spans import SpanState

shares = st.one_of(st.floats(-1, 2), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1.0]))
widths = st.integers(0, 60)


def text_of(cell: cells.Cell) -> str:
    return "".join(text for text, _ in cell)


@given(shares, widths)
def test_a_bar_has_its_width(share: float, width: int) -> None:
    assert cell_len(text_of(cells.bar(share, width, "works"))) == width


@given(st.lists(shares, max_size=5), widths)
def test_a_stacked_bar_has_its_width(parts: list[float], width: int) -> None:
    assert len(text_of(cells.stacked_bar([BarPart(share, "█", "works") for share in parts], width))) == width


@given(st.lists(st.floats(0, 1e9), max_size=40), widths)
def test_a_sparkline_has_its_width(values: list[float], width: int) -> None:
    assert len(text_of(cells.sparkline(values, width, "works"))) == width


@settings(max_examples=50)
@given(st.lists(st.tuples(st.text(max_size=20), st.just("")), max_size=4), st.integers(1, 30), st.booleans())
def test_a_cell_fits(cell: list[cells.Piece], width: int, right: bool) -> None:
    cell = [(cells.safe_text(text).replace("\n", " "), role) for text, role in cell]
    assert cells.fitted(cell, width, right).cell_len == width


@given(st.lists(st.floats(0, 10), max_size=12), st.integers(1, 80))
def test_a_strip_shows_the_largest_state_of_each_part(edges: list[float], width: int) -> None:
    edges = sorted({0.0, *edges, 10.0})
    begins, ends = np.array(edges[:-1]), np.array(edges[1:])
    states = np.array([SpanState.WORKS if at % 2 else SpanState.WAITS for at in range(len(begins))])
    text = text_of(cells.strip((begins, ends, states), 0.0, 10.0, width))
    assert len(text) == width
    assert set(text) <= {"█", "░"}


def test_a_strip_is_empty_where_nothing_is_known() -> None:
    spans = np.array([5.0]), np.array([10.0]), np.array([SpanState.WORKS])
    assert text_of(cells.strip(spans, 0.0, 10.0, 10)) == "     █████"
    assert cells.strip(spans, 3.0, 3.0, 10) == []


@given(st.floats(0, 1e15))
def test_numbers_are_short(number: float) -> None:
    assert len(cells.duration(number / 1e6)) <= 12
    assert len(cells.count(number)) <= 7
    assert len(cells.rate(number)) <= 7


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (2e-5, "20 µs"), (0.0123, "12.3 ms"), (3.21, "3.2 s"), (125, "125 s"), (900, "15 min"),
     (7500, "2 h 5 m"), (200000, "2 d 7 h"), (math.nan, "")],
)  # fmt: skip
def test_durations_have_a_unit(seconds: float, words: str) -> None:
    assert cells.duration(seconds) == words


@pytest.mark.parametrize(
    ("rows", "words"), [(0, "0"), (0.0004, "<0.001"), (0.02, "0.02"), (12.44, "12.4"), (1048, "1,048"),
                        (12_300_000, "12.3M")],
)  # fmt: skip
def test_rates_have_at_most_three_digits_behind_the_point(rows: float, words: str) -> None:
    assert cells.rate(rows) == words


def test_control_characters_are_shown_as_text() -> None:
    assert cells.safe_text("a\x1b[2J\rb\nc") == "a\\x1b[2J\\rb\nc"
