"""The conformance suite on Ray's object store, and with direct transport: by calls, and within an actor that transfers
directly; and what becomes of those who are killed in the middle. On a cluster of this machine, one for all."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import ray

import transfer_queue as tq
from tests.server_processes import until  # Ray imports this module in workers, which find only this path
from transfer_queue.errors import CapacityError, StartError
from transfer_queue.ray_runtime.store_actors import end_store_actor, start_store_actor
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, StoreAddress, connect
from transfer_queue.testing.conformance import StoreConformance

MIB = 1 << 20
CAPACITY = 96 * MIB
SECONDS = 60.0
ROWS = (8, MIB // 4)  # of float32, 8 MiB: above what goes directly where nobody says otherwise
LEAST = 1024  # bytes from which on blocks go directly here


class Direct(StoreConformance):
    """As an actor, made with enable_tensor_transport=True."""

    capacity = 2 * CAPACITY

    def __init__(self, where: StoreAddress) -> None:
        type(self).where = where

    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where

    def run(self, test: str) -> None:
        getattr(self, test)()

    def process(self) -> int:
        return os.getpid()

    def life(self) -> str:
        return self.store.life()

    def has_transport(self) -> bool:
        store: Any = self.store
        return store._direct is not None and store._direct._transport is not None

    def failures(self) -> float:
        """Until when it goes by calls, as the transport has failed; 0 where it never has."""
        store: Any = self.store
        return float(store._direct._rests_until)

    def write(self, key: str, nbytes: int, within: float = 10.0) -> None:
        with self.store.buffer(key, nbytes) as memory:
            memory[:] = content_of(key, nbytes)
            self.store.write(key, memory, within)

    def write_on(self, prefix: str, nbytes: int) -> None:
        for turn in range(1000):
            self.write(f"{prefix}/{turn % 2}", nbytes)

    def is_right(self, key: str, nbytes: int) -> bool:
        found = self.get(key, nbytes)
        return found is not None and np.array_equal(found, content_of(key, nbytes))

    def put_rows(self, value: float) -> Any:
        import torch
        from tensordict import TensorDict

        import transfer_queue as tq

        return tq.get_client().put(TensorDict({"x": torch.full(ROWS, value)}, batch_size=ROWS[0]), partition_id="p")

    def has_rows(self, meta: Any, value: float) -> bool:
        import transfer_queue as tq

        found = tq.get_client().get_data(meta, layout="dense")["x"]
        return found.shape == ROWS and bool((found == value).all())

    def read_on(self, key: str, nbytes: int) -> None:
        for _ in range(1000):
            assert self.is_right(key, nbytes)


def content_of(key: str, nbytes: int) -> Bytes:
    return np.arange(nbytes, dtype=np.uint32).astype(np.uint8) + np.uint8(sum(key.encode()) % 256)


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    """What a RayStore with direct transport is made with."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 * MIB)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # held, as a keeper ends with its handle
    first, stored = start_store_actor(ray, "stored", "tests", False, SECONDS)
    second, options = start_store_actor(ray, "keeper", "tests", False, SECONDS, CAPACITY, LEAST)
    TestRay.where, TestByCalls.where = StoreAddress("RayStore", stored), StoreAddress("RayStore", options)
    yield options
    for ended in (stored, options, options):
        end_store_actor(ray, ended)
    del first, second
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


def actor(options: dict[str, Any], enabled: bool = True) -> Any:
    kind = ray.remote(num_cpus=0, enable_tensor_transport=enabled, max_concurrency=2)(Direct)
    return kind.remote(StoreAddress("RayStore", options))


@dataclass(frozen=True)
class Actors:
    """All but `plain` have enabled it. They start together, before threads of NIXL take the cores."""

    direct: Any
    writer: Any
    reader: Any
    plain: Any


@pytest.fixture(scope="module")
def actors(options: dict[str, Any]) -> Actors:
    found = Actors(actor(options), actor(options), actor(options), actor(options, enabled=False))
    ask([one.process.remote() for one in (found.direct, found.writer, found.reader, found.plain)])
    return found


@pytest.fixture
def direct(actors: Actors) -> Any:
    ask(actors.direct.write.remote("first", LEAST))
    assert ask(actors.direct.has_transport.remote())
    return actors.direct


def ask(call: Any) -> Any:
    return ray.get(call, timeout=SECONDS)


def test_rows_go_directly(actors: Actors) -> None:
    """With a system: what an actor has put is read by it and by the driver; cleared, it takes no space."""
    store = {"storage_backend": "RayStore", "RayStore": {"capacity": CAPACITY, "direct_transport": "nixl"}}
    tq.init({"runtime": "ray", "backend": store})
    try:
        client, meta = tq.get_client(), ask(actors.direct.put_rows.remote(7.0))
        (name,) = [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if each["name"].startswith("TransferQueueKeeper")
        ]
        keeper = ray.get_actor(name, namespace="transfer_queue")
        assert ask(keeper.__ray_call__.remote(lambda self: self._transport is not None)), "it came directly"
        assert ask(actors.direct.has_rows.remote(meta, 7.0))
        found = client.get_data(meta, layout="dense")["x"]
        assert found.shape == ROWS
        assert bool((found == 7.0).all())

        def leased() -> int:
            return int(ask(keeper.__ray_call__.remote(lambda self: self._table.leased)))

        assert leased() >= found.nbytes
        client.clear_samples(meta)
        until(lambda: leased() == 0, "the keeper's memory is free")
    finally:
        tq.close()


