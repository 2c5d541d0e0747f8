"""The files that a checkpoint shares with older ones: a load takes only those of their blocks that the state needs.

The model is a dict of each system's blocks. Systems go on from checkpoints of each other, under the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.client.checkpoint import block_file, checkpoint_data
from transfer_queue.client.checkpoint.block_file import BlockFile, Mapped, space_of_blocks
from transfer_queue.client.checkpoint.checkpoint_data import CheckpointSave, block_sources, save_blocks, shared_below
from transfer_queue.client.checkpoint.checkpoint_folder import read_manifest

SIZES = [0, 1, 63, 64, 65, 130]
Blocks = dict[int, bytes]


@dataclass
class System:
    """origin, origins: as in `messages.checkpoints.BeginCheckpointReply`. blocks: by number. next: the number of the
    next one.
    """

    origin: str
    origins: dict[str, int] = field(default_factory=dict)
    blocks: Blocks = field(default_factory=dict)
    next: int = 1


@dataclass
class Saved:
    """A checkpoint: where it is, and the system as it was."""

    folder: Path
    system: System


def cut(system: System) -> tuple[CheckpointSave, np.ndarray]:
    """All blocks of a system, in two units, and the memory of both."""
    numbers = sorted(system.blocks)
    nbytes = np.array([len(system.blocks[number]) for number in numbers], "i8")
    units = np.array([number % 2 for number in numbers], "i8")
    memory = np.zeros((2, 1 << 13), np.uint8)
    offsets, ends = [], [0, 0]
    for number, unit, taken in zip(numbers, units.tolist(), space_of_blocks(nbytes).tolist(), strict=True):
        offsets.append(ends[unit] + 64 * (number % 3 == 0))
        ends[unit] = offsets[-1] + taken
        memory[unit, offsets[-1] : offsets[-1] + len(system.blocks[number])] = list(system.blocks[number])
    columns = {"number": np.array(numbers, "i8"), "unit": units, "offset": np.array(offsets, "i8"), "nbytes": nbytes}
    return CheckpointSave("cut", system.origin, Path(), columns, dict(system.origins)), memory


def loaded(saved: Saved, external: bool) -> Blocks:
    """The blocks that a load of a checkpoint writes."""
    system = saved.system
    numbers = np.array(sorted(system.blocks), "i8")
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(BlockFile(saved.folder / each.file)) for each in read_manifest(saved.folder)]
        source = block_sources(files, numbers, lambda origin: shared_below(origin, system.origin, system.origins))
        piece, within, sizes = checkpoint_data.layout_pieces(source, external)
        spaces = [[np.full(size, 0xEE, np.uint8)] for size in sizes]
        checkpoint_data.copy_blocks(source, piece, within, spaces)
        places = zip(*(column.tolist() for column in (source.number, source.nbytes, piece, within)), strict=True)
        return {number: spaces[at][0][start : start + size].tobytes() for number, size, at, start in places}


@given(st.data())
@differential(30)
def test_the_blocks_of_the_state_come_back(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    home = tmp_path_factory.mktemp("checkpoints")
    systems: list[System] = [System("first")]
    saves: list[Saved] = []
    contents = itertools.count(1)

    def put(system: System) -> None:
        for size in data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=4)):
            system.blocks[system.next] = bytes([next(contents) % 251]) * size
            system.next += 1

    def save(system: System) -> None:
        folder = home / str(len(saves))
        folder.mkdir()
        older = data.draw(st.sampled_from([*(each.folder for each in [*saves[-1:] * 2, *saves[-3:]]), None]))
        made, memory = cut(system)
        save_blocks(folder, made, older, lambda unit: Mapped(memory[unit]))
        assert len(read_manifest(folder)) <= checkpoint_data.MAX_FILES
        saves.append(Saved(folder, replace(system, origins=dict(system.origins), blocks=dict(system.blocks))))
        assert loaded(saves[-1], external=data.draw(st.booleans())) == system.blocks

    def go_on(system: System, again: bool) -> None:
        """In a new system from where a checkpoint was, or in the same one, whose numbers never go back."""
        before = data.draw(st.sampled_from([*saves[:2], *saves])).system
        origins = {**before.origins, before.origin: before.next}
        start = max(before.next, system.next) if again else before.next
        now = System(f"{system.origin}, {len(saves)} {len(systems)}", origins, dict(before.blocks), start)
        put(now)
        if again:
            systems.remove(system)
        systems.append(now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_file, "SEGMENT", data.draw(st.sampled_from([64, 256, 1 << 20])))
        patch.setattr(block_file, "_PIECES", data.draw(st.sampled_from([1, 512])))
        patch.setattr(checkpoint_data, "PIECE", data.draw(st.sampled_from([64, 256, 1 << 20])))
        patch.setattr(checkpoint_data, "MIN_PIECE", 64)
        patch.setattr(checkpoint_data, "MAX_FILES", data.draw(st.sampled_from([2, 3, 32])))
        put(systems[0])
        save(systems[0])
        for _ in range(data.draw(st.integers(2, 9))):
            system = data.draw(st.sampled_from([systems[-1], *systems]))
            what = data.draw(st.sampled_from(["put", "clear", "save", "new", "new", "again"]))
            if what == "put":
                put(system)
            elif what == "clear" and system.blocks:
                del system.blocks[data.draw(st.sampled_from(sorted(system.blocks)))]
            elif what in ("new", "again"):
                go_on(system, what == "again")
                system = systems[-1]
            save(system)
        for saved in saves:
            assert loaded(saved, external=False) == saved.system.blocks
