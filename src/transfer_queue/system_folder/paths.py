"""The folder of a system: its files, its permissions, and how it is removed.

    <runtime dir>/<name>/         0700, this user's
        key                       0600, 32 random bytes; a user who can read it may use the system
        system.json               `Description`; exists exactly while the system can be used
        heir                      the process that replaced the starter, if one did
        successor                 `ControllerPlace`, if another node has taken over the controller
        alive                     locked by every process of the system (`system_folder.liveness`)
        arena                     link to the folder of the arenas, preferably in memory
        disk                      link to the folder of arenas on disk, if there are any (`node.system.data_folders`)
        journal/                  the controller's records (`journal.journal`), unless the user chose another folder
        clients/                  locks of the clients that live (`system_folder.liveness`)
        slots-0/                  slot locks of writers (`storage.arena.writer_locks`)
        states/                   states of the controller, while clients save or load (`node.controller.state_files`)
        live                      0600, the address of the page that shows the system, if `live.enabled` is set
        samplers/                 samplers sent to the running system (`node.controller.sampler_loading`)
        controller.sock, unit-0.sock
        logs/                     supervisor.log, controller.log, unit-0.log; sampler.log of a user's sampler
    <runtime dir>/.<name>.lock    while a process starts the system or removes its files

A folder that another user owns or can read is refused. This module starts and ends no process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from pathlib import Path

import msgspec

from transfer_queue.config import environment
from transfer_queue.errors import AttachError, StartError, with_advice
from transfer_queue.messages.base import PROTOCOL_VERSION, UNREADABLE
from transfer_queue.net.drivers.connection import MAX_PATH
from transfer_queue.private_files import no_link, replace_private, write_private

DEFAULT_NAME = "default"
KEY_BYTES = 32
STARTING_BYTES = 256 << 10
"""Bytes of the files with which a system starts, without its journal."""
ARENA_PREFIX = "transfer_queue-"
DISK_PREFIX = "transfer_queue-disk-"
DURABLE_PREFIX = "transfer_queue-durable-"  # of arenas that no sweep removes (`node.system.durable_folder`)
OWNER = "system"  # in a folder of arenas: a link to the folder of the system that owns it

_Heir = tuple[int, int | None]  # pid, and see `processes.start_time`
_LONGEST = "controller.sock"  # the longest name of a socket in the folder, up to a million units


class Description(msgspec.Struct, frozen=True):
    """The content of system.json."""

    name: str
    pid: int
    """The supervisor's process."""
    started: int | None
    """When that process started; see `processes.start_time`."""
    starter_pid: int
    starter_command: str
    starter_user: str
    started_at: float
    """Seconds since 1970."""
    detached: bool
    folder: str
    logs: str
    controller: str
    """The path of the controller's socket, or its "host:port" if the controller is on another node."""
    protocol: int = PROTOCOL_VERSION
    node: str = ""
    """The node of this folder; "" if the system has only one."""
    remote: str = ""
    """"host:port" where the controller of this folder listens for other nodes; "" if it does not."""
    tls: dict[str, str] | None = None
    """`Settings.tls`, for connections to other nodes."""
    term: int = 0
    """The term of the controller (`journal.terms`); 0 if it has none."""
    durable: str = ""
    """The folder that keeps the values of the system (`node.system.durable_folder`); "" if none does."""
    pid_namespace: int = 0
    """The namespace in which `pid` identifies the supervisor, see `processes.pid_namespace`; 0 if it is unknown."""

    @property
    def is_outpost(self) -> bool:
        """Whether the system's controller is on another node."""
        return not os.path.isabs(self.controller)

    @property
    def address(self) -> str | tuple[str, int]:
        """The address on which the controller listens."""
        return host_and_port(self.controller) if self.is_outpost else self.controller


