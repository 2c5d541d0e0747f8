"""What a client is told of the changes of a partition: `PartitionChange` and the events in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transfer_queue.client import replies
from transfer_queue.messages import ChangeReply


@dataclass(frozen=True)
class SampleChange:
    """One event of a subscription: a sample has changed, or was cleared.

    kind: "changed": this is its tag now; samples change when they get fields or tags, or a key. "cleared": it is gone.
    "incomplete": more samples were cleared since the last event than the system remembers, and some of them are told
    by no event; `kv_list` says what is left. Then there is no key, and global_index is -1.
    version: of the partition when that happened; `subscribe(since=version - 1)` begins with the events of this version.
    """

    key: str | None
    global_index: int
    tag: dict[str, Any]
    version: int
    kind: str = "changed"


@dataclass(frozen=True)
class SampleLoss:
    """Values of a sample were lost with the storage unit that held them: it does not have these fields any more.

    What is put again is there again. version: of the partition when it was told.
    """

    key: str | None
    global_index: int
    fields: list[str]
    version: int


@dataclass(frozen=True)
class PartitionChange:
    """What `wait_for_change` found; false where nothing changed in the time given.

    version: of the partition, for `since=` of the next call; -1 where there is none. global_indexes, keys,
    versions, tags: the samples that changed, each once with its newest tag, in the order of their last change and with
    the version at which it was. cleared_...: samples that are gone, to be taken off before the changed ones are put
    in, since a key may have been put anew. sealed: the partition is.
    dropped: the partition that was watched is no more. complete: False where more samples were cleared since than the
    system remembers; what else there is told by `kv_list`. lost: samples that lost values, and have not got them again.
    """

    version: int
    changed: bool
    global_indexes: list[int]
    keys: list[str | None]
    versions: list[int]
    tags: list[dict[str, Any]]
    cleared_indexes: list[int]
    cleared_keys: list[str | None]
    cleared_versions: list[int]
    sealed: bool
    dropped: bool
    complete: bool
    lost: list[SampleLoss] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.changed

    def events(self) -> Iterator[SampleChange]:
        """The same, sample by sample, in the order in which it happened."""
        if not self.complete:
            yield SampleChange(None, -1, {}, self.version, "incomplete")
        cleared = [
            SampleChange(key, index, {}, version, "cleared")
            for key, index, version in zip(self.cleared_keys, self.cleared_indexes, self.cleared_versions)
        ]
        changed = [
            SampleChange(key, index, tag, version)
            for key, index, tag, version in zip(self.keys, self.global_indexes, self.tags, self.versions)
        ]
        yield from sorted([*cleared, *changed], key=lambda event: event.version)


def partition_change(reply: ChangeReply, allow_pickle: bool) -> PartitionChange:
    """What a reply tells."""
    rows, cleared = _numbers(reply.rows), _numbers(reply.cleared)
    return PartitionChange(
        version=reply.version,
        changed=reply.changed,
        global_indexes=rows,
        keys=reply.keys or [None] * len(rows),
        versions=_numbers(reply.versions),
        tags=replies.tags(reply.tags, allow_pickle) or [{} for _ in rows],
        cleared_indexes=cleared,
        cleared_keys=reply.cleared_keys or [None] * len(cleared),
        cleared_versions=_numbers(reply.cleared_versions),
        sealed=reply.sealed,
        dropped=reply.dropped,
        complete=reply.complete,
        lost=_losses(reply),
    )


def _losses(reply: ChangeReply) -> list[SampleLoss]:
    rows = _numbers(reply.lost)
    lost = {name: np.frombuffer(which, "?") for name, which in reply.lost_fields.items()}
    return [
        SampleLoss(key, index, [name for name, which in lost.items() if which[at]], reply.version)
        for at, (index, key) in enumerate(zip(rows, reply.lost_keys or [None] * len(rows)))
    ]


def _numbers(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i8").tolist()  # type: ignore[no-any-return]
