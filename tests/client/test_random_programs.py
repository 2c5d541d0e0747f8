"""Random programs of two clients against a dict: what is read is, to the last bit, what was put last.

The arena is small, so that space is used again all the time, and messages arrive in an order drawn by a seed.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tensordict import NonTensorStack

from simulated import rows_of, same
from transfer_queue.errors import CapacityError, FieldTypeError, StorageKeyNotFoundError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Cluster

MIB = 1 << 20
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64]
PARTITIONS = ["p", "q"]
FIELDS = ["x", "y", "z"]

numbers = st.integers(0, 2**32 - 1)
objects = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
    | st.builds(lambda seed: np.random.default_rng(seed).bytes(300), numbers)
    | st.builds(lambda seed: np.random.default_rng(seed).integers(0, 9, size=(seed % 3, 2)), numbers),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)  # fmt: skip


def promoted(values: list[Any]) -> list[Any]:
    """Return the expected result of a get of these values: tensors in the dtype that torch promotes theirs to."""
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    if len(dtypes) < 2:
        return values
    dtype = functools.reduce(torch.promote_types, dtypes)
    return [value.to(dtype) for value in values]


def as_tensors(values: list[Any], live: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return what a field of tensors takes these values as; None if it refuses them.

    A number takes the dtype that torch's arithmetic gives it beside the field's, an array keeps its own.
    """
    own = functools.reduce(torch.promote_types, [value.dtype for value in live])
    made = []
    for value in values:
        if isinstance(value, torch.Tensor):
            made.append(value)
        elif isinstance(value, np.ndarray):
            made.append(torch.from_numpy(value.copy()))
        elif type(value) in (bool, int, float):
            try:
                dtype = torch.result_type(torch.empty(1, dtype=own), value)
                if type(value) is int and dtype is torch.int8 and not -128 <= value < 128:
                    dtype = torch.int64
                made.append(torch.tensor(value, dtype=dtype))
            except (OverflowError, RuntimeError):
                return None
        else:
            return None
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in made])
    return [value.to(dtype) for value in made]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits of this dtype, NaNs of any payload among them; bools are 0 and 1."""
    random = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(random.integers(0, 2, size=shape, dtype=np.uint8)).view(torch.bool)
    count = int(np.prod(shape, dtype=np.int64)) * torch.empty(0, dtype=dtype).element_size()
    return (
        torch.frombuffer(bytearray(random.bytes(count)), dtype=dtype).reshape(shape)
        if count
        else torch.zeros(shape, dtype=dtype)
    )


@st.composite
def column(draw: st.DrawFn, rows: int) -> list[Any]:
    """A value a row: tensors of one dtype (equal shapes, ragged in some dimensions, or several ranks), or objects."""
    kind = draw(st.sampled_from(["dense", "large", "ragged", "ranks", "objects"]))
    if kind == "objects":
        return [draw(objects) for _ in range(rows)]
    dtype = draw(st.sampled_from(DTYPES))
    shapes: list[tuple[int, ...]]
    if kind == "large":
        shapes = [(draw(st.integers(20_000, 60_000)),)] * rows
    elif kind == "dense":
        shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=3)))] * rows
    elif kind == "ranks":
        shapes = [tuple(draw(st.lists(st.integers(0, 3), max_size=2))) for _ in range(rows)]
    else:
        rank = draw(st.integers(1, 2))
        shapes = [tuple(draw(st.integers(0, 300)) for _ in range(rank)) for _ in range(rows)]
    return [tensor(shape, dtype, draw(numbers)) for shape in shapes]


def as_column(values: list[Any], seed: int) -> Any:
    """The same values in one of the containers that can hold them."""
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if len({value.shape for value in values}) == 1 and seed % 3:
        return torch.stack(values)
    if seed % 2 and all(value.dim() == 1 for value in values):
        return torch.nested.nested_tensor(values, layout=torch.jagged)
    return values


def check_container(column: Any, wanted: list[Any], layout: str = "jagged") -> None:
    """A get returns a tensor if and only if the rows that it returns are tensors of one rank."""
    tensors = all(isinstance(row, torch.Tensor) for row in wanted)
    one_rank = tensors and len({row.dim() for row in wanted}) == 1
    if one_rank and layout == "jagged":
        assert isinstance(column, torch.Tensor)
        assert column.is_nested == (wanted[0].dim() > 0)
    elif not one_rank:
        assert isinstance(column, NonTensorStack)


class Programs(RuleBasedStateMachine):
    """model: partition -> key -> field -> value; indexes: the global index of every key's row, for ever."""

    @initialize(seed=numbers)
    def begin(self, seed: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="tq-test-")
        self.cluster = Cluster(Path(self.folder.name) / "arena", seed=seed, arena_bytes=4 * MIB)
        self.clients = [self.cluster.client(name) for name in "ab"]
        self.model: dict[str, dict[str, dict[str, Any]]] = {}
        self.metas: list[tuple[BatchMeta, list[tuple[str, str]]]] = []
        self.next_key = 0

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        for client in self.clients:
            client.close()
        last = self.cluster.client("last")
        for name in list(self.model):
            last.clear_partition(name)
        self.cluster.run()
        self.cluster.check()
        assert self.cluster.unit.table.leased == 0
        self.cluster.close()
        self.folder.cleanup()

    def _taken(self, partition: str, columns: dict[str, list[Any]]) -> dict[str, list[Any]] | None:
        """The values as they are stored; None if the put is refused: live tensors and objects do not mix in a field."""
        taken = {}
        for name, values in columns.items():
            live = [row[name] for row in self.model.get(partition, {}).values() if name in row]
            tensors = all(isinstance(value, torch.Tensor) for value in values)
            of_tensors = bool(live) and isinstance(live[0], torch.Tensor)
            stored = as_tensors(values, live) if of_tensors and not tensors else values
            if stored is None or (live and tensors and not of_tensors):
                return None
            taken[name] = stored
        return taken

    @rule(data=st.data(), who=st.integers(0, 1), partition=st.sampled_from(PARTITIONS), seed=numbers)
    def put(self, data: st.DataObject, who: int, partition: str, seed: int) -> None:
        """New and known keys, some fields."""
        known = list(self.model.get(partition, {}))
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True, max_size=3)) if known else []
        fresh = data.draw(st.integers(0 if chosen else 1, 3))
        keys = chosen + [f"k{self.next_key + i}" for i in range(fresh)]
        names = data.draw(st.lists(st.sampled_from(FIELDS), unique=True, min_size=1))
        columns = {name: data.draw(column(len(keys))) for name in names}
        given_columns = {name: as_column(values, seed) for name, values in columns.items()}
        taken = self._taken(partition, columns)
        try:
            meta = self.clients[who].kv_batch_put(keys, partition, given_columns, tags=[{"n": seed}] * len(keys))
        except FieldTypeError:
            assert taken is None
            return
        except CapacityError:
            return
        assert taken is not None
        assert meta.keys == keys
        self.next_key += fresh
        rows = self.model.setdefault(partition, {})
        for i, key in enumerate(keys):
            rows.setdefault(key, {}).update({name: values[i] for name, values in taken.items()})

    @rule(data=st.data(), who=st.integers(0, 1), layout=st.sampled_from(["jagged", "list"]))
    @precondition(lambda self: any(self.model.values()))
    def get_by_keys(self, data: st.DataObject, who: int, layout: str) -> None:
        partition = data.draw(st.sampled_from([name for name, rows in self.model.items() if rows]))
        rows = self.model[partition]
        keys = data.draw(st.lists(st.sampled_from(list(rows)), min_size=1, max_size=6))
        fields = set.intersection(*(set(rows[key]) for key in keys))
        if not fields:
            with pytest.raises(ValueError, match="not ready"):
                self.clients[who].kv_batch_get(keys, partition)
            return
        back = self.clients[who].kv_batch_get(keys, partition, layout=layout)
        assert set(back.keys()) == fields
        for name in fields:
            wanted = promoted([rows[key][name] for key in keys])
            check_container(back.get(name), wanted, layout)
            for value, row, key in zip(rows_of(back.get(name)), wanted, keys, strict=True):
                assert same(value, row), (partition, key, name)

    @rule(who=st.integers(0, 1), data=st.data())
    @precondition(lambda self: any(self.model.values()))
    def remember_rows(self, who: int, data: st.DataObject) -> None:
        """Metadata that is kept, and read later, maybe after its rows were replaced or cleared."""
        partition = data.draw(st.sampled_from([name for name, rows in self.model.items() if rows]))
        keys = data.draw(st.lists(st.sampled_from(list(self.model[partition])), unique=True, min_size=1))
        self.metas.append((self.clients[who].kv_retrieve_meta(keys, partition), [(partition, key) for key in keys]))

    @rule(who=st.integers(0, 1), data=st.data())
    @precondition(lambda self: self.metas)
    def get_by_metadata(self, who: int, data: st.DataObject) -> None:
        meta, names = data.draw(st.sampled_from(self.metas))
        rows = [self.model.get(partition, {}).get(key) for partition, key in names]
        if any(row is None for row in rows) and meta.field_names:
            with pytest.raises(StorageKeyNotFoundError):
                self.clients[who].get_data(meta)
            return
        back = self.clients[who].get_data(meta)
        for name in meta.field_names:
            wanted = promoted([row[name] for row in rows if row is not None])
            check_container(back.get(name), wanted)
            for value, row in zip(rows_of(back.get(name)), wanted, strict=True):
                assert same(value, row)

    @rule(who=st.integers(0, 1), data=st.data())
    @precondition(lambda self: any(self.model.values()))
    def clear(self, who: int, data: st.DataObject) -> None:
        partition = data.draw(st.sampled_from([name for name, rows in self.model.items() if rows]))
        keys = data.draw(st.lists(st.sampled_from(list(self.model[partition])), unique=True, min_size=1))
        self.clients[who].kv_clear(keys, partition)
        for key in keys:
            del self.model[partition][key]

    @rule(who=st.integers(0, 1), partition=st.sampled_from(PARTITIONS))
    def drop(self, who: int, partition: str) -> None:
        self.clients[who].clear_partition(partition)
        self.model.pop(partition, None)

    @rule(who=st.integers(0, 1))
    def lose_connection(self, who: int) -> None:
        self.clients[who].reconnect()

    @rule(who=st.integers(0, 1))
    def replace_client(self, who: int) -> None:
        """A client dies; another one takes its place. What it put stays."""
        self.clients[who].die()
        self.cluster.advance(1)
        self.clients[who] = self.cluster.client(f"{self.clients[who].name}+")

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.check()

    @invariant()
    def the_same_keys_are_there(self) -> None:
        if hasattr(self, "cluster"):
            listed = {name: list(keys) for name, keys in self.clients[0].kv_list().items()}
            assert listed == {name: list(rows) for name, rows in self.model.items()}


