"""What does it cost to encode columns as bytes and decode them, compared with a memcpy of the same bytes?

A block is encoded and written into memory, and gathered out of it: all of it, half of its rows in random order, and
rows of which each is a separate block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from benchmarks.harness import payloads
from benchmarks.harness.machine import Memcpy, clocked
from benchmarks.harness.payloads import Payload
from benchmarks.harness.report import Row, Scale, compared
from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.blocks.encode import EncodedBlock, encode_columns, encode_row
from transfer_queue.wire.blocks.gather import gather

QUESTION = "What does it cost to encode columns as bytes and decode them, compared with a memcpy of the same bytes?"


def reply_of(blocks: list[tuple[int, EncodedBlock]], types: list[FieldType], places: np.ndarray) -> LookupReply:
    """Return the reply of a lookup for blocks of one schema in one arena; places: [rows, (block, slot)]."""
    dims = sorted({block.dims for _, block in blocks})
    number = {value: position for position, value in enumerate(dims)}
    columns = [
        np.zeros(len(blocks), "<i4"),
        np.array([start for start, _ in blocks], "<i8"),
        np.zeros(len(blocks), "<i8"),
        np.array([block.nbytes for _, block in blocks], "<i8"),
        np.array([block.rows for _, block in blocks], "<i4"),
        np.zeros(len(blocks), "<i4"),
        np.array([number[block.dims] for _, block in blocks], "<i4"),
    ]
    parts: list[Any] = [*(column.tobytes() for column in columns), [blocks[0][1].schema], dims]
    placement = Placement([kind.name for kind in types], *(places[:, i].astype("<i4").tobytes() for i in (0, 1)))
    return LookupReply(len(places), types, Blocks(*parts), [placement])


def field_type(name: str, column: object) -> FieldType:
    """Return the type of a field as the controller would report it."""
    if not isinstance(column, torch.Tensor):
        return FieldType(name, "object", "object", 1, None, 1, False)
    ragged = column.is_nested
    shape = list(column.shape[1:]) if not ragged else None
    return FieldType(name, "tensor", str(column.dtype)[6:], column.dim() - 1, shape, int(ragged), False)


def run(scale: Scale) -> list[Row]:
    """All shapes."""
    rounds = scale.pick(15, 1)
    small = scale.pick(Payload("dense", 8192, 5, 128), Payload("dense", 16, 2, 128))
    rows = _one_row(rounds) + _whole(small, rounds) + _singles(small, rounds)
    rows += _whole(scale.pick(Payload("mixed", 512, 6, 1900), Payload("mixed", 8, 6, 20)), rounds)
    rows += _whole(scale.pick(Payload("dense", 1024, 9, 8192), Payload("dense", 8, 2, 32)), rounds)
    return rows


def _beside(what: str, nbytes: int, rounds: int, work: Callable[[], object]) -> Row:
    """Measure rounds of the work, each with a memcpy. The first round, which uses new memory, is not counted."""
    copy = Memcpy(nbytes)
    took = [(clocked(work) * 1e3, copy.seconds() * 1e3) for _ in range(rounds + 1)][1:]
    ours, plain = ([pair[i] for pair in took] for i in (0, 1))
    return compared(what, "ms", ours, plain, "memcpy", more={"best_ms": min(ours), "mib": nbytes / 2**20})


def _check(got: TensorDict, batch: TensorDict, order: np.ndarray) -> None:
    """Compare the gathered rows with the expected ones."""
    for name in payloads.names_of(batch):
        one, other = got.get(name), batch.get(name)
        if isinstance(other, torch.Tensor):
            rows = list(other.unbind())
            same = all(torch.equal(a, rows[i]) for a, i in zip(one.unbind(), order.tolist(), strict=True))
        else:
            values = other.tolist()
            same = one.tolist() == [values[i] for i in order.tolist()]
        if not same:
            raise AssertionError(f"the gathered bytes of {name} differ from the written ones")


def _one_row(rounds: int) -> list[Row]:
    sample = {"prompt": torch.arange(300), "response": torch.arange(500), "reward": torch.tensor(0.5)}
    one = encode_row(sample)
    memory = np.zeros(one.nbytes, np.uint8)
    name = "one row of 3 tensors"
    encoded = _beside(
        f"encode and write {name}", one.nbytes, 20 * rounds, lambda: encode_row(sample).write_into(memory)
    )
    types = [FieldType(n, "tensor", str(t.dtype)[6:], t.dim(), list(t.shape), 0, False) for n, t in sample.items()]
    reply = reply_of([(0, one)], types, np.zeros((1, 2), np.int64))
    return [encoded, _beside(f"gather {name}", one.nbytes, 20 * rounds, lambda: gather(reply, lambda unit: memory))]


def _types(batch: TensorDict) -> list[FieldType]:
    return [field_type(name, batch.get(name)) for name in payloads.names_of(batch)]


def _whole(payload: Payload, rounds: int) -> list[Row]:
    """Measure a batch as one block: all of it, and half of it in random order."""
    batch, rows = payloads.make(payload, 1), payload.rows
    block = encode_columns(batch, rows)
    arena = np.zeros(block.nbytes, np.uint8)
    found = [
        _beside(
            f"encode and write {payload.name}", block.nbytes, rounds,
            lambda: encode_columns(batch, rows).write_into(arena),
        )
    ]  # fmt: skip
    places = np.stack((np.zeros(rows, np.int64), np.arange(rows)), axis=1)
    half = np.random.default_rng(0).permutation(places)[: max(rows // 2, 1)]
    for words, some in (("", places), ("a random half of ", half)):
        reply = reply_of([(0, block)], _types(batch), some)
        _check(gather(reply, lambda unit: arena), batch, some[:, 1])
        nbytes = block.nbytes * len(some) // rows
        what = f"gather {words}{payload.name}"
        found.append(_beside(what, nbytes, rounds, lambda: gather(reply, lambda unit: arena)))  # noqa: B023
    return found


def _singles(payload: Payload, rounds: int) -> list[Row]:
    """Measure the same rows as blocks of one row, gathered in random order."""
    batch = payloads.make(payload, 1)
    names = payloads.names_of(batch)
    blocks = [encode_row({name: batch.get(name)[row] for name in names}) for row in range(payload.rows)]
    starts = np.cumsum([0, *(block.nbytes for block in blocks)])
    arena = np.zeros(int(starts[-1]), np.uint8)
    for start, block in zip(starts, blocks, strict=False):
        block.write_into(arena[start : start + block.nbytes])
    order = np.random.default_rng(0).permutation(payload.rows)
    placed = list(zip(starts.tolist(), blocks, strict=False))
    reply = reply_of(placed, _types(batch), np.stack((order, np.zeros_like(order)), axis=1))
    _check(gather(reply, lambda unit: arena), batch, order)
    what = f"gather {payload.name}, each a block, in random order"
    return [_beside(what, int(starts[-1]), rounds, lambda: gather(reply, lambda unit: arena))]
