"""All that may interleave, against a model in plain dicts: hypothesis looks for an order that breaks a rule.

The model does not choose rows as samplers do. It knows what is produced, consumed, tagged, keyed and grouped, and
checks what was dealt: only ready rows, whole groups, no row twice, the same key the same batch. A batch without a key
is held until it is handed over; until then it may come back, and afterwards it never does. After every event no
claim may be left waiting that could be met, or for which nothing will come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import harness
import numpy as np
from harness import Harness, column, rows_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from differential import stateful
from transfer_queue.core.absent_clients import ABSENCE_SECONDS
from transfer_queue.core.claims import deal as claim_deal
from transfer_queue.core.claims.deal_jobs import LongDeals
from transfer_queue.core.events.records import Dealt, HandedOver, LeaseEnded, PassedOver
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import Cancel, Claim, ClaimReply, Nack, ResetConsumption
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.puts import ClearKeys, ClearRows, Publish
from transfer_queue.messages.queries import (
    CheckConsumption,
    CheckProduction,
    ConsumptionStatus,
    ListKeys,
    Lookup,
    ProductionStatus,
    RetrieveMeta,
)
from transfer_queue.messages.reports.timeline import Leave
from transfer_queue.messages.reports.unit_reports import RegisterUnit, WriterGone
from transfer_queue.sampler import (
    BaseSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)

GROUP = 2
RANKS = 2
SAMPLERS: dict[str, Callable[[], BaseSampler]] = {
    "sequential": SequentialSampler,
    "rank_aware": RankAwareSampler,
    "groups": lambda: GRPOGroupNSampler(GROUP),
    "balanced": lambda: SeqlenBalancedSampler(GROUP, RANKS),
    "sequential by n": lambda: PrioritySampler("n"),
    "groups by n": lambda: PrioritySampler("n", GRPOGroupNSampler(GROUP), aging=0.5),
    "balanced later": lambda: SeqlenBalancedSampler(GROUP, RANKS),
}
PARTITIONS = st.sampled_from(["p", "p", "p", "p", "q"])
TASKS = st.sampled_from(["t", "t", "t", "u"])
FIELDS = st.sampled_from([("x",), ("y",), ("x", "y")])
READERS = st.sampled_from(["r0", "r1", "r2"])
KEYS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True)
TAGS = st.sampled_from([None, {}, {"n": 1}, {"n": 2, "s": "x"}, {"n": harness.DELETE}, {"total_lengths": 7}])


KINDS = [
    *("insert",) * 3, *("write",) * 4, *("by_keys",) * 2, "join", *("claim",) * 6,
    *("work",) * 3, *("retry",) * 2, *("report",) * 2, *("clear_rows",) * 2, *("end",) * 2, *("world",) * 2,
]  # fmt: skip

# (task, rows of a share) dealt by the last event -> rows of the whole deal, and whether they were ready for each who
# got a share of it
Fresh = dict[tuple[str, tuple[int, ...]], tuple[list[int], list[bool]]]


class Row:
    """One live sample of the model. at: its number in order of reservation. values: field -> (block offset, slot)."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.values: dict[str, tuple[int, int]] = {}
        self.tag: dict[str, Any] = {}
        self.key: str | None = None
        self.group: str | None = None


