"""The rows of keys are found whatever their order, whether they are compared as a whole or one by one."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.state.partition import FEW_KEYS
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.puts import ClearKeys

ROWS = CHUNK + 40
NAMES = [f"k{i}" for i in range(ROWS)]


@pytest.fixture(scope="module")
def keyed() -> Harness:
    """Rows with keys in two chunks, of which two rows have no key, and two are cleared."""
    h = Harness()
    h.put(CHUNK - 20, keys=NAMES[: CHUNK - 20])
    h.put(2)
    h.put(ROWS - CHUNK + 20, keys=NAMES[CHUNK - 20 :])
    h.ask(ClearKeys("p", ["k9", NAMES[CHUNK]]))
    return h


around = st.integers(-30, 30).map(lambda at: at + CHUNK - 20)


@given(
    runs=st.lists(st.tuples(st.one_of(st.integers(0, 20), around), st.integers(1, 60)), min_size=1, max_size=3),
    unknown=st.lists(st.integers(0, 200), max_size=2),
)
def test_keys_are_found_as_in_a_dict(keyed: Harness, runs: list[tuple[int, int]], unknown: list[int]) -> None:
    asked = [name for first, count in runs for name in NAMES[first : first + count]]
    for at in unknown:
        asked.insert(at, f"unknown{at}")
    partition = keyed.state.partitions["p"]
    expected = [partition.keys[name] for name in asked if name in partition.keys]
    assert partition.positions_of_keys(asked).tolist() == expected


def test_consecutive_rows_of_two_chunks_are_one_run(keyed: Harness) -> None:
    partition = keyed.state.partitions["p"]
    first = CHUNK - 18  # after two rows without keys
    asked = NAMES[CHUNK - 20 : CHUNK]
    assert len(asked) > FEW_KEYS
    assert partition.positions_of_keys(asked).tolist() == list(range(first, first + len(asked)))
    assert partition.positions_of_keys([]).tolist() == []
    assert not len(partition.positions_of_keys(["unknown"] * (FEW_KEYS + 1)))


def test_keys_beyond_the_last_row_are_unknown() -> None:
    h = Harness()
    names = [f"k{i}" for i in range(FEW_KEYS + 4)]  # as many as a chunk has places at first, and more
    h.put(FEW_KEYS, keys=names[:FEW_KEYS])
    partition = h.state.partitions["p"]
    assert np.array_equal(partition.positions_of_keys(names), np.arange(FEW_KEYS))
