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
from hypothesis.stateful import RuleBasedStateMachine

Test = TypeVar("Test", bound=Callable[..., Any])

factor = 1.0
"""How many times the usual number of examples is run; set by conftest.py before the tests are imported."""


def _examples(usual: int, costly: bool) -> int:
    return max(1, int(usual * (max(1.0, factor / 10) if costly and factor >= 1 else factor)))


def differential(examples: int, *, costly: bool = False) -> Callable[[Test], Test]:
    """Returns a decorator that makes a hypothesis test a differential one.

    Args:
        examples: How many examples `make test` runs; `make fuzz` runs 100 times as many.
        costly: Whether an example takes long: `make fuzz` runs 10 times as many.
    """
    chosen = settings(max_examples=_examples(examples, costly), deadline=None, suppress_health_check=list(HealthCheck))

    def mark(test: Test) -> Test:
        return pytest.mark.differential(chosen(test))

    return mark


def stateful(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> Any:
    """Returns the test case of a state machine.

    Args:
        machine: Its rules; usually events of a controller, beside a model.
        examples: How many runs `make test` makes; `make fuzz` makes 10 times as many.
        steps: How many rules are applied in a run.
    """
    case = machine.TestCase
    chosen = settings(max_examples=_examples(examples, True), stateful_step_count=steps, deadline=None)
    case.settings = chosen
    return pytest.mark.differential(case)


small = st.integers(0, 2)
"""Lengths whose sums and means coincide."""


def row_lengths(count: int) -> st.SearchStrategy[list[int]]:
    """Lengths of `rows` rows: small ones, equal ones, and small ones with empty rows first and last."""
    any_of_them = st.lists(small, min_size=count, max_size=count)
    equal = small.map(lambda length: [length] * count)
    bordered = any_of_them.map(lambda found: [0, *found[1:-1], 0] if count > 1 else found)
    return st.one_of(any_of_them, equal, bordered)
