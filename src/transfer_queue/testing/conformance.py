"""The conformance suite of stores: tests that the author of a store runs on it.

    class TestMine(StoreConformance):
        def address(self) -> StoreAddress:
            return StoreAddress("my_package.my_store:MyStore", {"where": "..."})

pytest collects the tests of the class. `address` is called once; the store must be running by then. Other processes use
the store by the same address.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import uuid
import zlib
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from transfer_queue.errors import CapacityError
from transfer_queue.storage.protocols import Bytes
from transfer_queue.storage.stores.base import Piece, Store, StoreAddress, connect

WITHIN = 10.0  # seconds that a call may take
OTHER_SECONDS = 60.0  # for another process

_OTHER = """
import os, signal, sys, zlib, msgspec, numpy as np
from transfer_queue.storage.stores.base import Piece, StoreAddress, connect
store = connect(msgspec.json.decode(sys.argv[1], type=StoreAddress))
what, key, nbytes = sys.argv[2], sys.argv[3], int(sys.argv[4])
if what == "write":
    with store.buffer(key, nbytes) as memory:
        memory[:] = np.arange(nbytes) % 251
        store.write(key, memory, 10.0)
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "begin":
    for n in range(1000):  # until it is killed
        with store.buffer(key + str(n), nbytes) as memory:
            print("writes", flush=True)
            store.write(key + str(n), memory, 10.0)
        store.remove([key + str(n)])
