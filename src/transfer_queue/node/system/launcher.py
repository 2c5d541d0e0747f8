"""Starts, finds and stops systems on this machine.

`start_local` returns the running system of a name, or starts it. It does so under a lock: of many simultaneous calls
one starts the system and the others get the same one. A system ends when its starter dies, for whatever reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import msgspec

from transfer_queue.config import environment as environment_of
from transfer_queue.errors import AttachError, StartError, TransferQueueError, WaitTimeoutError, with_advice
from transfer_queue.net.session import Session, Target
from transfer_queue.net.tls_contexts import tls_context
from transfer_queue.node.system import launcher_protocol, processes, sampler_transfer
from transfer_queue.node.system.controller_moves import move_session
from transfer_queue.node.system.durable_folder import DurableFolder
from transfer_queue.node.system.store_process import read_status
from transfer_queue.private_files import no_link
from transfer_queue.storage.stores.base import StoreAddress
from transfer_queue.system_folder.liveness import ClientLiveness, Liveness, StartLock, is_alive
from transfer_queue.system_folder.paths import (
    DEFAULT_NAME,
    ControllerPlace,
    Description,
    SystemFolder,
    host_and_port,
    runtime_dir,
)

if TYPE_CHECKING:
    import ssl

START_SECONDS = 30.0
STOP_SECONDS = 15.0
END_SECONDS = 10.0  # for a supervisor to end after SIGTERM, or for its orphans to end after it was killed

_ADDRESS = "TQ_ADDRESS"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)  # not inherited from this process
NO_SAMPLERS: Mapping[str, object] = {}
_FIRST_FREE = 10  # descriptors from here on are not among those that the supervisor is started with

logger = logging.getLogger(__name__)


class RunningSystem:
    """A running system, as seen from one process."""

    new = False
    """Whether the call that returned this object has started the system."""
    conf: Any = None
    """The merged configuration, in the process that started the system."""

    def __init__(
        self, system: SystemFolder, description: Description, key: bytes, owner: int | None = None,
        environment: MutableMapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = system.name
        self.folder = system.folder
        self.logs = system.logs
        """The folder of the servers' logs."""
        self.states = system.states
        """The folder of state files."""
        self.node = description.node
        """See `Description`."""
        self.shares_states = not description.is_outpost
        self.key = key
        """A secret: never log or print it."""
        self.description = description
        self._system = system
        self._described = system.description_identity()
        self._folder_identity = system.identity()
        self._durable = DurableFolder(Path(description.durable)) if description.durable else None
        self._owner = owner
        self._environment = environment

    @property
    def controller(self) -> str | tuple[str, int]:
        """Where the controller listens now."""
        place = self._system.read_controller_place() if self.description.term else None
        return self.description.address if place is None else host_and_port(place.address)

    def __repr__(self) -> str:
        return f"<system {self.name} at {self.folder}, {self.describe()}>"

    @functools.cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for connections to other nodes; None without TLS.

        Raises InvalidArgumentError if its files cannot be read.
        """
        return tls_context(self.description.tls, server=False)

    @property
    def stores(self) -> dict[str, StoreAddress]:
        """Where processes of this node reach the external stores, by backend."""
        addresses = {}
        for path in self._system.stores:
            with contextlib.suppress(OSError):
                address = read_status(path)
                addresses[address.kind] = address
        return addresses

    @property
    def live_address(self) -> str:
        """The address of the page that shows the system, with its token; "" if `live.enabled` is not set."""
        return self._system.read_live_address()

    @property
    def owned(self) -> bool:
        """Whether this process started the system and so ends it when it ends. False in its forked children."""
        return self._owner == os.getpid()

    def describe(self) -> str:
        """Return who started the system: "started by pid 123 (python train.py) of user x at 2026-01-31 12:00:00"."""
        start = self.description
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.started_at))
        return f"started by pid {start.starter_pid} ({start.starter_command}) of user {start.starter_user} at {at}"

    def settings_warning(self, differing: list[str]) -> str:
        """Return a message that the system runs with other settings than requested, and what to do.

        `differing` has a phrase for each setting, see `config.loading.differences`.
        """
        listed = "".join(f"\n  {each}" for each in differing)
        return (
            f"the system {self.name!r}, {self.describe()}, runs with other settings than requested:{listed}\n"
            f"The settings in force stay. To start a system of your own, give it another name (system.name, or "
            f"TQ_SYSTEM). To replace this one, stop it first (`tq stop --name {self.name}`)"
        )

    def log_of(self, target: Target) -> str:
        """Return the log of ("controller", 0) or ("unit", n); "" if there is none, or if it is about to be removed."""
        if self.description.is_outpost:  # units have other numbers here, and the controller is on another node
            return ""
        log = self._system.log(target[0] if target[0] == "controller" else f"{target[0]}-{target[1]}")
        # servers whose supervisor was killed remove all files; a supervisor removes the description before it ends
        is_removed_soon = self._system.description.exists() and self._is_supervisor_dead()
        return str(log) if log.exists() and not is_removed_soon else ""

    def describe_stopped(self) -> str:
        """Return a clause about the processes of the system that are stopped (SIGSTOP), and what to do; "" if none is.

        A stopped process keeps the system alive, but cannot reply, and does not end with its supervisor.
        """
        stopped = " ".join(map(str, processes.stopped_holders(self._system.alive)))
        if not stopped:
            return ""
        which = f"processes {stopped} of it are" if " " in stopped else f"process {stopped} of it is"
        if self._is_supervisor_dead():
            return f"its supervisor is gone, but {which} stopped (SIGSTOP): end it with `kill -KILL {stopped}`"
        return f"{which} stopped (SIGSTOP): continue it with `kill -CONT {stopped}`"

    def is_ending(self) -> bool:
        """Whether the supervisor has ended, so that the other processes of the system end, too, unless stopped."""
        description = self.description
        same = description.pid_namespace in (0, processes.pid_namespace()) and not description.is_outpost
        return same and self._is_supervisor_dead()

    def _is_supervisor_dead(self) -> bool:
        with contextlib.closing(processes.Process(self.description.pid, self.description.started)) as supervisor:
            return supervisor.has_ended()

    def start_liveness(self, client_id: str) -> ClientLiveness | None:
        """Show the system's controllers that a client of this process lives; None if that is not possible.

        A controller on another node sees this by the client's connections only.
        """
        if self.description.is_outpost:
            return None
        try:
            return ClientLiveness(self._system.clients, client_id)
        except OSError as error:
            logger.warning(
                "client %s cannot lock its liveness file, so a restarted controller may treat it as gone: %s",
                client_id,
                with_advice(error, "make the folder writable, and start this process again"),
            )
            return None

    def follow_controller(self, session: Session) -> None:
        """Move this session to the next controller when another node takes over, until the session is closed."""
        if self.description.term and self.description.is_outpost:
            move_session(session, self._system, self.description.controller)

    def move_controller(self, place: ControllerPlace) -> None:
        """Tell servers and clients of this node where the controller is now.

        Raises StartError if they know a controller of a later term.
        """
        with StartLock(self._system.lock, END_SECONDS):
            known = self._system.read_controller_place()
            latest = self.description.term if known is None else known.term
            if place.term < latest:
                raise StartError(
                    f"the controller at {place.address} of term {place.term} was replaced by one of term {latest}"
                )
            if place.term > latest:
                self._system.write_controller_place(place)

    def is_alive(self) -> bool:
        """Whether the system can be used. False also if a later system of its name has replaced it."""
        return self._system.description.exists() and is_alive(self._system.alive) and self._owns_folder()

    def describe_lost_name(self) -> str:
        """Return how a system that runs has lost its name, so that `init` does not find it; "" if it has the name."""
        return ""

    def will_return(self) -> bool:
        """Whether a server that cannot be reached will return: the system runs, or it is durable and was not stopped.

        If all processes of a durable system died, the next start with its folder continues it.
        """
        return self.is_alive() or (self._durable is not None and self._durable.will_return(self.key))

    def is_running(self) -> bool:
        """Whether the system has not been stopped, by one look at a file, which takes two microseconds.

        False for a system that is about to stop; True for one of which every process was killed.
        """
        described = self._system.description_identity()
        if described == self._described:
            return True
        if self._durable is None or not self.will_return():
            return False
        if described is not None and self.is_alive():
            self._described = described  # another start continues the system
        return True

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Stop the system, whichever process started it. Returns when no process and no file of it is left.

        After a crash, logs the end of the dead server's log before the logs are removed too. Kills a supervisor that
        does not end in time; its servers then end by themselves. Idempotent. Raises WaitTimeoutError if a process
        remains even then, and AttachError, at once, if the system runs in another PID namespace.
        """
        namespace = self.description.pid_namespace
        if namespace not in (0, processes.pid_namespace()) and self.is_alive():
            raise AttachError(
                f"the system {self.name!r}, {self.describe()}, runs in another PID namespace than this process, so "
                f"this process cannot signal its supervisor (there pid {self.description.pid}): run `tq stop --name "
                f"{self.name}` there, for example in the container that started the system"
            )
        self._withdraw_address()
        supervisor = processes.Process(self.description.pid, self.description.started)
        with Liveness(self._system.alive) as liveness:
            if not self._is_of_this_start():
                supervisor.reap()
                supervisor.close()
                return
            try:
                # a supervisor that stops its system removes the description first
                ended = not self._system.description.exists()
                if not _end(supervisor, timeout):
                    logger.error(
                        "the supervisor of system %s did not end within %g s; this process kills it", self.name, timeout
                    )
                if not liveness.wait(END_SECONDS):
                    stopped = self.describe_stopped()
                    raise WaitTimeoutError(
                        f"Timeout: a process of system {self.name} has not ended {END_SECONDS:g} s after its "
                        f"supervisor{f': {stopped}' if stopped else ''}; see {self.logs}"
                    )
                if ended and self.logs.exists():
                    logger.error("system %s crashed before it was closed:\n%s", self.name, log_tails(self._system))
            finally:
                supervisor.close()
        if self._durable is not None and self._durable.system() == self.folder:
            self._durable.mark_stopped()  # its supervisor does this, unless it was killed
        self._sweep()

    def discard(self) -> int:
        """Remove what a durable system keeps, after `stop`. Returns the number of bytes; 0 if it is not durable.

        Raises StartError if another system uses it.
        """
        return 0 if self._durable is None else self._durable.discard()

    def leave(self) -> None:
        """Detach from the system, which continues."""

    def _is_of_this_start(self) -> bool:
        """Whether the folder belongs to this system, and not to a later start that continues it."""
        if not self._owns_folder():
            return False
        current, own = None, self.description
        with contextlib.suppress(AttachError):  # it cannot be read
            current = self._system.read_description()
        if current is None:  # it starts, ends or crashed
            return self._system.identity() == self._folder_identity
        return (current.pid, current.started) == (own.pid, own.started)

    def _owns_folder(self) -> bool:
        """Whether the folder belongs to this system, and not to a later one of its name."""
        try:
            return self._system.read_key() == self.key
        except AttachError:
            # the key is missing after a crash and while the system stops; a later system would have one
            return self._system.identity() is not None

    def _sweep(self) -> None:
        if self._system.identity() is None:
            return
        with StartLock(self._system.lock, END_SECONDS):
            if self._is_of_this_start() and not is_alive(self._system.alive):
                self._system.sweep()

    def _withdraw_address(self) -> None:
        environment = self._environment
        if environment is not None and self.owned and environment.get(_ADDRESS) == str(self.folder):
            del environment[_ADDRESS]


