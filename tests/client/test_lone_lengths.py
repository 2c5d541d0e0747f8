"""Lengths of one element through a system: they come back as they were put, and count as their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.sampler import SeqlenBalancedSampler
from transfer_queue.testing import Cluster


def test_lengths_of_one_element_are_balanced_and_come_back_as_they_were_put(start: Callable[..., Cluster]) -> None:
    client = start(sampler=SeqlenBalancedSampler(1, 2)).client("c")
    lengths: list[Any] = [torch.tensor([9]), np.array([9]), [1], 1]
    data = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    client.kv_batch_put(list("abcd"), "p", data, tags=[{"total_lengths": length} for length in lengths])
    shares = [
        client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": rank, "batch_index": 0})
        for rank in range(2)
    ]
    assert [sum(meta.global_indexes.count(row) for row in (0, 1)) for meta in shares] == [1, 1]
    tags = {row: tag for meta in shares for row, tag in zip(meta.global_indexes, meta.custom_meta)}
    assert torch.equal(tags[0]["total_lengths"], torch.tensor([9]))
    assert isinstance(tags[1]["total_lengths"], np.ndarray)
    assert (tags[2], tags[3]) == ({"total_lengths": [1]}, {"total_lengths": 1})
