"""The task: after `7=` the model must write `7777`. Model and tokenizer are made here, without any download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789="
ANSWER = 4
"""The length of an answer."""


def prompts() -> list[dict[str, str]]:
    """Return the rows of the dataset: a column "prompt", and the columns that the reward function needs."""
    return [{"prompt": f"{digit}=", "digit": digit} for digit in "0123456789"]


def reward(completions: list[str], digit: list[str], **others: Any) -> list[float]:
    """Return the share of correct characters of each answer."""
    return [
        sum(character == wanted for character in answer[:ANSWER]) / ANSWER for answer, wanted in zip(completions, digit)
    ]


def make_model(folder: Path, seed: int) -> None:
    """Save a Llama of 64 x 2 layers with random weights, and a tokenizer that knows 14 characters."""
    torch.manual_seed(seed)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", "<unknown>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()  # otherwise there are spaces between the characters
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    ).save_pretrained(folder)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    ).save_pretrained(folder)