def find(system: str | None = None) -> RunningSystem | None:
    """Return the running system of this name, or in this folder (an absolute path); None if there is none.

    A `system` of None means TQ_ADDRESS, else TQ_SYSTEM, else the user's default. Raises AttachError if the folder or
    the key belongs to another user.
    """
    if system is None:
        system = environment_of.address() or environment_of.system_name() or DEFAULT_NAME
    return _find(SystemFolder(Path(system)) if os.path.isabs(system) else SystemFolder.named(system))


def find_successor(system: str | None, old: RunningSystem | None) -> RunningSystem | None:
    """Return the system that runs in the place of one that has ended (None: of none); None if none does yet."""
    try:
        later = find(system)
    except (TransferQueueError, OSError):
        return None  # it is still starting
    if later is None or old is None:
        return later
    new, was = later.description, old.description  # a start that continues a durable system has the same key
    return later if (later.key, new.pid, new.started) != (old.key, was.pid, was.started) else None


def _find(system: SystemFolder) -> RunningSystem | None:
    if system.identity() is None:
        return None
    try:
        system.check_private()
        description = system.read_description()
        if description is None or not is_alive(system.alive):
            return None
        return RunningSystem(system, description, system.read_key())
    except AttachError as error:
        if isinstance(error.__cause__, FileNotFoundError) and not system.description.exists():
            return None  # it has just ended
        raise


