"""Every request to a controller has one handler, and every record one applier."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from transfer_queue.core.configuration import CoreConfig
from transfer_queue.core.controller import RECORDS, Controller
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Send
from transfer_queue.core.events.registry import APPLIERS, HANDLERS, READS, applies, handles
from transfer_queue.messages.base import Failure
from transfer_queue.messages.checkpoints import FetchState, SendState
from transfer_queue.messages.envelopes import AnyRequest, RequestEnvelope
from transfer_queue.messages.reports.overview import MeasureServers, ShowViews
from transfer_queue.messages.reports.store_reports import CheckExtents, CheckStore
from transfer_queue.messages.reports.unit_reports import (
    BlockMissing,
    DrainFinished,
    Measure,
    Measured,
    Move,
    RefuseWriters,
    ReleaseExtents,
    RemoveArena,
)
from transfer_queue.messages.storage import (
    CacheBlocks,
    LeaseExtent,
    OpenSlot,
    ReadPieces,
    ReturnExtent,
    UnitStatus,
    WriteBytes,
)
from transfer_queue.messages.system import UseSampler
from transfer_queue.sampler import SequentialSampler

TO_UNITS = {
    DrainFinished,
    ReleaseExtents,
    RemoveArena,
    CacheBlocks,
    CheckExtents,
    CheckStore,
    LeaseExtent,
    Measure,
    BlockMissing,
    Move,
    OpenSlot,
    ReadPieces,
    RefuseWriters,
    ReturnExtent,
    UnitStatus,
    WriteBytes,
}
"""Requests that storage units take."""
TO_THE_PROCESS = {FetchState, Measured, MeasureServers, SendState, ShowViews, UseSampler}
"""Requests that the process around the controller carries out."""


def test_every_request_to_the_controller_has_a_handler():
    assert Controller.__module__ == "transfer_queue.core.controller"  # its import registers the handlers
    assert set(HANDLERS) == set(get_args(AnyRequest)) - TO_UNITS - TO_THE_PROCESS


def test_every_record_has_an_applier():
    declared = {kind for kind in vars(r).values() if isinstance(kind, type) and issubclass(kind, r.Record)}
    assert set(RECORDS) == set(APPLIERS) >= declared - {r.Record}


def test_every_request_that_only_reads_has_a_handler():
    assert set(HANDLERS) > READS > set()


@pytest.mark.parametrize(("table", "register"), [(HANDLERS, handles), (APPLIERS, applies)], ids=["handler", "applier"])
def test_a_second_function_is_refused(table, register):
    for kind, registered in list(table.items()):
        with pytest.raises(ValueError, match=f"{kind.__name__} has two functions"):
            register(kind)(lambda *arguments: None)
        assert table[kind] is registered


def test_a_request_to_a_storage_unit_is_refused():
    request = LeaseExtent(*[0] * sum(field.required for field in msgspec.structs.fields(LeaseExtent)))
    controller = Controller(CoreConfig(SequentialSampler()))
    (effect,) = controller.handle("c", 1, RequestEnvelope(1, 0, request), 0.0)
    assert isinstance(effect, Send)
    assert effect.reply == Failure("ProtocolError", "LeaseExtent is not a request to a controller")
