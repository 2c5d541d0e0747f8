"""Token ids are decoded to text by a tokenizer that is found on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import transfer_queue as tq
from tests.tiny_tokenizer import write_tokenizer
from transfer_queue.token_text import LONGEST_TEXT, TokenText, find_tokenizer, load_tokenizer


@pytest.fixture
def tokens(tmp_path: Path) -> TokenText:
    return load_tokenizer(str(write_tokenizer(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_the_vocabulary_are_decoded_with_special_tokens(tokens: TokenText, dtype: torch.dtype) -> None:
    assert tokens.decode(torch.tensor([2, 3, 4, 1], dtype=dtype)) == "what is two <end>"


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([2, -100]), torch.tensor([2, 9]), torch.tensor([[2, 3]]), torch.tensor(2), torch.tensor([2.0]),
        torch.zeros(0, dtype=torch.int64), torch.tensor([2], dtype=torch.int16), torch.tensor([2], dtype=torch.uint8),
        torch.tensor([1 << 40]), torch.tensor([True]),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_are_not_token_ids_are_not_decoded(tokens: TokenText, value: torch.Tensor) -> None:
    assert tokens.decode(value) is None


def test_a_long_text_is_cut(tokens: TokenText) -> None:
    text = tokens.decode(torch.full((1_000_000,), 2))
    assert text is not None
    assert len(text) == LONGEST_TEXT


def test_a_file_a_folder_and_a_model_in_the_cache_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "hub" / "models--org--tiny"
    file = write_tokenizer(model / "snapshots" / "b")
    write_tokenizer(model / "snapshots" / "a")
    assert find_tokenizer(str(file)) == file
    assert find_tokenizer(str(file.parent)) == file
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert find_tokenizer("org/tiny").parent.name == "a"
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("b")
    assert find_tokenizer("org/tiny") == file
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(tq.InvalidArgumentError, match="elsewhere"):
        find_tokenizer("org/tiny")


def test_what_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        tq.InvalidArgumentError, match=r"'nowhere' was not found: .*; give the path of a tokenizer\.json"
    ):
        load_tokenizer("nowhere")
    with pytest.raises(tq.InvalidArgumentError, match=r"is a folder without a file tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    damaged = tmp_path / "tokenizer.json"
    damaged.write_text("{}")
    with pytest.raises(tq.InvalidArgumentError, match="cannot be read from"):
        load_tokenizer(str(damaged))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(tq.InvalidArgumentError, match=r"pip install 'transfer_queue\[tokenizer\]'"):
        load_tokenizer(str(damaged))
