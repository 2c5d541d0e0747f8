"""An arena of plain memory, and the lookup replies that a controller would give for the blocks written into it."""

import struct

import numpy as np

from transfer_queue.messages.descriptors import Blocks, FieldType, Placement
from transfer_queue.messages.queries import LookupReply
from transfer_queue.wire.buffers.block_layout import ALIGNMENT, columns


def nbytes_of(block, rows):
    """The length of an encoded block, from its descriptor alone."""
    layouts = columns(block.schema, np.frombuffer(block.dims, np.int64), rows)
    end = int(layouts[-1].offsets[0] + layouts[-1].nbytes[0])
    return -(-end // ALIGNMENT) * ALIGNMENT


class Arenas:
    """One arena a unit; blocks lie in them at multiples of 64, in the order written."""

    def __init__(self, units=1, size=1 << 20):
        self.memories = [np.full(size, 0xA5, np.uint8) for _ in range(units)]
        self.ends = [0] * units
        self.blocks = []

    def memory(self, unit):
        return self.memories[unit]

    def write(self, block, unit=0):
        """Writes an encoded block, and gives its number."""
        start = self.ends[unit]
        needed = start + block.nbytes
        if needed > len(self.memories[unit]):
            larger = np.full(2 * needed, 0xA5, np.uint8)
            larger[: len(self.memories[unit])] = self.memories[unit]
            self.memories[unit] = larger
        block.write_into(self.memories[unit][start:needed])
        self.ends[unit] = needed
        self.blocks.append((unit, start, block))
        return len(self.blocks) - 1

    def reply(self, wanted=None, fields=None, ever=()):
        """The reply for these (block, slot) pairs, by default all rows of all blocks.

        fields: names, or one list of pairs a field (dict) where fields lie in different blocks. ever: encoded
        blocks that count for the types without being in the reply's rows.
        """
        if wanted is None:
            wanted = [(b, s) for b, (_, _, block) in enumerate(self.blocks) for s in range(block.rows)]
        if not isinstance(fields, dict):
            names = fields or [spec.name for spec in self.blocks[0][2].schema]
            fields = dict.fromkeys(names, wanted)
        placements = []
        for name, pairs in fields.items():
            numbers = np.array(pairs, np.int32).reshape(-1, 2)
            same = [p for p in placements if p.block == numbers[:, 0].tobytes() and p.slot == numbers[:, 1].tobytes()]
            if same:
                same[0].fields.append(name)
            else:
                placements.append(Placement([name], numbers[:, 0].tobytes(), numbers[:, 1].tobytes()))
        encoded = [block for _, _, block in self.blocks]
        return LookupReply(
            len(next(iter(fields.values()))),
            [field_type(name, [*encoded, *ever]) for name in fields],
            self._blocks(),
            placements,
        )

    def _blocks(self):
        schemas, dims = [], []
        for _, _, block in self.blocks:
            if block.schema not in schemas:
                schemas.append(block.schema)
            if block.dims not in dims:
                dims.append(block.dims)
        table = [(unit, start, 0, block.nbytes, block.rows, schemas.index(block.schema), dims.index(block.dims))
                 for unit, start, block in self.blocks]  # fmt: skip
        parts = [np.array(column, kind).tobytes() for column, kind in zip(
            zip(*table, strict=True), ("<i4", "<i8", "<i8", "<i8", "<i4", "<i4", "<i4"), strict=True)]  # fmt: skip
        return Blocks(*parts, schemas, dims)


def field_type(name, blocks):
    """What a controller knows of a field after these blocks."""
    shapes = []
    for block in blocks:
        dims = np.frombuffer(block.dims, np.int64)
        for spec, column in zip(block.schema, columns(block.schema, dims, block.rows), strict=True):
            if spec.name == name and block.rows:
                kind, dtype = spec.kind, spec.dtype
                shapes += [tuple(s for s in shape if s >= 0) for shape in column.shapes[0].tolist()]
    first = shapes[0]
    mixed = any(len(shape) != len(first) for shape in shapes)
    differs = 0
    for shape in shapes:
        for d, (one, other) in enumerate(zip(shape, first, strict=False)):
            differs |= (one != other) << d
    same = all(shape == first for shape in shapes)
    return FieldType(name, kind, dtype, len(first), list(first) if same else None, differs, mixed)


def packed(*numbers):
    """dims as they travel."""
    return struct.pack(f"<{len(numbers)}q", *numbers)
