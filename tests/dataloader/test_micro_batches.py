"""Micro-batches by token budget, and packed: every row once, in order, with its metadata; the values to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from simulated import numbers, ragged, table
from transfer_queue.dataloader.micro_batches import chunk_batch_fn, chunk_by_tokens, pack, row_lengths, token_field
from transfer_queue.dataloader.streaming_dataset import StreamingDataset
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.blocks.gather import stack_of

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12)


def tables(lengths: list[int]) -> TensorDict:
    """The data of `batch` as x, n, and in a TensorDict in a TensorDict: t::u::x, t::u::k, t::u::o, t::j, t::n."""
    data, _ = batch(lengths)
    inner = data.select("x", "k", "o")
    outer = data.select("j", "n")
    outer["u"] = inner
    whole = data.select("x", "n")
    whole["t"] = outer
    return whole


def metadata(lengths: list[int], tag: str = "total_lengths") -> BatchMeta:
    tags = [{tag: length} for length in lengths]
    return BatchMeta(list(range(10, 10 + len(lengths))), ["p"] * len(lengths), custom_meta=tags)


def batch(lengths: list[int]) -> tuple[TensorDict, BatchMeta]:
    """x: row i is full of i + 1, j: ragged like x, with another dimension; k: ragged otherwise; n: the lengths."""
    rows = [torch.arange(length * 3).reshape(length, 3) + 100 * i for i, length in enumerate(lengths)]
    data = table(
        x=ragged(*lengths),
        j=torch.nested.nested_tensor(rows, layout=torch.jagged),
        k=ragged(*range(1, len(lengths) + 1)),
        n=torch.tensor(lengths),
        o=[f"row {i}" for i in range(len(lengths))],
    )
    return data, metadata(lengths)


class TestBudget:
    @given(LENGTHS, st.integers(1, 20), st.none() | st.integers(1, 5), st.sampled_from([None, "x", "n"]))
    def test_every_row_once_in_order_within_the_budget(
        self, lengths: list[int], budget: int, rows: int | None, field: str | None
    ) -> None:
        data, meta = batch(lengths)
        pieces = list(chunk_by_tokens(data, meta, budget, max_rows=rows, length_field=field))
        assert [index for _, m in pieces for index in m.global_indexes] == meta.global_indexes
        assert [row for d, _ in pieces for row in d["o"]] == [f"row {i}" for i in range(len(lengths))]
        assert [row.tolist() for d, _ in pieces for row in d["x"].unbind()] == [
            row.tolist() for row in data["x"].unbind()
        ]
        sums = [d["n"].sum().item() for d, _ in pieces]
        for (d, m), tokens in zip(pieces, sums):
            assert len(d) == len(m) > 0
            assert tokens <= budget or len(m) == 1
            assert rows is None or len(m) <= rows
            for column in (d["x"], d["j"]):
                sizes = column.offsets().diff().tolist()
                assert column.offsets()[0] == 0
                assert len(column.values()) == sum(sizes)
                assert (column._maybe_min_seqlen, column._maybe_max_seqlen) == (min(sizes), max(sizes))
        for (_, m), tokens, (following, _) in zip(pieces, sums, pieces[1:]):  # none could have taken one more
            assert tokens + following["n"][0].item() > budget or len(m) == rows

    def test_a_row_without_a_length(self) -> None:
        data, _ = batch([1, 2])
        for tags in ([{"total_lengths": 1}, {}], [{"total_lengths": 1}, {"total_lengths": "2"}]):
            meta = BatchMeta([7, 8], ["p", "p"], custom_meta=tags)
            with pytest.raises(InvalidArgumentError, match=r"'total_lengths' of row 8 .*length_field="):
                list(chunk_by_tokens(data, meta, 4))
        for field, words in [("y", "is not among the fields"), ("o", "has neither")]:
            with pytest.raises(InvalidArgumentError, match=words):
                list(chunk_by_tokens(data, metadata([1, 2]), 4, length_field=field))

    def test_lengths(self) -> None:
        jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(2, 5)], layout=torch.strided)
        other = torch.nested.as_nested_tensor([torch.ones(3, 2), torch.ones(5, 2)], layout=torch.jagged)
        data = table(a=other, b=other.transpose(1, 2), c=torch.ones(2, 4, 3), d=torch.tensor([6, 7]), e=jagged)
        assert [row_lengths(data, name).tolist() for name in "abcd"] == [[3, 5], [3, 5], [4, 4], [6, 7]]
        assert token_field(data, ["d", "b", "a"]) == "b"
        for name, column in [("f", torch.ones(2)), ("t", torch.tensor([True, False])), ("m", torch.tensor([1, -1]))]:
            with pytest.raises(InvalidArgumentError, match="has neither"):
                row_lengths(table(**{name: column}), name)


class TestPack:
    @given(LENGTHS)
    def test_as_variable_length_attention_takes_it(self, lengths: list[int]) -> None:
        data, _ = batch(lengths)
        packed = pack(data, "x")
        rows, tokens = len(lengths), sum(lengths)
        assert packed.batch_size == torch.Size([])
        assert packed["cu_seqlens"].dtype == torch.int32
        assert packed["cu_seqlens"].tolist() == [0, *np.cumsum(lengths).tolist()]
        assert packed["max_seqlen"] == max(lengths)
        assert type(packed["max_seqlen"]) is int
        assert packed["position_ids"].dtype == torch.int64
        assert packed["position_ids"].tolist() == [[i for length in lengths for i in range(length)]]
        assert packed["x"].tolist() == [data["x"].values().tolist()]
        assert packed["j"].shape == (1, tokens, 3)
        for row, (start, stop) in enumerate(zip(packed["cu_seqlens"], packed["cu_seqlens"][1:])):
            assert torch.equal(packed["x"][0, start:stop], data["x"][row])
            assert torch.equal(packed["j"][0, start:stop], data["j"][row])
        assert packed["n"].tolist() == lengths
        assert packed["o"] == [f"row {i}" for i in range(rows)]
        if lengths != list(range(1, rows + 1)):
            assert [len(row) for row in packed["k"].unbind()] == list(range(1, rows + 1))

    def test_shares_the_memory_of_the_batch(self) -> None:
        data, _ = batch([3, 4])
        assert pack(data, "x")["x"].data_ptr() == data["x"].values().data_ptr()

    def test_dense_rows_and_rows_ragged_in_another_dimension(self) -> None:
        wide = torch.nested.as_nested_tensor([torch.ones(3, 2), torch.zeros(3, 2)], layout=torch.jagged)
        data = table(a=torch.arange(6).reshape(2, 3), b=wide.transpose(1, 2))
        packed = pack(data, "a")
        assert packed["a"].tolist() == [[0, 1, 2, 3, 4, 5]]
        assert packed["b"].shape == (1, 2, 6)
        assert packed["b"].tolist() == [[[1, 1, 1, 0, 0, 0]] * 2]

    @given(LENGTHS.filter(any))
    def test_rows_that_share_memory_are_packed_like_others(self, lengths: list[int]) -> None:
        data, _ = batch(lengths)
        listed = table(**{name: stack_of(list(data[name].unbind()), len(lengths)) for name in "xj"})
        packed, wanted = pack(listed, "x"), pack(data, "x")
        for name in ("x", "j", "cu_seqlens", "position_ids"):
            assert torch.equal(packed[name], wanted[name])

    def test_rows_of_different_ranks_are_no_token_rows(self) -> None:
        for rows in ([torch.ones(2), torch.ones(2, 2)], [torch.ones(2, 3), torch.ones(3, 4)], [torch.ones(())] * 2):
            with pytest.raises(InvalidArgumentError, match="'x' has no such rows"):
                pack(table(x=stack_of(rows, 2)), "x")

    def test_positions_of_the_users_own(self) -> None:
        data = table(x=ragged(2, 1), position_ids=ragged(2, 1))
        assert pack(data, "x")["position_ids"].tolist() == [[1, 1, 2]]

    def test_refused(self) -> None:
        with pytest.raises(InvalidArgumentError, match="'n' has no such rows"):
            pack(table(n=torch.arange(2)), "n")
        with pytest.raises(InvalidArgumentError, match="cu_seqlens"):
            pack(table(x=ragged(1, 2), cu_seqlens=torch.arange(2)), "x")
        with pytest.raises(InvalidArgumentError, match=r"none of the fields \['n'\]"):
            token_field(table(n=torch.arange(2)), ["n"])


class TestNestedTables:
    def test_micro_batches_are_cut_at_the_offsets_of_jagged_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lengths = [3, 1, 0, 4, 2]
        data, meta = tables(lengths), metadata(lengths)
        monkeypatch.setattr(TensorDict, "__getitem__", no_jagged(TensorDict.__getitem__))
        pieces = list(chunk_batch_fn(data, meta, 2))
        monkeypatch.undo()
        assert [len(m) for _, m in pieces] == [2, 2, 1]
        start = 0
        for piece, m in pieces:
            assert piece["t"].batch_size == piece["t", "u"].batch_size == torch.Size([len(m)])
            assert [len(row) for row in piece["t", "u", "x"].unbind()] == lengths[start : start + len(m)]
            assert piece["t", "u", "x"].values().data_ptr() >= data["t", "u", "x"].values().data_ptr(), "it is a view"
            assert piece["t", "n"].tolist() == lengths[start : start + len(m)]
            assert piece["t", "u"].get("o").tolist() == [f"row {i}" for i in range(start, start + len(m))]
            start += len(m)

    def test_lengths_of_a_leaf(self) -> None:
        data, meta = tables([5, 2, 3]), metadata([1, 1, 1])
        assert [len(m) for _, m in chunk_by_tokens(data, meta, 5, length_field="t::u::x")] == [1, 2]
        assert [len(m) for _, m in chunk_by_tokens(data, meta, 5, length_field="t::n")] == [1, 2]
        for name in ("t", "t::u", "x::y", "t::z"):
            with pytest.raises(InvalidArgumentError, match=f"length_field '{name}' must have"):
                row_lengths(data, name)
        assert token_field(data, ["n", "t"]) == "t::j"
        assert token_field(data, ["t::u::k"]) == "t::u::k"
        with pytest.raises(InvalidArgumentError, match="none of the fields"):
            token_field(data, ["n", "t::n"])

    @pytest.mark.parametrize("length_field", ["x", "t::u::x", "t::j"])
    def test_leaves_are_packed_like_fields(self, length_field: str) -> None:
        data = tables([3, 0, 4])
        packed = pack(data, length_field)
        assert packed["t", "u", "x"].tolist() == packed["x"].tolist() == [data["x"].values().tolist()]
        assert packed["t", "j"].shape == (1, 7, 3)
        assert packed["t"].batch_size == packed["t", "u"].batch_size == torch.Size([])
        assert packed["t", "n"].tolist() == [3, 0, 4]
        assert [len(row) for row in packed["t", "u", "k"].unbind()] == [1, 2, 3]
        assert packed["t", "u"].get("o").tolist() == ["row 0", "row 1", "row 2"]
        assert packed["cu_seqlens"].tolist() == [0, 3, 3, 7]

    def test_a_dataset_takes_leaves_by_either_name(self, a: Client) -> None:
        a.put(tables([5, 2, 3]), partition_id="p")
        a.seal("p")
        wanted: list[Any] = [("t", "u", "x"), "n"]
        for task, name in enumerate((("t", "u", "x"), "t::u::x", None)):
            more: Any = {"max_tokens": 5, "length_field": name} if name else {}
            stream = StreamingDataset(a, 3, 3, wanted, "p", f"t{task}", 0, pack=True, **more)
            packed = [(data["t", "u", "x"].tolist(), data["cu_seqlens"].tolist()) for data, _ in stream]
            assert [cuts for _, cuts in packed] == ([[0, 5], [0, 2, 5]] if name else [[0, 5, 7, 10]])
            assert [len(row) for (row,), _ in packed] == ([5, 5] if name else [10])


def no_jagged(slicing: Any) -> Any:
    """The slicing of TensorDicts, which must not meet jagged columns: torch's own costs more and writes to the log."""

    def sliced(data: TensorDict, index: Any) -> Any:
        if isinstance(index, slice):
            assert not [v for v in data.values(True, True) if isinstance(v, torch.Tensor) and v.layout == torch.jagged]
        return slicing(data, index)

    return sliced


