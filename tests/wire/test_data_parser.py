"""What a data_parser is given and may return."""

import numpy as np
import pytest
import torch
from carried_values import jagged, same
from tensordict import NonTensorData, NonTensorStack, TensorDict

from transfer_queue.client.conversion.arguments import checked_parser_result, one_row, parser_columns
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.wire.blocks.encode import encode_columns, encode_row

ROWS = [torch.arange(2), torch.arange(3)]
TABLE = TensorDict({"z": torch.arange(2)}, [2])


@pytest.mark.parametrize(("column", "wanted"), [
    (torch.arange(4).reshape(2, 2), torch.arange(4).reshape(2, 2)), (["a", "b"], ["a", "b"]), (jagged(ROWS), ROWS),
    (torch.nested.nested_tensor(ROWS), ROWS), (NonTensorStack("a", [1]), ["a", [1]]), (NonTensorStack(*ROWS), ROWS),
    (NonTensorData(np.array(["a", "b"], object), batch_size=[2]), np.array(["a", "b"], object)),
    (np.array(["a", "b"]), np.array(["a", "b"])), (NonTensorData(["a", 1], batch_size=[2]), ["a", 1]),
    (NonTensorData("a", batch_size=[2]), ["a", "a"]),
    (TABLE, TABLE),
], ids=lambda v: type(v).__name__)  # fmt: skip
def test_columns_that_a_parser_gets(column, wanted):
    given = parser_columns(TensorDict({"x": column}, [2]), 2)
    assert same(given, {"x": wanted})
    again = encode_columns(checked_parser_result(given, given, 2), 2)
    once = encode_columns(TensorDict({"x": column}, [2]), 2)
    assert (again.schema, again.dims) == (once.schema, once.dims)


@pytest.mark.parametrize("after", [
    {"y": ["a", "b"]}, {"x": ["a", "b"], "y": [1, 2]}, {}, {"x": ["a"]}, {"x": torch.zeros(3)}, {"x": "ab"},
    {"x": None}, {"x": torch.tensor(1)}, {"x": np.array(1)}, [1, 2], None, {"x": np.zeros(1)},
    {"x": jagged([torch.ones(1)] * 3)},
    {"x": {"a": 1, "b": 2}}, {"x": TensorDict({}, [3])},
], ids=str)  # fmt: skip
def test_wrong_results(after):
    with pytest.raises(InvalidArgumentError, match="data_parser"):
        checked_parser_result({"x": ["a", "b"]}, after, 2)


@pytest.mark.parametrize("column", [
    torch.zeros(2, 3), ["a", "b"], (1, 2), np.zeros(2), jagged(ROWS), NonTensorStack("a", "b"), TensorDict({}, [2]),
    NonTensorData("a", batch_size=[2]),
], ids=lambda v: type(v).__name__)  # fmt: skip
def test_right_results(column):
    after = checked_parser_result({"x": ["a", "b"], "y": ["c", "d"]}, {"y": column, "x": column}, 2)
    assert list(after) == ["x", "y"]
    assert encode_columns(after, 2).rows == 2


def test_columns_of_one_sample():
    fields = {"t": torch.arange(3), "s": torch.tensor(1.0), "o": "path", "l": [1, 2]}
    columns = one_row(fields)
    assert same(columns, {"t": torch.arange(3)[None], "s": torch.tensor([1.0]), "o": ["path"], "l": [[1, 2]]})
    row, batch = encode_row(fields), encode_columns(columns, 1)
    assert (row.schema, row.dims, row.nbytes) == (batch.schema, batch.dims, batch.nbytes)
    with pytest.raises(InvalidArgumentError, match="nested"):
        one_row({"x": jagged(ROWS)})
