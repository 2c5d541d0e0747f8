"""What the stream of the live page has, as JSON. `live.answers` has the answers to its questions.

Units: times are Unix seconds by the controller's clock, durations are seconds, sizes bytes, rates rows per second, and
shares go from 0 to 1. A name is text from users; it may contain anything. "" as a task is a client without a task.

The stream of `GET /api/live` consists of server-sent events. The first event is `full` with a `LiveView` that has all
parts. Each later event is `delta` with a `LiveView` that has `seq`, `now`, and the parts that have changed; an absent
part is unchanged. `full` may come again at any time: it replaces everything. A part in a `delta` replaces the previous
one, with two exceptions:

- `rates`: forget the points from the time of the first new one on and those older than 300 s; then append.
- `timeline`: for each lane that is named, cut its spans (or points) at `since`, then append. Forget lanes that are not
  in `order`, and everything that is older than 300 s.

An event `bye` with a `SystemState` says that the server ends; the page keeps what it shows and connects again.
"""

from __future__ import annotations

from typing import Any, Union

import msgspec
from msgspec import UNSET, Struct, UnsetType

HISTORY_SECONDS = 300.0
"""How much time `rates` and `timeline` cover."""
WINDOW_SECONDS = 60.0
"""The window of the rates and shares."""


class Part(Struct, frozen=True):
    """Base of all parts: a JSON object."""


class SystemInfo(Part, frozen=True):
    """The system, and what the page may show. It changes only if another system takes the place of this one."""

    name: str
    started: float
    """When the system was started."""
    describe: str
    """Who started it, in words."""
    version: str
    """The version of the package that serves the page."""
    values: bool
    """Whether `/api/sample` returns values, and the values of tags (`live.values`)."""
    window: float = WINDOW_SECONDS
    """The window of rates and shares."""
    history: float = HISTORY_SECONDS
    """How much time `rates` and `timeline` cover."""


class SystemState(Part, frozen=True):
    """Whether the data is up to date, and why not."""

    state: str
    """"live"; "empty": nothing was put yet; "restarting": the controller does not reply; "ended": the system ended;
    "snapshot": the page shows a file. If it is "restarting" or "ended", all other parts are the last known ones."""
    since: float
    """When the state began; if it is "restarting", the time of what is shown, which is `LiveView.now`; if "snapshot",
    when the file was saved."""
    words: str = ""
    """The reason or the next step, in words; "" if the system is live."""
    every: float = 1.0
    """The seconds between two events of the stream: 1, or 5 while the system or this process is overloaded."""


class VerdictView(Part, frozen=True):
    """`transfer_queue.Verdict`, in two parts of its text."""

    state: str
    """"starting", "flowing", "slow", "stopped" or "idle"."""
    text: str
    """The verdict in one sentence."""
    headline: str
    """The beginning of `text`: what is slow, or what the state is."""
    detail: str
    """The rest of `text`."""
    stage: Union[str, None] = None
    """The slowest task; None if nothing is slow, or if it is not a single task."""
    field: Union[str, None] = None
    """The field that is missing, which the slowest task puts."""
    last: str = ""
    """The task at the end of the pipeline which the rates of `LiveView.rates` and `LiveView.step` are about."""
    queue_rows: int = 0
    """The rows that queue before the slowest task."""
    since: Union[float, None] = None
    """See `transfer_queue.Verdict.since`."""
    cause: str = ""
    """Why it is slow, in words; "" if this is not known."""
    advice: str = ""
    """How many ranks it needs, in words; "" if this is not known."""


class RatePoint(Part, frozen=True):
    """Two seconds."""

    t: float
    """The end of the two seconds."""
    rows: float
    """The rows per second that the task at the end was dealt."""
    queue: float
    """The rows that queued at `t` before the slowest task, or before the task at the end if nothing is slow."""


class StepView(Part, frozen=True):
    """How far the task at the end is with the partition that it claims."""

    partition: str
    dealt: int
    """The rows that the task was dealt or has consumed so far."""
    rows: int
    """The rows of the partition so far, including cleared and reserved ones."""
    sealed: bool
    """Whether no more rows can come."""
    eta: Union[float, None]
    """The seconds until all are dealt, at the rate of the window; None if nothing is dealt, or more rows may come."""


