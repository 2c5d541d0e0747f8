"""The options that several commands have, `--name` and `--tokenizer`, and the type of options in seconds."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from transfer_queue.config.validators import SystemName
from transfer_queue.errors import InvalidArgumentError

Commands = Any  # argparse has no public name for what `add_subparsers` returns


def add_name(command: argparse.ArgumentParser) -> None:
    """Add the option `--name`, which selects the system."""
    command.add_argument("--name", type=_name, help="the system's name (TQ_SYSTEM, or your default one)")


def _name(text: str) -> str:
    try:
        return SystemName().convert("the name of a system", text)
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds_type(wanted: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option in seconds. It must be finite; `wanted` says in words what `accepts` accepts."""

    def convert(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and accepts(seconds)):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return seconds

    return convert


def add_tokenizer(command: argparse.ArgumentParser, default: str) -> None:
    """Add the option `--tokenizer`, which decodes token ids."""
    command.add_argument(
        "--tokenizer", metavar="PATH_OR_NAME",
        help="also show token ids as text, decoded by this tokenizer: the path of a tokenizer.json or of a folder that "
        "has one, or the name of a model in the cache of Hugging Face; nothing is downloaded; needs the extra "
        f"[tokenizer] (default: {default})",
    )  # fmt: skip