class ControllerPlace(msgspec.Struct, frozen=True):
    """Where the controller of a term is."""

    term: int
    """See `journal.terms`."""
    address: str
    """"host:port"."""


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of "host:port"."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def runtime_dir() -> Path:
    """Return the folder of this user's systems; create it if it is missing.

    It is TQ_RUNTIME_DIR; else `transfer_queue` in the user's runtime folder /run/user/<uid>; else a folder of the user
    in the folder of temporary files. Raises StartError if other users could create files in it.
    """
    configured = environment.runtime_dir()
    if configured is not None:
        folder = Path(configured)
    elif _is_own_folder(Path(f"/run/user/{os.geteuid()}")):
        folder = Path(f"/run/user/{os.geteuid()}/transfer_queue")
    else:
        import tempfile  # imported here, because it takes a megabyte of each server

        folder = Path(tempfile.gettempdir()) / f"transfer_queue-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
    except OSError as error:
        advice = "set TQ_RUNTIME_DIR to a folder of this user"
        raise StartError(f"the runtime folder {folder} cannot be used: {with_advice(error, advice)}") from error
    others_write = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
    if facts.st_uid not in (0, os.geteuid()) or others_write:
        raise StartError(
            f"the runtime folder {folder} belongs to user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):o}, so "
            f"that others could change it; make it yours with mode 700, or set TQ_RUNTIME_DIR to one that is"
        )
    return folder


def _is_own_folder(folder: Path) -> bool:
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o077