def start_local(
    system: str | None,
    config: dict[str, Any],
    samplers: Mapping[str, object] = NO_SAMPLERS,
    detached: bool = False,
    timeout: float = START_SECONDS,
    environment: MutableMapping[str, str] | None = None,
    heirs: float = 0.0,
    seat: launcher_protocol.NodeRole = launcher_protocol.HERE,
    key: bytes | None = None,
) -> RunningSystem:
    """Return the running system of this name; start it if there is none.

    Args:
        system: The name. None: TQ_SYSTEM, else the user's default.
        config: JSON values that attaching clients get; `config["settings"]` is `Settings.to_json()`.
        samplers: The samplers that the settings do not name, by the keys of `Settings.samplers`: objects or classes, or
            such that were pickled in another process.
        detached: The system outlives this process.
        timeout: Seconds until the system must be up.
        environment: Gets TQ_ADDRESS while this process owns the system (`os.environ`, so that its children attach).
        heirs: Seconds after the death of this process in which another process may replace it
            (`replace_supervisor`). The supervisor is then not a child of this process, because some launchers end
            their children when they die.
        seat: The role of this node in a system of several nodes.
        key: The key of the system, if its controller is on another node.

    Raises:
        StartError: With the server's traceback or the end of the logs. Nothing of the system is left then.
    """
    sampler_transfer.refuse_while_loading()
    limit = time.monotonic() + timeout
    folder = SystemFolder.named(system or environment_of.system_name() or DEFAULT_NAME)
    with StartLock(folder.lock, timeout):
        running = _find(folder)
        if running is not None:
            return running
        with Liveness(folder.alive) as liveness:  # a previous system of this name may be about to end
            if not liveness.wait(max(0.0, limit - time.monotonic())):
                raise StartError(
                    f"the previous system in {folder.folder} is stopping, and has not ended within {timeout:g} s; see "
                    f"{folder.logs}"
                )
        folder.sweep()
        pickled = sampler_transfer.dump_all(samplers)
        seconds = max(0.1, limit - time.monotonic())
        started = _start(folder, config, pickled, detached, seconds, environment, heirs, seat, key)
    if environment is not None and not detached:
        environment[_ADDRESS] = str(folder.folder)
    return started


