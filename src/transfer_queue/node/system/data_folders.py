"""The folders in which a system keeps its state and its values: made for it alone, or those of a durable folder."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import uuid
from pathlib import Path

from transfer_queue.config.settings import Settings
from transfer_queue.errors import StartError
from transfer_queue.journal.segment import RESERVED_BYTES, check_space
from transfer_queue.journal.terms import Term
from transfer_queue.node.system.durable_folder import DurableFolder, Identity, Wanted
from transfer_queue.node.system.launcher_protocol import HERE, NodeRole
from transfer_queue.node.unit.mirror_folders import mirror_folder, retire_arenas
from transfer_queue.storage.arena.arena import choose_folder
from transfer_queue.system_folder.liveness import StartLock, hold_liveness, is_alive
from transfer_queue.system_folder.paths import DISK_PREFIX, SystemFolder, mount_of

logger = logging.getLogger(__name__)


class DataFolders:
    """Makes the folders of one system, once. Every method raises StartError if a folder cannot be used."""

    def __init__(self, system: SystemFolder, settings: Settings, key: bytes, units: int, role: NodeRole = HERE) -> None:
        self._system = system
        self._settings = settings
        self._key = key
        self._units = units
        self._role = role
        self._identity: Identity | None = None
        self.durable: DurableFolder | None = None
        """The folder that keeps the system's values; None if none does."""
        self.term: Term | None = None
        """The term of the controller; None if no other node may take over the controller."""
        self.warnings: list[str] = []
        """Warnings for the user."""

    def open_journal(self) -> Path | None:
        """Return the folder of the controller's journal; None if there is no journal. Takes the durable folder."""
        settings = self._settings
        if settings.durability_mode == "none":
            return None
        if settings.durability_folder is None:
            self._system.journal.mkdir(mode=0o700)
            folder = self._system.journal
        else:
            folder = self._take(DurableFolder(Path(settings.durability_folder)))
        _check_space(folder)
        return folder

    def _take(self, durable: DurableFolder) -> Path:
        """Lock the folder of the settings, and prepare it if it keeps values. Returns the folder of the journal."""
        keeps_values = self._settings.durability_values != "none"
        self.durable = durable if keeps_values else None
        if self._role.succeeds:
            self.term = durable.succeed(self._role.system)
            return self.term.folder
        durable.take(keeps_values)
        if not keeps_values:
            durable.refuse_values()
            return self._begin_term(durable)
        identity, warning = durable.prepare(self._wanted(durable.identity()), self._has_mirror)
        self._note(warning)
        if identity.arenas:
            self._identity = identity
            disk = Path(identity.disk) if identity.disk else None
            self._system.link_arenas(Path(identity.arenas), disk, self._units + self._disk_units)
        return self._begin_term(durable)

    @property
    def _has_mirror(self) -> bool:
        return self._settings.durability_values == "machine"

    def _begin_term(self, durable: DurableFolder) -> Path:
        if not self._role.system and not durable.has_terms():
            return durable.folder
        self.term = durable.begin_term(self._role.system or uuid.uuid4().hex)
        return self.term.folder

    @property
    def _disk_units(self) -> int:
        # one unit for each replica of a block, because replicas lie in different units
        return 0 if self._settings.offload_path is None else self._settings.replicas

    def _wanted(self, known: Identity | None) -> Wanted:
        if self._role.system:  # each node has memory of its own, which ends with it
            return Wanted(self._system.name, self._key, None, None, 0, 0)
        disk = None if self._settings.offload_path is None else Path(self._settings.offload_path)
        if disk is not None:
            self._note(check_path(disk))
        if self._settings.arena_folder is not None:
            arenas = Path(self._settings.arena_folder)
        else:
            arenas = Path(known.arenas).parent if known is not None and known.arenas else self._chosen()
        return Wanted(self._system.name, self._key, arenas, disk, self._units, self._disk_units)

    def arenas(self) -> Path:
        """Return the folder of the arenas in memory."""
        if self._identity is not None:
            return Path(self._identity.arenas)
        folder = self._settings.arena_folder
        if folder is None:
            return self._system.create_arena_folder(self._chosen())
        try:
            return self._system.create_arena_folder(Path(folder))
        except OSError as error:
            raise StartError(
                f"the arena cannot be created in {folder} (backend.SimpleStorage.arena_folder): {error}; choose a "
                f"folder that exists and that this user can write to"
            ) from error

    def offloads(self, seconds: float) -> list[Path]:
        """Return the folder of each unit on disk. Other systems that start are waited for at most this long."""
        path = self._settings.offload_path
        if path is None:
            return []
        if self._identity is not None:
            return [Path(self._identity.disk)] * self._disk_units
        folder, warning = make_folder(self._system, Path(path), seconds)
        self._note(warning)
        return [folder] * self._disk_units

    def mirror(self) -> Path | None:
        """Return the folder of the mirror; None if the system has no mirror."""
        if self.durable is None or not self._has_mirror:
            return None
        folder = mirror_folder(self.durable.folder, self.term)
        folder.mkdir(mode=0o700, exist_ok=True)
        kind, _ = mount_of(folder)
        if kind in IN_MEMORY:
            self._note(
                f"durability.folder is {self.durable.folder}, which is a {kind}: the values do not survive a failure "
                f"of the machine; choose a folder on a disk"
            )
        return folder

    def retired(self) -> list[Path]:
        """Return the arenas of the mirrors of earlier terms."""
        if self.durable is None or self.term is None or not self._has_mirror:
            return []
        return retire_arenas(self.durable.folder, self.term)

    def begin(self) -> None:
        """Note that the system is up, if clients of before can connect again. Raises StartError if the disk is full."""
        if self._identity is not None and self.durable is not None:
            self.durable.begin(self._system.folder)

    def mark_stopped(self) -> None:
        """Note that the system was stopped: no client waits for it any longer."""
        if self._identity is not None and self.durable is not None:
            self.durable.mark_stopped()

    def _chosen(self) -> Path:
        choice = choose_folder()
        self._note(choice.warning)
        return choice.folder

    def _note(self, warning: str | None) -> None:
        if warning is not None:
            logger.warning("%s", warning)
            self.warnings.append(warning)


