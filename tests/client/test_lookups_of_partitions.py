"""Lookups of several partitions that are put together name the same rows as each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from differential import differential, row_lengths, small
from simulated import rows_of, same
from transfer_queue.metadata import BatchMeta
from transfer_queue.testing import Cluster

MIB = 1 << 20


@st.composite
def columns(draw: st.DrawFn, trailing: int) -> dict[str, list[torch.Tensor]]:
    """Rows of three fields whose shapes coincide within a partition or between two."""
    sizes = draw(st.integers(1, 4).flatmap(row_lengths))
    other = draw(small)
    shapes = {"a": [(size,) for size in sizes], "b": [(other, trailing)] * len(sizes), "c": [()] * len(sizes)}
    seed = draw(st.integers(0, 100))
    return {
        name: [torch.full(shape, 7 * seed + row, dtype=torch.int16) for row, shape in enumerate(found)]
        for name, found in shapes.items()
    }


@given(st.data())
@differential(12)
def test_rows_of_several_partitions(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with Cluster(tmp_path_factory.mktemp("joined") / "arena", arena_bytes=MIB) as cluster:
        client = cluster.client("a")
        rows: list[tuple[BatchMeta, dict[str, Any]]] = []
        trailing = data.draw(small)
        for number in range(data.draw(st.integers(2, 5))):
            put = data.draw(columns(trailing))
            meta = client.put(put, partition_id=f"p{number % 3}")
            rows += [(meta.select_samples([row]), {name: put[name][row] for name in put}) for row in range(meta.size)]
        chosen = data.draw(st.permutations(rows))[: data.draw(st.integers(1, len(rows)))]
        fields = data.draw(st.sampled_from([["a"], ["a", "b", "c"], ["c", "b"]]))
        layout = data.draw(st.sampled_from(["jagged", "list"]))
        found = client.get_data(BatchMeta.concat([meta for meta, _ in chosen]).select_fields(fields), layout=layout)
        for name in fields:
            for value, (_, put) in zip(rows_of(found.get(name)), chosen, strict=True):
                assert same(value, put[name])
        client.close()