class StepTime(Part, frozen=True):
    """A step of the training that has ended."""

    name: str
    """The policy version that ended it, such as "v42", or the partition that was claimed."""
    end: float
    seconds: float


class StepsView(Part, frozen=True):
    """How long the last steps of the training took."""

    by: str
    """"version": a step is the time from one policy version to the next. "partition": the time between the first claims
    of two partitions by `task`, if no policy version was set."""
    task: str
    """The task at the end."""
    steps: list[StepTime]
    """At most 32, the newest last."""
    since: Union[float, None]
    """When the current step began; None if it is not known."""


class TaskView(Part, frozen=True):
    """A task in the window. At most 16; what the others do is summed in one with the name "other" and `joined` > 0."""

    name: str
    ranks: int
    """The number of its ranks, those that are gone included."""
    alive: int
    """The number of those that are connected."""
    gone: int
    """The number of those that are gone."""
    takes: list[str]
    """The fields that its claims name."""
    puts: list[str]
    """The fields that it puts."""
    rate: float
    """The rows per second that it claims; of a task that only puts, that it puts."""
    put_rate: float
    """The rows per second that it puts."""
    works: float
    """The share of the time of its connected ranks for which they work. One that only puts works if it is not held."""
    waits: float
    """The share for which they wait for samples."""
    held: float
    """The share for which capacity or the policy version holds their puts."""
    idle: float
    """The share of the rest, as after the end of a partition."""
    states: dict[str, int]
    """State -> number of ranks that are in it now: "works", "waits", "held", "idle", "gone"."""
    rank_state: str
    """The state of each rank now, in the order of ranks, one letter each: W works, w waits, h held, i idle, x gone. ""
    if there are more than 64."""
    joined: int = 0
    """The number of tasks that are summed here."""


class QueueView(Part, frozen=True):
    """The rows that are ready for a task and not claimed."""

    task: str
    rows: int
    age_p50: Union[float, None]
    """The median of the seconds for which rows were ready before they were claimed; None if nothing was claimed."""
    age_max: Union[float, None]
    """The largest of these."""


class FieldView(Part, frozen=True):
    """A field. At most 50; the rates of the others are summed in one with the name "other"."""

    name: str
    put_by: list[str]
    """The tasks that put it, the fastest first."""
    taken_by: list[str]
    """The tasks whose claims name it."""
    rate: float
    """Rows per second."""


class LifePart(Part, frozen=True):
    """A part of the way of a sample from its first put to the task at the end."""

    part: str
    """"queue": it is ready and waits for a claim. "work": it is at a rank."""
    task: str
    p50: float
    """The median in seconds."""


class WaitView(Part, frozen=True):
    """Ranks of a task that wait or are held for one reason, or that are gone. The most expensive is first."""

    task: str
    kind: str
    """"wait": for samples. "held": for capacity or the policy version. "gone": the connections have ended."""
    ranks: list[str]
    """The ranks with their processes, such as "rank 0, pid 17, node-1"; at most 16."""
    count: int
    """The number of ranks."""
    of: int
    """The number of ranks of the task, those that are gone included."""
    rows: int
    """The rows that each of them waits to get, or to put."""
    fields: list[str]
    """The fields of the claims."""
    field: str
    """The field that is missing; "" if it is not known."""
    producer: str
    """The task that puts it; "" if no task does."""
    partition: str
    since: float
    """When the oldest of these waits began."""
    share: float
    """The share of the time of the task's ranks in the window for which they wait, or are held."""
    words: str
    """The reason, in words of `TransferQueueClient.explain`; "" until the controller has answered."""
    sample: Union[int, None] = None
    """The sample that is nearest to ready; None if it is not known."""


class LaneView(Part, frozen=True):
    """A rank, or ranks of one task that are joined to a band because there are more than 64."""

    id: int
    """Identifies the lane in the timeline."""
    task: str
    rank: int
    """The rank; -1 if it is not known, or if this is a band."""
    ranks: int
    """The number of ranks: 1, or more for a band."""
    label: str
    """The rank and its process, such as "rank 0, pid 17, node-1"; "" for a band."""
    gone_at: Union[float, None]
    """When its connection ended, if it is gone."""
    spans: list[tuple[float, float, int, int]] = []
    """[t0, t1, state, why]: seconds since `Timeline.origin`; the state is one of `STATES`; `why` is a position in
    `Timeline.why`, for spans of waiting. Neighbours of one state are joined; no span: nothing is known."""
    band: list[tuple[float, int, int, int, int]] = []
    """Of a band: [t, works, waits, held, gone] by second that ends at t seconds since `Timeline.origin`; percent of its
    ranks. The rest is idle."""


