"""What the errors of openYuanrong's library mean: a block that is lost, or a worker that does not respond."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from transfer_queue.errors import CapacityError, ConnectionLostError
from transfer_queue.storage.stores import base, yuanrong
from transfer_queue.storage.stores.base import Piece
from transfer_queue.storage.stores.yuanrong import YuanrongStore

NO_COPY = (
    "code: [Runtime error], msg: [Fail to get object tq:u:4 from remote worker, no object copy exists, traceId: e7]"
)
NOT_FOUND = "code: [Key not found], msg: [Cannot get objects from worker, traceId: fefe]"
DOWN = "code: [RPC unavailable], msg: [the worker does not respond]"
SLOW = "code: [RPC_RECV_TIMEOUT], msg: [no reply in time]"


class Library:
    """The library's client, in which every read and write fails."""

    def __init__(self, words: str) -> None:
        self.words = words

    def get_buffers(self, keys: Sequence[str]) -> list[Any]:
        raise RuntimeError(self.words)

    read = get_buffers

    def mcreate(self, keys: Sequence[str], sizes: Sequence[int]) -> list[Any]:
        raise RuntimeError(self.words)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(words: str) -> YuanrongStore:
        store = YuanrongStore("127.0.0.1", 1)
        monkeypatch.setattr(store, "connect", lambda: Library(words))
        return store

    library = ModuleType("yr.datasystem.kv_client")
    library.ReadParam = lambda key, offset, size: key  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yr.datasystem.kv_client", library)
    attempt = base.retry_attempt
    monkeypatch.setattr(yuanrong, "retry_attempt", lambda within, work: attempt(0.0, work))
    return make


@pytest.mark.parametrize("words", [NO_COPY, NOT_FOUND])
def test_a_block_whose_worker_has_died_is_missing(failing: Any, words: str) -> None:
    """Also if it is the only one that is asked for: the library then says how it failed, instead of which blocks."""
    store = failing(words)
    assert store.read([Piece("u/4", 0, 8, 0)], np.zeros(8, np.uint8), 0.0) == ["u/4"]
    assert store.missing(["u/4"]) == ["u/4"]
    store.rewrite(["u/4"])


def test_a_worker_that_does_not_respond_loses_nothing(failing: Any) -> None:
    store = failing(DOWN)
    with pytest.raises(ConnectionLostError, match="does not respond"):
        store.read([Piece("u/4", 0, 8, 0)], np.zeros(8, np.uint8), 0.0)
    with pytest.raises(ConnectionLostError, match="does not respond"):
        store.missing(["u/4"])
    with pytest.raises(ConnectionLostError, match="cannot read a block"):
        store.rewrite(["u/4"])


def test_a_write_without_space_says_what_the_library_said(failing: Any) -> None:
    """Nothing else distinguishes a worker that is full from one that is too slow."""
    with pytest.raises(CapacityError, match=r"for 8 bytes \(code: \[RPC_RECV_TIMEOUT\].*\); clear samples"):
        failing(SLOW).write("u/4", np.zeros(8, np.uint8), 0.0)
