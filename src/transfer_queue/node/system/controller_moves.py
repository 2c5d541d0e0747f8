"""How servers and clients of a remote node follow the controller when another node takes it over.

The actor of the node writes the new place into the node's system folder (`SystemFolder.successor`). Whoever connects
reads it. A thread looks at it, too, because a controller that is frozen, or whose machine has no power, ends no
connection: it ends the connections to the former places, so that requests under way are sent again to the new one.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator
from typing import Union

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Topology
from transfer_queue.net.calls import CONTROLLER, Call
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import Pool
from transfer_queue.net.session import Session
from transfer_queue.node.system.paths import SystemFolder, host_and_port

LOOK_SECONDS = 0.25  # between two looks at the place of the controller
HELLO_SECONDS = 10.0  # for which an idle client tries to show the new controller that it is there

Address = Union[str, tuple[str, int]]
OnLook = Callable[[Collection[Address], bool], bool]
"""Called with the former addresses, and whether one was added. Returns whether to look again."""


def controller_address(system: SystemFolder, first: str) -> Address:
    """Return where the controller is now. first: the path or "host:port" of the first one."""
    place = system.read_controller_place()
    address = first if place is None else place.address
    return address if address.startswith("/") else host_and_port(address)


def watch_controller(system: SystemFolder, first: str, look: OnLook) -> None:
    """Call `look` in a thread every LOOK_SECONDS, until it returns False."""
    threading.Thread(target=_watch, args=(system, first, look), name="follow controller", daemon=True).start()


def move_session(session: Session, system: SystemFolder, first: str) -> None:
    """Move the requests of a session to the next controller when another node takes over, until it is closed."""
    followed = weakref.ref(session)

    def look(former: Collection[Address], moved: bool) -> bool:
        session = followed()
        if session is None or session.closed:
            return False
        if former:
            session.transport(Pool).end_connections(former)
        if moved:
            # an idle client without a connection would count as gone after the reconnect grace
            with contextlib.suppress(TransferQueueError):
                run_blocking(session, _say_hello())
        return True

    watch_controller(system, first, look)


def _say_hello() -> Generator[Call, AnyReply, None]:
    yield Call(CONTROLLER, Topology(), within=HELLO_SECONDS)


def _watch(system: SystemFolder, first: str, look: OnLook) -> None:
    former: set[Address] = set()
    known = controller_address(system, first)
    while True:
        now = controller_address(system, first)
        moved = now != known
        if moved:
            former.add(known)
            former.discard(now)
            known = now
        if not look(former, moved):
            return
        time.sleep(LOOK_SECONDS)