@pytest.mark.usefixtures("options")
class TestRay(StoreConformance):
    """All goes through the object store."""

    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


@pytest.mark.usefixtures("options")
class TestByCalls(StoreConformance):
    """From the driver, which is no actor."""

    capacity = 2 * CAPACITY
    where: ClassVar[StoreAddress]

    def address(self) -> StoreAddress:
        return self.where


@pytest.mark.parametrize("test", [name for name in dir(StoreConformance) if name.startswith("test_")])
def test_within_an_actor_that_transfers_directly(direct: Any, test: str) -> None:
    ask(direct.run.remote(test))
    assert ask(direct.failures.remote()) == 0


def test_who_has_not_enabled_it_goes_by_calls(options: dict[str, Any], actors: Actors, direct: Any) -> None:
    """And reads what was written directly, and the other way round."""
    plain = actors.plain
    ask(plain.write.remote("plain", MIB))
    ask(direct.write.remote("direct", MIB))
    assert not ask(plain.has_transport.remote())
    for reader in (plain, direct):
        assert ask(reader.is_right.remote("plain", MIB))
        assert ask(reader.is_right.remote("direct", MIB))
    ray.kill(plain)
    connect(StoreAddress("RayStore", options)).remove(["plain", "direct"])


def test_who_is_killed_in_the_middle_holds_nobody_up(options: dict[str, Any], actors: Actors, direct: Any) -> None:
    """A writer and a reader; what the writer had put is there, and what it was about to put takes no space."""
    nbytes = 8 * MIB
    store = connect(StoreAddress("RayStore", options))
    writer, reader = actors.writer, actors.reader
    ask(writer.write.remote("whole", nbytes))
    writer.write_on.remote("half", nbytes)
    reading = reader.read_on.remote("whole", nbytes)
    until(lambda: not store.missing(["half/0"]), "the writer goes on")
    for one in (writer, reader):
        os.kill(ask(one.process.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ask(reading)
    assert ask(direct.is_right.remote("whole", nbytes))
    into = np.zeros(nbytes, np.uint8)
    assert store.read([Piece("whole", 0, nbytes, 0)], into, 10.0) == []
    assert np.array_equal(into, content_of("whole", nbytes))
    for half in ("half/0", "half/1"):
        assert store.missing([half]) or ask(direct.is_right.remote(half, nbytes))
    store.remove(["whole", "half/0", "half/1"])
    fits = CAPACITY // nbytes
    keys = [f"fits/{n}" for n in range(fits)]
    for key in keys:
        ask(direct.write.remote(key, nbytes))
    store.remove(keys)
    store.close()


def test_a_key_whose_writer_gave_up_keeps_the_later_content(options: dict[str, Any]) -> None:
    """An attempt that ends after the next one counts for nothing, and takes no space."""
    keeper = ray.get_actor("keeper", namespace="tests")
    key, old, new = uuid.uuid4().hex, np.full(LEAST, 1, np.uint8), np.full(LEAST, 2, np.uint8)
    assert ask(keeper.keep.remote(key, new, 2))
    assert ask(keeper.keep.remote(key, old, 1))
    found, missing = ask(keeper.pieces.remote([(key, 0, LEAST)]))
    assert missing == []
    assert np.array_equal(found, new)
    connect(StoreAddress("RayStore", options)).remove([key])


def test_no_space(options: dict[str, Any], direct: Any) -> None:
    with pytest.raises(CapacityError, match=r"raise backend\.RayStore\.capacity"):
        ask(direct.write.remote("large", CAPACITY * 5 // 4, 0.1))


def test_a_keeper_that_is_killed_is_met_again(options: dict[str, Any], direct: Any) -> None:
    """It is another life, under the name of before; those who knew the old one transfer directly again."""
    store = connect(StoreAddress("RayStore", options))
    ask(direct.write.remote("before", MIB))
    before = store.life()
    os.kill(ask(ray.get_actor("keeper", namespace="tests").process.remote()), signal.SIGKILL)
    until(lambda: store.life() != before, "another keeper")
    until(lambda: ask(direct.life.remote()) == store.life(), "a reader in another process that meets it")
    assert store.missing(["before"]) == ["before"]
    assert ask(direct.get.remote("before", MIB)) is None
    ask(direct.write.remote("after", MIB))
    assert ask(direct.is_right.remote("after", MIB))
    assert ask(direct.failures.remote()) == 0
    store.close()


def test_what_cannot_start_says_why(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartError, match=r"backend\.RayStore\.capacity of .* lower it"):
        start_store_actor(ray, "large", "tests", False, SECONDS, 1 << 60, LEAST)
    monkeypatch.setattr("transfer_queue.ray_runtime.store_actors.DirectKeeperActor", without_nixl())
    with pytest.raises(StartError, match=r"pip install 'transfer_queue\[ray-direct\]'"):
        start_store_actor(ray, "without", "tests", False, SECONDS, CAPACITY, LEAST)


def without_nixl() -> type:
    """The actor where the package is missing."""
    from transfer_queue.ray_runtime.store_actors import DirectKeeperActor

    class Without(DirectKeeperActor):
        def __init__(self, *arguments: Any) -> None:
            sys.modules["nixl"] = None  # type: ignore[assignment]
            super().__init__(*arguments)

    return Without
