"""The messages of a call of a user's sampler: the call, its result, and what the sampler reads during the call."""

from __future__ import annotations

from typing import Any

import msgspec


class Facts(msgspec.Struct, frozen=True):
    """What the controller knows about a user's sampler without calling it."""

    name: str
    """The name of its class."""
    built_in: bool = False
    """Whether it, and all samplers in it, are built in: its result depends only on the ready rows."""
    ranked: bool = False
    """Whether its batches may belong to a (dp_rank, batch_index)."""
    deals: bool = False
    """Whether `deal` can be called instead of `sample`: no class of it, or of a sampler around it, overrides `sample`.
    """
    finally_: bool = False
    """Whether `deal` takes `final=True`."""
    begins: bool = False
    """Whether the call "begin" (see `Begun`) is needed before a claim is decided."""
    passes: bool = False
    """Whether it defines `passes_over`."""
    wants_list: bool = True
    """Whether it gets the ready rows as a list."""
    group_size: int | None = None
    """The number of samples in a group; None if it deals single samples."""
    tags: list[str] = []
    """The tags by which it, or a sampler inside it, orders rows."""


class SamplerRequest(msgspec.Struct, frozen=True):
    """The part of a claim that a sampler gets."""

    partition: str
    task: str
    count: int
    sampling: dict[str, Any]
    """The sampling_config of the claim, with task_name and partition_id added."""


class SamplerCall(msgspec.Struct, frozen=True):
    """One call of a sampler."""

    kind: str
    """A key of `CALLS`."""
    request: SamplerRequest
    key: tuple[int, int] | None = None
    """The (dp_rank, batch_index) of the requested batch."""
    kept: list[tuple[int, int]] | None = None
    """The batches of the task that the controller keeps, so that the sampler forgets all others; None: it keeps all."""
    final: bool = False
    """See `Facts.finally_`."""
    state: Any = None
    """The argument of `load_checkpoint`."""


class Begun(msgspec.Struct, frozen=True):
    """The first answer of a sampler about a claim."""

    key: tuple[int, int] | None
    """The (dp_rank, batch_index) of a batch that the controller keeps; None if it does not keep the batch."""
    cached: bool
    """Whether the sampler has dealt this batch before, and keeps it itself."""


class Given(msgspec.Struct, frozen=True):
    """A deal of a sampler."""

    shares: dict[int, tuple[bytes, bytes]]
    """dp_rank -> (sampled, consumed), i8 columns as bytes."""
    cached: int = 0
    """How many batches of the task the sampler keeps in `_states`."""


class Shown(msgspec.Struct, frozen=True):
    """The ready rows in a call of a sampler."""

    partition: str = ""
    group_size: int | None = None
    policy_version: int = 0
    total: int = 0
    """The number of ready rows."""
    rows: bytes = b""
    """The first of them, global indexes, i8."""
    after: int = -1
    """The position from which further rows are requested; -1 if `rows` has all."""


class Question(msgspec.Struct, frozen=True):
    """A request for what a sampler reads."""

    kind: str
    """What is read: "rows" (from position `after` on), "tags" (of `rows`), "groups" (the first `count` of `size`),
    "spoiled" (`key`, `bound`, `size`) or "orphans" (`size`).
    """
    rows: bytes = b""
    after: int = 0
    count: int = 0
    size: int = 0
    key: tuple[str, float, float, float] | None = None
    bound: float = 0.0


class ViewReply(msgspec.Struct, frozen=True):
    """The reply to a question."""

    rows: bytes = b""
    """Global indexes, i8."""
    after: int = -1
    """See `Shown`."""
    tags: dict[int, dict[str, Any]] = {}
    """The tags of existing rows, by global index."""
