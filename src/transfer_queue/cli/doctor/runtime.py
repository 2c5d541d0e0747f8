"""Checks of the runtime folder, its systems, leftovers of dead systems, and the variables that select a system."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transfer_queue.cli.doctor import machine
from transfer_queue.cli.doctor.report import OK, PROBLEM, WARNING, Finding
from transfer_queue.cli.shell.terminal import duration_text
from transfer_queue.config import environment
from transfer_queue.display import printable_name, size_text
from transfer_queue.errors import TransferQueueError
from transfer_queue.net.drivers.connection import MAX_PATH
from transfer_queue.node.system.durable_folder import arena_bytes, known_folders, used_at
from transfer_queue.system_folder.liveness import is_alive
from transfer_queue.system_folder.paths import (
    ARENA_PREFIX,
    DEFAULT_NAME,
    OWNER,
    Description,
    SystemFolder,
    allocated_bytes,
    runtime_dir,
)

REPLY_SECONDS = 3.0  # how long to wait for the reply of a controller
VARIABLES = {variable.name: variable for variable in environment.VARIABLES if variable.name.startswith("TQ_")}


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Yield the runtime folder; remove it afterwards if it did not exist before."""
    before = _candidates()
    folder = runtime_dir()
    try:
        yield folder
    finally:
        for path in (folder, *folder.parents):
            if path in before:
                with contextlib.suppress(OSError):  # another process has put something there meanwhile
                    path.rmdir()


def _candidates() -> set[Path]:
    """Return the folders that the search for the runtime folder may create."""
    configured = environment.runtime_dir()
    paths = [Path(configured)] if configured is not None else []
    paths += [
        Path(f"/run/user/{os.geteuid()}/transfer_queue"),
        Path(tempfile.gettempdir()) / f"{ARENA_PREFIX}{os.geteuid()}",
    ]
    return {above for path in paths for above in (path, *path.parents) if not above.exists()}


def check_folder() -> Iterator[Finding]:
    """Check that systems can use the folder: its owner, its mode, and the length of the paths of sockets."""
    with _folder() as folder:
        status = folder.stat()
        if not os.access(folder, os.W_OK | os.X_OK):
            advice = "make it writable, or set TQ_RUNTIME_DIR to your own folder"
            yield Finding("folder", PROBLEM, f"{folder} cannot be written", advice, {"folder": str(folder)})
        elif status.st_mode & 0o077:
            text = f"{folder}, which other users can read (mode {status.st_mode & 0o7777:o}); systems in it are private"
            yield Finding("folder", OK, text, values={"folder": str(folder), "private": False})
        else:
            yield Finding("folder", OK, f"{folder}, private", values={"folder": str(folder), "private": True})
        yield _check_paths(folder)


def _check_paths(folder: Path) -> Finding:
    longest = MAX_PATH - len(os.fsencode(SystemFolder(folder / "x").controller)) + 1
    values = {"longest_name": max(0, longest)}
    if longest < len(DEFAULT_NAME):
        advice = "set TQ_RUNTIME_DIR to a folder with a shorter path"
        text = f"{folder} is too long for the sockets of a system named {DEFAULT_NAME!r}"
        return Finding("socket paths", PROBLEM, text, advice, values)
    return Finding("socket paths", OK, f"names of systems may have {min(longest, 64)} characters", values=values)


def check_systems() -> Iterator[Finding]:
    """Report running systems and leftovers of dead ones."""
    with _folder() as folder:
        linked = set()
        for path in sorted(folder.iterdir()):
            system = SystemFolder(path)
            if path.name.endswith(".gone"):
                yield _leftover(path.name, f"{path} is what a killed process was removing", f"rm -r {path}")
            elif not path.name.startswith(".") and path.is_dir():
                with contextlib.suppress(OSError):
                    linked.add(Path(os.readlink(system.arena)))
                yield from _system(system)
        if not any(not path.name.startswith(".") for path in folder.iterdir()):
            yield Finding("systems", OK, "none is running")
        yield from _durable_folders()
    yield from _arenas(linked)


def _system(system: SystemFolder) -> Iterator[Finding]:
    name = printable_name(system.name)
    try:
        system.check_private()
        description = system.read_description()
    except TransferQueueError as error:
        yield Finding(name, WARNING, str(error), "", {"alive": False})
        return
    if is_alive(system.alive):
        yield _running(system, name, description)
    elif description is not None and description.durable:
        return  # see `_durable_folders`
    elif system.key.exists():
        text = f"all its processes were killed, and their files are still in {system.folder}"
        yield _leftover(name, text, f"tq start --name {name} removes them and starts the system again")
    elif system.logs.exists():
        text = f"it crashed; its logs are in {system.logs}"
        yield _leftover(name, text, f"read them, then rm -r {system.folder}, or start it again under its name")