def sweep_killed(prefix: str) -> None:
    """Remove the files of killed systems whose names begin with this prefix and are not used again."""
    for path in runtime_dir().glob(f"{prefix}*"):
        folder = SystemFolder(path)
        if folder.identity() is None:
            continue
        # a process that starts a system holds its lock until the system lives
        with contextlib.suppress(StartError, AttachError, OSError), StartLock(folder.lock, 0.0):
            if not is_alive(folder.alive):
                folder.sweep()


def _start(
    folder: SystemFolder, config: dict[str, Any], samplers: dict[str, sampler_transfer.PickledSampler], detached: bool,
    seconds: float, environment: MutableMapping[str, str] | None, heirs: float, seat: launcher_protocol.NodeRole,
    key: bytes | None,
) -> RunningSystem:  # fmt: skip
    settings = config["settings"]
    if key is None and settings["durability_values"] != "none":
        key = DurableFolder(Path(settings["durability_folder"])).key()
    key = folder.create(key)
    identity = folder.identity()
    assert identity is not None
    supervisor: processes.Process | None = None
    try:
        channel, pid = _spawn(folder)
        supervisor = processes.Process(pid, None)
        with channel:
            message = launcher_protocol.StartRequest(
                folder=str(folder.folder),
                identity=identity,
                config=msgspec.json.encode(config).decode(),
                key=key,
                samplers=samplers,
                starter_pid=os.getpid(),
                starter_started=processes.start_time(os.getpid()),
                starter_command=processes.command(),
                starter_user=processes.user(),
                detached=detached,
                seconds=seconds,
                heirs=heirs,
                seat=seat,
            )
            _request_start(folder, channel, message, seconds)
        description = folder.read_description()
        if description is None:
            raise StartError(f"the system in {folder.folder} ended right after its start; {log_tails(folder)}")
    except BaseException:
        if supervisor is not None:
            _abandon(supervisor, folder)
        folder.sweep()
        raise
    finally:
        if supervisor is not None:
            supervisor.close()
    started = RunningSystem(folder, description, key, None if detached else os.getpid(), environment)
    started.new = True
    return started