class Model:
    """One partition: live rows by global index, ascending; rows ever reserved; what each task consumed; its batches."""

    def __init__(self) -> None:
        self.rows: dict[int, Row] = {}
        self.end = 0
        self.fields: set[str] = set()
        self.sealed = False
        self.consumed: dict[str, set[int]] = {}
        self.ever: dict[str, int] = {}  # how many rows each task has consumed, without those that were taken back
        self.batches: dict[tuple[str, int, int], list[int]] = {}
        self.members: dict[str, list[int]] = {}  # declared group -> live and cleared members
        self.declared = False  # once a group was declared there are none by order

    def ready(self, task: str, fields: Iterable[str]) -> list[int]:
        done = self.consumed.get(task, set())
        return [i for i, row in self.rows.items() if i not in done and all(f in row.values for f in fields)]

    def finished(self, task: str) -> bool:
        """Whether the task has consumed something, and nothing else is left."""
        return self.consumed.get(task) == set(self.rows) and (bool(self.rows) or self.ever.get(task, 0) > 0)

    def group_of(self, index: int) -> Any:
        if self.declared:
            return self.rows[index].group
        return self.rows[index].at // GROUP

    def size_of(self, group: Any) -> int:
        """Members of a group, cleared ones included."""
        if self.declared:
            return len(self.members[group])
        return GROUP if (group + 1) * GROUP <= self.end else self.end - group * GROUP

    def living(self, group: Any) -> set[int]:
        return {i for i in self.rows if self.group_of(i) == group}

    def hopeless(self, group: Any) -> bool:
        if group is None:
            return True
        size = self.size_of(group)
        return len(self.living(group)) < size or size > GROUP or (self.sealed and size < GROUP)

    def whole(self, ready: list[int]) -> int:
        """How many groups are wholly ready."""
        groups = {self.group_of(i) for i in ready} - {None}
        return sum(1 for g in groups if not self.hopeless(g) and len(self.living(g) & set(ready)) == GROUP)

    def clear(self, indexes: Iterable[int]) -> None:
        for index in indexes:
            self.rows.pop(index, None)
        for group in [g for g, members in self.members.items() if not any(i in self.rows for i in members)]:
            del self.members[group]
        for done in self.consumed.values():
            done &= set(self.rows)
        gone = [key for key, rows in self.batches.items() if rows and not any(i in self.rows for i in rows)]
        for key in gone:
            self.batches[key] = []


