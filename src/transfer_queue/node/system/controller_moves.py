"""How servers and clients of a remote node follow the controller when another node takes it over.

The actor of the node writes the new place into the node's system folder (`SystemFolder.successor`). Whoever connects
reads it. A thread looks at it, too, because a controller that is frozen, or whose machine has no power, ends no
connection: it ends the connections to the former places, so that requests under way are sent again to the new one. The
same is true of the storage units of that node. When the new controller knows that they are lost, the thread of
a client ends the connections to them, so that their users learn it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Collection, Generator

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.descriptors import UnitInfo
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Call, Request
from transfer_queue.net.drivers.blocking_driver import run_blocking
from transfer_queue.net.drivers.connection import Address, Pool
from transfer_queue.net.session import Session
from transfer_queue.system_folder.paths import SystemFolder, host_and_port

LOOK_SECONDS = 0.25  # between two looks at the place of the controller
HELLO_SECONDS = 10.0  # for which a client waits for the new controller to answer a look at its units
LOST_SECONDS = 60.0  # after a takeover, in which the new controller may learn that units are lost

OnLook = Callable[[Collection[Address], bool], bool]
"""Called with the former addresses, and whether one was added. Returns whether to look again."""


def controller_address(system: SystemFolder, first: str) -> Address:
    """Return where the controller is now. first: the path or "host:port" of the first one."""
    place = system.read_controller_place()
    address = first if place is None else place.address
    return address if address.startswith("/") else host_and_port(address)


def watch_controller(system: SystemFolder, first: str, look: OnLook) -> None:
    """Call `look` in a thread every LOOK_SECONDS, until it returns False. It reports moves from this call on."""
    known = controller_address(system, first)
    threading.Thread(target=_watch, args=(system, first, known, look), name="follow controller", daemon=True).start()


def move_session(session: Session, system: SystemFolder, first: str) -> None:
    """Move the requests of a session to the next controller when another node takes over, until it is closed."""
    followed = weakref.ref(session)
    looks_until = 0.0

    def look(former: Collection[Address], moved: bool) -> bool:
        nonlocal looks_until
        session = followed()
        if session is None or session.closed:
            return False
        pool = session.transport(Pool)
        if former:
            pool.end_connections(former)
        if moved:
            looks_until = time.monotonic() + LOST_SECONDS
        if time.monotonic() < looks_until:
            # The first request also shows the new controller that this client is there: an idle client without a
            # connection would count as gone after the reconnect grace.
            with contextlib.suppress(TransferQueueError):
                units = run_blocking(session, _ask_for_units())
                used = {unit.address for unit in units} | {host_and_port(unit.remote) for unit in units if unit.remote}
                pool.end_connections(pool.addresses - used - {controller_address(system, first)})
        return True

    watch_controller(system, first, look)


def _ask_for_units() -> Generator[Call, AnyReply, list[UnitInfo]]:
    reply = yield Request(CONTROLLER, Topology(), within=HELLO_SECONDS)
    assert isinstance(reply, TopologyReply)
    return reply.units


def _watch(system: SystemFolder, first: str, known: Address, look: OnLook) -> None:
    former: set[Address] = set()
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
