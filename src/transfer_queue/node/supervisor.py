"""`python -m transfer_queue.node.supervisor`: owns the processes of one system and removes the files they leave.

The launcher starts it with a private pipe as descriptor 3. The supervisor binds the sockets of the controller and the
units, and forks these servers after the imports. If a server dies, it forks another one with the same sockets
(`hosting.child_process`); a controller continues from its journal. At the first of these events it stops all servers
and removes every file:

    SIGTERM            `close`, or `tq stop`
    the starter died   for any reason, and no heir appeared in time (`StartRequest.heirs`); not for a detached system
    a server is lost   it cannot be started again, or cannot be resumed (a controller without journal). This is logged;
                       the logs then stay until the next start or `RunningSystem.stop`
    taken over         the controller of another node has begun a later term (`journal.terms`)

It has a session of its own, so that Ctrl-C at the starter's terminal does not reach it or its children.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import resource
import secrets
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from transfer_queue.config.settings import Settings
from transfer_queue.config.store_options import SIMPLE
from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.messages.descriptors import DISK, MEMORY, MIRROR
from transfer_queue.net.server.sockets import bind_socket
from transfer_queue.node.controller.controller_process import Sockets, build_controller
from transfer_queue.node.hosting.child_process import ChildServer, Serves, run_server
from transfer_queue.node.hosting.server_log import configure_logging, write_log_to
from transfer_queue.node.system import launcher_protocol, processes
from transfer_queue.node.system.data_folders import DataFolders
from transfer_queue.node.system.store_process import build_store_server, write_status
from transfer_queue.node.unit.unit_process import UnitPlace, build_unit
from transfer_queue.private_files import no_link
from transfer_queue.storage.stores.base import StoreAddress, has_server
from transfer_queue.system_folder.liveness import StartLock, hold_liveness
from transfer_queue.system_folder.paths import Description, SystemFolder
from transfer_queue.token_text import find_tokenizer

CHANNEL = 3  # the descriptor of the launcher's pipe
RECEIVE_SECONDS = 10.0
TERM_SECONDS = 3.0  # between SIGTERM and SIGKILL to a server
PAGE = "transfer_queue.live.serving.live_server"
PAGE_NEEDS = ("starlette", "uvicorn")
WATCH_SECONDS = 0.5  # between two checks of a starter without a pidfd

_HANDLED = (signal.SIGTERM, signal.SIGCHLD)

logger = logging.getLogger(__name__)


class _ShutdownReason(Exception):
    """Why the system stops."""

    def __init__(self, reason: str, crashed: bool = False) -> None:
        super().__init__(reason)
        self.crashed = crashed
        """A server died, so the logs are kept."""


class Supervisor:
    """Supervises one system. `run` returns when nothing of the system is left."""

    def __init__(self, start: launcher_protocol.StartRequest, channel: socket.socket) -> None:
        self._start = start
        self._channel = channel
        self._system = SystemFolder(Path(start.folder))
        self._settings = Settings.from_json(msgspec.json.decode(start.config)["settings"])
        self._deadline = time.monotonic() + start.seconds
        self._children: list[ChildServer] = []
        self._listeners: list[socket.socket] = []
        """The sockets of all servers."""
        self._is_up = False
        """All servers were up once."""
        self._is_stop_requested = False
        """SIGTERM was received."""
        self._wake, wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        # children read one end; only this process has the other end, and never writes to it
        self._lifeline, self._life = os.pipe()
        self._take_possession()
        write_log_to(self._system.log("supervisor"))
        self._starter = None if start.detached else processes.Process(start.starter_pid, start.starter_started)
        self._orphaned: float | None = None
        """When the starter was first seen dead."""

    def _take_possession(self) -> None:
        """Lock the folder. Raises StartError if the launcher died and the folder is gone or another start owns it."""
        if self._owns_folder():
            hold_liveness(self._system.alive)
        if not self._owns_folder():
            raise StartError(
                f"{self._system.folder} is not the folder that the launcher created; start the system again"
            )

    def _owns_folder(self) -> bool:
        return self._system.identity() == self._start.identity

    def run(self) -> None:
        """Start the system, report that it is up, and supervise it until it stops."""
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._request_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        crashed = False
        try:
            self._bring_up()
            self._watch(lambda: False)
        except (_ShutdownReason, StartError) as end:
            reason = f"{end} (StartError)" if isinstance(end, StartError) else str(end)
            logger.info("the supervisor of system %s stops it: %s", self._system.name, reason)
            crashed = isinstance(end, _ShutdownReason) and end.crashed
            self._fail(reason)
        except BaseException:
            logger.exception("the supervisor of system %s failed and stops it", self._system.name)
            self._fail(traceback.format_exc())
        self._end(crashed)

    def _request_stop(self, *_: object) -> None:
        self._is_stop_requested = True

    # ------------------------------------------------------------ starting

    def _bring_up(self) -> None:
        start, system, seat, settings = self._start, self._system, self._start.seat, self._settings
        self._controller, self._remote = seat.controller, ""
        count = (settings.num_data_storage_units or 1) if seat.units is None else seat.units
        if not settings.has_arenas:
            count = 0
        self._folders = DataFolders(system, settings, start.key, count, seat)
        if not self._controller:
            self._bring_up_controller()
        for backend in settings.stores:
            self._bring_store(backend)
        stores = [] if seat.controller else settings.stores  # a unit on the first node knows the contents of each
        arenas = self._folders.arenas() if count or stores else Path()
        places = [(arenas, MEMORY, SIMPLE)] * count
        seconds = max(0.0, self._deadline - time.monotonic())
        places += [(folder, DISK, SIMPLE) for folder in self._folders.offloads(seconds)] if count else []
        mirror = self._folders.mirror()
        places += [] if mirror is None else [(mirror, MIRROR, SIMPLE)]
        retired = self._folders.retired()
        places += [(arena, MIRROR, SIMPLE) for arena in retired]
        places += [(arenas, MEMORY, backend) for backend in stores]
        for number, (folder, tier, backend) in enumerate(places):
            listeners, remote = self._listen_twice(str(system.unit(number)))
            only_read = folder in retired
            place = UnitPlace(self._controller, folder, listeners, seat.node, remote, tier, count, backend, only_read)
            build = partial(build_unit, system, number, start.config, start.key, place)
            child = self._child(f"unit-{number}", build)
            if only_read:
                child.needed, child.listeners = partial(os.path.exists, folder / "header"), listeners
            self._start_child(child)
        if settings.live_enabled and not seat.controller:
            self._bring_page()
        self._is_up = True
        self._folders.begin()
        system.describe(self._description())
        launcher_protocol.send(self._channel, launcher_protocol.StartReply(self._folders.warnings), RECEIVE_SECONDS)
        self._channel.close()
        logger.info("system %s is up: controller at %s and %d units", system.name, self._controller, len(places))

    def _bring_up_controller(self) -> None:
        start, system, settings = self._start, self._system, self._settings
        listeners, self._remote = self._listen_twice(str(system.controller))
        metrics = None
        if settings.metrics_enabled:
            keys = "metrics.port, metrics.host"
            metrics = self._listen_for("metrics", settings.metrics_host, settings.metrics_port, keys)
        sockets = Sockets(listeners, metrics)
        journal = self._folders.open_journal()
        term = self._folders.term
        build = partial(build_controller, system, start.config, start.key, start.samplers, sockets, journal, term)
        self._start_child(self._child("controller", build, restarts=journal is not None))
        self._controller = str(system.controller)

    def _listen_twice(self, path: str) -> tuple[list[socket.socket], str]:
        """Return sockets for a server: one at a path, and one on `seat.host` with its "host:port" for other nodes.

        Without `seat.host` there is only the first one, and "".
        """
        listeners, host = [self._listen(path)], self._start.seat.host
        if not host:
            return listeners, ""
        try:
            listeners.append(self._listen((host, 0)))
        except OSError as error:
            raise StartError(
                f"the servers cannot listen for other nodes on {host}: {error}; choose an address of this machine"
            ) from error
        return listeners, f"{host}:{listeners[-1].getsockname()[1]}"

    def _bring_store(self, backend: str) -> None:
        """Start the server of an external store, or write down where the store is."""
        settings = self._settings
        if has_server(backend):
            # less than the deadline, so that the child itself can report why the store's programs do not start
            seconds = max(1.0, self._deadline - time.monotonic() - 1.0)
            seat, key = self._start.seat, self._start.key
            build = partial(build_store_server, self._system, settings, backend, seconds, seat, self._controller, key)
            self._start_child(self._child("store" if len(settings.stores) == 1 else f"store-{backend}", build))
        else:
            write_status(self._system, StoreAddress(backend, settings.store_options[backend]))

    def _bring_page(self) -> None:
        """Start the process that shows the system in a browser.

        It is a client of the system, so that the servers do not know it: its module is imported in its process only.
        """
        settings, missing = self._settings, [name for name in PAGE_NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            raise StartError(
                f"live.enabled is set, but {' and '.join(missing)} cannot be imported: install transfer_queue[live]"
            )
        self._check_tokenizer()
        listener = self._listen_for("the page", settings.live_host, settings.live_port, "live.port, live.host")
        token = secrets.token_urlsafe(32)

        def build() -> Serves:
            server: Serves = importlib.import_module(PAGE).build_page(self._system, settings, token, listener)
            return server

        child = self._child("live", build)
        child.is_essential = False
        self._start_child(child)

    def _check_tokenizer(self) -> None:
        """Raise StartError if there is no tokenizer where `live.tokenizer` says."""
        name = self._settings.live_tokenizer
        if name is None:
            return
        if importlib.util.find_spec("tokenizers") is None:
            raise StartError(
                "live.tokenizer is set, but tokenizers cannot be imported: install transfer_queue[tokenizer]"
            )
        try:
            find_tokenizer(name)
        except InvalidArgumentError as error:
            raise StartError(f"live.tokenizer: {error}") from error

    def _listen(self, address: str | tuple[str, int]) -> socket.socket:
        """Return a socket for a server. The supervisor owns it: clients wait in its queue while the server restarts."""
        listener = bind_socket(address)
        self._listeners.append(listener)
        return listener

    def _listen_for(self, what: str, host: str, port: int, keys: str) -> socket.socket:
        """Return a socket for what users look at. Raises StartError, which names the keys of port and host."""
        try:
            return self._listen((host, port))
        except OSError as error:
            raise StartError(
                f"{what} cannot be served on port {port} of {host} ({keys}): {error}; choose another port or address"
            ) from error

    def _description(self) -> Description:
        start, system = self._start, self._system
        return Description(
            name=system.name,
            pid=os.getpid(),
            started=processes.start_time(os.getpid()),
            starter_pid=start.starter_pid,
            starter_command=start.starter_command,
            starter_user=start.starter_user,
            started_at=time.time(),
            detached=start.detached,
            folder=str(system.folder),
            logs=str(system.logs),
            controller=self._controller,
            node=start.seat.node,
            remote=self._remote,
            term=start.seat.term if self._folders.term is None else self._folders.term.number,
            tls=self._settings.tls,
            durable="" if self._folders.durable is None else str(self._folders.durable.folder),
            pid_namespace=processes.pid_namespace(),
        )

    def _child(self, name: str, build: Callable[[], Serves], restarts: bool = True) -> ChildServer:
        return ChildServer(name, build, restarts, self._settings.restart_timeout)

    def _start_child(self, child: ChildServer) -> None:
        """Fork a server and wait until it is up. Raises _ShutdownReason with its traceback if it does not start."""
        self._children.append(child)
        self._fork(child, self._deadline)
        self._watch(lambda: child.is_up or child not in self._children)

    def _fork(self, child: ChildServer, deadline: float) -> None:
        ready, say = os.pipe()
        # until the child has its own handlers, a signal to it would run this process's handlers and be lost
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        pid = os.fork()
        if not pid:
            os.close(ready)
            self._run_child(child, say)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        os.close(say)
        child.record_fork(pid, ready, deadline)

    def _run_child(self, child: ChildServer, say: int) -> None:
        """Run the forked child. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            os.close(self._life)
            os.close(self._wake)
            self._channel.close()
            code = run_server(child.name, self._system, self._lifeline, say, child.build)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    # ------------------------------------------------------------ watching

    def _watch(self, until: Callable[[], bool]) -> None:
        """Supervise the servers until the condition holds. Raises _ShutdownReason when the system must stop."""
        while not until():
            self._check_end()
            poll = select.poll()
            watched = [self._wake, None if self._starter is None or self._orphaned else self._starter.descriptor]
            for descriptor in [*watched, *(child.ready for child in self._children)]:
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            readable = [descriptor for descriptor, _ in poll.poll(self._poll_timeout())]
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            for child in [child for child in self._children if child.ready in readable]:
                self._read_report(child)
            self._check_children()
            self._check_times()

    def _poll_timeout(self) -> float | None:
        """Return the milliseconds to wait at most; None for no limit."""
        times = [child.deadline for child in self._children if child.ready is not None]
        times += [child.due for child in self._children if child.due is not None]
        waits = [max(0.0, when - time.monotonic()) for when in times]
        if self._starter is not None and (self._orphaned or self._starter.descriptor is None):
            waits.append(WATCH_SECONDS)
        return min(waits) * 1000 + 1 if waits else None

    def _check_end(self) -> None:
        if self._is_stop_requested:
            raise _ShutdownReason("it received SIGTERM")
        if self._starter is not None and self._starter.has_ended():
            now = time.monotonic()
            self._orphaned = self._orphaned or now
            if self._start.heirs and now < self._orphaned + self._start.heirs:
                self._look_for_heir()
            else:
                raise _ShutdownReason(f"its starter, process {self._starter.pid}, has ended")

    def _look_for_heir(self) -> None:
        """Continue with the process that replaces the dead starter, if there is one."""
        assert self._starter is not None
        heir_process = self._system.read_heir()
        if heir_process is None or heir_process[0] == self._starter.pid:
            return
        heir = processes.Process(*heir_process)
        if heir.has_ended():
            heir.close()
            return
        logger.info("the supervisor: process %d replaces the starter, process %d", heir.pid, self._starter.pid)
        self._starter.close()
        self._starter, self._orphaned = heir, None

    def _read_report(self, child: ChildServer) -> None:
        child.read_report()
        if child.failed and not self._is_up:
            report = child.report.decode("utf-8", "replace")
            report = report or "it ended without a message; its log:\n" + log_tail(self._system, child.name)
            raise _ShutdownReason(f"the {child.name} could not be started:\n{report}")
        if child.is_up and self._is_up:
            logger.warning("the supervisor restarted the %s: it is up again, process %d", child.name, child.pid)

    def _check_children(self) -> None:
        """Handle the servers whose processes have ended."""
        ended = self._reap()
        if ended and self._is_up and self._is_replaced():
            raise _ShutdownReason("another node has taken over its controller")
        lost = []
        for child, pid, code in ended:
            while child.ready is not None:  # a message that it sent before its end says more than its exit code
                self._read_report(child)
            how, again = _describe_exit(code), child.record_end(code)
            if not child.needed():
                logger.info("the %s, process %d, %s, because it has nothing to do any more", child.name, pid, how)
                self._children.remove(child)
                child.refuse_connections()
                continue
            with contextlib.suppress(OSError), open(self._system.log(child.name), "a", opener=no_link) as log:
                log.write(f"the {child.name}, process {pid}, {how}\n")
            logger.error("the %s, process %d, %s; its log: %s", child.name, pid, how, self._system.log(child.name))
            if self._is_up and not child.is_essential:
                if not again:
                    logger.error("the supervisor gives up the %s: %s", child.name, how)
            elif not (self._is_up and child.restarts):
                lost.append(f"the {child.name} {how}")
            elif not again:
                assert child.failing_since is not None
                seconds = time.monotonic() - child.failing_since
                lost.append(
                    f"the {child.name} {how}: it could not be started for {seconds:.1f} s, in {child.failures} "
                    f"attempts (timeouts.restart: {child.patience:g})"
                )
        if lost:
            raise _ShutdownReason(" and ".join(lost), crashed=True)

    def _is_replaced(self) -> bool:
        """Whether the controller of another node has begun a later term. Its units count as lost there."""
        try:
            return self._folders.term is not None and not self._folders.term.is_current()
        except OSError:  # the storage does not answer
            return False

    def _check_times(self) -> None:
        """Fork the servers that are due, and kill those that did not come up in time."""
        now = time.monotonic()
        for child in self._children:
            if child.due is not None and child.due <= now:
                self._fork(child, now + self._start.seconds)
            elif child.ready is not None and child.deadline < now:
                problem = f"the {child.name} was not up within {self._start.seconds:.1f} s"
                if not self._is_up:
                    message = f"{problem}; its log:\n{log_tail(self._system, child.name)}"
                    if child.name != "controller" and not self._start.seat.controller:
                        message += f"\nand the log of the controller:\n{log_tail(self._system, 'controller')}"
                    raise _ShutdownReason(message)
                logger.error("%s; the supervisor kills it and tries again", problem)
                child.close()
                if child.pid is not None:
                    os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> list[tuple[ChildServer, int, int]]:
        """Return the children whose processes have ended, with the ids and exit codes of these processes."""
        ended = []
        for child in self._children:
            if child.pid is not None:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    ended.append((child, child.pid, os.waitstatus_to_exitcode(status)))
        return ended

    # ------------------------------------------------------------ ending

    def _fail(self, reason: str) -> None:
        """Report the reason to the launcher, if it still listens."""
        with contextlib.suppress(OSError):
            launcher_protocol.send(self._channel, launcher_protocol.StartFailure(reason), RECEIVE_SECONDS)
        self._channel.close()

    def _end(self, has_crashed: bool) -> None:
        """Stop every process and remove every file; after a crash, keep the logs."""
        self._system.description.unlink(missing_ok=True)  # from now on no process finds the system
        if self._is_stop_requested and self._is_up:
            self._folders.mark_stopped()
        for listener in self._listeners:
            listener.close()
        for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, TERM_SECONDS)):
            for pid in self._pids():
                os.kill(pid, number)
            self._wait_for_children(seconds)
        if self._pids():
            logger.error("the supervisor sent SIGKILL, but processes %s have not ended", self._pids())
        if has_crashed:
            self._system.remove_all_but_logs()
        else:
            self._system.remove()
        if self._system.lock.exists():
            # removes the lock of a starter that was killed; any other holder removes its lock itself
            with contextlib.suppress(StartError), StartLock(self._system.lock, 0.0):
                pass

    def _pids(self) -> list[int]:
        return [child.pid for child in self._children if child.pid is not None]

    def _wait_for_children(self, seconds: float) -> None:
        """Wait until all children have ended, for at most this many seconds."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        limit = time.monotonic() + seconds
        while True:
            for child, pid, code in self._reap():
                child.pid = None
                logger.info("the %s, process %d, %s", child.name, pid, _describe_exit(code))
            left = limit - time.monotonic()
            if not self._pids() or left <= 0:
                return
            if poll.poll(left * 1000):
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)


def _describe_exit(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def log_tail(system: SystemFolder, server: str) -> str:
    """Return the last lines of a server's log."""
    try:
        with open(system.log(server), encoding="utf-8", errors="replace", opener=no_link) as file:
            return "".join(file.readlines()[-40:])
    except OSError as error:
        return f"({error})"


def main() -> None:
    """Run the supervisor in this process."""
    with contextlib.suppress(OSError):
        os.setsid()
    os.umask(0o077)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(CHANNEL + 1, min(soft, 1 << 20))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    configure_logging()
    channel = socket.socket(fileno=CHANNEL)
    channel.set_inheritable(False)
    try:
        start = launcher_protocol.receive(channel, launcher_protocol.StartRequest, RECEIVE_SECONDS)
        if start.heirs and os.fork():
            os._exit(0)  # the supervisor must outlive its starter, so it must not be the starter's child
        supervisor = Supervisor(start, channel)
    except (EOFError, TimeoutError, StartError):
        logger.exception("the supervisor did not start a system")
        sys.exit(1)
    supervisor.run()


if __name__ == "__main__":
    main()
