"""The client of a run that moves partitions from one controller to another, while others use them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Generator
from typing import TYPE_CHECKING, cast

from tests.simulation.many_controllers.routing_client import RoutingClient
from tests.simulation.retrying_client import RetryingClient, Script
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, STATE, write_json
from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.net.calls import Call, Operation

if TYPE_CHECKING:
    from tests.simulation.many_controllers.run import ManyWorkload

FREEZE_SECONDS = 3.0
WITHIN = 2.0  # seconds for an operation


def relocator(work: ManyWorkload, names: list[str]) -> Script:
    """Return a script that moves these partitions between controllers at random."""

    def script(client: RetryingClient) -> Generator[Call, AnyReply, None]:
        while not work.closing:
            yield from work.pause(1.0)
            with contextlib.suppress(TransferQueueError):
                yield from move(work, cast(RoutingClient, client), work.draw.choice(names))

    return script


def move(work: ManyWorkload, client: RoutingClient, name: str) -> Operation[None]:
    """Move a partition to another controller. A client may be killed at any step; then the next move begins again."""
    source = client.owner_of(name)
    target = work.draw.choice([n for n in range(len(client.parts)) if n != source])
    giver, taker = client.parts[source], client.parts[target]
    number = yield from giver.order("freeze", name, FREEZE_SECONDS)
    if number is None:  # it does not exist, or is owned by another one, which a request finds
        yield from client.operations.kv_list(name, timeout=WITHIN)
        return
    if not (yield from taker.order("prepare", name, number, taker.next_sequence())):
        return
    folder = client.many.folder / f"move-{client.name}-{name}-{client.many.clock.now}"
    try:
        cut = yield from client.through(giver, giver.operations.begin_checkpoint(partitions=name, timeout=WITHIN))
        try:
            yield from client.through(giver, giver.operations.save_storage_checkpoint(folder, cut=cut))
            yield from client.through(giver, giver.operations.save_controller_checkpoint(folder / STATE, cut=cut))
        except TransferQueueError:
            yield from client.through(giver, giver.operations.end_checkpoint(cut, timeout=WITHIN))
            raise
        if not (yield from client.through(giver, giver.operations.end_checkpoint(cut, timeout=WITHIN))):
            return
        write_json(folder / METADATA, {"storage_saved": True, "user_metadata": {}, "partitions": [name]})
        yield from client.through(taker, taker.operations.load_samples(folder, name, timeout=WITHIN))
        if (yield from giver.order("give", name, number, target)):
            work.relocated += 1
            client._owners[name] = target
            yield from taker.order("adopt", name, number)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