def replace_supervisor(system: str, node: str = "") -> RunningSystem | None:
    """Make this process the starter of a running system whose starter has died. None if the system is not running.

    A system of another node than `node` is left alone, if the nodes share one machine.
    """
    folder = SystemFolder.named(system)
    running = _find(folder)
    if running is None or (node and running.node != node):
        return None
    folder.write_heir(os.getpid(), processes.start_time(os.getpid()))
    return RunningSystem(folder, running.description, running.key, os.getpid())


def _request_start(
    folder: SystemFolder, channel: socket.socket, message: launcher_protocol.StartRequest, seconds: float
) -> None:
    """Send the order to the supervisor, and wait until the system is up. Raises StartError if it fails."""
    try:
        launcher_protocol.send(channel, message, seconds)
        # the supervisor observes the time limit; its report of a failure may arrive a little later
        reply = launcher_protocol.receive(
            channel, Union[launcher_protocol.StartReply, launcher_protocol.StartFailure], seconds + END_SECONDS
        )
    except TimeoutError as error:
        raise StartError(f"the system {folder.name} was not up within {seconds:.1f} s.\n{log_tails(folder)}") from error
    except (EOFError, OSError) as error:
        raise StartError(f"the supervisor of system {folder.name} has ended.\n{log_tails(folder)}") from error
    if isinstance(reply, launcher_protocol.StartFailure):
        raise StartError(f"the system {folder.name} could not be started: {reply.reason}")
    for warning in reply.warnings:
        logger.warning("%s", warning)


def _abandon(supervisor: processes.Process, folder: SystemFolder) -> None:
    """End a supervisor whose system did not start."""
    with Liveness(folder.alive) as liveness:
        _end(supervisor, END_SECONDS)
        liveness.wait(END_SECONDS)


def _end(supervisor: processes.Process, seconds: float) -> bool:
    """End a supervisor by SIGTERM, and after some seconds by SIGKILL. Returns whether it ended in time."""
    supervisor.signal(signal.SIGTERM)
    in_time = supervisor.wait(seconds)
    if not in_time:
        supervisor.signal(signal.SIGKILL)
        supervisor.wait(END_SECONDS)
    supervisor.reap()
    return in_time


def _spawn(folder: SystemFolder) -> tuple[socket.socket, int]:
    """Start the supervisor. Returns this process's end of its pipe, and its pid."""
    python = sys.executable or shutil.which("python3")
    if not python:
        raise StartError(
            "the path of the Python interpreter is not known: sys.executable is empty, and PATH has no python3"
        )
    own, other = socket.socketpair()
    held: list[int] = []
    try:
        with other:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            log = os.open(folder.log("supervisor"), flags, 0o600)
            held.append(log)
            # copies with higher numbers than their targets, so that no descriptor is overwritten before it is copied
            held += [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE) for file in (log, other.fileno())]
            actions = [
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, held[1], 1),
                (os.POSIX_SPAWN_DUP2, held[1], 2),
                (os.POSIX_SPAWN_DUP2, held[2], 3),
            ]
            arguments = [python, "-m", "transfer_queue.node.supervisor"]
            pid = os.posix_spawn(
                python, arguments, _environment(), file_actions=actions, setsigmask=(), setsigdef=_SIGNALS
            )
    except OSError as error:
        own.close()
        advice = "check that this user may run it and that the machine has memory for it"
        raise StartError(f"the supervisor cannot be started with {python}: {with_advice(error, advice)}") from error
    finally:
        for file in held:
            os.close(file)
    return own, pid


_HUGE_PAGES = "glibc.malloc.hugetlb"  # memory in huge pages makes the fork of a large state several times as fast


def _environment() -> dict[str, str]:
    """Return the supervisor's environment: it imports this package and nothing from the current folder.

    Its OpenBLAS computes on one thread.
    """
    environment = dict(os.environ)
    spec = importlib.util.find_spec("transfer_queue")
    assert spec is not None
    assert spec.origin is not None
    path = [str(Path(spec.origin).parent.parent), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment["PYTHONSAFEPATH"] = "1"
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _HUGE_PAGES not in tunables:
        environment["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_HUGE_PAGES}=1")))
    environment.pop(_ADDRESS, None)
    return environment


def log_tails(folder: SystemFolder) -> str:
    """Return the ends of all logs of a system."""
    texts = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.logs.glob("*.log")):
            with open(path, encoding="utf-8", errors="replace", opener=no_link) as file:
                text = file.read().splitlines()[-30:]
            texts.append("\n".join([f"--- {path}", *text]))
    return "\n".join(texts) or "It has written no log."
