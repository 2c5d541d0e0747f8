"""The durable folder of a system (`durability.folder`): what of the system outlives all its processes.

    <durability.folder>/                         this user's
        lock                                     locked by every process of the system that runs
        identity.json                            0600, `Identity`: what belongs to the folder, and where it is
        key                                      0600, the key of the system, with which clients of before connect again
        running                                  the runtime folder of the system; missing after an orderly stop
        segment-*, state-*, load-*               the journal (`journal.journal`)
        term-*/                                  instead, the journal of a system of several nodes (`journal.terms`)
        mirror/, mirror-*/                       0700, the arenas of mirrors (`node.unit.mirror_folders`), if any
    <arenas>/transfer_queue-durable-<id>/        0700, in memory; and once more below the path of a disk tier
        alive                                    locked like `lock`, in case that the durable folder was copied
        system                                   link to the durable folder that owns these arenas
        unit-0/, slots-0/                        the arena of a unit, and the locks of its writers
        clients/                                 locks of the clients that live
    <runtime dir>/.durable-<id>.json             a copy of the identity, by which `tq list` finds the folder

The identity is written before the arenas are created, so that no arena is without a name and an owner. Nothing of this
is removed when the system ends, for whatever reason, but only by `discard`. The runtime folder of the system
(`system_folder.paths`) links to the arenas. The nodes of a system of several nodes have arenas in memory that end with
them: the folder then keeps the values in mirrors only, and no key, and `running` is not written.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from transfer_queue.errors import AttachError, StartError
from transfer_queue.journal.journal import list_numbers
from transfer_queue.journal.terms import Term, Terms
from transfer_queue.messages.base import UNREADABLE
from transfer_queue.node.unit.mirror_folders import list_mirrors, mirror_bytes, remove_mirrors
from transfer_queue.private_files import replace_private
from transfer_queue.storage.arena.arena import check_files
from transfer_queue.system_folder.liveness import hold_liveness, is_alive
from transfer_queue.system_folder.paths import (
    DURABLE_PREFIX,
    OWNER,
    allocated_bytes,
    read_private,
    runtime_dir,
)

FORMAT = 1
SHARED_MEMORY = Path("/dev/shm")
_KEY = "durability.folder"
_RECORD = ".durable-{}.json"


class Identity(msgspec.Struct, frozen=True):
    """The content of identity.json."""

    format: int
    id: str
    """16 hex digits that no other durable folder has."""
    name: str
    """The name of the system that used the folder last."""
    user: int
    """The user to whom the values belong."""
    folder: str
    """The path of the durable folder."""
    record: str
    """The path of the copy of this in the runtime folder."""
    arenas: str
    """The folder of the arenas in memory; "" if none outlives the system."""
    disk: str
    """The folder of the arenas on disk; "" if there is no disk tier."""
    units: int
    """The number of units in memory."""
    disk_units: int
    """The number of units on disk."""
    created_at: float
    """Seconds since 1970."""

    @property
    def places(self) -> list[Path]:
        """The folders of all arenas."""
        return [Path(path) for path in (self.arenas, self.disk) if path]

    def is_in_use(self) -> bool:
        """Whether a process of a system that uses the folder lives."""
        locks = [Path(self.folder) / "lock", *(place / "alive" for place in self.places)]
        return any(map(is_alive, [*locks, *_locks_of_terms(Path(self.folder))]))


class Wanted(msgspec.Struct, frozen=True):
    """What a system that starts with a durable folder wants of it."""

    name: str
    """The name of the system."""
    key: bytes
    """The key of the system, which is that of the folder if the folder has one."""
    arenas: Path | None
    """The folder in which the arenas in memory are created; None if none is to outlive the system."""
    disk: Path | None
    """The same for arenas on disk; None if there is no disk tier."""
    units: int
    """The number of units in memory."""
    disk_units: int
    """The number of units on disk."""


class DurableFolder:
    """The durable folder at a path. It may not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = folder / "lock"
        self._identity = folder / "identity.json"
        self._key = folder / "key"
        self._running = folder / "running"

    def _error(self, words: str) -> StartError:
        """Return the error that says this about the folder."""
        return StartError(f"the durable folder {self.folder} ({_KEY}) {words}")

    # ------------------------------------------------------------ reading

    def identity(self) -> Identity | None:
        """Return what belongs to the folder; None if it has kept no values yet.

        Raises StartError if the file cannot be read, or if another release wrote it.
        """
        if not self._identity.exists():
            return None
        try:
            content = read_private(self._identity)
            written = msgspec.json.decode(content, type=_Format).format
            if written != FORMAT:
                raise self._error(
                    f"was written by another release, in format {written}, but this release reads format {FORMAT}: use "
                    "that release, or choose another folder"
                )
            return msgspec.json.decode(content, type=Identity)
        except (AttachError, *UNREADABLE) as error:
            raise self._error(
                f"has an identity.json that cannot be read: {error}. Bring the file back, or choose another folder"
            ) from error

    def key(self) -> bytes | None:
        """Return the key of the system that used the folder; None if there is none.

        Raises StartError if other users can read it.
        """
        if not self._key.exists():
            return None
        try:
            return read_private(self._key)
        except AttachError as error:
            raise StartError(f"the key of the durable folder {self.folder} cannot be used: {error}") from error

    def system(self) -> Path | None:
        """Return the runtime folder of the system that uses the folder and was not stopped; None if there is none."""
        try:
            return Path(os.fsdecode(self._running.read_bytes()))
        except OSError:
            return None

    def will_return(self, key: bytes) -> bool:
        """Whether the system with this key was not stopped: if all its processes died, a start continues it."""
        try:
            return self.system() is not None and self.key() == key
        except StartError:
            return False

    def has_journal(self) -> bool:
        """Whether the folder contains the state of a system."""
        return self.folder.is_dir() and (any(list_numbers(self.folder)) or self.has_terms())

    def has_terms(self) -> bool:
        """Whether the folder was used by a system whose controller other nodes may take over."""
        return self.folder.is_dir() and bool(Terms(self.folder).list())

    # ------------------------------------------------------------ starting

    def take(self, keeps_values: bool) -> None:
        """Create the folder if it is missing, and lock it for this process and its children.

        Raises StartError if a running system uses it, or if it is to keep values and belongs to another user.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if keeps_values:
                self._check_owner()
            self._hold(self.lock)
            for path in self.folder.glob("space-*"):
                path.unlink(missing_ok=True)  # its process was killed in `journal.segment.check_space`
        except OSError as error:
            raise self._error(
                f"cannot be used: {error}; make it a folder that this user can write to, or choose another one"
            ) from error

    def succeed(self, system: str) -> Term:
        """Take the folder over from another controller of this system, which may be dead, frozen or cut off.

        Raises StartError if the folder is not that of the system.
        """
        newest = Terms(self.folder).newest() if self.folder.is_dir() else None
        if newest is None or newest.owner != system:
            what = "is not visible on this node" if newest is None else "was used by another system meanwhile"
            raise StartError(
                f"this node cannot take over the controller, because its folder {self.folder} ({_KEY}) {what}; put the "
                f"folder on storage that all nodes see at the same path, and let no other system use it"
            )
        return self._claim(system)

    def begin_term(self, system: str) -> Term:
        """Begin a term in the folder, which this process has locked. Raises StartError if another node uses it."""
        self._check_terms()
        return self._claim(system)

    def _check_terms(self) -> None:
        """Raise StartError if a controller that has taken the folder over runs."""
        if any(map(is_alive, _locks_of_terms(self.folder))):
            raise StartError(self._in_use())

    def _claim(self, system: str) -> Term:
        try:
            return Terms(self.folder).claim(system, lambda folder: hold_liveness(folder / "lock"))
        except OSError as error:
            raise self._error(f"cannot be taken over: {error}; make it a folder that this user can write to") from error

    def _hold(self, lock: Path) -> int:
        try:
            return hold_liveness(lock)
        except StartError as error:
            raise StartError(self._in_use()) from error

    def _in_use(self) -> str:
        system = self.system()
        which = "a running system" if system is None else f"the running system {system.name!r} ({system})"
        how = "" if system is None else f" (`tq stop --name {system.name}`)"
        return f"the durable folder {self.folder} ({_KEY}) is used by {which}; stop it{how}, or name another folder"

    def _check_owner(self) -> None:
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            raise self._error(
                f"belongs to user {user_name(status.st_uid)}, but this process runs as {user_name(os.geteuid())}: run "
                "it as that user, or choose another folder. If the values are to belong to this user, change the "
                f"owner of the folder and of its arenas as root (chown -R), then run `tq adopt {self.folder}`"
            )
        if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            raise self._error(
                f"has the mode {stat.S_IMODE(status.st_mode):o}, so that other users could change it; make it private "
                "(chmod 700)"
            )

    def refuse_values(self) -> None:
        """Raise StartError if the folder keeps values, for a system that would not keep them."""
        identity = self.identity()
        if identity is not None:
            where, level = identity.arenas or self.folder, "machine" if list_mirrors(self.folder) else "processes"
            raise self._error(
                f"keeps the values of the system {identity.name!r} in {where}, but durability.values is none: set "
                f"durability.values to {level}, or remove the values with `tq stop --discard --folder {self.folder}`"
            )

    def prepare(self, wanted: Wanted, mirrored: bool = False) -> tuple[Identity, str | None]:
        """Create or take over what belongs to the folder, which this process has locked.

        `mirrored` says that the system has a mirror. Returns the identity, with a warning for the user, or
        None. Raises StartError if the folder does not fit.
        """
        known = self.identity()
        if known is not None:
            self._check_fits(known, wanted)
            self._check_mirror(mirrored)
        key = self.key()
        if wanted.arenas is None:
            pass  # no client of before can connect again
        elif key is None:
            _write(self._key, wanted.key)
        elif key != wanted.key:
            raise StartError(
                f"another process has started a system with the durable folder {self.folder} ({_KEY}) in the "
                f"meantime; start again"
            )
        identity = self._made(known, wanted)
        if known is None:
            warning = _elsewhere(identity)
        else:
            warning = self._missing(identity) if self.has_journal() else None
        _write(self._identity, msgspec.json.encode(identity))
        _write(Path(identity.record), msgspec.json.encode(identity))
        for place in identity.places:
            self._open_arenas(place)
        if identity.arenas:
            (Path(identity.arenas) / "clients").mkdir(mode=0o700, exist_ok=True)
        return identity, warning

    def _made(self, known: Identity | None, wanted: Wanted) -> Identity:
        """Return the identity of the folder from now on."""
        folder = os.path.realpath(self.folder)
        number = secrets.token_hex(8) if known is None else known.id
        if known is not None and known.arenas and wanted.arenas is not None:
            return msgspec.structs.replace(known, name=wanted.name, folder=folder, record=str(_record(number)))
        arenas, disk = (
            "" if place is None else str(place / f"{DURABLE_PREFIX}{number}") for place in (wanted.arenas, wanted.disk)
        )
        return Identity(
            FORMAT, number, wanted.name, os.geteuid(), folder, str(_record(number)), arenas, disk, wanted.units,
            wanted.disk_units, time.time() if known is None else known.created_at,
        )  # fmt: skip

    def _check_fits(self, known: Identity, wanted: Wanted) -> None:
        """Raise StartError if the folder is of another user, was moved, or has other units than wanted."""
        if known.user != os.geteuid():
            raise StartError(
                f"the values of the durable folder {self.folder} ({_KEY}) belong to user {user_name(known.user)}, but "
                f"this process runs as {user_name(os.geteuid())}: run `tq adopt {self.folder}` to make them this "
                f"user's, or choose another folder"
            )
        existing = next((place for place in known.places if place.is_dir()), None)
        if wanted.arenas is None and existing is not None:
            raise self._error(
                f"keeps values in {existing} on this machine, which a system under Ray does not use: continue with "
                f"runtime: local. If the copies on disk are enough, remove {existing}; the values that only it has are "
                "then reported as lost"
            )
        for key, has, asks in (
            ("backend.SimpleStorage.num_data_storage_units", known.units, wanted.units),
            ("units on disk (backend.SimpleStorage.offload, replicas)", known.disk_units, wanted.disk_units),
            ("backend.SimpleStorage.arena_folder", _parent(known.arenas), str(wanted.arenas)),
            ("backend.SimpleStorage.offload.path", _parent(known.disk), str(wanted.disk or "")),
        ):
            if has != asks and known.arenas and wanted.arenas is not None:
                raise self._error(
                    f"was made with {key} = {has or 'none'}, but the settings say {asks or 'none'}: start with the "
                    f"former value, or remove its values with `tq stop --discard --folder {self.folder}`"
                )
        self._refuse_copy(known)
        for place in known.places:
            owner = _owner_of(place)
            if owner not in (None, os.path.realpath(self.folder)):
                raise StartError(
                    f"the arenas of the durable folder {self.folder} ({_KEY}), in {place}, belong to the folder that "
                    f"was {owner}: if it was moved here, run `tq adopt {self.folder}`"
                )
        for place in (*known.places, *list_mirrors(self.folder)):
            for unit in sorted(place.glob("unit-*")):
                check_files(unit)

    def _check_mirror(self, mirrored: bool) -> None:
        """Raise StartError if the folder has a mirror, which a system would neither keep up to date nor free."""
        mirrors = list_mirrors(self.folder)
        if not mirrored and mirrors:
            raise self._error(
                f"keeps copies of its values on disk, in {mirrors[-1]}, but durability.values is processes: set "
                f"durability.values to machine, or remove the values with `tq stop --discard --folder {self.folder}`"
            )

    def _original(self, known: Identity) -> str | None:
        """Return the folder of which this one is a copy: its arenas are not this folder's. None if it is not a copy."""
        owners = [owner for owner in map(_owner_of, known.places) if owner is not None]
        return next((owner for owner in owners if _is_other(Path(owner), self.folder, known.id)), None)

    def _refuse_copy(self, known: Identity) -> None:
        """Raise StartError if this folder is a copy of another one, to which the values in memory belong."""
        original = self._original(known)
        if original is not None:
            raise self._error(
                f"is a copy of {original}, to which the values in {known.arenas} belong: use {original}, or another "
                f"folder. If the copy is to replace the original, remove {original}, then run `tq adopt {self.folder}`"
            )

    def _missing(self, identity: Identity) -> str | None:
        """Return a warning if arenas of the folder are gone, else None."""
        missing = [str(place) for place in identity.places if not place.is_dir()]
        if not missing:
            return None
        mirrors = list_mirrors(self.folder)
        if mirrors:
            return (
                f"the values that the durable folder {self.folder} kept in {' and '.join(missing)} are read from "
                f"{mirrors[-1]}, because that folder does not exist any more; the machine was probably restarted. tq "
                f"status shows the values that were lost"
            )
        return (
            f"the values that the durable folder {self.folder} kept in {' and '.join(missing)} are lost, because that "
            f"folder does not exist any more; the machine was probably restarted. The state continues, and tq status "
            f"shows the lost values, which can be put again"
        )

    def _open_arenas(self, place: Path) -> None:
        """Create a folder of arenas if it is missing, and lock it."""
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise StartError(
                f"{place}, where the durable folder {self.folder} keeps its values, is not a private folder of this "
                f"user (owner {user_name(status.st_uid)}, mode {stat.filemode(status.st_mode)}): change its owner and "
                f"mode back, or remove it"
            )
        self._hold(place / "alive")
        if _owner_of(place) is None:
            (place / OWNER).symlink_to(os.path.realpath(self.folder))

    def begin(self, system: Path) -> None:
        """Note that a system, whose runtime folder is this one, runs with the folder.

        Raises StartError if the disk is full.
        """
        try:
            _write(self._running, os.fsencode(system))
        except OSError as error:
            raise self._error(f"cannot be written: {error}; free some space there") from error

    def mark_stopped(self) -> None:
        """Note that the system was stopped: its clients do not wait for it any longer."""
        self._running.unlink(missing_ok=True)

    # ------------------------------------------------------------ adopting and removing

    @contextlib.contextmanager
    def adopt(self, name: str | None = None) -> Iterator[Identity]:
        """Make the values of a folder that was moved, or whose owner was changed, this folder's and this user's.

        No system can start with the folder before the context ends. Raises StartError if the folder keeps no values, is
        in use, is a copy of another one that exists, or if this user cannot access all of it.
        """
        known = self.identity()
        if known is None:
            raise StartError(
                f"{self.folder} keeps no values: it has no identity.json. Name the folder that was the setting "
                f"{_KEY} of a system with durability.values"
            )
        self._check_owner()
        self._refuse_copy(known)
        for place in (place for place in known.places if place.is_dir()):
            if place.stat().st_uid != os.geteuid():
                raise StartError(
                    f"{place}, where the durable folder {self.folder} keeps its values, belongs to user "
                    f"{user_name(place.stat().st_uid)}: change its owner as root (chown -R {os.geteuid()} {place}), "
                    f"then run `tq adopt` again"
                )
        identity = msgspec.structs.replace(
            known, name=name or known.name, user=os.geteuid(), folder=os.path.realpath(self.folder),
            record=str(_record(known.id)),
        )  # fmt: skip
        with self._held(known):
            _write(self._identity, msgspec.json.encode(identity))
            _write(Path(identity.record), msgspec.json.encode(identity))
            for place in (place for place in identity.places if place.is_dir()):
                (place / OWNER).unlink(missing_ok=True)
                (place / OWNER).symlink_to(identity.folder)
            yield identity

    @contextlib.contextmanager
    def _held(self, identity: Identity | None) -> Iterator[None]:
        """Keep systems from using the folder and its arenas. Raises StartError if one does."""
        places = [] if identity is None else [place for place in identity.places if place.is_dir()]
        with contextlib.ExitStack() as stack:
            for lock in (self.lock, *(place / "alive" for place in places)):
                stack.callback(os.close, self._hold(lock))
            self._check_terms()
            yield

    def discard(self) -> int:
        """Remove everything that the folder keeps, and the folder if it is empty then. Returns the number of bytes.

        A copy of a durable folder keeps its files only: the values in memory belong to the original, and stay. Raises
        StartError if it is in use.
        """
        identity = self.identity()
        if identity is not None and self._original(identity) is not None:
            identity = None
        nbytes = journal_bytes(self.folder) + mirror_bytes(self.folder)
        nbytes += 0 if identity is None else arena_bytes(identity)
        with self._held(identity):
            if identity is not None:
                remove_arenas(identity)
            for path in list(self.folder.iterdir()):
                if path.name in _OWN_FILES or path.name.startswith(_JOURNAL_FILES):
                    path.unlink(missing_ok=True)
            remove_mirrors(self.folder)
            Terms(self.folder).discard()
            with contextlib.suppress(OSError):  # it has other files
                self.folder.rmdir()
        return nbytes


