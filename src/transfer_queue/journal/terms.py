"""Terms: which of several controllers may use a journal in a folder that several nodes see.

Each controller that takes the folder over begins a *term*, which has a folder and a journal of its own:

    <durability.folder>/term-<n>/
        open-<hex>                    exists until a later term begins
        owner                         the id of the system
        lock                          locked by the processes of this controller's system
        complete                      the journal has everything of the terms before it
        segment-*, state-*, load-*    see `journal.journal`

Only the number decides: a controller of an earlier term may be dead, frozen or cut off. A controller writes its
records, then checks that its term is open, then answers. A later one first removes `open-*`, then reads the journal. So
whatever was answered, or ordered of a storage unit, is in the journal that the later one reads; and no record that it
has not read was answered. A journal that lies directly in the folder, without terms, counts as an ended term.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from transfer_queue.errors import StartError
from transfer_queue.journal.journal import list_numbers, segment_path
from transfer_queue.private_files import sync_folder, write_private

_NAME = re.compile(r"term-(\d{12})")
_OPEN = "open-"
_DRAFT = ".term-{}.draft"
_JOURNAL = ("segment-", "state-", "load-")
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)
_TRIES = 100
"""Attempts to copy a journal from which files disappear meanwhile."""


@dataclass(frozen=True)
class Term:
    """One term of the controllers of a folder."""

    number: int
    folder: Path
    """The folder of its journal."""
    mark: str = ""
    """The name of the file that exists while the term is open; "" for a term of another controller."""

    def is_current(self) -> bool:
        """Whether no later term than that of this controller has begun. Raises OSError if the storage does not answer.

        It opens the file, because NFS then asks the server, and does not answer from its cache of attributes.
        """
        try:
            file = os.open(os.path.join(self.folder, self.mark), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise
        try:
            return os.fstat(file).st_nlink > 0
        finally:
            os.close(file)

    @property
    def lock(self) -> Path:
        """The file that the processes of the term's system lock."""
        return self.folder / "lock"

    @property
    def is_complete(self) -> bool:
        """Whether its journal has everything of the terms before it. It answered no request before."""
        return (self.folder / "complete").exists()

    @property
    def owner(self) -> str:
        """The id of its system; "" if its folder does not exist any more."""
        try:
            return (self.folder / "owner").read_text()
        except OSError:
            return ""