TestPrograms = Programs.TestCase
TestPrograms.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("seed", range(6))
def test_readers_while_the_arena_turns_over(tmp_path: Path, seed: int) -> None:
    """Reads and writes that overlap in every order of messages: a read gives one of the values put, whole, or says
    that its row is gone."""
    random = np.random.default_rng(seed)
    with Cluster(tmp_path / "arena", seed=seed, arena_bytes=4 * MIB) as cluster:
        writer, reader = cluster.client("w"), cluster.client("r")
        reads: list[Any] = []
        writes: list[Any] = []
        for turn in range(60):
            key = f"k{random.integers(0, 3)}"
            fill = torch.full((1, int(random.integers(100_000, 200_000))), turn, dtype=torch.uint8)
            writes.append(writer.start(writer.operations.kv_batch_put([key], "p", {"x": fill}, timeout=1000)))
            reads.append(reader.start(reader.operations.kv_batch_get(["k0", "k1", "k2"], "p")))
            if random.integers(0, 4) == 0:
                writer.start(writer.operations.kv_clear([f"k{random.integers(0, 3)}"], "p"))
            for _ in range(random.integers(0, 12)):
                cluster.network.deliver()
        cluster.wait(lambda: all(task.done for task in [*writes, *reads]))  # a full arena is tidied as time passes
        whole = 0
        for read in reads:
            if read.error is not None:
                assert isinstance(read.error, ValueError)
                assert "not found" in str(read.error)
                continue
            for row in read.result()["x"].unbind():
                assert int(row.min()) == int(row.max())
                whole += 1
        assert whole > 20
        cluster.check()
