"""RoutingClient: a client of several controllers, which sends each operation to the owner of its partition.

Per controller it has a part with its own session, space and leases. A script of the workload uses it like a client of
one controller. It remembers the owners that it has learnt; a controller that does not own a partition refuses it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tests.simulation.many_controllers.gate import refusal_of
from tests.simulation.many_controllers.member_client import MemberClient
from tests.simulation.retrying_client import RetryingClient, sleep
from transfer_queue.client.operations.operations import Operations
from transfer_queue.errors import InvalidArgumentError, TransferQueueError
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.metadata import BatchMeta
from transfer_queue.net.calls import Call, Operation
from transfer_queue.testing.simulated_client import Task

if TYPE_CHECKING:
    from tests.simulation.faulty_cluster import FaultyCluster
    from tests.simulation.many_controllers.many_cluster import ManyCluster

T = TypeVar("T")

AGAIN_SECONDS = 0.05  # after a refusal
PATIENCE = 5.0  # seconds of refusals until an operation without a timeout fails
NAMED = ("partition_id", "partitions")  # the arguments that name the partition of an operation
OF_A_BATCH = ("metadata", "meta")


@cache
def _signature(operation: str) -> inspect.Signature:
    return inspect.signature(getattr(Operations, operation))


def partition_of(operation: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    """Return the partition of a call of an operation.

    Raises:
        InvalidArgumentError: It has several or none.
    """
    given = _signature(operation).bind(None, *arguments, **named).arguments
    for each in NAMED:
        if isinstance(given.get(each), str):
            return cast(str, given[each])
    batches = [value for value in given.values() if isinstance(value, BatchMeta)]
    names = sorted({name for batch in batches for name in batch.partition_ids})
    if len(names) != 1:
        raise InvalidArgumentError(f"{operation} needs samples of one partition, got {names}; split the batch")
    return names[0]


class RoutedOperations:
    """The operations of a client, each carried out by the owner of its partition."""

    def __init__(self, client: RoutingClient) -> None:
        self._client = client

    def __getattr__(self, operation: str) -> Callable[..., Operation[Any]]:
        def routed(*arguments: Any, **named: Any) -> Operation[Any]:
            name = partition_of(operation, arguments, named)
            return self._client.routed(
                name, lambda part: getattr(part.operations, operation)(*arguments, **named), named.get("timeout")
            )

        return routed


class RoutingClient(RetryingClient):
    """See the module. parts: One for each controller."""

    def __init__(self, many: ManyCluster, name: str) -> None:
        super().__init__(cast("FaultyCluster", many), name)
        self.many = many
        self.operations = cast(Any, RoutedOperations(self))
        self.parts: list[MemberClient] = [member.member_client(name) for member in many.members]
        for part in self.parts:
            part.whole = self
        self._owners: dict[str, int] = {}
        self._asking: MemberClient | None = None

    # ------------------------------------------------------------ routing

    def through(self, part: MemberClient, operation: Operation[T]) -> Operation[T]:
        """Carry out an operation of a part; its calls go to the controller of that part."""
        try:
            call = next(operation)
            while True:
                self._asking = part
                try:
                    reply = yield call
                except GeneratorExit:
                    raise
                except Exception as error:
                    call = operation.throw(error)
                else:
                    call = operation.send(reply)
        except StopIteration as end:
            return cast(T, end.value)

    def _ask(self, task: Task[Any], call: Call) -> None:
        part, self._asking = self._asking, None
        if part is None:
            super()._ask(task, call)
        else:
            part._ask(task, call)

    def routed(self, name: str, begin: Callable[[MemberClient], Operation[T]], timeout: float | None) -> Operation[T]:
        """Carry out an operation at the owner of a partition, which it learns from refusals."""
        limit = self.many.clock.now + (PATIENCE if timeout is None else timeout)
        while True:
            part = self.parts[self.owner_of(name)]
            try:
                return (yield from self.through(part, begin(part)))
            except TransferQueueError as error:
                refusal = refusal_of(error)
                if refusal is None or self.many.clock.now >= limit:
                    raise
            yield from self._learn(name, refusal)

    def owner_of(self, name: str) -> int:
        """Return the controller that owns a partition, as far as this client knows."""
        return self._owners.get(name, self.many.home_of(name))

    def _learn(self, name: str, refusal: dict[str, Any]) -> Operation[None]:
        """Learn the owner of a partition from a refusal, or wait."""
        if refusal["why"] == "moved":
            owner = refusal["owner"]
            if (yield from self.parts[owner].order("adopt", name, refusal["move"], within=1.0)):
                self._owners[name] = owner
                return
        if refusal["why"] == "moved":
            self._owners[name] = refusal["owner"]  # it may have given it away, too
        elif refusal["why"] == "unknown":
            self._owners.pop(name, None)
        yield from sleep(AGAIN_SECONDS)

    # ------------------------------------------------------------ all parts

    def freeze(self) -> None:
        """See `RetryingClient.freeze`."""
        if not self.frozen:
            super().freeze()
            for part in self.parts:
                part.freeze_part()

    def thaw(self) -> None:
        """See `RetryingClient.thaw`."""
        if self.frozen:
            for part in self.parts:
                part.thaw_part()
            super().thaw()

    def die(self) -> None:
        """See `RetryingClient.die`."""
        super().die()
        for part in self.parts:
            part.die()

    def return_extents(self) -> Operation[None]:
        """See `RetryingClient.return_extents`."""
        for part in self.parts:
            yield from self.through(part, part.return_extents())

    def leave(self) -> Operation[None]:
        """See `RetryingClient.leave`."""
        error: TransferQueueError | None = None
        for part in self.parts:
            try:
                yield from self.through(part, part.leave())
            except TransferQueueError as raised:
                error = raised
        if error is not None:
            raise error

    def close(self) -> None:
        """See `Client.close`."""
        for part in self.parts:
            part.close()


Script = Callable[[RoutingClient], Generator[Call, AnyReply, None]]