_OWN_FILES = ("lock", "identity.json", "identity.json.new", "key", "key.new", "running", "running.new")
_JOURNAL_FILES = ("segment-", "state-", ".state-", "load-", "space-")


class _Format(msgspec.Struct):
    format: int


def remove_arenas(identity: Identity) -> None:
    """Remove the arenas of a durable folder, which may not exist any more, and the record of it."""
    for place in identity.places:
        with contextlib.suppress(OSError):
            if place.lstat().st_uid == os.geteuid() and place.name == f"{DURABLE_PREFIX}{identity.id}":
                shutil.rmtree(place, ignore_errors=True)
    for record in (_record(identity.id), Path(identity.record)):
        with contextlib.suppress(OSError):
            record.unlink(missing_ok=True)


def known_folders() -> list[Identity]:
    """Return all durable folders of this user that are known here, also those that do not exist any more, by name.

    They are known by their records in the runtime folder, and by arenas in shared memory that no such record names.
    """
    identities: dict[str, Identity] = {}
    for path in sorted(runtime_dir().glob(_RECORD.format("*"))):
        with contextlib.suppress(AttachError, *UNREADABLE):
            identity = msgspec.json.decode(read_private(path), type=Identity)
            identities[identity.id] = identity
    for identity in _in_shared_memory():
        identities.setdefault(identity.id, identity)
    return sorted(identities.values(), key=lambda identity: (identity.name, identity.created_at))


