"""A request or a reply on its way."""

from __future__ import annotations

from typing import Union

import msgspec

from transfer_queue.messages.base import Natural
from transfer_queue.messages.replies import (
    ChangeReply,
    ClaimReply,
    CutReply,
    Done,
    Failure,
    KeptReply,
    KeysReply,
    LeaseReply,
    LookupReply,
    PublishReply,
    SlotReply,
    SnapshotReply,
    StatusReply,
    SystemStatus,
    TopologyReply,
    UnitStatusReply,
)
from transfer_queue.messages.requests import (
    Ack,
    BeginCheckpoint,
    Cancel,
    CheckConsumption,
    CheckProduction,
    Claim,
    ClearKeys,
    ClearPartition,
    ClearRows,
    CloseExtents,
    ConsumptionStatus,
    CreatePartition,
    Drain,
    Drop,
    EndCheckpoint,
    Explain,
    FetchState,
    Finish,
    ListKeys,
    ListPartitions,
    LoadState,
    Lookup,
    Nack,
    NodeGone,
    ProductionStatus,
    Publish,
    RankGone,
    Renew,
    Reserve,
    ResetConsumption,
    RetrieveKeys,
    RetrieveMeta,
    Seal,
    SendState,
    SetPolicyVersion,
    Show,
    Status,
    TakeSnapshot,
    Topology,
    UseSampler,
    Want,
    Wanted,
    Watch,
)
from transfer_queue.messages.unit_requests import (
    Drained,
    ExtentsGone,
    Free,
    Freed,
    Keep,
    Lease,
    Measure,
    Measured,
    Missed,
    Move,
    Moved,
    OpenSlot,
    ReadPieces,
    Recalled,
    Refuse,
    RegisterUnit,
    Return,
    SpaceShort,
    UnitStatus,
    WriteBytes,
    WriterGone,
)

AnyRequest = Union[
    Topology, CreatePartition, Reserve, Publish, Claim, Show, RetrieveMeta, RetrieveKeys, Lookup, ListKeys,
    ListPartitions, ClearRows, ClearKeys, ClearPartition, ProductionStatus, ConsumptionStatus, CheckProduction,
    CheckConsumption, ResetConsumption, Seal, Explain, Status, CloseExtents, RegisterUnit, WriterGone, Cancel,
    Lease, OpenSlot, Return, UnitStatus, Free, Drop, Finish, SetPolicyVersion, Want, Wanted,
    SpaceShort, Refuse, Watch, Freed, BeginCheckpoint, EndCheckpoint, LoadState,
    Ack, Nack, Renew, RankGone,
    Move, Moved, Drain, Drained, Recalled, TakeSnapshot, UseSampler, ReadPieces, WriteBytes, NodeGone,
    ExtentsGone, Missed, Measure, Measured, Keep, FetchState, SendState,
]  # fmt: skip
AnyReply = Union[
    Failure, Done, TopologyReply, PublishReply, ClaimReply, LookupReply, StatusReply, SystemStatus, LeaseReply,
    SlotReply, UnitStatusReply, ChangeReply, CutReply, KeysReply, SnapshotReply, KeptReply,
]  # fmt: skip


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A request on its way. acknowledged: replies up to this sequence of the client are not needed again.

    finished: (first, last) sequences beyond `acknowledged` whose replies the client does not need any more either,
    because it has finished them while an older request still waits for its reply. An envelope names a run of sequences
    when it has grown. If that envelope is lost, the replies are dropped when `acknowledged` passes them.
    """

    sequence: Natural
    acknowledged: Natural
    body: AnyRequest
    finished: list[tuple[Natural, Natural]] = []


class Answer(msgspec.Struct, array_like=True, frozen=True):
    """A reply on its way."""

    sequence: int
    body: AnyReply