STATES = ("idle", "works", "held", "waits", "gone")
"""The states of `LaneView.spans`, by number."""


class Tick(Part, frozen=True):
    """A moment that concerns all lanes."""

    t: float
    """Unix seconds."""
    version: int
    """The policy version that was set."""


class GapView(Part, frozen=True):
    """A time of which nothing, or not everything, is known."""

    start: float
    end: float


class Timeline(Part, frozen=True):
    """What each rank did."""

    origin: float
    """Unix seconds to which the times in spans are relative. It changes only with `full`."""
    since: float
    """Seconds since `origin` from which on the spans and points of a `delta` replace the previous ones."""
    until: float
    """Seconds since `origin` to which they reach."""
    order: list[int]
    """The ids of all lanes from top to bottom: tasks in the order of the flow, ranks ascending."""
    lanes: list[LaneView]
    """The lanes; in a `delta` those that have changed, which are all that are connected."""
    why: list[str]
    """Reasons of waiting: field names, "policy" or "capacity" for a lane that is held. In a `delta` all of them."""
    versions: list[Tick]
    """When the policy version was set, in the last 300 s."""
    gaps: list[GapView]
    """Times of which events are missing, as after a restart of the controller."""


class PolicyView(Part, frozen=True):
    """The policy version and its limit. None if no partition has a policy version."""

    version: int
    since: Union[float, None]
    """When it was set; None if this is not recorded."""
    limit: Union[int, None]
    """The largest allowed age of a sample in versions (`max_staleness`); None if it has no limit."""
    partition: str
    """The partition that the two following numbers are about: the one that admits most."""
    admitted: int
    """The rows admitted so far."""
    admit_max: Union[int, None]
    """The rows that may be admitted at this version; None without a limit."""


class AgeView(Part, frozen=True):
    """By how many versions the rows were old that the task at the end claimed at one policy version."""

    step: int
    """The policy version at the time of the claims."""
    counts: list[int]
    """Position n: the rows that were n versions old; the last of at most 8 counts all that are older."""


class GroupView(Part, frozen=True):
    """The groups of a partition, which are the samples of one prompt."""

    partition: str
    size: int
    """The samples of a group; 0 if it is not known or differs."""
    task: str
    """The task whose fields are meant by "all fields"."""
    whole: int
    """Groups with all members, which have all fields."""
    lack_field: int
    """Groups with all members, some of which lack a field."""
    lack_member: int
    """Groups that lack members."""
    orphaned: int
    """Groups that can never be complete."""
    passed_over: int
    """Samples that the task will never be dealt."""
    dropped: int
    """Samples that were dropped, for example because they were too long."""


class ListedPartition(Part, frozen=True):
    """A partition. `shown` ones have a matrix; at most 20 others are listed, and the rest is summed in `rest`."""

    name: str
    rows: int
    """Live rows."""
    sealed: bool
    shown: bool
    """Whether it is one of the three that are claimed."""
    missing: int
    """Rows that lack the field which the task at the end waits for."""
    field: str
    """This field; "" if none is missing."""
    sample: Union[int, None] = None
    """The first sample that lacks it, for a link."""


class PartitionsView(Part, frozen=True):
    """The partitions."""

    count: int
    """The number of all partitions."""
    rows: int
    """The live rows of all partitions."""
    bytes: int
    """The bytes of the values of all partitions."""
    listed: list[ListedPartition] = msgspec.field(name="list")
    """The shown ones first, then the 20 that were created last."""
    rest: int
    """The number of those that are not in the list."""
    rest_rows: int
    """The live rows of these."""


class UnitView(Part, frozen=True):
    """A storage unit, in bytes."""

    unit: int
    node: str
    tier: str
    capacity: int
    """0 if it is not known."""
    held: int
    """Allocated in the file system: leased or free. 0 if it is not known."""
    leased: int
    """Leased to writers, whether it is needed or not."""
    live: int
    """In blocks that are needed. -1 if it is not known."""
    longest_wait: float
    """The seconds for which the oldest writer has waited for space; 0 if none waits."""
    waiting: int
    """The writers that wait for space."""
    drained: bool


