"""Answers claims: records what they get, and replies.

It notes what the clients now reference or lease. Claims that are met together have one deal, whose reply is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise, repeat
from typing import cast

import msgspec
import numpy as np

from transfer_queue.core.absent_clients import AbsentHolders
from transfer_queue.core.activity import Activity
from transfer_queue.core.claims import deal, row_leases
from transfer_queue.core.claims.plan import ClaimPlan, OpenClaim, Plans, consumer_of, rank_of
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.context import Context
from transfer_queue.core.events import records as r
from transfer_queue.core.events.effects import Effect, Send
from transfer_queue.core.events.registry import Decision
from transfer_queue.core.queries import lookups
from transfer_queue.core.queries.lookups import meta_reply
from transfer_queue.core.state.partition import Partition
from transfer_queue.core.state.state import State
from transfer_queue.core.tables.rows import rows_without, sort_unique
from transfer_queue.core.timeline.recorder import TimelineRecorder
from transfer_queue.messages.claims import Claim, ClaimReply
from transfer_queue.messages.envelopes import AnyReply
from transfer_queue.messages.tag_table import slice_tags

PLACED = 32  # claims met together whose replies contain the locations of values; further ones look them up


def empty_reply(context: Context, claim: Claim, ended: bool) -> ClaimReply:
    """Return the reply to a claim that gets no rows, with the known types of its fields, and of fields around them."""
    partition = context.state.partitions.get(claim.partition)
    fields = []
    if partition is not None and not claim.probe:
        names = lookups.with_nested(partition, claim.fields)
        fields = [partition.fields[name].to_field_type() for name in sorted(set(names)) if name in partition.fields]
    version = -1 if partition is None or not claim.probe else partition.version
    dealt = partition.dealt.get(claim.task) if ended and partition is not None else None
    texts = (context.services[Plans].of(partition, claim).warning, dealt.describe_held(claim.task) if dealt else None)
    return ClaimReply(b"", fields, ended=ended, version=version, warning=". ".join(filter(None, texts)) or None)


def answer(context: Context, plan: ClaimPlan, claims: Sequence[OpenClaim], outcome: deal.Outcome) -> list[Effect]:
    """Answer claims: record what they get, or that they have ended, and reply to them."""
    first, records, batches = claims[0], outcome.records, outcome.batches
    claim = first.claim
    if first.waiting is not None:
        context.parked.unpark(*(each.waiting for each in claims if each.waiting is not None))
    if outcome.is_end:
        context.services[TimelineRecorder].note_end(first.caller.client, claim, first.since)
    if claim.probe or (batches is None and not records):
        reply = empty_reply(context, claim, outcome.is_end)
        return [context.answer(first.caller.waiter, first.caller.peer, reply)]
    for record in records:
        if isinstance(record, r.Dealt):
            context.measures.counters["dealt_rows"] += sum([len(share.rows) for share in record.shares]) // 8
    if batches is None:  # the end: the remainder was dealt to other ranks, or is skipped
        return context.commit(first.caller, Decision(records, lambda: empty_reply(context, claim, outcome.is_end)))
    partition, log = plan.partition, context.log
    assert partition is not None
    tokens = grant(context.state, plan, claims, batches, records)
    is_held = plan.task in partition.holds.tasks and not (tokens and claim.lease is not None)
    for each, rows in zip(claims, batches, strict=True) if is_held else ():
        records += _hold_records(partition, each.caller.client, each.claim, rows)
    log.actor = first.caller.client
    for record in records:
        log.apply(record)
    log.actor = ""
    return _reply(context, plan, claims, batches, tokens, is_held)


def grant(
    state: State, plan: ClaimPlan, claims: Sequence[OpenClaim], batches: list[np.ndarray], records: list[r.AnyRecord]
) -> list[int]:
    """Add what clients hold to the records of their claims, and return the token of each; [] if they hold nothing.

    With a lease, a client holds the rows that are claimed after the deals are recorded. Without a lease, it holds what
    was dealt for no rank until it has handed it over, and the rows of a dealt batch that wait for an ack are consumed.

    Several claims do not get rows that wait for an ack without a lease (`wake`).
    """
    claim, partition = claims[0].claim, plan.partition
    assert partition is not None
    deal = records[0] if records else None  # the deals are first
    if claim.lease is not None or (deal is None and partition.claimed.get(plan.task)):
        return row_leases.lease_rows(state, plan, claims, batches, records)
    if not claim.hand_over or not isinstance(deal, r.Dealt) or deal.batch_index is not None or not deal.consumed:
        return []  # a batch under a key stays under it
    columns = [deal.consumed] if len(claims) == 1 else [share.rows for share in deal.shares]
    tokens = list(range(state.next_token, state.next_token + len(claims)))
    unseen: list[r.UnseenBatch] = []
    for token, each, rows in zip(tokens, claims, columns, strict=True):
        unseen.append(r.UnseenBatch(token, plan.task, each.caller.client, rows, partition.policy_version))
    records[0] = msgspec.structs.replace(deal, unseen=unseen)
    return tokens


def _reply(
    context: Context,
    plan: ClaimPlan,
    claims: Sequence[OpenClaim],
    batches: list[np.ndarray],
    tokens: list[int],
    is_held: bool,
) -> list[Effect]:
    """Reply to claims that are met, and note what their clients have now.

    tokens: see `grant`. is_held: whether the clients reference the rows, also if they did before.
    """
    partition, claim = plan.partition, claims[0].claim
    assert partition is not None
    count = len(claims)
    rows = batches[0] if count == 1 else np.concatenate(batches)
    positions = partition.rows.positions_of(rows)
    replies = [meta_reply(partition, positions, rows, claim.fields)]
    if count > 1:
        replies = _cut_reply(partition, plan, replies[0], batches)
    counts = row_leases.deliveries(partition, plan.task, positions) if tokens and claim.lease is not None else None
    warning = plan.warning
    if plan.groups_by_order and partition.name not in context.samplers.warned:
        warning = _add_spanning_warning(context, plan, rows)
    timeline, activity = context.services[TimelineRecorder], context.services[Activity]
    effects: list[Effect] = []
    answers: list[tuple[str, int, AnyReply]] = []
    end = 0
    for each, reply, batch, token in zip(claims, replies, batches, tokens or repeat(0)):
        caller, asked, start, end = each.caller, each.claim, end, end + len(batch)
        client, sequence, part = caller.client, caller.envelope.sequence, positions[start:end]
        timeline.note_claim(client, asked, each.since, partition, reply.rows, part)
        activity.begin_work(client, consumer_of(asked))
        numbers = None
        if counts is not None:
            context.services[Leases].begin(partition.name, partition.leases.by_token[token])
            numbers = None if (counts[start:end] == 1).all() else counts[start:end].tobytes()
        elif token:
            context.services[AbsentHolders].note_holder(client)
        if token or is_held or warning is not None:
            reply = msgspec.structs.replace(reply, held=is_held, warning=warning, token=token, deliveries=numbers)
            warning = None
        # The reply that is kept for retries does not contain the locations, because a retry may come much later.
        answers.append((client, sequence, reply))
        if asked.places and count <= PLACED:
            places = lookups.locate_claimed(context.state, partition, part, asked.fields)
            reply = msgspec.structs.replace(reply, places=places)
        effects.append(Send(caller.peer, sequence, reply))
    if count > 1:
        context.log.apply(r.RepliesSent(answers))
    else:
        (client, sequence, kept), envelope = answers[0], claims[0].caller.envelope
        context.log.apply(r.ReplySent(client, sequence, envelope.acknowledged, kept, envelope.finished))
    return effects


def _cut_reply(partition: Partition, plan: ClaimPlan, whole: ClaimReply, batches: list[np.ndarray]) -> list[ClaimReply]:
    """Cut the reply for all rows into one reply for each batch."""
    if any(field.mixed_rank for field in whole.fields):  # not in all of the batches
        names = list(plan.fields)
        return [meta_reply(partition, partition.rows.positions_of(rows), rows, names) for rows in batches]
    ends = [0, *accumulate(map(len, batches))]
    column, fields, tags, epoch = whole.rows, whole.fields, whole.tags, whole.epoch
    steps = {name: len(shapes) // ends[-1] for name, shapes in whole.shapes.items()}
    return [
        ClaimReply(
            rows=column[8 * start : 8 * end], fields=fields, epoch=epoch,
            tags=None if tags is None else slice_tags(tags, start, end),
            shapes={name: whole.shapes[name][start * step : end * step] for name, step in steps.items()},
            dtypes={name: codes[start:end] for name, codes in whole.dtypes.items()},
        )
        for start, end in pairwise(ends)
    ]  # fmt: skip


def _add_spanning_warning(context: Context, plan: ClaimPlan, rows: np.ndarray) -> str | None:
    """Return the plan's warning, with one, once for each partition, about dealt groups with rows of several clients."""
    partition, size = cast(Partition, plan.partition), plan.group_size or 1
    if len(partition.owners) < 2 or len(rows) % size:
        return plan.warning
    groups = rows.reshape(-1, size)
    owners = partition.rows.owners_of(partition.rows.positions_of(rows)).reshape(-1, size)
    mixed = np.flatnonzero((owners != owners[:, :1]).any(axis=1))
    if not len(mixed):
        return plan.warning
    context.samplers.warned.add(partition.name)
    warning = (
        f"groups of partition {partition.name!r} are formed by order of reservation, {size} samples each, but several "
        f"clients reserve samples there: samples {groups[mixed[0]].tolist()} were dealt as one group, although they "
        f"come from different clients. Put samples with group_ids= so that groups do not mix prompts."
    )
    return ". ".join(filter(None, (warning, plan.warning)))


def _hold_records(partition: Partition, client: str, claim: Claim, rows: np.ndarray) -> list[r.AnyRecord]:
    """Return the record that a client references these rows, if the partition frees finished rows."""
    holds = partition.holds
    if claim.probe or claim.task not in holds.tasks:
        return []
    rank = rank_of(claim)
    live = rows[partition.rows.positions_of(rows) >= 0]
    fresh = rows_without(sort_unique(live), holds.rows_of(claim.task, client, rank))
    return [r.RowsHeld(partition.name, claim.task, client, rank, fresh.tobytes())] if len(fresh) else []
