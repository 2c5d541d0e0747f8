"""Makes the columns of an empty batch. They have the types that a get of some rows returns, and no rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from transfer_queue.metadata.field_columns import FieldColumn
from transfer_queue.wire.blocks.gather import stack_of
from transfer_queue.wire.buffers.jagged import offsets_of_lengths


def column_of_no_rows(field: FieldColumn, layout: str) -> Any:
    """Return a field without rows, in the container of a layout (see `get_data`).

    A field whose dtype is not known counts as a field of objects. The size of a row dimension that is not known is 0.
    """
    if field.is_non_tensor or field.dtype is None or field.ndim is None or layout == "list":
        return stack_of([], 0)
    shape = list(field.shape or [0] * field.ndim)
    if field.ndim and layout == "jagged":
        none = np.zeros(0, "i8").tobytes()
        return offsets_of_lengths(none).make_jagged(torch.empty([0, *shape[1:]], dtype=field.dtype), 1)
    return torch.empty([0, *shape], dtype=field.dtype)
