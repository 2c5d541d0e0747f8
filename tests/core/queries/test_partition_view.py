"""Lists of keys come in pages, in order, whatever happens between two pages."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Harness, tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.core.queries import partition_view
from transfer_queue.messages.partitions import ClearPartition, CreatePartition
from transfer_queue.messages.puts import ClearKeys
from transfer_queue.messages.queries import ListKeys

Listed = dict[str, dict[str, dict[str, Any]]]


def pages(h: Harness, request: ListKeys, between: Any = lambda: None) -> tuple[Listed, int]:
    """Return everything that is listed, and the number of pages."""
    listed: Listed = {}
    count = 0
    while True:
        page = h.look(request)
        count += 1
        for name, keys in page.value.items():
            assert not listed.get(name, {}).keys() & keys.keys()
            listed.setdefault(name, {}).update(keys)
        if not page.left:
            return listed, count
        between()
        request = ListKeys(page.left, request.where, page.made, page.start)


def put(h: Harness, partition: str, keys: list[str]) -> None:
    """Put one row for each key, tagged with this key."""
    h.ask(h.publish(len(keys), {"x": tensor()}, partition=partition, keys=keys, tags=[{"k": key} for key in keys]))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    page_keys=st.integers(1, 5),
    page_rows=st.integers(1, 7),
    cleared=st.sets(st.integers(0, 30)),
)
def test_pages_together_are_the_list(sizes: list[int], page_keys: int, page_rows: int, cleared: set[int]) -> None:
    h = Harness()
    want: Listed = {}
    for number, size in enumerate(sizes):
        keys = [f"{number}.{i}" for i in range(size)]
        put(h, f"p{number}", keys)
        gone = [key for i, key in enumerate(keys) if i in cleared]
        if gone:
            h.ask(ClearKeys(f"p{number}", gone))
        want[f"p{number}"] = {key: {"k": key} for key in keys if key not in gone}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition_view, "PAGE_KEYS", page_keys)
        patch.setattr(partition_view, "SCANNED_ROWS", page_rows)
        listed, count = pages(h, ListKeys())
        assert listed == want
        assert [list(keys) for keys in listed.values()] == [list(keys) for keys in want.values()]
        assert count >= sum(map(len, want.values())) // page_keys
        key = "0.0"
        some, _ = pages(h, ListKeys(["p0", "nobody"], {"k": key}))
        assert some == {"p0": {key: {"k": key}} if key in want["p0"] else {}}


def test_changes_between_two_pages(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that exist all the time are listed once; a partition created again is not mistaken for the old one."""
    monkeypatch.setattr(partition_view, "PAGE_KEYS", 2)
    put(h, "p", ["a", "b", "c", "d", "e"])

    def change() -> None:
        h.ask(ClearKeys("p", ["a", "d"]))
        if "f" not in h.state.partitions["p"].keys:
            put(h, "p", ["f"])

    listed, _ = pages(h, ListKeys(["p"]), change)
    assert list(listed["p"]) == ["a", "b", "c", "e", "f"]

    def anew() -> None:
        h.ask(ClearPartition("p"))
        put(h, "p", ["new", "newer", "newest"])

    put(h, "q", ["z"])
    listed, _ = pages(h, ListKeys(["p", "q"]), anew)
    assert listed == {"p": {"b": {"k": "b"}, "c": {"k": "c"}}, "q": {"z": {"k": "z"}}}


def test_cleared_rows_are_not_read(h: Harness) -> None:
    """The pages of a list depend on the keys that are left, not on how many there were."""
    for number in range(6):
        keys = [f"{number}.{i}" for i in range(4096)]
        put(h, "p", keys)
        h.ask(ClearKeys("p", keys[1:]))
    listed, count = pages(h, ListKeys(["p"]))
    assert list(listed["p"]) == [f"{number}.0" for number in range(6)]
    assert count == 1


def test_a_list_of_many_partitions_has_pages(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_view, "SCANNED_ROWS", 10 * partition_view.ROWS_OF_A_PARTITION)
    for number in range(35):
        h.ask(CreatePartition(f"p{number}"))
    put(h, "p7", ["a"])
    listed, count = pages(h, ListKeys())
    assert list(listed) == [f"p{number}" for number in range(35)]
    assert listed["p7"] == {"a": {"k": "a"}}
    assert count == 4