def _check_space(folder: Path) -> None:
    """Stop the start of the system if the disk is full. A running controller would wait for free space."""
    try:
        check_space(folder, RESERVED_BYTES)
    except OSError as error:
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        raise StartError(
            f"the journal in {folder} cannot be written: {error}. It needs {RESERVED_BYTES} bytes at the start, but "
            f"its disk has {free} free bytes: free some space, or choose another folder (durability.folder)"
        ) from error


# ---------------------------------------------------------------- the folder of the disk tier
# The folder on disk to which a system offloads blocks.
#
#     <path>/transfer_queue-disk-<uid>-<name>-<hex>/   mode 0700; belongs to one system
#         alive                                        locked by every process of the system (`system_folder.liveness`)
#         unit-1/                                      the arena of a unit on disk
#     <path>/.transfer_queue-disk-<uid>.lock           while a process creates or sweeps such folders
#
# The system removes its folder when it stops. The folders of killed systems outlive even a boot of the machine, so
# every start removes those of this user that no process has locked. The folder of a durable system has another name and
# stays (`node.system.durable_folder`).


KEY = "backend.SimpleStorage.offload.path"
IN_MEMORY = ("tmpfs", "ramfs")


def make_folder(system: SystemFolder, path: Path, seconds: float) -> tuple[Path, str | None]:
    """Create and lock the system's folder under this path. Returns it with a warning for the user, or None.

    `seconds` is the time to wait for other systems that start. Raises StartError if the path cannot be used.
    """
    warning = check_path(path)
    try:
        with StartLock(path / f".{_prefix()[:-1]}.lock", seconds):
            sweep(path)
            folder = system.create_offload_folder(path)
            hold_liveness(folder / "alive")
    except OSError as error:
        raise StartError(f"{KEY} is {path}, which cannot be used: {error}; choose another folder") from error
    return folder, warning


def check_path(path: Path) -> str | None:
    """Return a warning if the path is in memory, else None. Raises StartError if it cannot be used."""
    if not path.is_dir():
        raise StartError(f"{KEY} is {path}, which is not a folder; create it on an SSD, or choose another folder")
    if not os.access(path, os.W_OK | os.X_OK):
        raise StartError(f"{KEY} is {path}, which this user cannot write to; change its mode, or choose another folder")
    kind, _ = mount_of(path)
    if kind not in IN_MEMORY:
        return None
    return f"{KEY} is {path}, which is a {kind}: offloaded blocks stay in memory; choose a folder on an SSD"


def sweep(path: Path) -> None:
    """Remove this user's folders under the path that belong to no running system. Needs the lock of the path."""
    for folder in path.glob(f"{_prefix()}*"):
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not is_alive(folder / "alive"):
            shutil.rmtree(folder, ignore_errors=True)


def _prefix() -> str:
    return f"{DISK_PREFIX}{os.geteuid()}-"
