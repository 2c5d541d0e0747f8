"""Differential tests compare a shortcut of the data path with a few simple lines, on inputs with many coincidences.

A shortcut that is taken under a wrong condition gives the right bytes for nearly all inputs. Its tests therefore draw
what makes the conditions of shortcuts hold by accident: lengths of 0, 1 and 2, repeated rows, empty rows at both ends,
many small blocks. `make fuzz` runs them with 100 times the examples (`--examples-factor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Test = TypeVar("Test", bound=Callable[..., Any])

factor = 1
"""How many times the usual number of examples is run; set by conftest.py before the tests are imported."""


def differential(examples: int) -> Callable[[Test], Test]:
    """Returns a decorator that makes a hypothesis test a differential one.

    Args:
        examples: How many examples `make test` runs; `make fuzz` runs 100 times as many.
    """
    chosen = settings(max_examples=examples * factor, deadline=None, suppress_health_check=list(HealthCheck))

    def mark(test: Test) -> Test:
        return pytest.mark.differential(chosen(test))

    return mark


small = st.integers(0, 2)
"""Lengths whose sums and means coincide."""


def row_lengths(count: int) -> st.SearchStrategy[list[int]]:
    """Lengths of `rows` rows: small ones, equal ones, and small ones with empty rows first and last."""
    any_of_them = st.lists(small, min_size=count, max_size=count)
    equal = small.map(lambda length: [length] * count)
    bordered = any_of_them.map(lambda found: [0, *found[1:-1], 0] if count > 1 else found)
    return st.one_of(any_of_them, equal, bordered)
