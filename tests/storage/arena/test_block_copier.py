"""Blocks that a unit moves or repacks keep the bytes of their rows, however many steps the copies take."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from differential import differential, row_lengths
from transfer_queue.core.units.migration_planner import blocks_message
from transfer_queue.messages.descriptors import FieldSpec, NewBlock
from transfer_queue.messages.reports.unit_reports import BlocksMovedReport, Move, Repack
from transfer_queue.storage.arena import block_copier
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.block_copier import BlockCopier
from transfer_queue.storage.unit.extent_pool import ArenaPool

CAPACITY = 1 << 20
Rows = list[bytes]


def written(pool: ArenaPool, columns: list[Rows]) -> NewBlock:
    """A block in its own extent, laid out by hand: each column begins at a multiple of 64 bytes."""
    content, dims = b"", []
    for rows in columns:
        content += bytes(-len(content) % 64) + b"".join(rows)
        dims += [len(row) for row in rows]
    content += bytes(-len(content) % 64)
    extent = pool.lease(1, max(len(content), 1), 0)
    pool.arena.view(extent.offset, len(content))[:] = np.frombuffer(content, np.uint8)
    schema = [FieldSpec(f"f{n}", "tensor", "uint8", 1, True) for n in range(len(columns))]
    place = (0, extent.number, extent.offset, pool.generation(extent.offset))
    return NewBlock(*place, len(content), len(columns[0]), schema, np.array(dims, "<i8").tobytes())


def moved(pool: ArenaPool, blocks: list[NewBlock], repacks: list[Repack]) -> BlocksMovedReport:
    """Return the answer of a unit to an order."""
    work = BlockCopier(
        0, pool.arena, Move(1, blocks_message(blocks), {}, repacks, {}), lambda nbytes: pool.lease(0, nbytes, 0)
    )
    while (answer := work.step()) is None:
        pass
    return answer


def columns_of(pool: ArenaPool, block: NewBlock) -> dict[str, Rows]:
    """Return the rows of each field of a block, read by hand."""
    dims, found, at = np.frombuffer(block.dims, "<i8").tolist(), {}, 0
    for spec in block.schema:
        sizes = [dims.pop(0) for _ in range(block.rows)] if spec.ragged else [dims.pop(0)] * block.rows
        at += -at % 64
        rows = []
        for size in sizes:
            rows.append(pool.arena.memory[block.offset + at : block.offset + at + size].tobytes())
            at += size
        found[spec.name] = rows
    return found


@given(st.data())
@differential(30)
def test_moved_blocks_have_the_rows_that_were_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    arena = Arena.create(tmp_path_factory.mktemp("mover") / "arena", CAPACITY)
    pool = ArenaPool(arena)
    blocks, contents, repacks = [], [], []
    content = 0
    for at in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, 5))
        columns = []
        for _ in range(data.draw(st.integers(1, 2))):
            content += 1
            sizes = data.draw(row_lengths(count))
            columns.append([bytes([50 * content % 251 + row]) * size for row, size in enumerate(sizes)])
        blocks.append(written(pool, columns))
        contents.append(columns)
        if data.draw(st.booleans()):
            slots = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
            fields = sorted(data.draw(st.sets(st.sampled_from([spec.name for spec in blocks[-1].schema]), min_size=1)))
            repacks.append(Repack(at, np.array(slots, "<i4").tobytes(), fields))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copier, "STEP_BYTES", data.draw(st.sampled_from([1, 3, 1 << 20])))
        patch.setattr(block_copier, "STEP_PIECES", data.draw(st.sampled_from([1, 2, 1 << 20])))
        answer = moved(pool, blocks, repacks)
    made = dict(zip([repack.at for repack in repacks], answer.repacked, strict=True))
    offsets = iter(np.frombuffer(answer.offsets, "<i8").tolist())
    for at, (block, columns) in enumerate(zip(blocks, contents, strict=True)):
        wanted = {spec.name: rows for spec, rows in zip(block.schema, columns, strict=True)}
        new = made[at] if at in made else msgspec.structs.replace(block, offset=next(offsets))
        assert new is not None
        if at in made:
            (repack,) = (repack for repack in repacks if repack.at == at)
            slots = np.frombuffer(repack.slots, "<i4").tolist()
            wanted = {name: [wanted[name][slot] for slot in slots] for name in wanted if name in repack.fields}
        assert columns_of(pool, new) == wanted
    arena.close()


def test_a_block_that_is_shorter_than_its_rows_is_not_repacked(tmp_path: Path) -> None:
    """Some of its bytes do not exist: the unit must not copy other bytes instead."""
    arena = Arena.create(tmp_path / "arena", CAPACITY)
    pool = ArenaPool(arena)
    block = msgspec.structs.replace(written(pool, [[b"a" * 40, b"b" * 40]]), nbytes=64)
    answer = moved(pool, [block], [Repack(0, np.array([1], "<i4").tobytes(), ["f0"])])
    assert answer.repacked in ([], [None])
    arena.close()
