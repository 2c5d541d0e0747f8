"""Decodes the token ids of a sample to text with a tokenizer of Hugging Face, for people who look at samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.config import environment
from transfer_queue.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

FILE = "tokenizer.json"
MAX_IDS = 2000  # that are decoded
LONGEST_TEXT = 2000  # characters that are kept
ID_TYPES = ("torch.int32", "torch.int64")


class TokenText:
    """Decodes the ids of one vocabulary.

    Args:
        tokenizer: The tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def decode(self, value: Tensor) -> str | None:
        """Return the beginning of the text whose token ids a tensor contains, special tokens included.

        Args:
            value: A tensor. Only one of one dimension and type int32 or int64 is decoded, if every value is in the
                vocabulary.

        Returns:
            At most 2,000 characters; None if these are not token ids.
        """
        if value.ndim != 1 or str(value.dtype) not in ID_TYPES or not value.numel():
            return None
        if int(value.min()) < 0 or int(value.max()) >= self._ids:
            return None
        text: str = self._tokenizer.decode(value[:MAX_IDS].tolist(), skip_special_tokens=False)
        return text[:LONGEST_TEXT]


def find_tokenizer(name: str) -> Path:
    """Return the file of a tokenizer. Nothing is downloaded.

    Args:
        name: The path of a `tokenizer.json` or of a folder that has one, or the name of a model, such as
            `Qwen/Qwen3-8B`, whose tokenizer is in the cache of Hugging Face on this machine.

    Raises:
        InvalidArgumentError: There is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / FILE).is_file():
            return path / FILE
        raise InvalidArgumentError(f"the tokenizer {name!r} is a folder without a file {FILE}; name one that has it")
    cache = _cache()
    model = cache / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    revisions = [main.read_text("utf-8").strip()] if main.is_file() else []
    for folder in [model / "snapshots" / each for each in revisions] + sorted(model.glob("snapshots/*")):
        if (folder / FILE).is_file():
            return folder / FILE
    raise InvalidArgumentError(
        f"the tokenizer {name!r} was not found: there is no such file or folder, and no {FILE} of a model of this name "
        f"in {cache}; give the path of a {FILE}, or download the model first"
    )


def load_tokenizer(name: str) -> TokenText:
    """Return a tokenizer; see `find_tokenizer`.

    Raises:
        InvalidArgumentError: There is none, it cannot be read, or the package tokenizers is not installed.
    """
    path = find_tokenizer(name)
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InvalidArgumentError(
            f"the tokenizer {name!r} needs the package tokenizers, which cannot be imported: {error}; install it with "
            f"`pip install 'transfer_queue[tokenizer]'`"
        ) from None
    try:
        return TokenText(Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises nothing more specific
        raise InvalidArgumentError(
            f"the tokenizer {name!r} cannot be read from {path}: {error}; give the path of a {FILE} of Hugging Face"
        ) from None


def _cache() -> Path:
    """Return the folder in which Hugging Face keeps the files of models."""
    hub, home = environment.hf_hub_cache(), environment.hf_home()
    if hub is not None:
        return Path(hub).expanduser()
    return (Path("~/.cache/huggingface") if home is None else Path(home)).expanduser() / "hub"