class LeaseView(Part, frozen=True):
    """The leases of a task."""

    task: str
    count: int
    """The leases in force; -1 if only the rows are known."""
    rows: int
    """The rows under them that are not acknowledged yet."""
    oldest: Union[float, None] = None
    """The seconds since the oldest of them was granted; None if it is not known."""


class MemoryView(Part, frozen=True):
    """Memory, leases and losses."""

    units: list[UnitView]
    leases: list[LeaseView]
    redelivered: int
    """Rows that were delivered again because a delivery was not acknowledged, since the controller started."""
    lost: int
    """Values that were lost with their unit and not put again."""
    poison: int
    """Rows that are skipped because their deliveries failed too often."""
    waiting_puts: int
    """Puts and reservations that wait."""


class ServerView(Part, frozen=True):
    """A server process: the controller or a storage unit."""

    name: str
    """"controller" or "unit 3"."""
    up: bool
    """Whether it answered within 1 s."""
    cpu: Union[float, None]
    """The share of one core that it used since the last measurement; None at the first one."""
    p99: Union[float, None]
    """The seconds that 99 % of its requests took at most since the last measurement; None at the first one."""
    longest: float
    """The longest recent event in its loop, in seconds."""
    connections: int
    ended: int
    """The number of connections that have ended so far."""


class JournalView(Part, frozen=True):
    """The journal of the controller. None if the system has none."""

    lag: float
    """Seconds since the last snapshot."""
    records: int
    """Records since then, which a restart replays."""
    trouble: str
    """Why the controller cannot write it; "" if it can."""


class ServersView(Part, frozen=True):
    """The servers."""

    servers: list[ServerView]
    answered: int
    count: int
    journal: Union[JournalView, None]
    failed: int
    """Requests that the controller has answered with an error so far."""
    logs: str
    """The folder of the logs."""


class ClientsView(Part, frozen=True):
    """Who is connected."""

    connected: int
    """The number of connected clients, this page not included."""
    waiting: list[str]
    """Who waits already, in words, if the system is empty; at most 8."""


class LiveView(Struct, frozen=True, omit_defaults=True):
    """The data of an event of the stream. An absent part is unchanged."""

    seq: int
    """Ascends by 1 in a stream. After a `full` it starts anywhere."""
    now: float
    """The controller's time of what is shown."""
    system: Union[SystemInfo, UnsetType] = UNSET
    state: Union[SystemState, UnsetType] = UNSET
    verdict: Union[VerdictView, UnsetType] = UNSET
    rates: Union[list[RatePoint], UnsetType] = UNSET
    step: Union[StepView, UnsetType, None] = UNSET
    """None if the task at the end claims no partition."""
    steps: Union[StepsView, UnsetType] = UNSET
    tasks: Union[list[TaskView], UnsetType] = UNSET
    """In the order of the flow: a task comes after those whose fields it takes."""
    queues: Union[list[QueueView], UnsetType] = UNSET
    """One for each task that takes fields."""
    fields: Union[list[FieldView], UnsetType] = UNSET
    """In the order of the flow."""
    life: Union[list[LifePart], UnsetType] = UNSET
    """In the order of the way of a sample; empty if it is not known."""
    waits: Union[list[WaitView], UnsetType] = UNSET
    """At most 5."""
    timeline: Union[Timeline, UnsetType] = UNSET
    policy: Union[PolicyView, UnsetType, None] = UNSET
    ages: Union[list[AgeView], UnsetType] = UNSET
    """At most 8, the newest last; empty without policy versions."""
    groups: Union[list[GroupView], UnsetType] = UNSET
    """For the partitions that are shown and have groups."""
    partitions: Union[PartitionsView, UnsetType] = UNSET
    memory: Union[MemoryView, UnsetType] = UNSET
    servers: Union[ServersView, UnsetType] = UNSET
    clients: Union[ClientsView, UnsetType] = UNSET


def to_json(value: Any) -> bytes:
    """Return parts as JSON. Numbers that JSON does not have, such as infinity, become null."""
    return msgspec.json.encode(value)
