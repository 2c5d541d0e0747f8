"""What does it cost to put and get rows that share values, as the answers to a prompt share its image?

Prompts have 1 MiB of pixels each, and 16 answers. Their put is compared with the put of one row for each prompt.
The rows share memory, or have copies of their own that are found by a hash, in the first put or in a later one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.harness.machine import clocked
from benchmarks.harness.report import Row, Scale, compared
from benchmarks.harness.systems import system
from transfer_queue import interface as tq

QUESTION = "What does it cost to put and get rows that share values, as the answers to a prompt share its image?"
MIB = 1 << 20
ANSWERS = 16

Columns = dict[str, Any]


def run(scale: Scale) -> list[Row]:
    """Puts of rows that share values, and gets of them."""
    prompts, rounds = scale.pick(64, 4), scale.pick(9, 1)
    size = scale.pick(MIB, 64 << 10)
    pixels = torch.arange(prompts * size // 8).view(torch.uint8).view(prompts, size)
    count = prompts * ANSWERS
    answers = torch.arange(count)
    alone = {"pixels": list(pixels.unbind(0)), "answer": answers[:prompts]}
    shared: Columns = {"pixels": [row for row in pixels.unbind(0) for _ in range(ANSWERS)], "answer": answers}
    copied: Columns = {"copies": [row.clone() for row in pixels.unbind(0) for _ in range(ANSWERS)], "answer": answers}
    known = {"copies": copied["copies"][:count], "answer": answers}
    conf = {"dedup": {"fields": ["copies"]}}
    with system(conf):
        rows = [
            _put("the answers share memory", shared, alone, rounds),
            _put("the answers have equal bytes", copied, alone, rounds),
            _put("the answers have bytes of an earlier put", known, alone, rounds, copied),
        ]
        return [*rows, *_gets(shared, prompts, rounds)]


def _put(what: str, columns: Columns, alone: Columns, rounds: int, earlier: Columns | None = None) -> Row:
    """Measure the put of all answers, each time beside that of one row for each prompt."""
    ours, single, held = [], [], 0
    (name,) = set(columns) - {"answer"}
    for _ in range(rounds + 1):
        if earlier is not None:
            _put_rows("equal", earlier, "earlier")
        before = _stored()
        ours.append(_timed_put("equal", columns) * 1e3)
        held = _stored() - before
        saved = sum(each.saved for each in tq.get_client().status().partitions)
        tq.get_client().clear_partition("equal")
        single.append(_timed_put("single", alone) * 1e3)
        tq.get_client().clear_partition("single")
    more = {"rows": len(columns[name]), "stored_mib": held / MIB, "saved_mib": saved / MIB}
    words = "the put of one row for each prompt"
    return compared(f"put where {what}", "ms", ours[1:], single[1:], words, more=more)


def _gets(columns: Columns, prompts: int, rounds: int) -> list[Row]:
    """Measure gets of all answers, with and without shared rows, each time beside that of one row for each prompt."""
    client = tq.get_client()
    _put_rows("equal", columns)
    keys = _keys(columns)
    firsts = keys[::ANSWERS]
    made = []
    for what, shared in (("a row of its own for each answer", False), ("rows that share memory", True)):
        ours, single = [], []
        for _ in range(rounds + 1):
            ours.append(clocked(partial(client.kv_batch_get, keys, "equal", shared=shared)) * 1e3)
            single.append(clocked(partial(client.kv_batch_get, firsts, "equal")) * 1e3)
        made.append(compared(f"get with {what}", "ms", ours[1:], single[1:], "the get of one row for each prompt"))
    got = client.kv_batch_get(keys, "equal", shared=True)["pixels"].tolist()
    same = all(torch.equal(row, wanted) for row, wanted in zip(got, columns["pixels"], strict=True))
    if not same or len({row.data_ptr() for row in got}) != prompts:
        raise AssertionError("the rows of the get are not those that were put, or do not share memory")
    return made


def _keys(columns: Columns, prefix: str = "") -> list[str]:
    return [f"{prefix}{number}" for number in range(len(columns["answer"]))]


def _put_rows(partition: str, columns: Columns, prefix: str = "") -> None:
    tq.get_client().kv_batch_put(_keys(columns, prefix), partition, columns)


def _timed_put(partition: str, columns: Columns) -> float:
    return clocked(partial(_put_rows, partition, columns))


def _stored() -> int:
    return sum(partition.nbytes for partition in tq.get_client().status().partitions)
