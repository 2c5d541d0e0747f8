"""Requests about single samples: the report about one sample with its history, and the samples that are stuck.

All times are Unix seconds by the controller's wall clock.
"""

from __future__ import annotations

from typing import Any

from transfer_queue.messages.base import AnyIndex, Message, Natural, Reply, RequestBody, Seconds

LIVE, RESERVED, CLEARED, UNKNOWN = "live", "reserved", "cleared", "unknown"
"""The states of a sample: it has a value or a tag and can be read; no put has written it yet; it was cleared; the
partition or the sample does not exist, and nothing is known of it."""

CONSUMED, CLAIMED, READY, WAITING, SKIPPED = "consumed", "claimed", "ready", "waiting", "skipped"
"""The states of a sample for a task: the task has consumed it; it is in a batch under a lease, or not acknowledged; a
claim may take it; it lacks fields of the task's claims; the task is never dealt it."""

PUT, REPLACED, TAGGED, CLAIM, ACK, RETURNED, CLEAR, PARTITION_CLEAR = (
    "put", "replaced", "tagged", "claimed", "acknowledged", "returned", "cleared", "partition cleared"
)  # fmt: skip
"""What an event of a history is."""

CLEARS = frozenset({CLEAR, PARTITION_CLEAR})
"""Events after which the sample does not exist."""


class DescribeSample(RequestBody, frozen=True):
    """Ask for a page of the report about one sample, named by global index or key. The reply is a `SampleReport`."""

    partition: str
    row: AnyIndex | None = None
    key: str | None = None
    before: Natural | None = None
    """`SampleReport.before` of the previous page: only older events are returned. None for the first page."""
    field: Natural = 0
    """`SampleReport.next_field` of the previous page: the page begins with this field."""


class SampleField(Message, frozen=True):
    """One field of a sample that has a value."""

    name: str
    """The name of the field."""
    kind: str
    """"tensor", "object" or "nested"."""
    dtype: str
    """The dtype of a tensor, as `float32`; otherwise "object"."""
    shape: list[int] | None
    """The shape of the sample's value; None for an object, and for further fields of a sample with very many."""
    nbytes: int | None
    """The bytes of the value; None if they are not known."""
    unit: int
    """The storage unit of the value."""
    tier: str
    """Where that unit stores it: "memory", "disk" or "store"."""
    block: int
    """The number of the block that contains the value."""
    copy_unit: int = -1
    """The storage unit of a copy; -1 if the block has no copy."""
    client: str = ""
    """The client that put the value; "" if it is not known any more."""
    task: str = ""
    """The task of that client; "" if it is not known."""
    rank: int = -1
    """Its rank; -1 if it is not known."""
    time: float | None = None
    """When the value was put; None if it is not known any more."""
    host: str = ""
    """The host of the client's process; "" if it is not known."""
    pid: int = 0
    """The id of that process; 0 if it is not known."""


class SampleTask(Message, frozen=True):
    """The state of a sample for one task."""

    name: str
    """The name of the task."""
    state: str
    """"consumed", "claimed", "ready", "waiting" or "skipped"."""
    lacks: list[str] = []
    """The fields that the claims of the task ask for and the sample does not have."""
    client: str = ""
    """The client that has the sample, or had it last; "" if it is not known."""
    rank: int = -1
    """The rank of the claim, or of the dealt batch; -1 without a rank."""
    batch_index: int = -1
    """The index of the dealt batch; -1 if no kept batch contains the sample."""
    leased: bool = False
    """Whether the sample is under a lease now."""
    time: float | None = None
    """When it was claimed last; None if it is not known any more."""
    deliveries: int = 0
    """The number of deliveries that ended without an acknowledgement."""
    reason: str = ""
    """Why the task skips the sample; "" if it does not."""
    host: str = ""
    """The host of the client's process; "" if it is not known."""
    pid: int = 0
    """The id of that process; 0 if it is not known."""


class SampleMember(Message, frozen=True):
    """A sample of a group."""

    index: int
    """The global index."""
    key: str | None
    """The key, if it has one."""
    lacks: int
    """The number of the partition's fields that it does not have; 0: it is complete."""


class SampleGroup(Message, frozen=True):
    """The group of a sample."""

    key: str | None
    """The group id; None for a group by order of reservation."""
    size: int | None
    """The number of samples of a complete group; None if it is not known."""
    members: list[SampleMember]
    """The members that exist, in the order in which they joined; the first 64 of them."""
    count: int
    """The number of members that exist."""
    cleared: int = 0
    """The number of members that were cleared."""


class SampleEvent(Message, frozen=True):
    """One event in the history of a sample."""

    time: float
    """When it happened."""
    kind: str
    """"put", "replaced" (some of its fields were put before), "tagged", "claimed", "acknowledged", "returned" (a lease
    ended without an acknowledgement), "cleared", or "partition cleared" (with all samples that the partition still had;
    if this is the only event of an incomplete history, the sample may have been cleared before)."""
    client: str
    """The client; "" for the controller itself."""
    task: str
    """The task of the client; "" if it is not known."""
    rank: int
    """Its rank; -1 if it is not known."""
    fields: list[str] = []
    """The fields that were put or claimed."""
    rows: int = 0
    """The number of samples of the event."""
    block: int = 0
    """The number of the block that was put; 0 if the event put no block."""
    host: str = ""
    """The host of the client's process; "" if it is not known."""
    pid: int = 0
    """The id of that process; 0 if it is not known."""


