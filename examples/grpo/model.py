"""A character transformer in plain torch: pre-norm, rotary positions, 0.9 million parameters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, HEADS = 192, 2, 6
HEAD = WIDTH // HEADS
LONGEST = 64
"""Positions that the rotary tables cover."""

Cache = list[tuple[Tensor, Tensor]]
"""For each layer its keys and values, both [rows, heads, columns, head]."""


class Block(nn.Module):
    """Attention and a squared-ReLU feed-forward layer, each on a normalised residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(
        self, x: Tensor, rotation: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply the layer to x [rows, columns, width]; with `past`, x continues the columns in it."""
        rows, columns, _ = x.shape
        split = self.qkv(self.attention_norm(x)).view(rows, columns, 3, HEADS, HEAD)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, rotation), rotate(k, rotation)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, columns, WIDTH))
        return x + self.down(F.relu(self.up(self.feed_norm(x))).square()), (k, v)


class Transformer(nn.Module):
    """Tokens to logits. Positions are relative, so a padded prompt needs a mask and nothing else."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)
        frequency = 100.0 ** -(torch.arange(HEAD // 2) / (HEAD // 2))
        angle = torch.arange(LONGEST)[:, None] * frequency
        self.rotation: Tensor
        self.register_buffer("rotation", torch.stack((angle.cos(), angle.sin())), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [rows, columns, vocabulary] of whole sequences, which may be padded on the right."""
        return self.extend(tokens, None, None)[0]

    def extend(self, tokens: Tensor, past: Cache | None, mask: Tensor | None) -> tuple[Tensor, Cache]:
        """Return the logits of tokens [rows, columns] that follow `past`, and the cache that includes them.

        `mask` [rows, 1, columns, all columns] is true for the columns to which a token attends; None means causal.
        """
        start = past[0][0].shape[2] if past else 0
        rotation = self.rotation[:, start : start + tokens.shape[1]]
        x, cache = self.embed(tokens), []
        for layer, block in enumerate(self.blocks):
            x, kept = block(x, rotation, past[layer] if past else None, mask)
            cache.append(kept)
        return self.head(self.norm(x)), cache


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) of x [rows, heads, columns, head]."""
    cos, sin = rotation
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1)


def flatten(model: nn.Module) -> Tensor:
    """Return all weights as one float32 vector, the form in which they are put."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def load(model: nn.Module, weights: Tensor) -> None:
    """Put a vector made by `flatten` into the model."""
    nn.utils.vector_to_parameters(weights.reshape(-1), model.parameters())
