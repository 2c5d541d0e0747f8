"""One client's attachment to its system: its session, what it knows of the system, and how it asks the controller.

A forked child never uses the attachment of its parent: `Attachment.after_fork` closes the inherited descriptors, and
the child's client makes a new one, with its own id, extents and locks.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from transfer_queue.client.conversion import arguments
from transfer_queue.client.data.device_copies import Devices
from transfer_queue.client.data.lease_renewal import Renewals
from transfer_queue.client.data.timeline_reader import TimelineReader
from transfer_queue.client.space import WriteSpace
from transfer_queue.client.tracing import find_tracer
from transfer_queue.client.units import SystemAddress, Units
from transfer_queue.config.environment import copy_threads
from transfer_queue.config.settings import Settings
from transfer_queue.errors import (
    AuthenticationError,
    ConnectionLostError,
    NotInitializedError,
    ProtocolError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done
from transfer_queue.messages.claims import ClaimReply, ReportBatches
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.messages.envelopes import AnyRequest
from transfer_queue.messages.queries import Lookup, LookupReply
from transfer_queue.messages.reports.timeline import Introduce, Leave
from transfer_queue.messages.system import Topology, TopologyReply
from transfer_queue.net.calls import CONTROLLER, Notice, Operation, Request, ask_controller
from transfer_queue.net.session import Session, Target
from transfer_queue.storage.arena.writer_locks import HeldSlot, hold_slot
from transfer_queue.system_folder.liveness import ClientLiveness
from transfer_queue.utils.logging_utils import get_logger
from transfer_queue.wire.blocks.encode import EncodedBlock
from transfer_queue.wire.buffers.copies import set_copy_threads

T = TypeVar("T")

MAX_WARNINGS = 1000
"""A client logs at most this many different warnings."""
UNCERTAIN = (ConnectionLostError, NotInitializedError, WaitTimeoutError, ProtocolError, AuthenticationError)
"""After these errors it is unknown whether a request was carried out. Any other error means that it was refused."""
MAX_REMEMBERED = 1024
"""The number of (partition, field) that a client remembers. A put of a forgotten one is refused once and repeated."""


class FieldKinds:
    """The known fields of one client. It logs each warning once for each field name, for all partitions together.

    Args:
        warn: Logs a message unless it has logged one about the same subject (`Attachment.warn`).
    """

    def __init__(self, warn: Callable[[str, str], None]) -> None:
        self._lock = threading.Lock()
        self._warn = warn
        self._tensors: dict[tuple[str, str], list[str]] = {}
        """(partition, field) -> dtypes, for fields that took values of this client as tensors. May be out of date."""

    def expect(self, partition: str, encoded: EncodedBlock) -> None:
        """Encode values as tensors that were taken as tensors in the last put. The controller refuses a wrong guess."""
        if self._tensors:
            names = [spec.name for spec in encoded.schema if spec.kind == "object"]
            known = {name: dtypes for name in names if (dtypes := self._tensors.get((partition, name))) is not None}
            if known:
                encoded.hold_as_tensors(known)

    def learn(self, partition: str, encoded: EncodedBlock) -> None:
        """Remember which fields took the values of a put as tensors."""
        if not self._tensors and not encoded.converted:
            return
        with self._lock:
            for spec in encoded.schema:
                if spec.name in encoded.converted:
                    self._tensors[partition, spec.name] = encoded.converted[spec.name]
                elif spec.kind == "object":
                    self._tensors.pop((partition, spec.name), None)
            while len(self._tensors) > MAX_REMEMBERED:
                self._tensors.pop(next(iter(self._tensors)))

    def warn_of_dtypes(self, partition: str, dtypes: Mapping[str, Sequence[str]]) -> None:
        """Log that rows of these fields differ in dtype. `dtypes` maps a field to the dtypes of its live rows."""
        for name, several in dtypes.items():
            self._warn(
                f"field {name!r} of partition {partition!r} has rows of {', '.join(several[:-1])} and "
                f"{several[-1]}: a get over rows of several dtypes returns the dtype of torch.promote_types. To "
                f"prevent this, convert the values before the put. (This client logs this once for each field.)",
                f"dtype of {name}",
            )

    def warn_of_ranks(self, partition: str, types: Sequence[FieldType]) -> None:
        """Log which fields of a get are no tensors because its rows differ in rank."""
        for field in types:
            if field.mixed_rank:
                self._warn(
                    f"field {field.name!r} of partition {partition!r}: the rows of a get differ in their number of "
                    f"dimensions, so the get returned them as a NonTensorStack, one tensor for each row. Gets of rows "
                    f"of one rank return a tensor. To prevent this, put rows of one rank: in the dict of a kv_put a "
                    f"tensor is the row itself, without a batch dimension. (This client logs this once for each "
                    f"field.)",
                    f"rank of {field.name}",
                )


class Attachment:
    """The attachment of one client id in one process.

    Args:
        system: The address of the system.
        client_id: The client id. Default: a new one.
        hold: Locks a slot file.
        introduction: See `Attachment.introduction`.
    """

    def __init__(
        self,
        system: SystemAddress,
        client_id: str | None = None,
        hold: Callable[[Path], HeldSlot] = hold_slot,
        introduction: Introduce | None = None,
    ) -> None:
        self.system = system
        self.introduction = Introduce("") if introduction is None else introduction
        """What `learn` sends to the controller, with the host and the pid of this process, so that reports name it."""
        self.client_id = client_id or uuid.uuid4().hex
        self.session = session = Session(
            self.client_id, system.key, self._resolve, log_of=system.log_of, alive=self._will_return, tls=system.tls
        )
        self.units = Units(system, session)
        """The storage units."""
        self.space = WriteSpace(self.units, session, system.node, hold)
        """The space into which this client writes."""
        self.devices = Devices(self.units, self.client_id)
        """The copies to and from devices."""
        self.renewals = Renewals(lambda: session.clock(), lambda: bool(session.notices))
        self.jitter = random.Random(self.client_id)
        """The random generator for the pauses between attempts, which must differ between clients."""
        self.timeline = TimelineReader(lambda: session.clock())
        """What this client knows of the timeline."""
        self.kinds = FieldKinds(self.warn)
        self.tracer = find_tracer()
        """Returns the tracer of OpenTelemetry for spans that begin now; None if no exporter would receive them."""
        self.config: dict[str, Any] = {}
        """The system's configuration; empty before `learn` has run."""
        self._lock = threading.Lock()
        self._settings: Settings | None = None
        self._presence: ClientLiveness | None = None
        self._marks: ClientLiveness | None = None
        """`_presence`, if the controller finds there what this client has handed over."""
        self._introduced: Introduce | None = None
        self._warned: set[str] = set()

    def _resolve(self, target: Target) -> str | tuple[str, int]:
        return self.system.controller if target == CONTROLLER else self.units.address(target[1])

    def _will_return(self, target: Target) -> bool | None:
        """Whether a server that cannot be reached will return; None for one on another node, where this is unknown.

        No server returns to a system that has ended.
        """
        if not self.system.will_return():
            return False
        return None if target != CONTROLLER and self.units.is_elsewhere(target[1]) else True

    # ------------------------------------------------------------ what the client knows

    @property
    def settings(self) -> Settings:
        """The system's settings. `learn` must have run."""
        if self._settings is None:
            raise NotInitializedError("the client has not reached its system yet")
        return self._settings

    @property
    def report_wait(self) -> float | None:
        """The system's `timeouts.report_wait`; None also before `learn` has run."""
        return None if self._settings is None else self._settings.report_wait

    def learn(self) -> Operation[None]:
        """Request units and settings, once."""
        if self._settings is not None:
            return
        reply = yield from ask_controller(Topology(), TopologyReply)
        config = msgspec.json.decode(reply.config)
        yield from self.introduce()
        with self._lock:
            if self._settings is None:
                self._presence = self.system.start_liveness(self.client_id)
                self.session.notices.on_add = self.renewals.note_notice
                self.system.follow_controller(self.session)
                settings = Settings.from_json(config["settings"])
                self.config = config
                self.session.grace = settings.call_timeout
                self.session.report_wait = settings.report_wait
                set_copy_threads(settings.copy_threads or copy_threads())
                self._marks = self._presence if settings.durability_folder is None else None
                self.units.begin(settings, reply.units)
                self.space.begin(settings)
                self._settings = settings

    def introduce(self) -> Operation[None]:
        """Send the introduction, unless this process has sent it."""
        introduction = self.introduction
        if introduction == self._introduced:
            return
        body = msgspec.structs.replace(introduction, host=socket.gethostname(), pid=os.getpid())
        yield Request(CONTROLLER, body)
        self._introduced = introduction

    def warn(self, message: str, subject: str = "") -> None:
        """Log a warning, unless this client has already logged the same one, or one about the same subject."""
        with self._lock:
            if (subject or message) in self._warned or len(self._warned) >= MAX_WARNINGS:
                return
            self._warned.add(subject or message)
        get_logger(__name__).warning("%s", message)

    # ------------------------------------------------------------ requests

    def ask(
        self, request: AnyRequest, kind: type[T], timeout: float | None, parked: float | None = None
    ) -> Operation[T]:
        """Return the reply to a request. The caller has validated `parked`, the wait of the request itself."""
        arguments.check_partition_id(getattr(request, "partition", ""))
        call = Request(CONTROLLER, request, parked, arguments.validated_seconds(timeout))
        if self._settings is None:
            yield from self.learn()
        reply = yield call
        if not isinstance(reply, kind):
            raise ProtocolError(f"the controller replied to {type(request).__name__} with {type(reply).__name__}")
        if isinstance(reply, (Done, ClaimReply)) and reply.warning is not None:
            self.warn(reply.warning)
        return reply

    def look_up(self, request: Lookup, timeout: float | None) -> Operation[LookupReply]:
        """Return the reply to a lookup, which names the units that this client prefers."""
        near, avoid = self.units.preferences()
        if near or avoid:
            request = msgspec.structs.replace(request, near=near, avoid=avoid)
        return self.ask(request, LookupReply, timeout)

    def note_handed_over(self, report: ReportBatches) -> bool:
        """Note that batches are handed over, so that the next request reports it. Returns False if it cannot wait.

        If the process dies before, the controller of the same node reads the note in the file of this client. A
        controller elsewhere, or one that may lose this file with the other processes, cannot.
        """
        if self._marks is None:
            return False
        for _, token in report.handed_over or report.finished:
            self._marks.note_handed_over(token)
        self.session.notices.add(report)
        return True

    # ------------------------------------------------------------ the end

    def leave(self, in_order: bool = True) -> Operation[None]:
        """Return every leased extent, and say that this client closes. A client sends these requests last.

        Args:
            in_order: False if it closes because of an error: then it counts as gone, like one whose process died.
        """
        if self._settings is not None:
            yield from self.space.return_extents()
            if in_order:
                yield Notice(ReportBatches(left=True))
                yield Request(CONTROLLER, Leave())

    def close(self) -> None:
        """Close connections and release the locks of slots."""
        self.devices.close()
        self.session.close()
        self.units.stores.close()
        self.space.release()
        if self._presence is not None:
            self._presence.end()

    def after_fork(self) -> None:
        """In a forked child: close inherited descriptors and forget connections."""
        self.session.after_fork()
        self.units.stores.after_fork()
        if self._presence is not None:
            self._presence.close_in_child()
