"""get_data: order, repeats, what is gone, several partitions at once, layouts, independence from the store."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from simulated import Start, numbers, ragged, rows_of, same, table
from transfer_queue.errors import FieldTypeError, InvalidArgumentError, StorageKeyNotFoundError, UncarriableValueError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client

TUTORIAL = Path(__file__).parents[2] / "examples" / "tutorials" / "03_producers_and_consumers.py"


class Point:
    """A class that only pickle carries."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and self.x == other.x

    __hash__ = None  # type: ignore[assignment]


class TestRows:
    def test_in_the_order_of_the_metadata(self, a: Client, b: Client) -> None:
        meta = a.put(table(x=torch.arange(4), n=ragged(1, 2, 3, 4), o=list("uvwx")), partition_id="p")
        meta.reorder([2, 0, 3, 1])
        back = b.get_data(meta)
        assert back.batch_size == torch.Size([4])
        assert back["x"].tolist() == [2, 0, 3, 1]
        assert [len(row) for row in back["n"].unbind()] == [3, 1, 4, 2]
        assert back.get("o").tolist() == list("wuxv")

    @pytest.mark.parametrize("layout", ["jagged", "list"])
    def test_on_a_device(self, a: Client, layout: str) -> None:
        """Fields of tensors come there, whatever holds them; objects stay."""
        mixed = NonTensorStack(torch.ones(2), torch.ones(2, 3), torch.ones(1))
        meta = a.put(table(x=torch.arange(3), n=ragged(1, 2, 3), m=mixed, o=list("uvw")), partition_id="p")
        back = a.get_data(meta, layout=layout, device="cpu")
        assert back.batch_size == torch.Size([3])
        plain = a.get_data(meta, layout=layout)
        for name in "xnmo":
            assert type(back.get(name)) is type(plain.get(name))
            assert same(rows_of(back.get(name)), rows_of(plain.get(name)))
        assert a.get_data(BatchMeta(), device="cpu").batch_size == torch.Size([0])

    @pytest.mark.parametrize("pieces", [(1, 2, 4), (4, 1, 1), (2, 4, 2)])
    def test_fields_that_came_in_any_pieces(self, a: Client, pieces: tuple[int, ...]) -> None:
        """One row at a time, two, or all four: the rows of each field lie in blocks of its own."""
        meta = a.get_meta(["x"], 4, "p", mode="insert")
        for name, size in zip("xyz", pieces, strict=True):
            for start in range(0, 4, size):
                rows = list(range(start, start + size))
                values = torch.tensor([10 * ord(name) + row for row in rows])
                a.put(table(**{name: values}), meta.select_samples(rows))
        back = a.get_data(a.get_meta(list("xyz"), 4, "p", task_name="t"), layout="dense")
        for name in "xyz":
            assert back[name].tolist() == [10 * ord(name) + row for row in range(4)]

    def test_repeats(self, a: Client) -> None:
        a.put(numbers(3), partition_id="p")
        meta = BatchMeta([2, 0, 2], ["p"] * 3, {"x": {"dtype": torch.int64, "shape": torch.Size([])}})
        assert a.get_data(meta)["x"].tolist() == [2, 0, 2]

    def test_selected_fields(self, a: Client) -> None:
        meta = a.put(table(x=torch.arange(2), y=torch.ones(2)), partition_id="p")
        assert sorted(a.get_data(meta.select_fields(["y"])).keys()) == ["y"]
        nothing = a.get_data(meta.select_fields([]))
        assert (list(nothing.keys()), nothing.batch_size) == ([], torch.Size([2]))

    def test_of_no_samples(self, a: Client) -> None:
        nothing = a.get_data(BatchMeta())
        assert isinstance(nothing, TensorDict)
        assert (list(nothing.keys()), nothing.batch_size) == ([], torch.Size([0]))