def _in_shared_memory() -> Iterator[Identity]:
    """Yield the durable folders that arenas of this user in shared memory belong to."""
    for place in SHARED_MEMORY.glob(f"{DURABLE_PREFIX}*"):
        with contextlib.suppress(OSError):
            if place.lstat().st_uid != os.geteuid():
                continue
            identity = _identity_of_arenas(place, _owner_of(place) or "")
            if not Path(identity.record).is_file():  # otherwise it is listed with the runtime folder of the record
                yield identity


def _identity_of_arenas(place: Path, owner: str) -> Identity:
    """Return the identity of the durable folder that owns these arenas; what the arenas tell if it is gone."""
    number = place.name[len(DURABLE_PREFIX) :]
    with contextlib.suppress(StartError):
        known = DurableFolder(Path(owner)).identity() if owner else None
        if known is not None and known.id == number:
            return known
    made = place.lstat().st_ctime
    return Identity(FORMAT, number, "unknown", os.geteuid(), owner, str(_record(number)), str(place), "", 0, 0, made)


def user_name(user: int) -> str:
    """Return the name and number of a user."""
    try:
        return f"{pwd.getpwuid(user).pw_name} ({user})"
    except KeyError:
        return str(user)


def used_at(identity: Identity) -> float:
    """Return when the folder was used last, in Unix seconds; when it was made if its files are gone."""
    times = [identity.created_at]
    with contextlib.suppress(OSError):  # it does not exist, or a file was removed in the meantime
        times += [path.lstat().st_mtime for path in Path(identity.folder).iterdir()]
    return max(times)


