"""Saving and restoring, beyond the fixture of all core tests: encoded tags, order of keys, invalid states."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import sameness
from harness import Harness, column, through_file
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.core.columns import kinds
from transfer_queue.core.columns.kinds import PIECE, pack_texts, unpack_texts
from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.state import serialization
from transfer_queue.core.state.check import check_state
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import CHUNK, Chunk
from transfer_queue.errors import CheckpointError
from transfer_queue.messages.puts import ClearRows, Publish
from transfer_queue.messages.queries import ListKeys
from transfer_queue.sampler import PrioritySampler


def packed(chunk: Chunk) -> bool:
    return chunk._packed is not None


def chunk_of(tree: Any) -> Any:
    """The first chunk of partition p in a saved state."""
    return tree["partitions"]["p"]["rows"]["chunks"][0]


def test_tags_stay_encoded_until_one_is_read(h: Harness) -> None:
    """They also stay encoded if they are saved again. Then only those of one chunk are decoded."""
    rows = h.put(CHUNK + 3, tags=[{"n": i} for i in range(CHUNK + 3)])
    h.restart()
    h.restart()
    first, second = h.state.partitions["p"].rows.chunks.values()
    assert packed(first)
    assert packed(second)
    assert h.state.partitions["p"].tags_of(np.array([CHUNK + 1])) == [{"n": CHUNK + 1}]
    assert packed(first)
    assert not packed(second)
    h.ask(Publish("p", 1, column(rows[:1]), tags=[{"m": 1}], pre_allocate=0))
    assert not packed(first)
    assert h.state.partitions["p"].tags_of(np.array([0, 1])) == [{"n": 0, "m": 1}, {"n": 1}]


def test_rows_are_added_to_a_chunk_whose_tags_are_encoded(h: Harness) -> None:
    h.put(3, tags=[{"n": 1}] * 3)
    h.restart()
    h.put(100)
    h.put(1, tags=[{"n": 2}])
    assert h.state.partitions["p"].tags_of(np.array([2, 50, 103])) == [{"n": 1}, {}, {"n": 2}]


@pytest.mark.parametrize("tags", [[{"n": 1}, None, {"m": [2]}], [{}, {"n": "text"}]])
def test_tags_that_earlier_releases_saved_are_read(h: Harness, tags: list[Any]) -> None:
    """They saved a list with a dict for each row, or None."""
    h.put(3)
    tree = serialization.save_state(h.state)
    chunk_of(tree)["tags"] = np.frombuffer(msgspec.msgpack.encode(tags), "u1")
    wanted = [tag or {} for tag in tags] + [{}] * (3 - len(tags))
    assert serialization.load_untrusted(tree).partitions["p"].tags_of(np.arange(3)) == wanted


def test_finished_rows_are_counted_from_now_on_if_an_earlier_release_did_not(h: Harness) -> None:
    h.create(max_staleness=1, rows_per_version=4)
    h.put(6)
    h.dealt(2)
    tree = serialization.save_state(h.state)
    del tree["partitions"]["p"]["window"]
    window = serialization.load_untrusted(tree).partitions["p"].window
    assert (window.unfinished, window.finished) == (4, 0)


def test_a_saved_table_that_is_wrong_is_refused(h: Harness) -> None:
    h.put(20, tags=[{"n": i} for i in range(20)])
    tree = serialization.save_state(h.state)
    chunk = chunk_of(tree)
    table = msgspec.msgpack.decode(chunk["tags"].data)
    table["columns"][0][1] = bytes([9])
    chunk["tags"] = np.frombuffer(msgspec.msgpack.encode(table), "u1")
    with pytest.raises(CheckpointError, match=r"tags of .* cannot be decoded"):
        serialization.load_untrusted(tree)


def test_cleared_rows_lose_encoded_tags_and_keys(h: Harness) -> None:
    rows = h.put(2, keys=["a", "b"], tags=[{"n": 1}, {"n": 2}])
    h.restart()
    h.ask(ClearRows("p", column(rows[:1])))
    assert h.look(ListKeys()).value == {"p": {"b": {"n": 2}}}


def test_keys_keep_the_order_of_their_creation(h: Harness) -> None:
    """It may differ from the order of their rows."""
    h.create(pre_allocate=0)
    h.put(1, keys=["z"])
    h.put(2, keys=["y", "a"])
    partition = h.state.partitions["p"]
    partition.keys = {key: partition.keys[key] for key in ["a", "z", "y"]}
    again = through_file(h.state).partitions["p"]
    assert list(again.keys) == ["a", "z", "y"]
    assert again.keys_of(np.arange(3)) == ["z", "y", "a"]


def test_watched_tags_are_restored_as_columns() -> None:
    h = Harness(PrioritySampler("n"))
    rows = h.put(3, tags=[{"n": 1}, {"n": 3}, {"n": 2}])
    h.restart()
    assert h.dealt(2) == [rows[1], rows[2]]


def test_the_capacity_is_not_saved() -> None:
    h = Harness(capacity=2)
    h.put(2)
    assert serialization.load_state(serialization.save_state(h.state), capacity=7).capacity == 7
    h.restart()
    assert h.state.capacity == 2


@pytest.mark.parametrize("tree", [None, 7, [], {}, "state", {"next_index": 0}])
def test_a_tree_that_is_not_a_state_is_refused(tree: Any) -> None:
    with pytest.raises(CheckpointError, match="does not know the form of the saved state"):
        serialization.load_state(tree)


def test_a_state_with_a_missing_part_is_refused(h: Harness) -> None:
    """A state of another release may lack a part."""
    h.put(2, keys=["a", "b"])
    required = {column.key for column in Partition.declared_columns() if column.missing is msgspec.NODEFAULT}
    assert required >= {"rows", "version"}
    for name in serialization.save_state(h.state)["partitions"]["p"]:
        if name not in required | {"keyed"}:  # a part that was added later has a default
            continue
        tree = serialization.save_state(h.state)
        del tree["partitions"]["p"][name]
        with pytest.raises(CheckpointError, match=f"required field `{name}`"):
            serialization.load_state(tree)


def test_an_attribute_that_is_not_saved_is_found(h: Harness) -> None:
    """The comparison at the end of every test of the core finds it."""
    h.put(1)
    one, other = State(), State()
    one.later = 1  # type: ignore[attr-defined]
    compared = [name for name in vars(other) if name not in sameness.LEFT_OUT[State]]
    assert sameness.differences(one, other) == [f"state: has {[*compared, 'later']!r}, and then {compared!r}"]
    again = through_file(h.state)
    again.partitions["p"].rows.chunks[0].owner[0] = 5
    assert "state.partitions.p.rows.chunks.0.owner" in sameness.differences(h.state, again)[0]


@pytest.mark.parametrize("how", ["twice in a chunk", "in two chunks", "of another row", "not listed", "without a row"])
def test_keys_of_many_chunks_are_those_of_their_rows(h: Harness, how: str) -> None:
    """They are restored and checked one chunk at a time: a call over a million keys would block other threads."""
    count = 2 * CHUNK + 1
    h.put(count, keys=[f"k{n}" for n in range(count)])
    before = dict(h.state.partitions["p"].keys)
    state = through_file(h.state)
    partition = state.partitions["p"]
    assert list(partition.keys.items()) == list(before.items())
    check_state(state)
    chunks = [chunk.keys for chunk in partition.rows.chunks.values()]
    if how == "twice in a chunk":
        chunks[1][1] = chunks[1][0]
    elif how == "in two chunks":
        chunks[1][0] = chunks[0][0]
    elif how == "of another row":
        chunks[0][0], chunks[1][0] = chunks[1][0], chunks[0][0]
    elif how == "not listed":
        del partition.keys["k5"]
    else:
        partition.keys["other"] = 5
    with pytest.raises(BrokenInvariant, match=r"keys of p are not those of its rows|two rows of p have the same key"):
        check_state(state)


def test_keys_are_saved_in_pieces(h: Harness) -> None:
    """No single call decodes all of them or makes a dict of them, because it would block other threads."""
    count = 2 * PIECE + 1
    h.put(count, keys=[f"k{n}" for n in range(count)])
    partition = h.state.partitions["p"]
    before = dict(partition.keys)
    tree = serialization.save_state(h.state)
    saved = tree["partitions"]["p"]
    assert [len(piece) for piece in unpack_texts(saved["keys"])] == [PIECE, PIECE, 1]
    assert list(serialization.load_state(tree).partitions["p"].keys.items()) == list(before.items())


@given(st.lists(st.text(max_size=3)), st.integers(1, 4))
def test_unpacked_texts_equal_the_packed_ones(texts: list[str], piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "PIECE", piece)
        packed = pack_texts(texts)
    assert [text for part in unpack_texts(packed) for text in part] == texts