class TestGone:
    def test_cleared(self, a: Client, b: Client) -> None:
        meta = a.put(numbers(3), partition_id="p")
        b.clear_samples(meta.select_samples([1]))
        with pytest.raises(StorageKeyNotFoundError, match=r"1 of 3 samples.*\[1\]"):
            a.get_data(meta)
        assert a.get_data(meta.select_samples([0, 2]))["x"].tolist() == [0, 2]

    def test_partition_dropped(self, a: Client, b: Client) -> None:
        meta = a.put(numbers(1), partition_id="p")
        b.clear_partition("p")
        with pytest.raises(KeyError):
            a.get_data(meta)

    def test_a_field_that_is_missing(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        a.put(table(y=torch.zeros(1)), meta[1].copy())
        wanted = a.get_meta(["x", "y"], None, "p", mode="force_fetch")
        with pytest.raises(StorageKeyNotFoundError, match=r"'y' is not produced for 1 of 2.*\[0\]"):
            a.get_data(wanted)

    def test_clearing_twice_is_fine(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        a.clear_samples(meta)
        a.clear_samples(meta)
        a.clear_samples(BatchMeta())
        assert a.get_partition_list() == ["p"]


class TestSeveralPartitions:
    def both(self, a: Client, one: TensorDict, two: TensorDict) -> BatchMeta:
        metas = [a.put(data, partition_id=p) for data, p in ((one, "p"), (two, "q"))]
        return BatchMeta.concat(metas, validate=False)

    def test_fields_in_different_blocks(self, a: Client) -> None:
        metas = []
        for start, name in ((0, "p"), (10, "q")):
            meta = a.put(numbers(2, start), partition_id=name)
            a.put(table(z=torch.arange(2) + start, y=torch.ones(2)), meta)
            metas.append(meta)
        back = a.get_data(BatchMeta.concat(metas))
        assert back["z"].tolist() == back["x"].tolist() == [0, 1, 10, 11]
        assert back["y"].tolist() == [1] * 4

    @pytest.mark.parametrize(
        ("one", "two", "where"),
        [
            (torch.zeros(2, 3), torch.ones(1, 3), 0),
            (torch.zeros(2, 3), torch.ones(1, 5), 0),
            (torch.zeros(2, 3, 4), torch.ones(1, 3, 5), 1),
            (torch.zeros(2, 3, 4), torch.ones(1, 2, 4), 0),
            (ragged(1, 3), torch.ones(1, 2), 0),
        ],
    )
    def test_one_ragged_dimension(self, a: Client, one: torch.Tensor, two: torch.Tensor, where: int) -> None:
        column = a.get_data(self.both(a, table(x=one), table(x=two)))["x"]
        assert (column.is_nested, column.layout) == (True, torch.jagged)
        assert column._ragged_idx == where + 1
        assert all(map(same, column.unbind(), [*one.unbind(), *two.unbind()]))

    def test_ragged_within_one_and_otherwise_between_both(self, a: Client) -> None:
        """One partition differs in the first dimension, the two differ in the second."""
        rows = [torch.zeros(1, 4), torch.zeros(2, 4)]
        both = self.both(
            a, table(x=torch.nested.nested_tensor(rows, layout=torch.jagged)), table(x=torch.ones(1, 5, 3))
        )
        column = a.get_data(both)["x"]
        assert (column.is_nested, column.layout) == (True, torch.strided)
        assert all(map(same, column.unbind(), [*rows, torch.ones(5, 3)]))

    def test_mixed_ranks_within_one(self, a: Client) -> None:
        rows = [torch.zeros(3), torch.zeros(1, 2)]
        both = self.both(a, TensorDict({"x": NonTensorStack(*rows)}, batch_size=[2]), table(x=torch.ones(1, 4)))
        assert all(map(same, a.get_data(both).get("x").tolist(), [*rows, torch.ones(4)]))

    def test_kinds_that_differ(self, a: Client) -> None:
        both = self.both(a, numbers(2), table(x=["text"]))
        with pytest.raises(FieldTypeError, match=r"'x'.*chunk_by_partition"):
            a.get_data(both)
        parts = [a.get_data(part) for part in both.chunk_by_partition()]
        assert [len(part) for part in parts] == [2, 1]

    def test_cleared_in_one(self, a: Client) -> None:
        both = self.both(a, numbers(1), numbers(1, 10))
        a.clear_partition("q")
        with pytest.raises(StorageKeyNotFoundError, match="'q'"):
            a.get_data(both)


class TestLayouts:
    def test_rows_that_differ(self, a: Client) -> None:
        meta = a.put(table(x=ragged(1, 3)), partition_id="p")
        assert [row.tolist() for row in a.get_data(meta)["x"].unbind()] == [[1], [2, 2, 2]]
        assert a.get_data(meta, layout="padded")["x"].tolist() == [[1, 0, 0], [2, 2, 2]]
        assert [row.tolist() for row in rows_of(a.get_data(meta, layout="list").get("x"))] == [[1], [2, 2, 2]]
        with pytest.raises(ValueError, match=r"'x'.*dense"):
            a.get_data(meta, layout="dense")
        assert a.get_data(meta[1], layout="dense")["x"].tolist() == [[2, 2, 2]]

    def test_an_unknown_one(self, a: Client) -> None:
        meta = a.put(numbers(1), partition_id="p")
        with pytest.raises(InvalidArgumentError, match="'round'"):
            a.get_data(meta, layout="round")

    def test_of_keys(self, a: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", table(x=ragged(1, 2)))
        assert a.kv_batch_get(["l", "k"], "p", layout="padded")["x"].tolist() == [[2, 2], [1, 0]]
        meta = a.kv_put("k", "p", {"y": 1})
        assert a.kv_batch_get_by_meta(meta, layout="list").get("y").tolist() == [1]

    def test_the_type_does_not_depend_on_the_batch(self, a: Client) -> None:
        meta = a.put(table(x=ragged(2, 2)), partition_id="p")
        assert a.get_data(meta)["x"].layout == torch.jagged
        a.put(table(x=torch.zeros(1, 5, 2)), partition_id="q")
        more = a.put(table(x=ragged(1)), partition_id="p")
        for batch in (meta, more, meta[1]):
            column = a.get_data(batch)["x"]
            assert (column.is_nested, column.layout, column.dim()) == (True, torch.jagged, 2)


class TestPickle:
    def test_objects_of_the_users(self, a: Client, b: Client) -> None:
        meta = a.put(table(o=[Point(1), [Point(2)]]), partition_id="p")
        assert b.get_data(meta).get("o").tolist() == [Point(1), [Point(2)]]

    def test_a_reader_without_it_reads_nothing_of_a_putter_with_it(self, a: Client, b: Client) -> None:
        """In data, inside what is stored without pickle, and in tags; the rest of the system goes on."""
        whole = a.put(table(o=[Point(1)]), partition_id="whole")
        inside = a.put(table(o=[{"n": [1, (Point(2),)]}]), partition_id="inside")
        a.kv_put("k", "tags", {"x": torch.ones(1)}, tag={"o": Point(3)})
        plain = a.put(table(x=torch.ones(1)), partition_id="plain")
        assert b.get_data(whole).get("o").tolist() == [Point(1)]
        b.state._settings = dataclasses.replace(b.state.settings, allow_pickle=False)
        for meta in (whole, inside):
            with pytest.raises(UncarriableValueError, match=r"security\.allow_pickle is false in this process"):
                b.get_data(meta)
        with pytest.raises(UncarriableValueError, match=r"security\.allow_pickle is false in this process"):
            b.kv_list("tags")
        with pytest.raises(UncarriableValueError, match="pickle"):
            b.wait_for_change("tags", where={"o": Point(3)}, timeout=0)
        assert b.get_data(plain).get("x").tolist() == [1.0]

    def test_forbidden_at_both_ends(self, start: Start) -> None:
        cluster = start(conf={"security": {"allow_pickle": False}})
        client = cluster.client("c")
        with pytest.raises(UncarriableValueError, match="pickle"):
            client.put(table(o=[Point(1)]), partition_id="p")
        with pytest.raises(UncarriableValueError, match="pickle"):
            client.kv_put("k", "p", tag={"o": Point(1)})
        with pytest.raises(UncarriableValueError, match="pickle"):
            client.kv_put("k", "p", {"o": Point(1)})
        assert client.get_partition_list() == []
        meta = client.put(table(o=[{"n": 1, "a": np.arange(2)}]), partition_id="p")
        assert same(client.get_data(meta).get("o").tolist(), [{"n": 1, "a": np.arange(2)}])


class TestNoRows:
    """An empty batch has the fields that it knows, with no rows."""

    def fill(self, client: Client) -> BatchMeta:
        data = table(
            scalar=torch.arange(2), row=torch.ones(2, 3, 4), ragged=ragged(1, 2), object=["a", "b"],
        )  # fmt: skip
        return client.put(data, partition_id="p")

    @pytest.mark.parametrize("layout", ["jagged", "dense", "padded", "list"])
    def test_of_a_cut(self, a: Client, layout: str) -> None:
        meta = self.fill(a)
        none = a.get_data(meta[0:0], layout=layout)
        some = a.get_data(meta[0:1], layout=layout)
        assert (none.batch_size, sorted(none.keys())) == (torch.Size([0]), sorted(some.keys()))
        for name in sorted(none.keys()):
            mine, other = none.get(name), some.get(name)
            assert type(mine) is type(other), name
            assert len(mine) == 0
            if isinstance(mine, torch.Tensor):
                assert (mine.dtype, mine.ndim, mine.is_nested) == (other.dtype, other.ndim, other.is_nested), name

    def test_of_an_answer_without_samples(self, start: Start) -> None:
        """The metadata has the known fields of the partition; no fields if the partition does not exist."""
        client = start(seed=1, conf={"controller": {"polling_mode": True}}).client("c")
        self.fill(client)
        fields = ["scalar", "row", "never"]
        polled = client.get_meta(fields, 3, "p", task_name="t")
        waited, ended = client.await_batch(fields[:2], 3, "p", "t", timeout=1)
        assert (len(polled), len(waited), ended) == (0, 0, False)
        for meta in (polled, waited):
            data = client.get_data(meta, layout="dense")
            assert data["row"].float().mean(dim=2).shape == (0, 3)
            assert data["scalar"].dtype == torch.int64
            assert sorted(data.keys()) == ["row", "scalar"]
        assert list(client.get_data(client.get_meta(fields, 3, "q", task_name="t")).keys()) == []

    @pytest.mark.parametrize("fields", [["n"], [("n", "y"), ("n", "m", "z")], ["n::y", "n::m"]])
    def test_of_an_answer_without_samples_of_nested_fields(self, start: Start, fields: list[object]) -> None:
        """They are nested as those of some samples are."""
        client = start(seed=1, conf={"controller": {"polling_mode": True}}).client("c")
        inner = table(y=torch.ones(2, 3), m=table(z=torch.arange(2)))
        client.put(table(n=inner), partition_id="p")
        none = client.get_data(client.get_meta(fields, 3, "p", task_name="t"))
        some = client.get_data(client.get_meta(fields, 2, "p", task_name="t"))
        assert set(none.keys(True, True)) == set(some.keys(True, True)) == {("n", "y"), ("n", "m", "z")}
        assert (len(none["n", "y"].unbind()), none["n", "m", "z"].shape) == (0, (0,))
        assert list(client.get_data(BatchMeta()).keys()) == []


def test_the_reward_loop_of_the_tutorial_survives_empty_batches(start: Start) -> None:
    cluster = start(seed=1)
    client, names = cluster.client("c"), runpy.run_path(str(TUTORIAL))
    client.put(table(answer=torch.ones(4, 6, dtype=torch.int64)), partition_id="train_0")
    for seconds in (200.0, 400.0):  # longer than one wait of the loop
        late = table(answer=torch.ones(4, 6, dtype=torch.int64))
        cluster.later(seconds, lambda data=late: client.start(client.operations.put(data, partition_id="train_0")))
    cluster.later(600.0, lambda: client.start(client.operations.seal("train_0")))
    offline = SimpleNamespace(init=lambda config: None, get_client=lambda: client, close=lambda: None)
    names["reward"].__globals__["tq"] = offline
    assert names["reward"](None) == 12
    assert cluster.clock.now >= 600