def arena_bytes(identity: Identity) -> int:
    """Return the bytes that the arenas of a durable folder hold."""
    return sum(allocated_bytes(place) for place in identity.places)


def journal_bytes(folder: Path) -> int:
    """Return the bytes of the journal in a durable folder."""
    nbytes = 0
    for path in (*folder.iterdir(), *folder.glob("term-*/*")) if folder.is_dir() else ():
        with contextlib.suppress(OSError):  # removed in the meantime
            nbytes += path.lstat().st_size if path.name.startswith(_JOURNAL_FILES) else 0
    return nbytes


def _locks_of_terms(folder: Path) -> list[Path]:
    return [term.lock for term in Terms(folder).list()] if folder.is_dir() else []


def _record(number: str) -> Path:
    return runtime_dir() / _RECORD.format(number)


def _owner_of(place: Path) -> str | None:
    """Return the durable folder that owns a folder of arenas; None if it has no owner yet."""
    try:
        return os.readlink(place / OWNER)
    except OSError:
        return None


def _elsewhere(new: Identity) -> str | None:
    """Return a warning if a system of the same name kept values in another folder, else None."""
    others = [known.folder for known in known_folders() if known.name == new.name and known.id != new.id]
    if not others:
        return None
    return (
        f"the durable folder {new.folder} ({_KEY}) is new, but a system named {new.name!r} keeps values in "
        f"{', '.join(others)}: if that folder was meant, stop this system and correct {_KEY}; `tq stop --discard "
        f"--folder FOLDER` removes values that are not needed any more"
    )


def _is_other(folder: Path, than: Path, number: str) -> bool:
    """Whether a folder exists, is not the other one under another path, and has or may have this id."""
    try:
        if os.path.samefile(folder, than):
            return False
        identity = DurableFolder(folder).identity()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (StartError, OSError):  # it cannot be read
        return True
    return identity is not None and identity.id == number


def _parent(place: str) -> str:
    return str(Path(place).parent) if place else ""


def _write(path: Path, content: bytes) -> None:
    """Write a private file atomically, also if the machine fails."""
    replace_private(path, content, f"{path.name}.new", sync=True)
