"""Puts of several clients that arrive in one turn have the results of the same puts one after the other."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from harness import DELETE, EXTENT, OBJECT, Harness, column, content_of, rows_of, tensor
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.core.configuration import MaxLag
from transfer_queue.core.events.records import PartitionMade, ReplySent, SamplesPut, WriterFenced
from transfer_queue.core.events.registry import Caller
from transfer_queue.core.puts.decide import group_puts
from transfer_queue.core.tables import fields as field_table
from transfer_queue.errors import CapacityError, InvalidArgumentError, ProtocolError
from transfer_queue.messages.base import Failure
from transfer_queue.messages.descriptors import MIRROR
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import ClearRows, Publish
from transfer_queue.messages.reports.unit_reports import RegisterUnit
from transfer_queue.sampler import PrioritySampler

CLIENTS = [f"c{number}" for number in range(6)]
FIELDS = {"x": tensor(), "y": OBJECT}


def put_of(h: Harness, name: str, count: int = 1, fields: Any = ("x",), **more: Any) -> tuple[str, Publish]:
    """A put with a block whose extent is known to be as long as a real one."""
    request = h.publish(count, fields, name=name, **more)
    assert request.block is not None
    return name, msgspec.structs.replace(request, block=msgspec.structs.replace(request.block, length=EXTENT))


def opened(h: Harness, clients: list[str] = CLIENTS, **more: Any) -> Harness:
    """The harness, after a first put of each client, which opens its extent."""
    for name in clients:
        h.ask(put_of(h, name, **more)[1], name)
    return h


def kinds(h: Harness, began: int) -> list[type]:
    """The records after the first `began` ones."""
    return [type(record) for record in h.records[began:]]


def writers(h: Harness, began: int) -> list[list[str]]:
    """The clients of each put among these records."""
    return [[put.client for put in record.puts] for record in h.records[began:] if isinstance(record, SamplesPut)]


def own_keys(name: str, count: int) -> list[str]:
    return [f"{name} {number}" for number in range(count)]


def results(h: Harness, puts: list[tuple[str, Publish]], sequences: list[int]) -> list[Any]:
    return [h.result(sequence, name) for (name, _), sequence in zip(puts, sequences, strict=True)]


def test_new_rows_of_several_clients_are_one_record(h: Harness) -> None:
    began = len(opened(h).records)
    first, counts = h.state.next_index, [1, 3, 1, 2]
    puts = [
        put_of(h, name, count, keys=own_keys(name, count), tags=[{"n": i} for i in range(count)])
        for name, count in zip(CLIENTS, counts, strict=False)
    ]
    got = [rows_of(reply) for reply in results(h, puts, h.send_together(puts))]
    assert kinds(h, began) == [SamplesPut, *[ReplySent] * 4]
    assert [row for rows in got for row in rows] == list(range(first, first + 7))
    assert [len(rows) for rows in got] == counts
    partition = h.state.partitions["p"]
    assert list(partition.keys) == [key for _, put in puts for key in put.keys or ()]
    assert partition.tags_of(np.arange(first, first + 7)) == [{"n": n} for n in (0, 0, 1, 2, 0, 0, 1)]
    for (_, put), rows in zip(puts, got, strict=True):
        assert put.block is not None
        assert h.lookup(rows, ["x"]) == [{"x": (put.block.offset, slot)} for slot in range(put.count)]
    names = {number: name for name, number in partition.owners.items()}
    owners = [names[number] for number in partition.rows.chunks[0].owner[first : first + 7].tolist()]
    assert owners == [name for name, count in zip(CLIENTS, counts, strict=False) for _ in range(count)]


@pytest.mark.parametrize("target", ["keys", "rows"])
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "tags"])
def test_updates_of_several_clients_are_one_record(h: Harness, target: str, with_values: bool) -> None:
    for name in CLIENTS:
        h.ask(put_of(h, name, 2, keys=own_keys(name, 2), tags=[{"old": 1}] * 2)[1], name)
    began, published = len(h.records), h.controller.context.measures.counters["published_rows"]
    puts = []
    for number, name in enumerate(CLIENTS):
        named = {"keys": own_keys(name, 2)} if target == "keys" else {"rows": [2 * number, 2 * number + 1]}
        tags = [{"n": 10 + number}, {"n": 20 + number}]
        _, request = put_of(h, name, 2, **named, tags=tags, replace_tags=name == CLIENTS[-1])
        puts.append((name, request if with_values else msgspec.structs.replace(request, block=None, closes=[])))
    got = results(h, puts, h.send_together(puts))
    assert writers(h, began) == [CLIENTS[:-1], CLIENTS[-1:]]
    assert [rows_of(reply) for reply in got] == [[2 * number, 2 * number + 1] for number in range(len(CLIENTS))]
    expected = [{"old": 1, "n": ten + n} for n in range(len(CLIENTS) - 1) for ten in (10, 20)]
    tags = h.state.partitions["p"].tags_of(np.arange(2 * len(CLIENTS)))
    assert tags == [*expected, {"n": 15}, {"n": 25}]
    assert h.controller.context.measures.counters["published_rows"] - published == (12 if with_values else 0)


def test_updates_of_the_same_sample_are_carried_out_one_by_one(h: Harness) -> None:
    h.put(1, keys=["k"])
    puts = [(name, Publish("p", 1, keys=["k"], tags=[{name: 1}])) for name in CLIENTS]
    assert all(results(h, puts, h.send_together(puts)))
    assert h.state.partitions["p"].tags_of(np.arange(1)) == [dict.fromkeys(CLIENTS, 1)]


def test_puts_of_other_partitions_and_schemas_are_decided_apart(h: Harness) -> None:
    opened(h, ["c0", "c2", "c4"])
    began = len(opened(h, ["c1", "c3"], partition="q").records)
    puts = [
        put_of(h, "c0"),
        put_of(h, "c1", partition="q"),
        put_of(h, "c2"),
        put_of(h, "c3", partition="q"),
        put_of(h, "c4", fields=FIELDS),
    ]
    h.send_together(puts)
    assert writers(h, began) == [["c0", "c2"], ["c1", "c3"], ["c4"]]
    assert len(h.state.partitions["p"].fields) == 2


def test_puts_beyond_a_limit_are_refused_one_by_one() -> None:
    h = opened(Harness(capacity=8))
    puts = [put_of(h, name) for name in CLIENTS[:4]]
    sequences = h.send_together(puts)
    for name, sequence in zip(CLIENTS[:2], sequences, strict=False):
        assert h.result(sequence, name)
    for name, sequence in zip(CLIENTS[2:4], sequences[2:], strict=True):
        with pytest.raises(CapacityError):
            h.result(sequence, name)


def test_puts_beyond_a_limit_wait_one_by_one() -> None:
    h = opened(Harness(capacity=8))
    puts = [put_of(h, name, wait=10.0) for name in CLIENTS[:4]]
    sequences = h.send_together(puts)
    assert [h.parked(sequence, name) for (name, _), sequence in zip(puts, sequences, strict=True)] == [
        False, False, True, True
    ]  # fmt: skip
    h.ask(ClearRows("p", column([0, 1])))
    assert all(results(h, puts, sequences))


def test_a_put_that_is_sent_again_has_its_effect_once(h: Harness) -> None:
    opened(h)
    puts = [put_of(h, name) for name in CLIENTS[:3]]
    sequences = h.send_together(puts)
    before = results(h, puts, sequences)
    rows, client = h.state.row_count, h.clients["c0"]
    again = RequestEnvelope(sequences[0], 0, puts[0][1])
    new = [put_of(h, name) for name in CLIENTS[3:5]]
    h.replies.clear()
    arrived = [("c0", client.peer, again)]
    for name, request in new:
        h.clients[name].sequence += 1
        arrived.append((name, h.clients[name].peer, RequestEnvelope(h.clients[name].sequence, 0, request)))
    h.take(h.controller.handle_puts(arrived, h.now))
    assert h.result(sequences[0], "c0") == before[0]
    assert h.state.row_count == rows + 2


def test_first_puts_of_clients_are_one_record(h: Harness) -> None:
    """Nothing is known yet of the extents in which their blocks are."""
    h.put(1)
    began = len(h.records)
    puts = [put_of(h, name, 2) for name in CLIENTS]
    got = [rows_of(reply) for reply in results(h, puts, h.send_together(puts))]
    assert kinds(h, began) == [SamplesPut, *[ReplySent] * len(CLIENTS)]
    for (_, put), rows in zip(puts, got, strict=True):
        assert put.block is not None
        assert h.lookup(rows, ["x"]) == [{"x": (put.block.offset, slot)} for slot in range(2)]
    began = len(h.records)
    h.send_together([put_of(h, name) for name in CLIENTS])
    assert kinds(h, began) == [SamplesPut, *[ReplySent] * len(CLIENTS)]


def test_the_first_put_of_a_partition_goes_alone(h: Harness) -> None:
    began, others = len(h.records), len(CLIENTS) - 1
    h.send_together([put_of(h, name) for name in CLIENTS])
    assert kinds(h, began) == [PartitionMade, SamplesPut, ReplySent, SamplesPut, *[ReplySent] * others]
    assert writers(h, began) == [CLIENTS[:1], CLIENTS[1:]]


def moved(put: tuple[str, Publish], **place: int) -> tuple[str, Publish]:
    """The same put with its block at another place."""
    name, request = put
    assert request.block is not None
    return name, msgspec.structs.replace(request, block=msgspec.structs.replace(request.block, **place))


def test_a_writer_that_is_proven_dead_is_refused_alone(h: Harness) -> None:
    opened(h)
    h.controller.context.log.apply(WriterFenced("c1", h.unit, []))
    puts = [put_of(h, name) for name in CLIENTS[:3]]
    one, two, three = h.send_together(puts)
    assert h.result(one, "c0")
    assert h.result(three, "c2")
    with pytest.raises(ProtocolError, match="proven dead"):
        h.result(two, "c1")


def test_objects_of_an_external_store_are_put_together(h: Harness) -> None:
    """Each block has an extent of its own there, and all begin at byte 0."""
    h.put(1)
    store = json.dumps({"kind": "MooncakeStore", "options": {}})
    h.ask(RegisterUnit("store", "/store", name="store", store=store), "store")
    unit, began = max(h.state.units), len(h.records)
    puts = [moved(put_of(h, name), unit=unit, extent=at, offset=0) for at, name in enumerate(CLIENTS)]
    assert all(results(h, puts, h.send_together(puts)))
    assert writers(h, began) == [CLIENTS]


def test_replies_wait_for_the_mirror() -> None:
    h = opened(Harness(max_lag=MaxLag(-1, 0.0)))
    h.ask(RegisterUnit("mirror.sock", "/mirror", "boot", "mirror", "now", b"", 1 << 30, tier=MIRROR), "mirror")
    began = len(h.records)
    puts = [put_of(h, name) for name in CLIENTS[:2]]
    sequences = h.send_together(puts)
    assert writers(h, began) == [CLIENTS[:2]]
    assert results(h, puts, sequences) == [None, None]  # nothing is on the disk yet


def unversioned(reply: Any) -> Any:
    """The reply without the version of the partition, which puts of one record share."""
    return msgspec.structs.replace(reply, version=0)


OPTIONS = st.fixed_dictionaries(
    {
        "client": st.sampled_from(CLIENTS),
        "count": st.sampled_from([1, 1, 1, 2, 3]),
        "fields": st.sampled_from([("x",), ("x",), FIELDS]),
        "target": st.sampled_from(["", "", "new", "same", "own", "own", "rows"]),
        "values": st.sampled_from([True, True, False]),
        "replace_tags": st.booleans(),
        "tags": st.sampled_from([None, [{}], [{"n": 1}], [{"n": 2, "s": "a"}], [{"n": DELETE}], [None]]),
        "groups": st.sampled_from([False, False, False, True]),
        "shape": st.integers(1, 3),
        "partition": st.sampled_from(["p", "p", "p", "q"]),
    }
)


@differential(40, costly=True)
@given(st.lists(st.lists(OPTIONS, min_size=1, max_size=6, unique_by=lambda put: put["client"]), max_size=6))
def test_any_puts_have_the_results_that_they_have_one_after_the_other(turns: list[list[dict[str, Any]]]) -> None:
    one, two = Harness(PrioritySampler("n")), Harness(PrioritySampler("n"))
    for h in (one, two):
        for name in CLIENTS:
            h.ask(put_of(h, name, 3, keys=own_keys(name, 3))[1], name)
        h.claim(2, fields=["x"])
    names, with_values = 0, set(one.live())
    for turn in turns:
        puts: dict[Harness, list[tuple[str, Publish]]] = {one: [], two: []}
        for put in turn:
            count, target = put["count"], put["target"]
            names += count
            keys = {
                "new": [f"k{names + i}" for i in range(count)],
                "same": ["k0", "k1", "k2"][:count],
                "own": own_keys(put["client"], count),
            }.get(target)
            first_row = 3 * CLIENTS.index(put["client"])
            named = range(first_row, first_row + count) if target == "rows" else None
            fields = {name: tensor(shape=(put["shape"],)) if name == "x" else OBJECT for name in put["fields"]}
            for h, sent in puts.items():
                name, request = put_of(
                    h, put["client"], count, fields, partition=put["partition"], keys=keys, rows=named,
                    tags=put["tags"] and put["tags"] * count, replace_tags=put["replace_tags"],
                    groups=["g"] * count if put["groups"] and not target else None,
                )  # fmt: skip
                if put["tags"] is not None and not put["values"]:
                    request = msgspec.structs.replace(request, block=None, closes=[])
                sent.append((name, request))
        first = dict(zip((name for name, _ in puts[one]), one.send_together(puts[one]), strict=True))
        ordered = group_puts([Caller(name, 0, RequestEnvelope(1, 0, request)) for name, request in puts[two]])
        for caller in [caller for some in ordered for caller in some]:
            sequence = two.send(caller.envelope.body, caller.client)
            got, expected = one.reply(first[caller.client], caller.client), two.reply(sequence, caller.client)
            assert type(got) is type(expected)
            assert isinstance(got, Failure) or unversioned(got) == unversioned(expected)
            request = caller.envelope.body
            if not isinstance(got, Failure) and request.block is not None and request.partition == "p":
                with_values |= set(rows_of(got))
        rows = sorted(with_values & set(one.live()))
        assert one.lookup(rows, ["x"]) == two.lookup(rows, ["x"])
        contents = content_of(one), content_of(two)
        for content in contents:
            del content["changed"]  # since the last version, which the rows of one record share
        assert contents[0] == contents[1]


PLACES = st.fixed_dictionaries(
    {
        "client": st.sampled_from(CLIENTS),
        "extent": st.sampled_from([0, 0, 0, 21, 22, 23, 24]),  # 0: the extent of the client
        "offset": st.integers(0, 12),
        "nbytes": st.sampled_from([0, 64, 64, 128, 192]),
        "length": st.sampled_from([0, 256, 1024]),
    }
)


@differential(40, costly=True)
@given(st.lists(st.lists(PLACES, min_size=2, max_size=6, unique_by=lambda put: put["client"]), max_size=6))
def test_blocks_at_any_places_have_the_results_that_they_have_one_after_the_other(
    turns: list[list[dict[str, Any]]],
) -> None:
    one, two = Harness(), Harness()
    for h in (one, two):
        h.put(1)
    for turn in turns:
        for h in (one, two):
            puts = [
                moved(
                    put_of(h, put["client"]), extent=put["extent"] or 10 + CLIENTS.index(put["client"]),
                    offset=64 * put["offset"], nbytes=put["nbytes"], length=put["length"],
                )
                for put in turn
            ]  # fmt: skip
            puts = [(name, msgspec.structs.replace(request, closes=[])) for name, request in puts]
            if h is one:
                sequences = h.send_together(puts)
            else:
                expected = [(name, h.reply(h.send(request, name), name)) for name, request in puts]
        for sequence, (name, reply) in zip(sequences, expected, strict=True):
            got = one.reply(sequence, name)
            assert type(got) is type(reply)
            assert isinstance(got, Failure) or unversioned(got) == unversioned(reply)
        extents = [
            {place: (e.writer, e.blocks, e.low, e.top, e.gaps) for place, e in h.state.blocks.extents.items()}
            for h in (one, two)
        ]
        assert extents[0] == extents[1]
        assert one.state.blocks.leased == two.state.blocks.leased


def test_puts_that_give_the_partition_too_many_fields_are_refused_one_by_one(
    h: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_table, "MAX_FIELDS", 2)
    opened(h)
    fields = {"x": tensor(), "y": tensor(), "z": tensor()}
    puts = [put_of(h, name, fields=fields, keys=[name]) for name in CLIENTS[:3]]
    for (name, _), sequence in zip(puts, h.send_together(puts), strict=True):
        with pytest.raises(InvalidArgumentError, match="at most 2 fields"):
            h.result(sequence, name)
    assert list(h.state.partitions["p"].fields) == ["x"]