class Terms:
    """The terms of a folder, which exists."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list(self) -> list[Term]:
        """Return all terms, the newest last."""
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return [self._term(number) for number in sorted(int(match[1]) for match in matches if match is not None)]

    def newest(self) -> Term | None:
        """Return the newest term that is complete; None if there is none."""
        return next((term for term in reversed(self.list()) if term.is_complete), None)

    def claim(self, owner: str, mark: Callable[[Path], object] = lambda folder: None) -> Term:
        """Begin a term with the journal of the newest one before it. All earlier terms end.

        Args:
            owner: The id of the system.
            mark: Called with the folder of the term before others can see it.

        Raises:
            StartError: Another controller has begun a later term meanwhile.
            OSError: As the file system does.
        """
        steps = self.claim_in_steps(owner, mark)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                term: Term = end.value
                return term

    def claim_in_steps(
        self, owner: str, mark: Callable[[Path], object] = lambda folder: None
    ) -> Generator[None, None, Term]:
        """Do the same, and yield between the steps that other controllers can see."""
        term = yield from self._begin(owner, mark)
        for earlier in self.list():
            if earlier.number < term.number:
                _close(earlier.folder)
                yield
        yield from self._take_journal(term)
        self._check_current(term)
        try:
            write_private(term.folder / "complete", b"", "wb", sync=True)
            sync_folder(term.folder)
        except FileNotFoundError:  # a later term has removed the folder
            self._check_current(term)
            raise
        yield
        self._check_current(term)
        self._remove_before(term)
        return term

    def discard(self) -> None:
        """Remove all terms. No controller may use the folder."""
        for path in [*self.folder.glob("term-*"), *self.folder.glob(_DRAFT.format("*"))]:
            shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------ the steps of a claim

    def _begin(self, owner: str, mark: Callable[[Path], object]) -> Generator[None, None, Term]:
        """Create the folder of a new term under the next number. Exactly one controller gets a number."""
        while True:
            draft = self.folder / _DRAFT.format(secrets.token_hex(8))
            draft.mkdir(mode=0o700)
            # first of all: a folder that is not empty cannot be replaced
            write_private(draft / "owner", owner.encode(), "wb", sync=True)
            # a name of its own: once its folder is removed, a slow controller may create one with the same number
            opened = f"{_OPEN}{secrets.token_hex(8)}"
            write_private(draft / opened, b"", "wb", sync=True)
            mark(draft)
            sync_folder(draft)
            term = self._term(1 + max((term.number for term in self.list()), default=0), opened)
            yield
            try:
                draft.rename(term.folder)
            except OSError as error:
                shutil.rmtree(draft, ignore_errors=True)
                if error.errno not in _TAKEN:
                    raise
                continue  # another controller was faster
            sync_folder(self.folder)
            yield
            if self.list()[-1].number == term.number:
                return term
            # later terms have begun and removed the earlier ones, since the number was chosen
            shutil.rmtree(term.folder, ignore_errors=True)

    def _take_journal(self, term: Term) -> Generator[None, None, None]:
        """Take over the journal of the newest complete term, which is complete as far as anything was answered."""
        for _ in range(_TRIES):
            base = self._base(term)
            if base is None:
                return
            with contextlib.suppress(FileNotFoundError):
                yield from _copy_journal(base, term.folder)
                if _is_whole(term.folder) and self._base(term) == base:
                    return
            # its controller replaced old files by a snapshot, or a later one has removed it after its own claim
            self._check_current(term)
            with contextlib.suppress(FileNotFoundError):  # then a later term has removed the folder
                for path in _journal_files(term.folder):
                    path.unlink()
        raise StartError(
            f"the journal in {self.folder} (durability.folder) could not be copied in {_TRIES} attempts, because other "
            f"controllers change it; stop them, then start again"
        )

    def _check_current(self, term: Term) -> None:
        """Raise StartError if a later term has begun."""
        if not term.is_current():
            raise StartError(
                f"another controller took over {self.folder} (durability.folder) while this one was starting, in a "
                f"later term than {term.number}; use the system that runs with it"
            )

    def _base(self, term: Term) -> Path | None:
        for earlier in reversed(self.list()):
            if earlier.number < term.number and earlier.is_complete:
                return earlier.folder
        return self.folder if any(list_numbers(self.folder)) else None

    def _remove_before(self, term: Term) -> None:
        for earlier in self.list():
            if earlier.number < term.number:
                removed = self.folder / _DRAFT.format(secrets.token_hex(8))
                with contextlib.suppress(FileNotFoundError):
                    earlier.folder.rename(removed)  # at once: a controller that copies it must not miss only some files
                shutil.rmtree(removed, ignore_errors=True)
        for path in _journal_files(self.folder):
            path.unlink(missing_ok=True)

    def _term(self, number: int, mark: str = "") -> Term:
        return Term(number, self.folder / f"term-{number:012d}", mark)


def _copy_journal(base: Path, folder: Path) -> Generator[None, None, None]:
    """Copy a journal whose controller may still append to its last segment. Other files get a second name."""
    segments, _ = list_numbers(base)
    yield
    if segments:
        source = segment_path(base, segments[-1])
        write_private(folder / source.name, source.read_bytes(), "wb", sync=True)
    yield
    # files of loaded states are listed after the segment that may name them was copied
    for path in _journal_files(base):
        if not path.name.startswith("segment-") or path.name < segment_path(base, max(segments, default=0)).name:
            _link(path, folder / path.name)
            yield
    sync_folder(folder)


def _is_whole(folder: Path) -> bool:
    """Whether a copy has its newest snapshot and all segments after it."""
    segments, snapshots = list_numbers(folder)
    first = snapshots[-1] if snapshots else 1
    return [number for number in segments if number >= first] == list(range(first, max([*segments, first - 1]) + 1))


def _journal_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name.startswith(_JOURNAL)]


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # the file system has no hard links
        write_private(target, source.read_bytes(), "wb", sync=True)


def _close(folder: Path) -> None:
    """End a term."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.glob(f"{_OPEN}*"):
            path.unlink()
        sync_folder(folder)
