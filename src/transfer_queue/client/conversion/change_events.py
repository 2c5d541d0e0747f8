"""PartitionChange: the changes of a partition, and the events of which they consist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transfer_queue.client.conversion import replies
from transfer_queue.messages.queries import ChangeReply


@dataclass(frozen=True)
class SampleChange:
    """One event of a subscription: a sample has changed or was cleared.

    Example:
        >>> put = client.kv_put("a", "train_0", tag={"status": "done"})
        >>> [event] = client.wait_for_change("train_0").events()
        >>> event.key, event.tag, event.kind
        ('a', {'status': 'done'}, 'changed')
    """

    key: str | None
    """The key of the sample; None if it has none."""
    global_index: int
    """The global index of the sample; -1 if `kind` is "incomplete"."""
    tag: dict[str, Any]
    """The present tag of the sample; {} if it was cleared."""
    version: int
    """The partition version of the change. `subscribe(since=version - 1)` begins with the events of this version."""
    kind: str = "changed"
    """"changed": the sample got fields, tags or a key. "cleared": it was cleared.

    "incomplete": more samples were cleared since the last event than the system remembers, so some of them have no
    event. `kv_list` returns what is left.
    """


@dataclass(frozen=True)
class SampleLoss:
    """Values of a sample were lost with their storage unit: it does not have these fields any more.

    Values that are put again exist again.

    Example:
        >>> tq.SampleLoss(key="a", global_index=4, fields=["prompt"], version=7).fields
        ['prompt']
    """

    key: str | None
    """The key of the sample; None if it has none."""
    global_index: int
    """The global index of the sample."""
    fields: list[str]
    """The fields that were lost."""
    version: int
    """The partition version at which the loss was reported."""


@dataclass(frozen=True)
class PartitionChange:
    """The changes that `wait_for_change` returns. It is falsy if nothing changed in the given time.

    Each sample that changed appears once, with its newest tag, in the order of the last changes. Remove the cleared
    samples from a copy of the partition before you add the changed ones, because a key may have been put again.

    Example:
        >>> put = client.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
        >>> change = client.wait_for_change("train_0")
        >>> change.keys, change.sealed
        (['a', 'b'], False)
    """

    version: int
    """The partition version, for `since=` of the next call; -1 if the partition does not exist."""
    changed: bool
    """True if anything changed."""
    global_indexes: list[int]
    """The global indexes of the samples that changed."""
    keys: list[str | None]
    """Their keys; None for a sample without a key."""
    versions: list[int]
    """The partition versions of their last changes, ascending."""
    tags: list[dict[str, Any]]
    """Their present tags."""
    cleared_indexes: list[int]
    """The global indexes of the samples that were cleared."""
    cleared_keys: list[str | None]
    """Their keys; None for a sample without a key."""
    cleared_versions: list[int]
    """The partition versions at which they were cleared."""
    sealed: bool
    """True if the partition is sealed."""
    dropped: bool
    """True if the partition was removed."""
    complete: bool
    """False if more samples were cleared than the system remembers. `kv_list` returns what is left."""
    lost: list[SampleLoss] = field(default_factory=list)
    """The samples that lost values and did not get them again."""

    def __bool__(self) -> bool:
        return self.changed

    def events(self) -> Iterator[SampleChange]:
        """Iterate over the changes, sample by sample, in the order in which they happened.

        Yields:
            The events.

        Example:
            >>> put = client.kv_batch_put(["a", "b"], "train_0", tags=[{"step": 1}, {"step": 2}])
            >>> [event.key for event in client.wait_for_change("train_0").events()]
            ['a', 'b']
        """
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
    """Return the changes that a reply contains."""
    rows, cleared = _numbers(reply.rows), _numbers(reply.cleared)
    return PartitionChange(
        version=reply.version,
        changed=reply.changed,
        global_indexes=rows,
        keys=reply.keys or [None] * len(rows),
        versions=_numbers(reply.versions),
        tags=replies.tag_list(reply.tags, len(rows), allow_pickle),
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
