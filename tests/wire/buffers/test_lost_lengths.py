"""Jagged tensors from `torch.nested.narrow`: stored with the rows that were selected, or refused if torch lost them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from carried_values import Point
from codec_arenas import Arenas
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import UncarriableValueError
from transfer_queue.wire.blocks.encode import encode_columns
from transfer_queue.wire.blocks.gather import gather
from transfer_queue.wire.objects.object_values import encode_tag_value

ISSUE = "github.com/pytorch/pytorch/issues/196708"

CHANGES: dict[str, Any] = {
    "as it is": lambda value: value,
    "transposed": lambda value: value.transpose(1, 2),
    "computed": lambda value: value * 1,
    "copied": lambda value: value.clone(),
    "contiguous": lambda value: value.contiguous(),
    "converted": lambda value: value.to(torch.int32),
}


def narrowed(base: torch.Tensor, selected: list[tuple[int, int]]) -> torch.Tensor:
    starts, lengths = (torch.tensor(part) for part in zip(*selected, strict=True))
    return torch.nested.narrow(base, 1, starts, lengths, layout=torch.jagged)


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=30)
@given(size=st.integers(1, 3), data=st.data())
def test_any_selection_is_stored_or_refused(change: str, size: int, data: st.DataObject) -> None:
    ranges = st.integers(0, size).flatmap(lambda start: st.tuples(st.just(start), st.integers(0, size - start)))
    selected = data.draw(st.lists(ranges, min_size=1, max_size=4))
    base = torch.arange(len(selected) * size * 2).view(len(selected), size, 2)
    value = CHANGES[change](narrowed(base, selected))
    rows = [row[start : start + length] for row, (start, length) in zip(base, selected, strict=True)]
    wanted = [CHANGES[change](row.unsqueeze(0))[0].tolist() for row in rows]
    if [row.tolist() for row in value.unbind()] == wanted:
        arenas = Arenas()
        arenas.write(encode_columns({"x": value}, len(rows)))
        found = gather(arenas.reply(), arenas.memory)["x"]
        assert [row.tolist() for row in found.unbind()] == wanted
        return
    with pytest.raises(UncarriableValueError, match=f"'x'.*{ISSUE}"):
        encode_columns({"x": value}, len(rows))


def lost() -> torch.Tensor:
    return narrowed(torch.arange(4).view(2, 2), [(0, 2), (1, 1)])


@pytest.mark.parametrize("value", [
    narrowed(torch.arange(4).view(2, 2), [(0, 2), (1, 1)]), narrowed(torch.arange(10).view(2, 5), [(4, 1), (1, 4)]),
    narrowed(torch.arange(12).view(3, 4), [(1, 3), (0, 4), (2, 1)]), narrowed(torch.ones(2, 2), [(1, 1), (1, 1)]),
], ids=["longest", "shortest", "three rows", "equal lengths"])  # fmt: skip
def test_lost_lengths_are_refused(value: torch.Tensor) -> None:
    with pytest.raises(UncarriableValueError, match=rf"(?s)'x'.*NestedTensor.*{ISSUE}.*as_nested_tensor"):
        encode_columns({"x": value}, value.size(0))


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: {"a": [v]}, Point], ids=["alone", "in a dict", "in an object"])
def test_they_are_refused_as_an_object(wrap: Any) -> None:
    with pytest.raises(UncarriableValueError, match=f"'x', row 1.*{ISSUE}"):
        encode_columns({"x": ["a", wrap(lost())]}, 2)
    with pytest.raises(UncarriableValueError, match=ISSUE):
        encode_tag_value(wrap(lost()))


def test_a_bound_above_the_longest_row_is_allowed() -> None:
    value = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 2, 3, 6]), min_seqlen=0, max_seqlen=64
    )
    assert encode_columns({"x": value}, 3).schema[0].ragged
