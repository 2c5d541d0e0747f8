"""Makes the arena and slots of a storage unit: those of the unit before it if they are valid, else new ones.

<arenas>/unit-0, or unit-0.2 after the first was lost, and so on
<system>/slots-0/<boot id of the arena>/
"""

from __future__ import annotations

import logging
import shutil
from itertools import count
from pathlib import Path

from transfer_queue.errors import AttachError
from transfer_queue.node.system.paths import SystemFolder
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.storage.arena.writer_locks import SlotFolder
from transfer_queue.storage.unit.object_pool import ObjectNames

logger = logging.getLogger(__name__)


def recover_arena(
    system: SystemFolder, number: int, arenas: Path, capacity: int | None, tier: str
) -> tuple[Arena, SlotFolder]:
    """Return the arena and slots of unit `number` of a system. Arenas that cannot be reopened are logged and removed.

    `capacity` applies to a new arena, `tier` to any; see `Arena.create`.
    """
    slots = system.slots(number)
    names = (f"unit-{number}" + (f".{n}" if n > 1 else "") for n in count(1))
    for name in names:
        folder = arenas / name
        if not folder.exists():
            break
        if not any(folder.iterdir()):
            continue  # was lost before
        try:
            arena = Arena.reopen(folder, tier)
        except AttachError as error:
            logger.error("storage unit %d: all values in arena %s are lost: %s", number, folder, error)
        else:
            logger.info("storage unit %d continues with arena %s: %d bytes are leased", number, folder, arena.held)
            return arena, SlotFolder(slots / arena.boot_id)
    if slots.exists() and any(slots.iterdir()) and folder == arenas / f"unit-{number}":
        logger.error("storage unit %d: all values are lost, because arena %s does not exist any more", number, folder)
    arena = Arena.create(folder, capacity, tier)
    _remove_slots(slots)
    for lost in arenas.glob(f"unit-{number}*"):
        if lost != folder and lost.name.partition(".")[0] == f"unit-{number}":
            _remove_files(lost)
    return arena, SlotFolder(slots / arena.boot_id)


def recover_object_names(system: SystemFolder, number: int, arenas: Path) -> tuple[ObjectNames, SlotFolder]:
    """Do the same for a unit whose blocks are in an external store. Raises OSError if the folder cannot be used."""
    folder, slots = arenas / f"unit-{number}", system.slots(number)
    if folder.exists():
        try:
            names = ObjectNames.reopen(folder)
        except AttachError as error:
            logger.error("storage unit %d: the record of its objects in the store is lost: %s", number, error)
            _remove_files(folder)
        else:
            return names, SlotFolder(slots / names.boot_id)
    names = ObjectNames.create(folder)
    _remove_slots(slots)
    return names, SlotFolder(slots / names.boot_id)


def _remove_slots(slots: Path) -> None:
    """Remove the slots of a lost arena. The folder itself stays, because it may be a link to a durable one."""
    for path in slots.iterdir() if slots.exists() else ():
        shutil.rmtree(path, ignore_errors=True)


def _remove_files(folder: Path) -> None:
    """Free the space of a lost arena."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
