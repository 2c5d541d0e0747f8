"""A put of new rows in one record has the result of a reservation and a put into the reserved rows."""

from __future__ import annotations

import numpy as np
import pytest
from harness import DELETE, Harness, content_of, rows_of, tensor

from transfer_queue.core.events.records import SamplesPut
from transfer_queue.core.tables.rows import CHUNK
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import CreatePartition
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.sampler import GRPOGroupNSampler, PrioritySampler

SHAPES = [(3,), (5,), (3,)]


def puts(h: Harness) -> list[SamplesPut]:
    return [record for record in h.records if isinstance(record, SamplesPut)]


@pytest.mark.parametrize("count", [1, 3, CHUNK + 2])
@pytest.mark.parametrize("named", ["keys", "groups", None])
def test_a_put_of_new_rows_equals_a_reservation_and_a_put_into_it(count: int, named: str | None) -> None:
    sampler = PrioritySampler("n") if named == "keys" else GRPOGroupNSampler(2)
    one, two = Harness(sampler), Harness(sampler)
    group_size = {"n_samples_per_prompt": 2} if named != "keys" else {}
    for h in (one, two):
        h.put(CHUNK - 1, tags=[{"n": i % 7} for i in range(CHUNK - 1)])
        h.claim(2, task="t", fields=["x"], **group_size)
        h.claim(2, task="u", fields=["y"], **group_size)
    names = [f"k{i}" for i in range(count)]
    groups = [f"g{i // 2}" for i in range(count)] if named == "groups" else None
    tags = [None if i % 5 == 1 else {"n": i / 3, "s": "new"} if i % 3 else {} for i in range(count)]
    fields = {"x": tensor(), "y": tensor("int64", (SHAPES * count)[:count])}
    began = len(puts(one))
    if named == "keys":
        rows = one.put(count, fields, keys=names, tags=tags)
        two.ask(Reserve("p", count, names, 0))
    else:
        rows = one.put(count, fields, groups=groups, tags=tags)
        two.ask(Reserve("p", count, None, 0, groups))
    two.ask(two.publish(count, fields, rows=rows, tags=tags))
    assert [(put.count, put.rows) for put in puts(one)[began:]] == [(count, None)]
    assert content_of(one) == content_of(two)
    for h in (one, two):
        h.claim(count - count % 2 or 2, task="u", fields=["y"], **group_size)
    assert content_of(one) == content_of(two)


@pytest.mark.parametrize("named", ["keys", "groups", None])
@pytest.mark.parametrize("pre_allocate", [0, 1, 3])
def test_the_first_put_of_a_partition_takes_the_rows_that_would_be_pre_allocated(
    named: str | None, pre_allocate: int
) -> None:
    one, two = Harness(), Harness()
    names = {named: ["a", "b", "c"]} if named else {}
    two.ask(CreatePartition("p", pre_allocate))
    for h in (one, two):
        assert h.put(3, tags=[{"n": 1}, None, {"m": 2}], pre_allocate=pre_allocate, **names) == [0, 1, 2]
        assert h.put(1, keys=["d"]) == [3]
    assert [put.taken for put in puts(one)] == [0, 0]
    left, right = content_of(one), content_of(two)
    assert left == right


def test_a_new_row_has_no_tags_that_its_put_removes(h: Harness) -> None:
    h.put(1)
    rows = h.put(3, None, tags=[{"a": DELETE, "b": [1]}, {"a": DELETE}, None])
    partition = h.state.partitions["p"]
    assert [put.count for put in puts(h)] == [1, 3]
    assert partition.tags_of(partition.rows.positions_of(np.array(rows))) == [{"b": [1]}, {}, {}]


def test_pre_allocated_rows_are_taken_first(h: Harness) -> None:
    assert h.put(1, keys=["a"], pre_allocate=3) == [0]
    assert h.put(4, keys=list("bcde")) == [1, 2, 3, 4]
    assert [(put.taken, put.count) for put in puts(h)] == [(0, 3), (1, 0), (2, 2)]
    assert h.put(2, keys=list("fg")) == [5, 6]
    assert (puts(h)[-1].taken, puts(h)[-1].count) == (0, 2)


def test_a_late_put_into_a_dropped_group_names_the_remaining_rows(h: Harness) -> None:
    h.ask(CreatePartition("p", 0, PartitionOptions(group_size=2)))
    h.put(2, keys=["a", "b"], groups=["g", "h"])
    h.ask(Drop("p", "bad", groups=["g"]))
    reply = h.ask(h.publish(2, keys=["c", "d"], groups=["g", "h"], tags=[{"n": 1}, {"n": 2}]))
    assert (reply.tags, reply.fields) == ([{}, {"n": 2}], [])
    assert list(h.state.partitions["p"].keys) == ["b", "d"]
    assert rows_of(reply) == [2, 3]