def _durable_folders() -> Iterator[Finding]:
    """Report the durable folders of systems that do not run."""
    for identity in known_folders():
        name = f"durable {printable_name(identity.name)}"
        size, values = size_text(arena_bytes(identity)), {"folder": identity.folder, "memory": arena_bytes(identity)}
        if not Path(identity.folder).is_dir():
            text = f"{identity.folder} does not exist any more, and {size} of its values are in {identity.arenas}"
            advice = f"tq adopt its new path if it was moved, or tq stop --discard --folder {identity.folder}"
            yield Finding(name, WARNING, text, advice, values)
        elif not identity.is_in_use():
            age = duration_text(max(0.0, time.time() - used_at(identity)))
            text = f"{identity.folder} keeps {size} of values in {identity.arenas}; it was used last {age} ago"
            yield Finding(name, OK, text, values=values)


def _running(system: SystemFolder, name: str, description: Description | None) -> Finding:
    """Check that a running system replies. If its controller is on another node, a missing reply is only a warning.

    A container that is restarted loses the values of its storage unit, and that does not help a controller elsewhere.
    """
    if description is None:
        return Finding(name, OK, "is starting or ending", values={"alive": True, "age": None, "replies": None})
    age = max(0.0, time.time() - description.started_at)
    text = f"running for {duration_text(age)}, started by pid {description.starter_pid} ({description.starter_command})"
    values = {"alive": True, "age": age, "replies": _replies(system)}
    if values["replies"]:
        return Finding(name, OK, text, values=values)
    if description.is_outpost:
        text += f"; its controller, on another node, did not reply within {REPLY_SECONDS:g} s"
        return Finding(name, WARNING, text, "check that node, and the network between the nodes", values)
    text += f"; its controller did not reply within {REPLY_SECONDS:g} s"
    advice = f"it is being restarted, or is overloaded; its log is {system.log('controller')}"
    return Finding(name, PROBLEM, text, advice, values)


def _replies(system: SystemFolder) -> bool:
    """Return whether the controller replies in time. A system that has just ended has nothing to reply."""
    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.node.system.launcher import find

    try:
        running = find(str(system.folder))
        if running is not None:
            with ControlClient(running) as onlooker:
                onlooker.topology(timeout=REPLY_SECONDS)
    except (TransferQueueError, OSError):
        return not is_alive(system.alive)
    return True


def _leftover(name: str, text: str, advice: str) -> Finding:
    return Finding(name, WARNING, text, advice, {"alive": False})


def _arenas(linked: set[Path]) -> Iterator[Finding]:
    """Report arenas that belong to no system here and that no process uses."""
    folders = {Path("/dev/shm"), machine.choice().folder}
    unused = [
        path for folder in folders for path in folder.glob(f"{ARENA_PREFIX}{os.geteuid()}-*") if path not in linked
    ]
    if not unused:
        return
    maps = _mapped()
    for path in sorted(unused):
        nbytes = allocated_bytes(path)
        if any(path.glob("unit-*/header")) and not any(f"{path}/" in text for text in maps):
            owner = path / OWNER
            of = f" ({os.readlink(owner)})" if owner.is_symlink() else ""
            message = f"{size_text(nbytes)} of a system that has ended{of}; no process here uses them"
            yield _leftover(str(path), message, f"rm -r {path}, unless a system in another container uses it")


def _mapped() -> list[str]:
    """Return the memory maps of every process that this user may read."""
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            texts.append(path.read_text("utf-8", "replace"))
    return texts


def check_environment() -> Iterator[Finding]:
    """Report each variable TQ_* that is set: what it does, and whether its value can be used."""
    given = {name: value for name, value in environment.process_environment().items() if name.startswith("TQ_")}
    if not given:
        yield Finding("variables", OK, "no variable TQ_* is set")
    for name, value in sorted(given.items()):
        values = {"value": value}
        if name not in VARIABLES:
            advice = f"the variables are: {', '.join(VARIABLES)}"
            yield Finding(name, WARNING, f"{value!r}; this package does not read this variable", advice, values)
            continue
        meaning = VARIABLES[name].summary
        try:
            VARIABLES[name]()
        except TransferQueueError as error:
            yield Finding(name, PROBLEM, str(error), f"correct or unset it ({meaning})", values)
            continue
        yield (
            _address(value, meaning)
            if name == "TQ_ADDRESS"
            else Finding(name, OK, f"{value} ({meaning})", values=values)
        )


def _address(value: str, meaning: str) -> Finding:
    values = {"value": value}
    if not value.strip() or is_alive(SystemFolder(Path(value.strip())).alive):
        return Finding("TQ_ADDRESS", OK, f"{value} ({meaning})", values=values)
    advice = "unset it; it was left by a program that has ended"
    return Finding("TQ_ADDRESS", WARNING, f"{value}, but no system is running there", advice, values)
