"""A value that is replaced or freed between a reader's lookup and its copy: it looks again, and never sees other bytes.

The reader's replies are held on the network while another client clears, and refills the space with other values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from simulated import Start, numbers, reply_on_its_way, table
from transfer_queue.client import reader as reader_module
from transfer_queue.client.units import Units
from transfer_queue.errors import ProtocolError, StorageKeyNotFoundError, UncarriableValueError
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks.gather import gather as real_gather
from transfer_queue.wire.blocks.gather import gather_each as real_gather_each
from transfer_queue.wire.buffers import copies

ROWS = 1 << 17  # of 8 bytes: an extent of its own, which is free as soon as its rows are cleared
MIB = 1 << 20


@pytest.fixture(params=[1, 4], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that share each copy."""
    for name, value in (("_most", request.param), ("PARALLEL", 1), ("PER_THREAD", 1), ("MIN_PART", 1 << 14)):
        monkeypatch.setattr(copies, name, value)


@pytest.fixture
def cluster(start: Start) -> Cluster:
    """Space for two such values."""
    return start(arena_bytes=2 * MIB, seed=3)


def value(fill: int) -> Any:
    return table(x=torch.full((1, ROWS), fill))


def lookups(cluster: Cluster, reader: Client, monkeypatch: pytest.MonkeyPatch) -> list[LookupReply]:
    """The lookups that the reader's copies went by, as they come.

    The look before a copy sees nothing: what is tried is that something changes after it.
    """
    seen: list[LookupReply] = []
    look = Units.is_unchanged

    def unchanged(units: Units, reply: LookupReply) -> bool:
        return look(units, reply) if seen and seen[-1] is reply else True

    def spy(reply: LookupReply, *arguments: Any, **more: Any) -> Any:
        seen.append(reply)
        return real_gather(reply, *arguments, **more)

    monkeypatch.setattr(reader_module, "gather", spy)
    monkeypatch.setattr(Units, "is_unchanged", unchanged)
    return seen


