"""Runs with faults in which two fields are many: puts and lookups of several fields are done in steps of one field.

Clients die, connections end and the controller restarts between the steps, and other clients change or drop the rows.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import chaos
from transfer_queue.core.puts import wide_puts
from transfer_queue.core.queries import wide_lookups
from transfer_queue.core.state import partition
from transfer_queue.core.tables import field_groups

SEEDS, PART = 40, 10


@pytest.fixture(autouse=True)
def two_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (wide_puts, wide_lookups):
        monkeypatch.setattr(module, "WIDE", 2)
        monkeypatch.setattr(module, "STEP", 1)
    for module in (field_groups, partition):
        monkeypatch.setattr(module, "MANY_FIELDS", 2)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_seeds(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Counter[str]()
    for name, table in (("lookups", wide_lookups.WideLookups), ("puts", wide_puts.WidePuts)):

        def begin(self: object, *arguments: object, name: str = name, original: object = table.begin) -> bool:
            begun = original(self, *arguments)  # type: ignore[operator]
            steps[name] += begun
            return bool(begun)

        monkeypatch.setattr(table, "begin", begin)
    reads = 0
    for seed in range(first, first + PART):
        try:
            reads += chaos.run(seed).ledger.reads
        except Exception as error:
            raise AssertionError(f"seed {seed} of this test failed") from error
    assert reads > 10 * PART
    assert steps["lookups"] > PART
    assert steps["puts"] > PART
