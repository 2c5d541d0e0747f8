"""The answers to the questions of the live page, as JSON. The units are those of `live.payload`."""

from __future__ import annotations

from typing import Union

from transfer_queue.live.payload import Part, Timeline


class MatrixField(Part, frozen=True):
    """A field in the matrix."""

    name: str
    rows: int
    """The rows of the partition that have it."""
    share: str
    """Base64 of run-length bytes: pairs of a count (1 to 255) and a value. There is one value for each column: the
    share of its rows that have the field, from 0 to 255. 0 means no row and 255 means all rows. "": 0 everywhere."""
    lost: str
    """The same for the share that was lost and not put again; "" if none was."""


class MatrixTask(Part, frozen=True):
    """A task in the matrix. The shares are as in `MatrixField`; "" if they are 0 everywhere."""

    name: str
    ready: str
    """Rows that have all fields which the claims of the task name, and that it has not claimed."""
    claimed: str
    """Rows under a lease that are not acknowledged."""
    consumed: str
    passed: str
    """Rows that the task skipped and will never be dealt."""


class MatrixAnswer(Part, frozen=True):
    """The answer to `GET /api/matrix?partition=&from=&to=&columns=`. 304 if nothing has changed: send the `ETag` back.

    `from` and `to` are positions among the live rows (default: all), `columns` is at most 1,024 (default: 256).
    404 with `Problem` if the partition does not exist.
    """

    partition: str
    epoch: str
    """Changes with the contents; equal to the `ETag` without its quotation marks."""
    rows: int
    """The live rows of the partition."""
    reserved: int
    start: int
    """The position of the first row that is shown."""
    stop: int
    """The position behind the last row that is shown."""
    columns: int
    """The number of columns: at most as many as requested."""
    column_rows: int
    """The rows of a column; the last one may have fewer. A multiple of the group size if there is one."""
    group_size: int
    """The samples of a group; 0 if the partition has no groups or their size is not known."""
    index: list[tuple[int, int, int]]
    """[column, index, step]: from this column on, the first row of column c has the global index
    `index + step * (c - column)`."""
    fields: list[MatrixField]
    """At most 50."""
    tasks: list[MatrixTask]
    """At most 16."""


class LanesAnswer(Part, frozen=True):
    """The answer to `GET /api/lanes?task=&from=&count=&after=`: ranks of a band, each as a lane.

    `task` is that of the band, `from` a position in it (default: 0), and `count` at most 64 (the default). `after` is
    the `epoch` of the previous answer. 404 with `Problem` if no ranks of this task are joined to a band.
    """

    task: str
    epoch: str
    """Send it back as `after` to get only what is new."""
    first: int
    """The position of the first lane among the ranks of the band."""
    ranks: int
    """The number of ranks of the band."""
    timeline: Timeline
    """The lanes, with times and reasons as in the stream, and ids of their own. `since` 0: it replaces everything;
    otherwise it continues the previous answer as a `delta` does."""


class SampleFieldView(Part, frozen=True):
    """A field of a sample."""

    name: str
    present: bool
    type: str
    """The type, such as "int64", "float32", "text", "object" or "pickled"."""
    shape: Union[list[int], None]
    """None if it is not a tensor, or not known."""
    bytes: Union[int, None]
    unit: Union[int, None]
    tier: str
    put_by: str
    """The task, rank and process that put it; "" if it is not known."""
    put_at: Union[float, None]
    """When it was put; None if the timeline does not reach back to it."""
    lost: bool = False
    head: Union[str, None] = None
    """The first 16 values as text, if the page may show values."""
    text: Union[str, None] = None
    """The first 2,000 characters, if the value is text and the page may show values."""
    decoded: Union[str, None] = None
    """The first 2,000 characters of the text whose token ids the value contains, if the page has a tokenizer."""
    note: str = ""
    """Why `head` is None, such as "pickled, 1,024 bytes" or "values are hidden: start tq live with --values"."""


class SampleEventView(Part, frozen=True):
    """Something that happened to a sample."""

    t: float
    what: str
    """In words, such as "put tokens, logprobs" or "claimed"."""
    who: str
    """The task, rank and process; "" if it is not known."""


class SampleTagView(Part, frozen=True):
    """An entry of a tag."""

    name: str
    value: Union[str, None]
    """As text; None if the page may not show values."""


class SampleGroupView(Part, frozen=True):
    """The group of a sample."""

    id: str
    size: int
    """The number of its samples; 0 if it is not known."""
    member: int
    """The position of the sample in it, from 0; -1 if it is not known."""


class SampleTaskView(Part, frozen=True):
    """The state of a sample for a task."""

    task: str
    state: str
    """"consumed", "claimed", "ready", "waiting" (it lacks fields) or "skipped"."""
    lacks: list[str]
    """The fields that the claims of the task name and the sample does not have."""
    who: str
    """The rank and process that has it or had it last; "" if it is not known."""
    reason: str
    """Why the task skips it; "" if it does not."""


class SampleAnswer(Part, frozen=True):
    """The answer to `GET /api/sample?partition=&index=` or `&key=`. 404 with `Problem` if it does not exist."""

    partition: str
    index: int
    """The global index."""
    key: Union[str, None]
    now: float
    words: str
    """Why the sample is not at the task at the end, as `TransferQueueClient.explain` says it."""
    command: str
    """The command that prints `words`."""
    fields: list[SampleFieldView]
    tags: list[SampleTagView]
    group: Union[SampleGroupView, None]
    history: list[SampleEventView]
    """At most 32, the oldest first."""
    history_note: str
    """"" or why the history is not complete, such as "older events are not kept"."""
    state: str
    """"live", "reserved" (nothing was put into it yet), or "cleared"; "" if it is not known."""
    tasks: list[SampleTaskView]
    """Its state for each task."""
    samples: list[int]
    """The samples of its group, by global index; at most 64."""


class ExplainAnswer(Part, frozen=True):
    """The answer to `GET /api/explain?partition=&index=&key=&task=`."""

    words: str


class Problem(Part, frozen=True):
    """The body of an answer with a status of 400 or more."""

    error: str
    """What was wrong, what was found, and what to do."""
