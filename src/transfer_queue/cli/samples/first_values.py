"""The beginnings of a sample's values, as `tq show` prints them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.display import short_repr
from transfer_queue.messages.reports.samples import SampleField, SampleReport

if TYPE_CHECKING:
    from transfer_queue.client import TransferQueueClient
    from transfer_queue.node.system.launcher import RunningSystem
    from transfer_queue.token_text import TokenText

MAX_BYTES = 64 << 20
"""The largest value that is read, in bytes."""
FIRST = 8
"""Numbers of a tensor that are shown."""
LEAST_TEXT = 2
"""Characters that a tensor must have to be shown as text."""
LONGEST_TEXT = 4096
"""Characters of a text that are kept."""


class ShownValue(msgspec.Struct, frozen=True):
    """The beginning of a value."""

    text: str | None = None
    """The text that the value contains; None if it does not contain text."""
    first: list[Any] = []
    """The first numbers of a tensor."""
    more: int = 0
    """The number of its other numbers."""
    other: str = ""
    """The beginning of the `repr` of an object."""
    decoded: str | None = None
    """The text whose token ids a tensor contains; None if it does not contain token ids, or without a tokenizer."""
    error: str = ""
    """Why the value is not shown."""


def read_values(system: RunningSystem, report: SampleReport, tokens: TokenText | None = None) -> dict[str, ShownValue]:
    """Return the beginnings of the values of a live sample, by field. `tokens` decodes token ids."""
    from transfer_queue.client import TransferQueueClient

    client = TransferQueueClient(system)
    try:
        fields = [field for field in report.fields if field.kind != "nested"]
        return {field.name: _read(client, report, field, tokens) for field in fields}
    finally:
        client.close()


def _read(
    client: TransferQueueClient, report: SampleReport, field: SampleField, tokens: TokenText | None
) -> ShownValue:
    if field.nbytes is not None and field.nbytes > MAX_BYTES:
        return ShownValue(error="too large to be shown")
    try:
        return shown(client._read_value(report.partition, report.index, field.name), tokens)
    except Exception as error:  # a user's class may raise anything when it is unpickled
        return ShownValue(error=f"{type(error).__name__}: {error}")


def shown(value: Any, tokens: TokenText | None = None) -> ShownValue:
    """Return the beginning of a value. `tokens` decodes token ids."""
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1) if not value.is_sparse else value.coalesce().values().reshape(-1)
        numbers = flat[:FIRST].tolist()
        decoded = None if tokens is None else tokens.decode(value)
        may_be_text = decoded is None and _may_be_text(value)
        text = text_of_numbers(flat[:LONGEST_TEXT].tolist()) if may_be_text else None
        return ShownValue(text, numbers, max(0, flat.numel() - len(numbers)), decoded=decoded)
    if isinstance(value, str):
        return ShownValue(value[:LONGEST_TEXT])
    if isinstance(value, (bytes, bytearray)):
        return ShownValue(text_of_numbers(list(value[:LONGEST_TEXT])), other=short_repr(bytes(value[:LONGEST_TEXT])))
    return ShownValue(other=f"{type(value).__name__}: {short_repr(value, 200)}")


def _may_be_text(value: Any) -> bool:
    kind = str(value.dtype)
    return value.ndim == 1 and kind.startswith(("torch.uint8", "torch.int"))


def text_of_numbers(numbers: Sequence[int]) -> str | None:
    """Return the text whose UTF-8 bytes these numbers are, without padding of zeros at its end; None if they are not.

    Token ids are hardly ever text by accident, because most of them are above 255.
    """
    kept = list(itertools.dropwhile(lambda number: number == 0, reversed(numbers)))[::-1]
    if len(kept) < LEAST_TEXT or not all(0 <= number < 256 for number in kept):
        return None
    try:
        text = bytes(kept).decode()
    except UnicodeDecodeError as error:
        if error.start < len(kept) - 4 or error.start < LEAST_TEXT:  # not a character that the limit has cut
            return None
        text = bytes(kept[: error.start]).decode()
    printable = all(character.isprintable() or character in "\n\r\t" for character in text)
    return text if printable else None
