"""The beginnings of the values of one sample, for a page that may show values. Nothing is unpickled."""

from __future__ import annotations

from dataclasses import replace

from transfer_queue.client.client import TransferQueueClient
from transfer_queue.errors import TransferQueueError, UncarriableValueError
from transfer_queue.live.questions.sample_answer import ValueHead
from transfer_queue.messages.reports.samples import SampleField, SampleReport
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.node.system.launcher import RunningSystem
from transfer_queue.token_text import TokenText

FIRST = 16  # values of a tensor
LONGEST_TEXT = 2000  # characters
MAX_BYTES = 64 << 10  # that are read for one sample


class ValueReader:
    """Reads values with a separate client, which never unpickles, even if `security.allow_pickle` is true.

    Args:
        system: The system.
        tokens: Decodes token ids; None to leave them numbers.
    """

    def __init__(self, system: RunningSystem, tokens: TokenText | None = None) -> None:
        self._tokens = tokens
        self._client = TransferQueueClient(system)
        attachment = self._client.storage_manager
        run_blocking(attachment.session, attachment.learn())
        attachment._settings = replace(attachment.settings, allow_pickle=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def read(self, report: SampleReport) -> dict[str, ValueHead]:
        """Return the beginnings of the values of a sample, the smallest values first, up to the limit."""
        left, heads = MAX_BYTES, {}
        for field in sorted(report.fields, key=lambda each: each.nbytes if each.nbytes is not None else MAX_BYTES + 1):
            if field.nbytes is None or field.nbytes > left:
                size = "its size is not known" if field.nbytes is None else f"{field.nbytes:,} bytes"
                heads[field.name] = ValueHead(note=f"too large to be read for the page ({size})")
                continue
            left -= field.nbytes
            heads[field.name] = self._read(report, field)
        return heads

    def _read(self, report: SampleReport, field: SampleField) -> ValueHead:
        try:
            return head_of(self._client._read_value(report.partition, report.index, field.name), self._tokens)
        except UncarriableValueError:
            return ValueHead(note=f"pickled, {field.nbytes or 0:,} bytes")
        except (TransferQueueError, LookupError, ValueError, TypeError, RuntimeError) as error:
            return ValueHead(note=f"it cannot be read: {type(error).__name__}")


def head_of(value: object, tokens: TokenText | None = None) -> ValueHead:
    """Return the beginning of a value. `tokens` decodes token ids."""
    import torch

    if isinstance(value, torch.Tensor):
        flat = (value.coalesce().values() if value.is_sparse else value).detach().reshape(-1)
        numbers = ", ".join(map(_number, flat[:FIRST].tolist()))
        decoded = None if tokens is None else tokens.decode(value)
        return ValueHead(numbers + (", ..." if flat.numel() > FIRST else ""), decoded=decoded)
    if isinstance(value, str):
        return ValueHead(text=value[:LONGEST_TEXT])
    if isinstance(value, (bytes, bytearray)):
        shown = bytes(value[:FIRST]).hex(" ")
        return ValueHead(shown + (" ..." if len(value) > FIRST else ""))
    if isinstance(value, (bool, int, float, type(None))):
        return ValueHead(_number(value))
    if isinstance(value, (list, tuple)) and all(isinstance(each, (bool, int, float, str)) for each in value[:FIRST]):
        parts = [_number(each) if not isinstance(each, str) else repr(each[:100]) for each in value[:FIRST]]
        return ValueHead((", ".join(parts) + (", ..." if len(value) > FIRST else ""))[:LONGEST_TEXT])
    if isinstance(value, dict):
        names = ", ".join(repr(str(name)[:100]) for name in list(value)[:FIRST])
        return ValueHead(note=f"a dict with {len(value):,} entries: {names}"[:LONGEST_TEXT])
    return ValueHead(note=type(value).__name__[:200])


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