class TestDataset:
    def stream(self, a: Client, **more: Any) -> StreamingDataset:
        data, _ = batch([5, 2, 3, 8, 1, 1])
        meta = a.put(data, partition_id="p")
        meta.update_custom_meta([{"total_lengths": length} for length in [5, 2, 3, 8, 1, 1]])
        a.set_custom_meta(meta)
        a.seal("p")
        return StreamingDataset(a, 6, 6, ["n", "x", "k"], "p", "t", 0, **more)

    @pytest.mark.parametrize(("field", "column"), [
        ("n", [[5, 2], [3], [8], [1, 1]]), ("cu_seqlens", [[0, 5, 7], [0, 3], [0, 8], [0, 1, 2]]),
    ])  # fmt: skip
    def test_by_tokens_as_rows_or_packed(self, a: Client, field: str, column: list[list[int]]) -> None:
        items = list(self.stream(a, max_tokens=8, pack=field == "cu_seqlens"))
        assert [d[field].tolist() for d, _ in items] == column
        assert [m.global_indexes for _, m in items] == [[0, 1], [2], [3], [4, 5]]

    def test_packed_by_count_and_another_field(self, a: Client) -> None:
        stream = self.stream(a, pack=True, length_field="k")
        stream.micro_batch_size = 4
        assert [d["cu_seqlens"].tolist() for d, _ in stream] == [[0, 1, 3, 6, 10], [0, 5, 11]]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
            ({"keep_batches": -1}, "keep_batches must be an integer of 0 or more, got -1"),
            ({"pack": True, "process_batch_fn": list}, "process_batch_fn"),
            ({"max_tokens": 1, "process_batch_fn": list}, "process_batch_fn"),
        ],
    )
    def test_refused(self, a: Client, more: dict[str, Any], words: str) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            StreamingDataset(a, 4, 2, ["x"], "p", "t", 0, **more)

    def test_no_lengths(self, a: Client) -> None:
        a.put(numbers(4), partition_id="q")
        with pytest.raises(InvalidArgumentError, match="total_lengths"):
            next(iter(StreamingDataset(a, 4, 4, ["x"], "q", "t", 0, max_tokens=5)))