class SystemFolder:
    """The paths of one system. Its folder may not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.name
        self.key = folder / "key"
        self.description = folder / "system.json"
        self.heir = folder / "heir"
        self.successor = folder / "successor"
        self.alive = folder / "alive"
        self.arena = folder / "arena"
        self.disk = folder / "disk"
        self.logs = folder / "logs"
        self.journal = folder / "journal"
        self.clients = folder / "clients"
        self.states = folder / "states"
        self.samplers = folder / "samplers"
        self.live = folder / "live"
        self.controller = folder / "controller.sock"

    @classmethod
    def named(cls, name: str) -> SystemFolder:
        """Return the folder of the system with this name, in the runtime folder."""
        return cls(runtime_dir() / name)

    @property
    def lock(self) -> Path:
        """The file that is locked while the system is started or removed. No system's name begins with a dot."""
        return self.folder.with_name(f".{self.name}.lock")

    def unit(self, number: int) -> Path:
        """Return the socket of a storage unit."""
        return self.folder / f"unit-{number}.sock"

    def store(self, backend: str) -> Path:
        """Return the file that says where an external store of the system is."""
        return self.folder / f"store-{backend}.json"

    @property
    def stores(self) -> list[Path]:
        """The files of all external stores."""
        return sorted(self.folder.glob("store-*.json"))

    def slots(self, number: int) -> Path:
        """Return the folder of slot locks of a storage unit."""
        return self.folder / f"slots-{number}"

    def log(self, server: str) -> Path:
        """Return the log of "supervisor", "controller" or for example "unit-0"."""
        return self.logs / f"{server}.log"

    def describe_crash(self) -> str:
        """Return a phrase that says where the logs of the last system in this folder are if it crashed, else ""."""
        crashed = self.logs.is_dir() and not self.key.exists()  # see `remove_all_but_logs`
        return f" (the last one crashed; its logs are in {self.logs})" if crashed else ""

    # ------------------------------------------------------------ making

    def create(self, key: bytes | None = None) -> bytes:
        """Create the folder, its subfolders and a key, a new one or this one. Returns the key. No folder may exist."""
        longest = len(os.fsencode(self.folder / _LONGEST))
        if longest > MAX_PATH:
            raise StartError(
                f"sockets in {self.folder} would have paths of {longest} bytes, the system's limit is {MAX_PATH}: set "
                "TQ_RUNTIME_DIR to a folder with a shorter path, or choose a shorter name for the system"
            )
        self._check_space()
        try:
            self.folder.mkdir(mode=0o700)
            self.logs.mkdir(mode=0o700)
            self.clients.mkdir(mode=0o700)
            self.states.mkdir(mode=0o700)
            self.samplers.mkdir(mode=0o700)
            key = key or secrets.token_bytes(KEY_BYTES)
            write_private(self.key, key)
        except OSError as error:
            advice = "make the runtime folder writable, or set TQ_RUNTIME_DIR"
            raise StartError(
                f"the system's folder {self.folder} cannot be created: {with_advice(error, advice)}"
            ) from error
        return key

    def _check_space(self) -> None:
        """Raise StartError if the disk of the runtime folder has no space for the files of a system."""
        runtime = self.folder.parent
        free = shutil.disk_usage(runtime).free
        if free < STARTING_BYTES:
            raise StartError(
                f"the runtime folder {runtime} is full: the files of the system {self.name} need {STARTING_BYTES} "
                f"bytes there at the start, and its disk has {free} free bytes. Free some space, or set TQ_RUNTIME_DIR "
                f"to a folder on another disk"
            )

    def create_arena_folder(self, parent: Path) -> Path:
        """Create a folder for arenas under `parent`. The link to it is made first, so that a sweep always finds it."""
        return self._create_linked(self.arena, parent, ARENA_PREFIX)

    def create_offload_folder(self, parent: Path) -> Path:
        """Do the same for arenas on disk."""
        return self._create_linked(self.disk, parent, DISK_PREFIX)

    def _create_linked(self, link: Path, parent: Path, prefix: str) -> Path:
        folder = parent / f"{prefix}{os.geteuid()}-{self.name}-{secrets.token_hex(4)}"
        link.symlink_to(folder)
        folder.mkdir(mode=0o700)
        (folder / OWNER).symlink_to(self.folder.absolute())
        return folder

    def link_arenas(self, arenas: Path, disk: Path | None, units: int) -> None:
        """Link to arenas that outlive the system, and to the locks of clients and writers beside them."""
        self.arena.symlink_to(arenas)
        if disk is not None:
            self.disk.symlink_to(disk)
        self.clients.rmdir()
        self.clients.symlink_to(arenas / "clients")
        for number in range(units):
            slots = self.slots(number)
            (arenas / slots.name).mkdir(mode=0o700, exist_ok=True)
            slots.symlink_to(arenas / slots.name)

    def describe(self, description: Description) -> None:
        """Write system.json atomically: from now on the system is found."""
        replace_private(self.description, msgspec.json.encode(description))

    def write_heir(self, pid: int, started: int | None) -> None:
        """Record that this process replaces the system's starter, which has died or is about to."""
        replace_private(self.heir, msgspec.json.encode((pid, started)))

    def write_controller_place(self, place: ControllerPlace) -> None:
        """Write where the controller is now. Call it under the lock."""
        replace_private(self.successor, msgspec.json.encode(place))

    def write_live_address(self, address: str) -> None:
        """Write the address of the page that shows the system."""
        replace_private(self.live, address.encode())

    # ------------------------------------------------------------ reading

    def read_live_address(self) -> str:
        """Return the address of the page that shows the system; "" if the system has no page."""
        return read_private(self.live).decode() if self.live.exists() else ""

    def description_identity(self) -> tuple[int, int] | None:
        """Return the inode and modification time of system.json, which identify it; None if there is none."""
        try:
            status = os.stat(self.description, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns

    def read_heir(self) -> _Heir | None:
        """Return the process that replaced the starter, see `write_heir`; None if there is none."""
        try:
            with open(self.heir, "rb", opener=no_link) as file:
                heir: _Heir = msgspec.json.decode(file.read(), type=_Heir)
                return heir
        except FileNotFoundError:
            return None

    def read_controller_place(self) -> ControllerPlace | None:
        """Return where the controller is now; None if it is still where the description says."""
        if not self.successor.exists():
            return None
        try:
            return msgspec.json.decode(read_private(self.successor), type=ControllerPlace)
        except (AttachError, *UNREADABLE):
            return None  # the system ends at this moment

    def check_private(self) -> None:
        """Raise AttachError unless the folder is a real folder that only this user can access."""
        try:
            status = self.folder.lstat()
        except OSError as error:
            raise AttachError(
                f"no system is running in {self.folder}: {error}; start it, or choose another name"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise AttachError(
                f"{self.folder} is not a private folder of this user (owner {status.st_uid}, mode "
                f"{stat.filemode(status.st_mode)}) and is not trusted; remove it, or choose another name"
            )

    def read_key(self) -> bytes:
        """Return the system's key. Raises AttachError if it is missing, or if other users can access it."""
        key = read_private(self.key)
        if len(key) != KEY_BYTES:
            raise AttachError(
                f"{self.key} must have {KEY_BYTES} bytes, and has {len(key)}; stop the system and start it again"
            )
        return key

    def read_description(self) -> Description | None:
        """Return the content of system.json; None if there is no system, or one that starts or stops."""
        try:
            content = read_private(self.description)
        except AttachError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        try:
            return msgspec.json.decode(content, type=Description)
        except UNREADABLE as error:
            raise AttachError(
                f"{self.description} cannot be read ({error}); stop the system and start it again"
            ) from error

    # ------------------------------------------------------------ removing

    def identity(self) -> tuple[int, int] | None:
        """Return what distinguishes this folder from a later one at the same path; None if there is none."""
        try:
            status = self.folder.lstat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def remove(self) -> None:
        """Remove everything of the system; other processes see it vanish at once. No process may still need it."""
        self.remove_arenas()
        removed = self.folder.with_name(f".{self.name}.{secrets.token_hex(4)}.gone")
        try:
            self.folder.rename(removed)
        except FileNotFoundError:
            return
        shutil.rmtree(removed, ignore_errors=True)

    def remove_all_but_logs(self) -> None:
        """Remove everything but the logs, which show why the system ended."""
        self.remove_arenas()
        for path in self.folder.iterdir():
            if path not in (self.logs, self.alive):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        self.alive.unlink(missing_ok=True)

    def remove_arenas(self) -> None:
        """Remove the folders of the arenas, if their names are those that `create_arena_folder` and the like give."""
        for link, prefix in ((self.arena, ARENA_PREFIX), (self.disk, DISK_PREFIX)):
            try:
                folder = Path(os.readlink(link))
                owner = folder.lstat().st_uid
            except OSError:
                continue
            if owner == os.geteuid() and folder.name.startswith(f"{prefix}{os.geteuid()}-{self.name}-"):
                shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what killed processes left. Call it under the lock, when no process of the system lives."""
        for removed in self.folder.parent.glob(f".{self.name}.*.gone"):
            shutil.rmtree(removed, ignore_errors=True)
        if self.identity() is not None:
            self.check_private()
            self.remove()


def read_private(path: Path) -> bytes:
    """Return the content of a file of at most a mebibyte. Raises AttachError if other users can access it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        advice = "check that the system is running and belongs to this user"
        raise AttachError(f"{path} cannot be read: {with_advice(error, advice)}") from error
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise AttachError(
                f"{path} can be accessed by other users (owner {status.st_uid}, mode {stat.filemode(status.st_mode)}) "
                f"and is not trusted; stop the system and start it again"
            )
        return stream.read(1 << 20)


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that all files below a folder take of their file system."""
    nbytes = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # removed in the meantime
            nbytes += path.lstat().st_blocks * 512
    return nbytes


_OF_ONE_MACHINE = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def is_network_storage(folder: Path) -> bool:
    """Whether other machines may see a folder. They see what is written only when the storage has it."""
    return mount_of(folder)[0] not in _OF_ONE_MACHINE


def mount_of(folder: Path) -> tuple[str, list[str]]:
    """Return the type and the options of the file system that contains a folder."""
    best, mount = "", ("unknown", [""])
    real = os.path.realpath(folder)
    mounts = Path("/proc/self/mounts")
    for line in mounts.read_text("utf-8", "replace").splitlines() if mounts.exists() else ():
        _, at, kind, options = line.split(" ")[:4]
        at = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), at)
        if (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best):
            best, mount = at, (kind, options.split(","))
    return mount
