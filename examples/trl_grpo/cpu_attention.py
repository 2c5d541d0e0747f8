"""Lets AsyncGRPOTrainer of TRL 1.5 to 1.16 run on a CPU. On a GPU it uses FlashAttention 3, and this is not needed."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


def replace_flash_attention() -> None:
    """Replace the kernel of TRL's packed attention. Versions without packing, such as 1.4, stay as they are."""
    try:
        packing: Any = importlib.import_module("trl.experimental.async_grpo.packing")
    except ModuleNotFoundError:
        return
    trainer: Any = importlib.import_module("trl.experimental.async_grpo.async_grpo_trainer")
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    trainer.get_peak_flops_per_device = lambda *arguments: None  # there is no entry for CPUs


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    *lengths: int, softmax_scale: float | None = None, **options: Any,
) -> torch.Tensor:  # fmt: skip
    """Return causal attention over segments of variable lengths. The last query of a segment sees all of its keys."""
    parts = []
    queries, keys = query_ends.tolist(), key_ends.tolist()
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys)):
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[a:b], key[c:d], value[c:d]))
        found = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)
