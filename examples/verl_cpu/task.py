"""The task, and the files that a training reads: a model, a tokenizer and prompts, all made here.

The prompt is a digit and "="; the reward is the part of the response that repeats the digit.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIGNS = ["<pad>", "<eos>", *"0123456789", "=", "?"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
RESPONSE_LENGTH = 4


def make_files(folder: Path, prompts: int) -> None:
    """Write the model into `folder`/model, and `prompts` prompts into `folder`/train.parquet."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SIGNS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [row(str(rng.randrange(10)), index) for index in range(prompts)]
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each sign."""
    made = Tokenizer(models.WordLevel({sign: number for number, sign in enumerate(SIGNS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="?", chat_template=TEMPLATE
    )


def row(digit: str, index: int) -> dict[str, Any]:
    """Return a prompt as verl's dataset reads it."""
    return {
        "prompt": [{"role": "user", "content": digit}],
        "data_source": "repeat",
        "reward_model": {"style": "rule", "ground_truth": digit},
        "extra_info": {"index": index},
    }


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Return the part of the response that repeats the digit. verl calls it for each response."""
    return solution_str.count(ground_truth) / RESPONSE_LENGTH