def test_replaced(a: Client, b: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = lookups(cluster, b, monkeypatch)
    meta = a.put(value(1), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.get_data(meta)) as task:
        a.put(value(2), meta)
        a.put(value(3), partition_id="q")  # takes the space of the first
    assert len(seen) == 2
    assert int(task.result()["x"].values().min()) == int(task.result()["x"].values().max()) == 2


def test_by_key(a: Client, b: Client, cluster: Cluster) -> None:
    a.kv_batch_put(["k"], "p", value(1))
    with reply_on_its_way(cluster, b, b.operations.kv_batch_get(["k"], "p")) as task:
        a.kv_clear(["k"], "p")
        a.kv_batch_put(["k"], "p", value(5))
    assert int(task.result()["x"].values().min()) == 5


def test_one_of_several_gets_that_travel_together(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value is replaced while all are copied: its get looks again, and the others keep what they have found."""
    cluster = start(arena_bytes=6 * MIB, seed=3)
    a, b = cluster.client("a"), cluster.client("b")

    def torn(*arguments: Any, **more: Any) -> Any:
        tables = real_gather_each(*arguments, **more)
        a.kv_batch_put(["k2"], "p", value(20))
        a.kv_batch_put(["taker"], "q", value(99))  # takes the space of the first value
        return tables

    for number in range(4):
        a.kv_batch_put([f"k{number}"], "p", value(number))
    monkeypatch.setattr(reader_module, "gather_each", torn)
    tasks = [b.start(b.operations.kv_batch_get([f"k{number}"], "p")) for number in range(4)]
    cluster.wait(lambda: all(task.done for task in tasks))
    values = [task.result()["x"].values() for task in tasks]
    assert [(int(each.min()), int(each.max())) for each in values] == [(0, 0), (1, 1), (20, 20), (3, 3)]


def test_one_partition_of_two(a: Client, b: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = lookups(cluster, b, monkeypatch)
    metas = [a.put(table(x=torch.full((1, ROWS // 2), fill)), partition_id=p) for fill, p in ((1, "p"), (2, "q"))]
    both = type(metas[0]).concat(metas)
    b.get_partition_list()
    b.hold()
    task = b.start(b.operations.get_data(both))
    b.release()
    cluster.run(lambda: task.call is not None and isinstance(task.call.body, Lookup)
                and task.call.body.partition == "q")  # fmt: skip
    b.hold()
    cluster.run()
    a.put(table(x=torch.full((1, ROWS // 2), 10)), metas[0])
    a.close()
    writer = cluster.client("writer")
    writer.put(table(x=torch.full((1, ROWS // 2), 11)), partition_id="r")
    b.release()
    cluster.run()
    rows = task.result()["x"].unbind()
    assert [int(row.min()) for row in rows] == [int(row.max()) for row in rows] == [10, 2]
    assert len(seen) == 2


@pytest.mark.parametrize("kind", [ProtocolError, UncarriableValueError, MemoryError])
def test_torn_bytes_may_look_like_anything(
    a: Client, b: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """An error of the copy counts only if the bytes were those that were looked up."""
    meta = a.put(value(1), partition_id="p")
    once: list[Callable[[], object]] = [
        lambda: a.put(value(2), meta),
        lambda: a.put(value(3), partition_id="q"),
    ]

    def torn(*arguments: Any, **more: Any) -> Any:
        if once:
            while once:
                once.pop(0)()
            raise kind("nonsense")
        return real_gather(*arguments, **more)

    monkeypatch.setattr(reader_module, "gather", torn)
    assert int(b.get_data(meta)["x"].values().max()) == 2


@pytest.mark.parametrize("kind", [ProtocolError, UncarriableValueError, MemoryError])
def test_an_error_of_whole_bytes_is_told(a: Client, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def fail(*arguments: Any, **more: Any) -> Any:
        raise kind("damaged")

    meta = a.put(numbers(1), partition_id="p")
    monkeypatch.setattr(reader_module, "gather", fail)
    with pytest.raises(kind, match="damaged"):
        a.get_data(meta)


def test_overwritten_during_the_copy(a: Client, b: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy itself went well, with bytes of another sample: they are thrown away."""
    meta = a.put(value(1), partition_id="p")
    copies: list[Any] = []

    def slow(*arguments: Any, **more: Any) -> Any:
        if not copies:
            a.clear_samples(meta)
            a.put(value(9), partition_id="q")
        copies.append(real_gather(*arguments, **more))
        return copies[-1]

    monkeypatch.setattr(reader_module, "gather", slow)
    with pytest.raises(StorageKeyNotFoundError):
        b.get_data(meta)
    assert int(copies[0]["x"].values().max()) == 9  # the other sample's bytes were there to be seen


def test_replaced_again_and_again(a: Client, b: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = a.put(value(1), partition_id="p")
    copies: list[Any] = []

    def slow(*arguments: Any, **more: Any) -> Any:
        a.put(value(len(copies)), meta)
        a.put(value(-1), partition_id="q")
        a.clear_partition("q")
        copies.append(real_gather(*arguments, **more))
        return copies[-1]

    monkeypatch.setattr(reader_module, "gather", slow)
    with pytest.raises(StorageKeyNotFoundError, match="replaced in each of 8 attempts"):
        b.get_data(meta)
    assert len(copies) == reader_module.READ_ATTEMPTS == 8


def test_freed_and_not_written_yet(a: Client, b: Client, cluster: Cluster) -> None:
    """The generation moves when space is freed, before anybody can lease it."""
    meta = a.put(value(1), partition_id="p")
    with reply_on_its_way(cluster, b, b.operations.get_data(meta)) as task:
        a.clear_samples(meta)
    with pytest.raises(StorageKeyNotFoundError):
        task.result()
