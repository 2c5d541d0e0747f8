"""A checkpoint of several controllers that is one consistent cut, and its load: the archivist of a run.

Save: hold all controllers, let each write its state, release all. If each says that it was held until then, all were
held at the moment at which the last one began to be, and no state changed around it. The values are copied afterwards.

Load: write the values of all states, hold all controllers without a limit, let each load its state, release all. From
the first load on there is no way back: a client that comes after a killed one finishes the load (`Archive.intent`).
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tests.simulation.many_controllers.routing_client import RoutingClient
from tests.simulation.retrying_client import RetryingClient, Script, sleep
from transfer_queue.client.checkpoint.checkpoint_folder import STATE
from transfer_queue.errors import CheckpointError, TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.many_controllers.run import ManyWorkload

HOLD_SECONDS = 2.0  # after which a controller ends the hold of a save by itself
WITHIN = 5.0  # seconds for an operation


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint. number: The time that identifies its cut in the ledger. gates: Who owned what."""

    number: float
    folder: Path
    gates: list[Any]

    def ownership(self, member: int) -> dict[str, Any]:
        """Return what a controller owns after a load. A move that was not decided in the cut did not happen.

        Otherwise a client could show the ticket of a decision that the load has undone.
        """
        decided = {
            (name, ticket["owner"], ticket["move"])
            for ownership, _ in self.gates
            for name, ticket in ownership["given"].items()
        }
        saved = self.gates[member][0]
        incoming = {name: move for name, move in saved["incoming"].items() if (name, member, move) in decided}
        return {**saved, "incoming": incoming}

    def of(self, member: int) -> Path:
        """Return the folder with the part of a controller."""
        return self.folder / f"controller-{member}"


class Archive:
    """The checkpoints of a run, and the load that must be finished.

    saves, loads: How many were complete. refused: How many saves ended because a hold did not last.
    """

    def __init__(self) -> None:
        self.saved: list[Saved] = []
        self.intent: Saved | None = None
        self.saves = self.loads = self.refused = 0
        self._names = 0

    def new_name(self, client: str) -> str:
        """Return a name for a hold."""
        self._names += 1
        return f"{client}/{self._names}"


def archivist(work: ManyWorkload) -> Script:
    """Return a script that saves checkpoints and sometimes loads one. It first finishes the load of a killed client."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        whole = cast(RoutingClient, client)
        yield from _take_over(work, whole)
        while not work.closing:
            yield from work.pause(1.5)
            with contextlib.suppress(TransferQueueError):
                if work.archive.saved and work.draw.random() < 0.4:
                    yield from _load(work, whole, work.draw.choice(work.archive.saved[-2:]))
                else:
                    yield from _save(work, whole)

    return script


def hold_all(client: RoutingClient, cut: str, seconds: float | None) -> Operation[bool]:
    """Hold all controllers; return whether that succeeded."""
    for part in client.parts:
        if not (yield from part.order("hold", cut, seconds)):
            return False
    return True


def release_all(client: RoutingClient, cut: str) -> Operation[bool]:
    """Release all controllers; return whether all were held until now."""
    held = True
    for part in client.parts:
        try:
            held &= yield from part.order("release", cut)
        except TransferQueueError:
            held = False
    return held


def _save(work: ManyWorkload, client: RoutingClient) -> Operation[None]:
    archive = work.archive
    cut = archive.new_name(client.name)
    number = float(len(work.ledger._cuts) + 1)
    begun: list[Any] = []
    error: TransferQueueError | None = None
    gates = []
    try:
        if (yield from hold_all(client, cut, HOLD_SECONDS)):
            work.ledger.cut(number)
            for part in client.parts:
                gates.append((yield from part.order("describe")))
                begun.append((yield from client.through(part, part.operations.begin_checkpoint(timeout=HOLD_SECONDS))))
    except TransferQueueError as raised:
        error = raised
    held = yield from release_all(client, cut)
    folder = client.many.folder / f"checkpoint-{number}"
    saved = Saved(number, folder, gates)
    whole = held and len(begun) == len(client.parts)
    archive.refused += not held
    for index, (part, save) in enumerate(zip(client.parts, begun, strict=False)):
        previous = archive.saved[-1].of(index) if archive.saved else None
        try:
            if whole:
                operations, target = part.operations, saved.of(index)
                yield from client.through(part, operations.save_storage_checkpoint(target, cut=save, previous=previous))
                yield from client.through(part, operations.save_controller_checkpoint(target / STATE, cut=save))
        except TransferQueueError as raised:
            whole, error = False, raised
        try:
            whole &= yield from client.through(part, part.operations.end_checkpoint(save, timeout=WITHIN))
        except TransferQueueError as raised:
            whole, error = False, raised
    if whole:
        archive.saves += 1
        archive.saved.append(saved)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    if error is not None:
        raise error


def _load(work: ManyWorkload, client: RoutingClient, saved: Saved) -> Operation[None]:
    """Load a checkpoint into all controllers, or into none."""
    yield from _write_values(client, saved)
    cut = work.archive.new_name(client.name)
    try:
        held = yield from hold_all(client, cut, None)
    except TransferQueueError:
        held = False
    if held:
        work.archive.intent = saved
        yield from _finish_load(work, client, cut)
    else:
        yield from _release(client, cut)


def _write_values(client: RoutingClient, saved: Saved) -> Operation[None]:
    for index, part in enumerate(client.parts):
        operation = part.operations.load_storage_checkpoint(saved.of(index), timeout=WITHIN)
        yield from client.through(part, operation)


def _finish_load(work: ManyWorkload, client: RoutingClient, cut: str) -> Operation[None]:
    """Load the states into the controllers, which are all held, again and again until all have loaded theirs."""
    saved = work.archive.intent
    assert saved is not None
    first = True
    while True:
        try:
            if not first:
                yield from _write_values(client, saved)
            first = False
            work.begin_load(saved)
            highest = max(moves for _, moves in saved.gates)
            for part in client.parts:
                highest = max(highest, (yield from part.order("describe"))[1])
            for index, part in enumerate(client.parts):
                path = saved.of(index) / STATE
                yield from part.order("restore", saved.ownership(index), highest)
                yield from client.through(part, part.operations.load_controller_checkpoint(path, timeout=WITHIN))
        except TransferQueueError as error:
            if isinstance(error, CheckpointError) and not work.load_began():
                break  # nothing was changed
            yield from sleep(work.draw.uniform(0.01, 1.0))
        else:
            work.archive.loads += 1
            break
    work.archive.intent = None
    yield from _release(client, cut)


def _release(client: RoutingClient, cut: str) -> Operation[None]:
    """End the holds of a load, which do not end by themselves."""
    for part in client.parts:
        while True:
            try:
                yield from part.order("release", cut)
            except TransferQueueError:
                yield from sleep(0.1)
            else:
                break


def _take_over(work: ManyWorkload, client: RoutingClient) -> Operation[None]:
    """Finish the load of a killed client, or end its holds."""
    cut = work.archive.new_name(client.name)
    while True:
        try:
            if (yield from hold_all(client, cut, None)):
                break
        except TransferQueueError:
            pass
        yield from sleep(0.1)
    if work.archive.intent is not None:
        yield from _write_again(work, client)
        yield from _finish_load(work, client, cut)
    else:
        yield from _release(client, cut)


def _write_again(work: ManyWorkload, client: RoutingClient) -> Operation[None]:
    assert work.archive.intent is not None
    while True:
        try:
            yield from _write_values(client, work.archive.intent)
        except TransferQueueError:
            yield from sleep(work.draw.uniform(0.01, 1.0))
        else:
            return
