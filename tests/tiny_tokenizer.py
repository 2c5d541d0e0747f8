"""A tokenizer of a few words, which a test writes itself."""

from __future__ import annotations

from pathlib import Path

WORDS = ("<unknown>", "<end>", "what", "is", "two", "plus", "<img", "src=x>")


def write_tokenizer(folder: Path) -> Path:
    """Write `tokenizer.json` of `WORDS` into a folder, and return its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([WORDS[1]])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