class Interleavings(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(SAMPLERS)))
    def start(self, name: str) -> None:
        self.sampler = name.split()[0]
        claim_deal.LONG = 0 if name == "balanced later" else 512  # every deal takes a while
        self.h = Harness(SAMPLERS[name]())
        self.model: dict[str, Model] = {}
        self.seen = len(self.h.records)
        self.writers = 0
        self.waiting: dict[tuple[str, int], Claim] = {}
        self.got: dict[tuple[str, int], Any] = {}  # kept replies by (client, sequence)
        self.requests: list[tuple[str, int, Any]] = []  # puts and claims that were sent, for retries
        self.unseen: dict[int, tuple[str, str, str, set[int]]] = {}  # token -> client, partition, task, rows
        self.tokens: list[tuple[str, int]] = []  # (partition, token) of all batches so far, that notices may name
        self.handed_over: set[tuple[str, int]] = set()  # (task, row): a ledger of what was handed over, until a reset

    # ------------------------------------------------------------ what happened

    @property
    def writer(self) -> str:
        return f"w{self.writers}"

    @property
    def grouping(self) -> bool:
        return self.sampler in ("groups", "balanced")

    def settle(self) -> None:
        """Takes in what the last event dealt, and the replies that claims got."""
        records, self.seen = self.h.records[self.seen :], len(self.h.records)
        fresh: Fresh = {}
        whole: tuple[list[int], list[bool]] = ([], [])
        for deal in records:
            if isinstance(deal, PassedOver):
                self.pass_over(deal)
            elif isinstance(deal, LeaseEnded):
                self.take_back(deal)
            elif isinstance(deal, HandedOver):
                _, _, task, rows = self.unseen.pop(deal.token)
                assert not {(task, row) for row in rows} & self.handed_over, "a row was handed over twice"
                self.handed_over |= {(task, row) for row in rows}
            if not isinstance(deal, Dealt):
                whole = ([], [])  # the deals of one claim, of several rounds at the end, lie side by side
                continue
            model = self.model[deal.partition]
            done = model.consumed.setdefault(deal.task, set())
            for share in deal.shares:
                rows = np.frombuffer(share.rows, "<i8").tolist()
                assert rows
                assert len(set(rows)) == len(rows)
                assert set(rows) <= set(model.rows), "a row was dealt that is not there"
                assert not set(rows) & done, "a row was dealt to a task twice"
                if self.grouping:
                    assert all(model.living(model.group_of(i)) <= set(rows) for i in rows), "a part of a group"
                    assert not any(model.hopeless(model.group_of(i)) for i in rows)
                done |= set(rows)
                model.ever[deal.task] = model.ever.get(deal.task, 0) + len(rows)
                if deal.batch_index is not None:
                    key = (deal.task, share.dp_rank, deal.batch_index)
                    assert key not in model.batches, "a batch was dealt twice"
                    model.batches[key] = rows
                whole[0].extend(rows)
                fresh[deal.task, tuple(rows)] = whole
            for batch in deal.unseen:
                assert deal.batch_index is None, "a batch under a key stays under it"
                self.unseen[batch.token] = (batch.client, deal.partition, deal.task, set(batch.indexes.tolist()))
                self.tokens.append((deal.partition, batch.token))
        for (client, sequence), claim in list(self.waiting.items()):
            reply = self.h.reply(sequence, client)
            if reply is None:
                continue
            del self.waiting[client, sequence]
            self.check_reply(claim, reply, fresh)
            self.got[client, sequence] = reply
        # others who wait for shares of the deal may have named other fields; one has all of its own in all rows
        assert all(any(ready) for _, ready in fresh.values()), "rows were dealt that were not ready"

    def pass_over(self, record: PassedOver) -> None:
        model = self.model[record.partition]
        rows = set(np.frombuffer(record.rows, "<i8").tolist())
        assert model.sealed
        assert rows <= set(model.rows)
        assert not rows & model.consumed.setdefault(record.task, set()), "a row was passed over that was consumed"
        model.consumed[record.task] |= rows
        model.ever[record.task] = model.ever.get(record.task, 0) + len(rows)

    def take_back(self, record: LeaseEnded) -> None:
        _, partition, task, rows = self.unseen.pop(record.token)
        model = self.model[partition]
        model.consumed[task] -= rows
        model.ever[task] -= len(rows & set(model.rows))

    def check_reply(self, claim: Claim, reply: Any, fresh: Fresh) -> None:
        model = self.model.get(claim.partition)
        if isinstance(reply, Failure):
            if reply.kind == "BatchGoneError":
                assert model is not None
                assert model.batches[self.key(claim)] == []
            else:
                assert reply.kind in ("WaitTimeoutError", "InvalidArgumentError"), reply
            return
        assert isinstance(reply, ClaimReply)
        rows = rows_of(reply)
        if reply.ended:
            assert model is not None
            assert model.sealed or (claim.finite and model.finished(claim.task)), "an end that is none"
            for task, everything, ready in {
                (k[0], tuple(w[0]), id(w[1])): (k[0], *w) for k, w in fresh.items()
            }.values():
                if task == claim.task and not claim.probe:  # it may have made others' shares of what is left
                    ready.append(all(field in model.rows[i].values for i in everything for field in claim.fields))
        if not rows:
            return
        assert model is not None
        assert not claim.probe
        held = reply.token in self.unseen
        assert held == (claim.hand_over and self.key(claim) is None)
        assert not held or self.unseen[reply.token][3] == set(rows)
        kept = model.batches.get(self.key(claim)) if self.key(claim) is not None else None
        if (claim.task, tuple(rows)) in fresh:
            assert len(rows) == claim.count or (model.sealed and len(rows) < claim.count)
            everything, ready = fresh[claim.task, tuple(rows)]
            ready.append(all(field in model.rows[i].values for i in everything for field in claim.fields))
        assert kept == rows if kept is not None else (claim.task, tuple(rows)) in fresh

    def key(self, claim: Claim) -> Any:
        batch = claim.sampling.get("batch_index")
        if batch is None or self.sampler == "sequential":
            return None
        return (claim.task, claim.sampling["dp_rank"], batch)

    # One rule draws what comes next: among many rules hypothesis switches most off in each run.
    @rule(data=st.data(), kind=st.sampled_from(KINDS), partition=PARTITIONS)
    def act(self, data: Any, kind: str, partition: str) -> None:
        draw = data.draw
        if kind == "insert":
            groups = draw(st.none() | st.lists(st.sampled_from("ghi"), min_size=4, max_size=4))
            self.insert(partition, draw(FIELDS), draw(st.integers(1, 4)), groups, draw(TAGS))
        elif kind == "write":
            self.write(partition, draw(FIELDS), data, draw(TAGS), draw(st.booleans()))
        elif kind == "by_keys":
            self.by_keys(partition, draw(KEYS), draw(FIELDS), draw(TAGS))
        elif kind == "join":
            self.join(partition, data, draw(st.sampled_from("gj")))
        elif kind == "claim":
            who = draw(st.lists(st.tuples(READERS, st.integers(0, RANKS - 1)), min_size=1, max_size=4))
            batch, wait = draw(st.sampled_from([None, 0, 0, 0, 1, 2])), draw(st.sampled_from([None, 25.0, 25.0, 25.0]))
            what = draw(st.sampled_from(["claim", "claim", "claim", "probe", "finite"]))
            size, hold = draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
            self.claim(partition, draw(TASKS), draw(FIELDS), size, who, batch, wait, what, hold)
        elif kind == "report":
            if self.tokens:
                self.report(draw(st.sampled_from(self.tokens[-8:])), draw(st.integers(0, 4)), draw(READERS))
        elif kind == "work":
            if self.h.works:
                self.work()
        elif kind == "retry":
            if self.requests:
                self.retry(draw(st.sampled_from(self.requests[-12:])))
        elif kind == "clear_rows":
            self.clear_rows(partition, data)
        elif kind == "end":
            self.end(
                draw(st.sampled_from(["seal", "seal", "reset", "keys", "drop"])),
                partition,
                draw(KEYS),
                draw(st.none() | TASKS),
            )
        else:
            self.world(draw(st.integers(0, 8)), draw(READERS), draw(st.sampled_from([0.5, 5.0, 30.0])), data)

    # ------------------------------------------------------------ puts

    def published(self, request: Publish, name: str) -> None:
        sequence = self.h.send(request, name)
        rows = rows_of(self.h.result(sequence, name))
        model = self.model.setdefault(request.partition, Model())
        for slot, index in enumerate(rows):
            row = model.rows.get(index)
            if row is None:
                assert index not in {i for m in self.model.values() for i in m.rows}
                row = model.rows[index] = Row(model.end)
                model.end += 1
                if request.keys is not None:
                    row.key = request.keys[slot]
            if request.groups is not None and row.group is None:
                row.group = request.groups[slot]
                model.declared = True
                model.members.setdefault(row.group, []).append(index)
            if request.block is not None:
                for spec in request.block.schema:
                    row.values[spec.name] = (request.block.offset, slot)
                    model.fields.add(spec.name)
            tag = request.tags[slot] if request.tags is not None else None
            if tag is not None:
                if request.replace_tags:
                    row.tag = {}
                row.tag = {k: v for k, v in {**row.tag, **tag}.items() if v != harness.DELETE}
        self.got[name, sequence] = self.h.reply(sequence, name)
        self.requests.append((name, sequence, request))
        self.settle()

    def insert(self, partition: str, fields: Any, count: int, groups: list[str] | None, tag: Any) -> None:
        model = self.model.get(partition)
        if model is not None and model.sealed:
            reply = self.h.reply(
                self.h.send(self.h.publish(count, None, partition, self.writer, tags=[{}] * count), self.writer),
                self.writer,
            )
            assert isinstance(reply, Failure)
            assert reply.kind == "SealedError"
            return
        tags = [tag] * count
        request = self.h.publish(
            count, fields, partition, self.writer, tags=tags, groups=groups[:count] if groups is not None else None
        )
        self.published(request, self.writer)

    def write(self, partition: str, fields: Any, data: Any, tag: Any, replace: bool) -> None:
        """Values, or tags alone, of rows that exist."""
        model = self.model.get(partition)
        if model is None or not model.rows:
            return
        rows = data.draw(st.lists(st.sampled_from(sorted(model.rows)), min_size=1, max_size=4, unique=True))
        alone = data.draw(st.booleans()) and tag is not None
        more = {"rows": rows, "tags": [tag] * len(rows), "replace_tags": replace}
        request = self.h.publish(len(rows), None if alone else fields, partition, self.writer, **more)
        self.published(request, self.writer)

    def join(self, partition: str, data: Any, group: str) -> None:
        model = self.model.get(partition)
        loose = [i for i, row in model.rows.items() if row.group is None] if model is not None else []
        if loose and self.grouping:
            rows = data.draw(st.lists(st.sampled_from(loose), min_size=1, max_size=2, unique=True))
            groups = [group] * len(rows)
            self.published(
                self.h.publish(len(rows), None, partition, self.writer, rows=rows, groups=groups), self.writer
            )

    def by_keys(self, partition: str, keys: list[str], fields: Any, tag: Any) -> None:
        model = self.model.get(partition)
        if model is not None and model.sealed:
            keys = [key for key in keys if key in {row.key for row in model.rows.values()}]
        if not keys:
            return
        request = self.h.publish(len(keys), fields, partition, self.writer, keys=keys, tags=[tag] * len(keys))
        self.published(request, self.writer)

    # ------------------------------------------------------------ claims

    def claim(
        self, partition: str, task: str, fields: Any, groups: int, who: Any, batch: Any, wait: Any, kind: str,
        hold: bool,
    ) -> None:  # fmt: skip
        """Some readers ask, ranks and their replicas."""
        count = GROUP * groups if self.grouping else groups
        for client, rank in who:
            sampling: dict[str, Any] = {} if self.sampler == "sequential" else {"dp_rank": rank}
            if self.sampler != "sequential" and (batch is not None or self.sampler == "rank_aware"):
                sampling["batch_index"] = batch or 0
            request = Claim(
                partition, task, list(fields), count, sampling, wait, kind == "probe", kind == "finite", hand_over=hold
            )
            sequence = self.h.send(request, client)
            self.waiting[client, sequence] = request
            self.requests.append((client, sequence, request))
            self.settle()

    def report(self, batch: tuple[str, int], kind: int, client: str) -> None:
        """A notice, or a return, of a batch that may have ended long ago."""
        if kind == 4:
            self.h.ask(Nack(*batch, b""), client)
        else:
            self.h.notify(client, **{["handed_over", "finished", "returned", "handed_over"][kind]: [batch]})
        assert batch[1] not in self.unseen or self.h.records[self.seen :]
        self.settle()
        assert batch[1] not in self.unseen

    def work(self) -> None:
        """A deal that was begun some events ago is made."""
        self.h.work()
        self.settle()

    def retry(self, which: Any) -> None:
        """The same request again: the same answer, or the same place in the queue."""
        client, sequence, request = which
        if client is None or client not in self.h.clients or (client.startswith("w") and client != self.writer):
            return
        recorded = self.h.state.clients.get(client)
        unrecorded = self.h.controller.context.connections.unrecorded.get(client)
        all_kept = [kept for kept in (recorded, unrecorded) if kept is not None]
        said = self.h.clients[client]
        if sequence <= said.acknowledged or any(first <= sequence <= last for first, last in said.finished):
            return  # a client that has said that it needs no reply does not ask again
        if any(kept.is_finished(sequence) for kept in all_kept):
            return
        if any(sequence in kept.replies for kept in all_kept):
            before = self.h.state.snapshot()
            self.h.send(request, client, sequence)
            assert self.h.reply(sequence, client) == self.got[client, sequence]
            assert self.h.state.snapshot() == before
        elif isinstance(request, Claim):
            if (client, sequence) not in self.waiting:
                self.waiting[client, sequence] = request
            self.h.send(request, client, sequence)
            self.settle()

    def _cancel(self, client: str, data: Any) -> None:
        mine = [sequence for name, sequence, request in self.requests if name == client and isinstance(request, Claim)]
        if mine:
            sequence = data.draw(st.sampled_from(mine[-6:]))
            if data.draw(st.booleans()):
                self.h.ask(Cancel(sequence), client)
            else:
                self.h.notify(client, withdrawn=[sequence])
            self.settle()
            reply = self.h.reply(sequence, client)
            assert (
                not isinstance(reply, ClaimReply)
                or reply.token not in self.unseen
                or self._is_finished(client, sequence)
            )

    def _is_finished(self, client: str, sequence: int) -> bool:
        """Whether the client has said that it has the reply."""
        kept = self.h.state.clients.get(client)
        return kept is None or sequence not in kept.replies

    def _finish(self, client: str) -> None:
        """The client has all replies that were sent; what waits keeps its place."""
        found = self.h.clients.get(self.writer if client == "w" else client)
        if found is None:
            return
        parked = sorted(s for name, s in self.h.state.waiting.by_waiter if name == found.name)
        marks = [*parked, found.sequence + 1]
        found.acknowledged = marks[0] - 1
        found.finished = [(a + 1, b - 1) for a, b in pairwise(marks) if a + 1 < b]

    # ------------------------------------------------------------ ends

    def clear_rows(self, partition: str, data: Any) -> None:
        model = self.model.get(partition)
        if model is None or not model.rows:
            return
        rows = data.draw(st.lists(st.sampled_from(sorted(model.rows)), min_size=1, max_size=5))
        self.h.ask(ClearRows(partition, column([*rows, 10**9])), self.writer)
        model.clear(rows)
        self.settle()

    def _clear_keys(self, partition: str, keys: list[str]) -> None:
        self.h.ask(ClearKeys(partition, keys), self.writer)
        model = self.model.get(partition)
        if model is not None:
            model.clear([i for i, row in model.rows.items() if row.key in keys])
        self.settle()

    def _drop(self, partition: str) -> None:
        self.h.ask(ClearPartition(partition), self.writer)
        self.model.pop(partition, None)
        self._forget_unseen(partition, None)
        self.settle()

    def _reset(self, partition: str, task: str | None) -> None:
        self.h.ask(ResetConsumption(partition, task), self.writer)
        model = self.model.get(partition)
        if model is not None:
            self._forget_unseen(partition, task)
            self.handed_over -= {
                (name, row) for name, row in self.handed_over if row in model.rows and task in (None, name)
            }
            for name in [task] if task is not None else ["t", "u"]:
                model.consumed.pop(name, None)
                model.batches = {key: rows for key, rows in model.batches.items() if key[0] != name}
        self.settle()

    def _forget_unseen(self, partition: str, task: str | None) -> None:
        for token, batch in list(self.unseen.items()):
            if batch[1] == partition and task in (None, batch[2]):
                del self.unseen[token]

    def _seal(self, partition: str) -> None:
        if partition in self.model:
            self.h.ask(Seal(partition), self.writer)
            self.model[partition].sealed = True
            self.settle()

    def end(self, kind: str, partition: str, keys: list[str], task: str | None) -> None:
        if kind == "seal":
            self._seal(partition)
        elif kind == "reset":
            self._reset(partition, task)
        elif kind == "keys":
            self._clear_keys(partition, keys)
        else:
            self._drop(partition)

    # ------------------------------------------------------------ the world

    def world(self, kind: int, client: str, seconds: float, data: Any) -> None:
        if kind == 0:
            self._cancel(client, data)
        elif kind == 1:
            self._finish(data.draw(st.sampled_from([client, "w"])))
        elif kind == 2:
            self._tick(seconds)
        elif kind == 3:
            self._reconnect(client)
        elif kind == 4:
            self._second_connection(client)
        elif kind == 5:
            self._unit_restarts()
        elif kind == 6:
            self._controller_restarts(data.draw(st.booleans()))
        elif kind == 7:
            self._leave(client, data.draw(st.booleans()))
        else:
            self._writer_dies()

    def _tick(self, seconds: float) -> None:
        self.h.tick(self.h.now + seconds)
        self.settle()
        deadline = self.h.controller.next_deadline()
        assert deadline is None or deadline > self.h.now

    def _reconnect(self, client: str) -> None:
        """A connection ends: what waits on it is cancelled, and nothing more is answered there."""
        if client in self.h.clients:
            self.h.disconnect(client)
            self.waiting = {who: claim for who, claim in self.waiting.items() if who[0] != client}
            self.h.connect(client)
            assert not any(name == client for name, _ in self.h.state.waiting.by_waiter)
            self.settle()

    def _leave(self, client: str, announced: bool) -> None:
        """A client closes, or is away for so long that it counts as dead; it has nothing afterwards."""
        if client not in self.h.clients:
            return
        if announced:
            self.h.ask(Leave(), client)
        self.h.disconnect(client)
        self.waiting = {who: claim for who, claim in self.waiting.items() if who[0] != client}
        self.settle()
        if not announced:
            self._tick(ABSENCE_SECONDS)
        assert not any(batch[0] == client for batch in self.unseen.values())
        self.h.connect(client)

    def _second_connection(self, client: str) -> None:
        """All that waits moves to a new connection, and the old one ends."""
        if client not in self.h.clients:
            return
        old = self.h.clients[client].peer
        self.h.connect(client)
        for (name, sequence), claim in list(self.waiting.items()):
            if name == client:
                self.h.send(claim, client, sequence)
                assert self.h.parked(sequence, client)
        self.h.disconnect(client, old)
        self.settle()
        assert all(self.h.parked(sequence, name) for name, sequence in self.waiting if name == client)

    def _unit_restarts(self) -> None:
        self.h.disconnect("unit-0")
        self.h.connect("unit-0")
        self.h.ask(RegisterUnit("unit.sock", "/arena"), "unit-0")
        self.settle()

    def _controller_restarts(self, replays: bool) -> None:
        """Its state comes out of a file or of the records, and those who waited ask again, in some order."""
        self.h.restart(replays=replays)
        self.h.ask(RegisterUnit("unit.sock", "/arena"), "unit-0")
        for (client, sequence), claim in reversed(self.waiting.items()):
            self.h.send(claim, client, sequence)
        self.settle()

    def _writer_dies(self) -> None:
        if self.writer in self.h.clients:
            name = self.writer
            self.h.disconnect(name)
            open_ = [
                number for _, number in self.h.state.blocks.extents if not self.h.state.blocks.extents[0, number].closed
            ]
            self.h.ask(WriterGone(name, 0, open_), "unit-0")
            self.h.connect(name)
            late = self.h.publish(1, ("x",), "p", name)
            assert isinstance(self.h.reply(self.h.send(late, name), name), Failure)
            self.writers += 1
            self.settle()

    # ------------------------------------------------------------ always

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        for (client, sequence), claim in self.waiting.items():
            assert self.h.parked(sequence, client)
            model = self.model.get(claim.partition)
            if model is None or (claim.partition, claim.task) in self.h.controller.context.services[LongDeals].is_stale:
                continue
            assert claim.wait is not None, "only a deal under way keeps it"
            ready = model.ready(claim.task, claim.fields)
            key = self.key(claim)
            assert key is None or key not in model.batches, "its batch was dealt"
            rest = [i for i in model.rows if i not in ready and i not in model.consumed.get(claim.task, ())]
            if self.grouping:
                ranks = RANKS if self.sampler == "balanced" and key is not None else 1
                waits = model.sealed and self.sampler == "groups" and key is not None  # all ranks' ends are to be equal
                assert waits or model.whole(ready) * GROUP < claim.count * ranks, "its rows are ready"
                rest = [i for i in rest if not model.hopeless(model.group_of(i))]
            elif not (model.sealed and key is not None):
                assert len(ready) < claim.count, "its rows are ready"
            assert not model.sealed or rest, "nothing more will come"
            if claim.finite:
                assert not model.finished(claim.task), "all is consumed"

    @invariant()
    def the_next_deadline_is_not_that_of_an_earlier_event(self) -> None:
        assert self.h.controller.next_deadline() == self.h.controller._earliest_deadline()

    @invariant()
    def everything_is_as_in_the_model(self) -> None:
        h = self.h
        assert h.look(ListKeys()).value == {
            name: {row.key: row.tag for row in model.rows.values() if row.key is not None}
            for name, model in self.model.items()
        }
        for name, model in self.model.items():
            for fields in (["x"], ["y"]):
                reply = h.look(ProductionStatus(name, fields))
                assert reply.known == (fields[0] in model.fields)
                if reply.known:
                    assert np.frombuffer(reply.rows, "<i8").tolist() == list(model.rows)
                    assert list(reply.matrix) == [int(fields[0] in row.values) for row in model.rows.values()]
                    produced = all(fields[0] in row.values for row in model.rows.values()) and bool(model.rows)
                    assert h.look(CheckProduction(name, fields)).value == produced
            for task in "tu":
                done = model.consumed.get(task, set())
                assert list(h.look(ConsumptionStatus(name, task)).matrix) == [int(i in done) for i in model.rows]
                assert h.look(CheckConsumption(name, task)).value == model.finished(task)
            keyed = {row.key: (i, row) for i, row in model.rows.items() if row.key is not None}
            reply = h.look(RetrieveMeta(name, [*keyed, "nobody"]))
            assert rows_of(reply) == [i for i, _ in keyed.values()]
            assert (reply.tags or [{}] * len(keyed)) == [row.tag for _, row in keyed.values()]

    @invariant()
    def what_was_not_handed_over_is_held_or_can_be_claimed(self) -> None:
        held = {
            token: (batch.client, name, batch.task, set(batch.indexes.tolist()))
            for name, partition in self.h.state.partitions.items()
            for token, batch in partition.unseen_batches.by_token.items()
        }
        assert held == self.unseen
        for _, name, task, rows in held.values():
            assert rows & set(self.model[name].rows) <= self.model[name].consumed[task]
            assert not {(task, row) for row in rows} & self.handed_over

    @invariant()
    def what_is_published_can_be_read(self) -> None:
        for name, model in self.model.items():
            for field in ("x", "y"):
                rows = [i for i, row in model.rows.items() if field in row.values]
                found = harness.places(self.h.look(Lookup(name, column(rows), fields=[field]))) if rows else []
                assert [place[field] for place in found] == [model.rows[i].values[field] for i in rows]

    def teardown(self) -> None:
        claim_deal.LONG = 512
        if hasattr(self, "h"):
            while self.h.works:
                self.work()
            harness.made.remove(self.h)
            self.h.replay()
            self.h.check_saving()


TestInterleavings = stateful(Interleavings, 60, 50)