into = np.zeros(nbytes, np.uint8)
missing = store.read([Piece(key, 0, nbytes, 0)], into, 10.0)
print(zlib.crc32(into), missing, flush=True)
os._exit(0)
"""


def _same(content: Bytes | None, wanted: Bytes) -> bool:
    return content is not None and np.array_equal(content, wanted)


class StoreConformance:
    """The tests that every external store must pass. Subclasses define `address`.

    Example:
        >>> from transfer_queue.storage.stores.base import StoreAddress
        >>> from transfer_queue.testing.conformance import StoreConformance
        >>> class TestMine(StoreConformance):
        ...     def address(self):
        ...         return StoreAddress("my_package.my_store:MyStore", {"where": "..."})
        >>> TestMine().address().kind
        'my_package.my_store:MyStore'
    """

    capacity: ClassVar[int | None] = None
    """A number of bytes that certainly do not fit into the store; None if filling it is not to be tested."""
    _connected: ClassVar[tuple[StoreAddress, Store] | None] = None

    def address(self) -> StoreAddress:
        """Return the address of the store. Subclasses define it.

        Returns:
            The address.
        """
        raise NotImplementedError

    @classmethod
    def teardown_class(cls) -> None:
        """Close the connection."""
        if cls._connected is not None:
            cls._connected[1].close()
            cls._connected[1].close()  # is idempotent
            cls._connected = None

    def _both(self) -> tuple[StoreAddress, Store]:
        kind = type(self)
        if kind._connected is None:
            address = self.address()
            kind._connected = address, connect(address)
        return kind._connected

    @property
    def store(self) -> Store:
        """Return the connection to the store, which all tests of the class share."""
        return self._both()[1]

    def put(self, nbytes: int, seed: int = 0, key: str | None = None) -> tuple[str, Bytes]:
        """Write random bytes.

        Args:
            nbytes: Their number.
            seed: The seed of the bytes. Default: 0.
            key: The name to write. Default: a new one.

        Returns:
            The name, and the bytes.
        """
        content = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
        key = key or f"conformance/{uuid.uuid4().hex}/1"
        with self.store.buffer(key, nbytes) as memory:
            assert memory.nbytes == nbytes
            memory[:] = content
            self.store.write(key, memory, WITHIN)
        return key, content

    def get(self, key: str, nbytes: int) -> Bytes | None:
        """Return all bytes under a name.

        Args:
            key: The name.
            nbytes: Their number.

        Returns:
            The bytes; None if the name does not exist.
        """
        into = np.zeros(nbytes, np.uint8)
        missing = self.store.read([Piece(key, 0, nbytes, 0)], into, WITHIN)
        assert missing in ([], [key])
        return None if missing else into

    # ------------------------------------------------------------ one process

    def test_what_is_written_is_read(self) -> None:
        """Blocks of any length are read back unchanged."""
        for nbytes in (1, 63, 64, 4096, 65_537, 3_000_001):
            key, content = self.put(nbytes, nbytes)
            assert _same(self.get(key, nbytes), content)
            self.store.remove([key])

    def test_pieces_go_where_they_are_wanted(self) -> None:
        """One read copies pieces of several blocks, and changes no other byte of the buffer."""
        first, one = self.put(100_000, 1)
        second, two = self.put(2_000_000, 2)
        into = np.full(50_000, 7, np.uint8)
        pieces = [
            Piece(first, 10, 1000, 5), Piece(first, 99_999, 1, 2000), Piece(second, 1_234_567, 20_000, 3000),
            Piece(second, 0, 64, 40_000),
        ]  # fmt: skip
        assert self.store.read(pieces, into, WITHIN) == []
        expected = np.full(50_000, 7, np.uint8)
        expected[5:1005], expected[2000] = one[10:1010], one[99_999]
        expected[3000:23_000], expected[40_000:40_064] = two[1_234_567:1_254_567], two[:64]
        assert np.array_equal(into, expected)
        self.store.remove([first, second])

    def test_a_large_destination(self) -> None:
        """A read into a buffer that is larger than the pieces."""
        key, content = self.put(1_500_000, 3)
        into = np.zeros(4_000_000, np.uint8)
        assert self.store.read([Piece(key, 0, 1_500_000, 2_000_000)], into, WITHIN) == []
        assert np.array_equal(into[2_000_000:3_500_000], content)
        assert not into[:2_000_000].any()
        self.store.remove([key])

    def test_what_is_missing_is_named(self) -> None:
        """A read returns missing keys, and copies the other pieces."""
        key, content = self.put(1000, 4)
        into = np.zeros(3000, np.uint8)
        pieces = [Piece("conformance/no/1", 0, 1000, 0), Piece(key, 0, 1000, 1000), Piece("conformance/no/2", 5, 1, 0)]
        assert sorted(self.store.read(pieces, into, WITHIN)) == ["conformance/no/1", "conformance/no/2"]
        assert np.array_equal(into[1000:2000], content)
        assert sorted(self.store.missing(["conformance/no/1", key])) == ["conformance/no/1"]
        self.store.remove([key])

    def test_what_is_removed_is_gone(self) -> None:
        """A removed block is missing at once, removing it again is not an error, and other blocks stay."""
        kept, content = self.put(500, 5)
        keys = [self.put(70_000, 6 + n)[0] for n in range(20)]
        assert self.store.missing(keys) == []
        self.store.remove(keys)
        self.store.remove(keys)
        self.store.remove([])
        assert [self.get(key, 70_000) for key in keys] == [None] * 20
        assert self.store.missing([*keys, kept]) == keys
        assert _same(self.get(kept, 500), content)
        self.store.remove([kept])

    def test_a_key_that_is_written_again_has_the_new_bytes(self) -> None:
        """A writer that did not get the reply writes the block again."""
        key, _ = self.put(200_000, 30)
        _, content = self.put(200_000, 31, key)
        assert _same(self.get(key, 200_000), content)
        self.store.remove([key])

    def test_a_block_that_is_rewritten_stays(self) -> None:
        """A block that a reader on another node misses is written again. Keys that do not exist are ignored."""
        key, content = self.put(200_000, 32)
        self.store.rewrite(["conformance/no/1", key])
        assert _same(self.get(key, 200_000), content)
        assert self.store.missing(["conformance/no/1", key]) == ["conformance/no/1"]
        self.store.remove([key])
        assert self.get(key, 200_000) is None

    def test_read_and_removed_at_once(self) -> None:
        """A reader gets the bytes, or the key is reported as missing. It never gets other bytes."""
        for turn in range(10):
            key, content = self.put(300_000, 50 + turn)
            remover = threading.Thread(target=self.store.remove, args=([key],))
            remover.start()
            result = self.get(key, 300_000)
            remover.join()
            assert result is None or _same(result, content)
            assert self.get(key, 300_000) is None

    def test_threads(self) -> None:
        """Several threads write and read at the same time."""
        failures: list[BaseException] = []

        def work(thread: int) -> None:
            try:
                for turn in range(5):
                    nbytes = 20_000 * (thread + 1) + turn
                    key, content = self.put(nbytes, 100 * thread + turn)
                    assert _same(self.get(key, nbytes), content)
                    self.store.remove([key])
                    assert self.get(key, nbytes) is None
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    # ------------------------------------------------------------ several processes

    def _process(self, what: str, key: str, nbytes: int) -> subprocess.Popen[str]:
        where = msgspec.json.encode(self._both()[0]).decode()
        command = [sys.executable, "-c", _OTHER, where, what, key, str(nbytes)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _elsewhere(self, what: str, key: str, nbytes: int) -> str:
        with self._process(what, key, nbytes) as process:
            try:
                output, trouble = process.communicate(timeout=OTHER_SECONDS)
            finally:
                process.kill()
        assert output, trouble
        return output.strip()

    def test_another_process_reads_it(self) -> None:
        """Another process reads a block with the same address of the store."""
        key, content = self.put(123_456, 7)
        assert self._elsewhere("read", key, 123_456) == f"{zlib.crc32(content.data)} []"
        self.store.remove([key])
        assert self._elsewhere("read", key, 123_456).endswith(f"[{key!r}]")

    def test_what_is_written_outlives_its_writer(self) -> None:
        """A block stays if its writer is killed right after `write`."""
        key = f"conformance/{uuid.uuid4().hex}/1"
        assert self._elsewhere("write", key, 250_000) == "written"
        result = self.get(key, 250_000)
        assert result is not None
        assert np.array_equal(result, np.arange(250_000) % 251)
        self.store.remove([key])

    def test_what_a_killed_writer_has_begun_is_removed(self) -> None:
        """If a writer is killed during `write`, its blocks can be removed."""
        key = f"conformance/{uuid.uuid4().hex}/"
        with self._process("begin", key, 16 << 20) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline() == "writes\n"
            process.kill()
            count = 3 + process.communicate(timeout=OTHER_SECONDS)[0].count("writes")
        keys = [f"{key}{n}" for n in range(count)]
        self.store.remove(keys)
        assert self.store.missing(keys) == keys

    # ------------------------------------------------------------ the end of the store

    def test_a_full_store_says_so(self) -> None:
        """A write into a full store raises CapacityError within its time, and succeeds after blocks are removed."""
        if self.capacity is None:
            return
        step = self.capacity // 8
        keys: list[str] = []
        try:
            for n in range(9):
                key = f"conformance/{uuid.uuid4().hex}/{n}"
                with self.store.buffer(key, step) as memory:
                    memory[:1] = n
                    self.store.write(key, memory, 0.2)
                keys.append(key)
        except CapacityError:
            pass
        else:
            raise AssertionError(f"{9 * step} bytes were written into a store of {self.capacity} bytes")
        finally:
            self.store.remove(keys)
        key, content = self.put(step // 2, 8)
        assert _same(self.get(key, step // 2), content)
        self.store.remove([key])

    def test_a_system_with_some_fields_in_the_store(self) -> None:
        """Some fields of a put are in the store, others in an arena: both are read back and freed together."""
        import torch
        from tensordict import TensorDict

        from transfer_queue.testing.cluster import Cluster

        address, _ = self._both()
        conf = {"backend": {"fields": {"stored*": address.kind}}}
        values = TensorDict({"here": torch.arange(8), "stored": torch.rand(8, 5000)}, batch_size=[8])
        with (
            tempfile.TemporaryDirectory() as folder,
            Cluster(Path(folder), conf=conf, arena_bytes=1 << 20, stores={address.kind: address}) as cluster,
        ):
            writer, reader = cluster.client("writer"), cluster.client("reader")
            store = cluster.units[1].pool
            for _ in range(2):
                meta = writer.put(values, partition_id="p")
                data = reader.get_data(meta, layout="dense")
                assert torch.equal(data["stored"], values["stored"])
                assert torch.equal(data["here"], values["here"])
                before = store.status().leased
                with contextlib.suppress(CapacityError):  # the arena is full, so nothing may be left in the store
                    writer.put(
                        TensorDict({"here": torch.zeros(1, 1 << 19), "stored": torch.rand(1, 9)}, [1]), partition_id="p"
                    )
                    raise AssertionError("2 MiB were put into an arena of 1 MiB")
                assert store.status().leased == before > 0
                writer.clear_samples(meta)
                cluster.wait(lambda: store.status().held == 0)
            cluster.check()
