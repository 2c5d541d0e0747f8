"""What the codec costs against a plain memcpy of the same bytes, in the same run.

    python benchmarks/codec.py [--scale 1.0] [--repeat 15]

Prints a table and, last, one JSON line. Ratios travel between machines; times do not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from tensordict import TensorDict

from transfer_queue.messages import Blocks, FieldType, LookupReply, Placement
from transfer_queue.wire.encode import EncodedBlock, encode_columns, encode_row
from transfer_queue.wire.gather import gather


def median(work: Callable[[], object], repeat: int) -> float:
    """Seconds; the first run, which touches memory, does not count."""
    work()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeat // 2]


def memcpy(nbytes: int, repeat: int) -> float:
    """Seconds to copy so many bytes between warm memories in one thread."""
    source, destination = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    return median(lambda: np.copyto(destination, source), repeat)


def reply_of(blocks: list[tuple[int, EncodedBlock]], types: list[FieldType], places: np.ndarray) -> LookupReply:
    """A lookup's reply for blocks of one schema in one arena; places: [rows, (block, slot)]."""
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
    parts = [column.tobytes() for column in columns]
    placement = Placement([kind.name for kind in types], *(places[:, i].astype("<i4").tobytes() for i in (0, 1)))
    return LookupReply(len(places), types, Blocks(*parts, [blocks[0][1].schema], dims), [placement])


def field_type(name: str, column: object) -> FieldType:
    if not isinstance(column, torch.Tensor):
        return FieldType(name, "object", "object", 1, None, 1, False)
    ragged = column.is_nested
    shape = list(column.shape[1:]) if not ragged else None
    return FieldType(name, "tensor", str(column.dtype)[6:], column.dim() - 1, shape, int(ragged), False)


class Bench:
    """The measurements: name -> times, bytes and the memcpy they stand against."""

    def __init__(self, repeat: int):
        self.repeat = repeat
        self.results: dict[str, dict[str, float]] = {}

    def add(self, name: str, nbytes: int, work: Callable[[], object]) -> None:
        seconds, plain = median(work, self.repeat), memcpy(nbytes, self.repeat)
        self.results[name] = {"us": seconds * 1e6, "bytes": nbytes, "memcpy_us": plain * 1e6, "ratio": seconds / plain}
        times = f"{seconds * 1e3:10.3f} ms {plain * 1e3:10.3f} ms {seconds / plain:8.2f}x"
        print(f"{name:44} {nbytes / 2**20:9.2f} MiB {times}")

    def whole(self, name: str, fields: TensorDict) -> None:
        """A batch as one block: encode and write, then gather all of it, and half of it in random order."""
        rows = fields.batch_size[0]
        block = encode_columns(fields, rows)
        arena = np.zeros(block.nbytes, np.uint8)
        self.add(f"{name}: encode + write", block.nbytes, lambda: encode_columns(fields, rows).write_into(arena))
        types = [field_type(key, fields.get(key)) for key in list(fields.keys())]
        places = np.stack((np.zeros(rows, np.int64), np.arange(rows)), axis=1)
        reply = reply_of([(0, block)], types, places)
        self.add(f"{name}: gather, whole", block.nbytes, lambda: gather(reply, lambda unit: arena))
        half = np.random.default_rng(0).permutation(places)[: max(rows // 2, 1)]
        some = reply_of([(0, block)], types, half)
        self.add(f"{name}: gather, random half", block.nbytes // 2, lambda: gather(some, lambda unit: arena))

    def singles(self, name: str, fields: TensorDict) -> None:
        """The same rows as blocks of one row, gathered in random order."""
        rows = fields.batch_size[0]
        blocks = [encode_row({key: fields.get(key)[row] for key in list(fields.keys())}) for row in range(rows)]
        starts = np.cumsum([0, *(block.nbytes for block in blocks)])
        arena = np.zeros(int(starts[-1]), np.uint8)
        for start, block in zip(starts, blocks, strict=False):
            block.write_into(arena[start : start + block.nbytes])
        types = [field_type(key, fields.get(key)) for key in list(fields.keys())]
        order = np.random.default_rng(0).permutation(rows)
        reply = reply_of(
            list(zip(starts.tolist(), blocks, strict=False)), types, np.stack((order, np.zeros_like(order)), axis=1)
        )
        self.add(f"{name}: gather", int(starts[-1]), lambda: gather(reply, lambda unit: arena))


def mixed(rows: int) -> TensorDict:
    """A batch as RL training has it: ragged token fields of equal lengths, scalars, texts and dicts."""
    random = np.random.default_rng(0)
    lengths = random.integers(20, 600, rows)
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
    total = int(offsets[-1])

    def jagged(values: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    return TensorDict(
        {
            "input_ids": jagged(torch.randint(0, 50000, (total,))),
            "loss_mask": jagged(torch.ones(total, dtype=torch.bool)),
            "log_probs": jagged(torch.randn(total)),
            "reward": torch.randn(rows),
            "prompt": [f"prompt number {row}" * 5 for row in range(rows)],
            "info": [{"uid": row, "source": "math", "turns": [1, 2, row]} for row in range(rows)],
        },
        batch_size=[rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of rows")
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    bench = Bench(options.repeat)

    def rows(count: int) -> int:
        return max(int(count * options.scale), 2)

    print(f"{'':44} {'bytes':>13} {'codec':>13} {'memcpy':>13} {'ratio':>9}")
    sample = {"prompt": torch.arange(300), "response": torch.arange(500), "reward": torch.tensor(0.5)}
    one = encode_row(sample)
    memory = np.zeros(one.nbytes, np.uint8)
    bench.add("one row of 3 tensors: encode + write", one.nbytes, lambda: encode_row(sample).write_into(memory))
    types = [FieldType(n, "tensor", str(t.dtype)[6:], t.dim(), list(t.shape), 0, False) for n, t in sample.items()]
    reply = reply_of([(0, one)], types, np.zeros((1, 2), np.int64))
    bench.add("one row of 3 tensors: gather", one.nbytes, lambda: gather(reply, lambda unit: memory))
    count = rows(8192)
    small = TensorDict({f"f{i}": torch.randn(count, 128) for i in range(5)}, batch_size=[count])
    bench.whole(f"{count} rows x 5 x 128 f32", small)
    bench.singles(f"{count} blocks of one row x 5 x 128 f32", small)
    count = rows(512)
    bench.whole(f"{count} mixed rows", mixed(count))
    count = rows(1024)
    large = TensorDict({f"f{i}": torch.randn(count, 8192) for i in range(9)}, batch_size=[count])
    bench.whole(f"9 x {count} x 8192 f32", large)
    print(json.dumps({"benchmark": "codec", "results": bench.results}))


if __name__ == "__main__":
    main()