class SampleReport(Reply, frozen=True):
    """Everything that the controller knows of one sample, without its values.

    Example:
        >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)}, tag={"length": 3})
        >>> report = client.describe_sample("train_0", key="a")
        >>> report.state, report.tags, [(field.name, field.dtype, field.shape) for field in report.fields]
        ('live', {'length': 3}, [('prompt', 'float32', [3])])
        >>> [event.kind for event in report.history]
        ['put']
    """

    partition: str
    """The name of the partition."""
    state: str
    """"live", "reserved" (nothing was put into it yet), "cleared", or "unknown" (it does not exist)."""
    now: float
    """The time of the report."""
    index: int = -1
    """The global index; -1 if it is not known."""
    key: str | None = None
    """The key, if it has one."""
    tags: dict[str, Any] = {}
    """The tags."""
    group: SampleGroup | None = None
    """The group; None if it has none."""
    fields: list[SampleField] = []
    """The fields that have a value, in the order in which the partition first got them."""
    missing: list[str] = []
    """The fields that other samples of the partition have, and this one does not."""
    lost: list[str] = []
    """Those of the missing fields whose value was lost with its storage unit."""
    tasks: list[SampleTask] = []
    """Its state for each task that takes samples of the partition, by name."""
    history: list[SampleEvent] = []
    """The newest events, at most 32, the newest last. The controller keeps them only while its timeline does."""
    complete: bool = False
    """Whether the history has all events of the sample; otherwise older ones are not kept, or are too many."""
    explanation: str = ""
    """Why tasks do not get the sample, in sentences. See `TransferQueueClient.explain`."""
    before: int | None = None
    """For the next page: the events before this position are not read yet; None if all are."""
    next_field: int | None = None
    """For the next page: its first field; None if all fields are listed."""


class FindStuck(RequestBody, frozen=True):
    """Ask for a page of the unfinished samples that have not changed for some time. The reply is a `StuckPage`."""

    seconds: Seconds
    """The time in seconds."""
    partitions: list[str] | None = None
    """The partitions that are not examined yet; None for all."""
    made: Natural | None = None
    """`StuckPage.made` of the previous page; None for the first page."""
    start: Natural = 0
    """`StuckPage.start` of the previous page."""
    most: Natural = 1024
    """The number of samples of the reply."""


class StuckPage(Reply, frozen=True):
    """A page of the samples that are stuck: those of some rows of one partition."""

    now: float
    """The time of the reply."""
    partition: str = ""
    """The partition of these samples."""
    count: int = 0
    """The number of samples among these rows that are stuck."""
    rows: bytes = b""
    """The global indexes of the oldest of them, i8."""
    times: bytes = b""
    """When each of them changed last, f8; NaN: before the controller was started."""
    left: list[str] = []
    """The partitions that are not examined yet."""
    made: int | None = None
    """Identifies the first of these partitions; None if its examination has not begun."""
    start: int = 0
    """The chunk of the first of these partitions with which the next page begins."""


class StuckSample(Message, frozen=True):
    """A sample that is not finished and has not changed for some time."""

    partition: str
    """The name of the partition."""
    index: int
    """The global index."""
    key: str | None
    """The key, if it has one."""
    prompt: str
    """What it is grouped by: its group id, else the part that its key shares with others, else ""."""
    time: float | None
    """When its fields or tags changed last; None: before the controller was started."""
    client: str
    """The client that changed it last; "" if it is not known."""
    task: str
    """The task of that client; "" if it is not known."""
    rank: int
    """Its rank; -1 if it is not known."""
    missing: list[str]
    """The fields that other samples of the partition have, and this one does not."""
    tasks: list[SampleTask]
    """The tasks that have not consumed it, with what each of them lacks."""
    host: str = ""
    """The host of the client's process; "" if it is not known."""
    pid: int = 0
    """The id of that process; 0 if it is not known."""
    consumed: list[SampleTask] = []
    """The tasks that have consumed it, with the client that did."""


class StuckReport(Message, frozen=True):
    """The samples that are stuck, the oldest first.

    Example:
        >>> put = client.kv_put("a", "train_0", {"prompt": torch.zeros(3)})
        >>> put = client.kv_put("b", "train_0", {"prompt": torch.zeros(3), "answer": torch.zeros(3)})
        >>> [(sample.key, sample.missing) for sample in client.find_stuck(older_than=0).samples]
        [('a', ['answer'])]
    """

    now: float
    """The time of the report."""
    older_than: float
    """The seconds for which the samples have not changed."""
    total: int
    """The number of samples that are stuck."""
    partitions: dict[str, int]
    """Partition -> the number of its samples that are stuck."""
    samples: list[StuckSample]
    """The oldest of them, those of a prompt together."""
