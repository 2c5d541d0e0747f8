"""Puts of single samples that wait at the same time: one request, and what each would have got alone."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from simulated import Start
from transfer_queue.core.events.records import SamplesPut
from transfer_queue.errors import CapacityError, InvalidArgumentError, SealedError, UncarriableValueError
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.net.calls import Operation
from transfer_queue.testing import Client, Cluster
from transfer_queue.testing.simulated_client import Task
from transfer_queue.wire.blocks import encode


def outcome(task: Task[KVBatchMeta]) -> Any:
    """What a put returned, or the class of its error."""
    assert task.done
    if task.error is not None:
        return type(task.error)
    meta = task.result()
    return meta.keys, meta.tags, meta.fields


def together(cluster: Cluster, client: Client, operations: list[Operation[KVBatchMeta]]) -> list[Any]:
    tasks = [client.start(operation) for operation in operations]
    cluster.wait(lambda: all(task.done for task in tasks))
    return [outcome(task) for task in tasks]


def row(number: int, length: int = 2) -> dict[str, Any]:
    return {"x": torch.arange(length) + number, "y": torch.tensor(number / 2), "o": f"text {number}"}


def put_records(cluster: Cluster) -> list[Any]:
    return [record for record in cluster.records if isinstance(record, SamplesPut)]


def test_those_that_wait_travel_together(a: Client, cluster: Cluster) -> None:
    a.kv_put("first", "p", row(0))
    before = len(put_records(cluster))
    operations = [a.operations.kv_put(f"k{n}", "p", row(n, 1 + n % 3), {"n": n}) for n in range(100)]
    found = together(cluster, a, operations)
    assert found == [([f"k{n}"], [{"n": n}], ["o", "x", "y"]) for n in range(100)]
    assert [record.count for record in put_records(cluster)[before:]] == [1, 1, 98]
    got = a.kv_batch_get([f"k{n}" for n in range(100)], "p", layout="list")
    for n in range(100):
        assert torch.equal(got["x"][n], row(n, 1 + n % 3)["x"])
        assert got["o"][n] == f"text {n}"
    assert [float(value) for value in got["y"]] == [n / 2 for n in range(100)]


def test_tag_updates_and_new_fields_of_samples_that_exist(a: Client, cluster: Cluster) -> None:
    for n in range(6):
        a.kv_put(f"k{n}", "p", {"x": torch.tensor(n)} if n % 2 else {"x": torch.tensor(n), "z": n}, {"old": n})
    before = len(put_records(cluster))
    found = together(cluster, a, [a.operations.kv_put(f"k{n}", "p", tag={"n": n}) for n in range(6)])
    assert found == [([f"k{n}"], [{"old": n, "n": n}], ["x"] if n % 2 else ["x", "z"]) for n in range(6)]
    assert len(put_records(cluster)) == before + 3
    found = together(cluster, a, [a.operations.kv_put(f"k{n}", "p", {"y": torch.tensor(n)}) for n in range(4, 8)])
    names = [["x", "y", "z"], ["x", "y"], ["y"], ["y"]]
    assert [each[2] for each in found] == names
    assert a.kv_batch_get(["k4", "k5", "k6", "k7"], "p", "y")["y"].tolist() == [4, 5, 6, 7]


def test_puts_of_one_key_keep_their_order(a: Client, cluster: Cluster) -> None:
    together(cluster, a, [a.operations.kv_put("k", "p", {"x": torch.tensor(n)}, {"n": n}) for n in range(9)])
    assert a.kv_batch_get("k", "p")["x"].tolist() == [8]
    assert a.kv_list("p") == {"p": {"k": {"n": 8}}}


def test_each_gets_its_own_error(a: Client, b: Client, cluster: Cluster) -> None:
    a.kv_put("old", "p", {"x": torch.tensor(1.0)})
    a.seal("p")
    operations = [a.operations.kv_put(key, "p", {"x": torch.tensor(2.0)}) for key in ("new", "old", "other", "old")]
    found = together(cluster, a, operations)
    assert [found[0], found[2]] == [SealedError, SealedError]
    assert found[1] == found[3] == (["old"], [{}], ["x"])
    assert a.kv_list("p") == {"p": {"old": {}}}


def test_a_partition_that_is_no_name_is_an_error_of_its_own_put(a: Client, cluster: Cluster) -> None:
    partitions: list[Any] = ["p", "p", ["p"], "p", {}]
    tasks = [
        a.start(a.operations.kv_put(f"k{n}", partition, {"x": torch.tensor(n)}))
        for n, partition in enumerate(partitions)
    ]
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [type(task.error) for task in tasks] == [
        type(None), type(None), InvalidArgumentError, type(None), InvalidArgumentError
    ]  # fmt: skip
    assert sorted(a.kv_list("p")["p"]) == ["k0", "k1", "k3"]


def test_a_full_group_refuses_only_what_is_too_much(a: Client, cluster: Cluster) -> None:
    a.create_partition("p", group_size=2)
    operations = [a.operations.kv_put(f"k{n}", "p", {"x": torch.tensor(n)}, group_id=n // 3) for n in range(6)]
    found = together(cluster, a, operations)
    assert [each for each in found if isinstance(each, type)] == [InvalidArgumentError] * 2
    assert len(a.kv_list("p")["p"]) == 4


def test_a_put_waits_for_space_by_itself(start: Start) -> None:
    cluster = start(conf={"backend": {"SimpleStorage": {"total_storage_size": 4}}})
    client, other = cluster.client("c"), cluster.client("d")
    tasks = [
        client.start(client.operations.kv_put(f"k{n}", "p", {"x": n}, timeout=10.0 if n == 5 else None))
        for n in range(6)
    ]
    cluster.run()
    assert [task.done for task in tasks] == [True] * 5 + [False]
    other.kv_clear("k0", "p")
    cluster.wait(lambda: tasks[5].done)
    assert outcome(tasks[5]) == (["k5"], [{}], ["x"])
    assert outcome(tasks[4]) is CapacityError


def test_a_value_that_cannot_be_stored_fails_its_own_put(a: Client, cluster: Cluster) -> None:
    values = [1, (n for n in "ab"), "text", 2]
    found = together(cluster, a, [a.operations.kv_put(f"k{n}", "p", {"o": value}) for n, value in enumerate(values)])
    assert [isinstance(each, type) for each in found] == [False, True, False, False]
    assert found[1] is UncarriableValueError
    assert a.kv_batch_get(["k0", "k2", "k3"], "p")["o"] is not None


def test_numbers_become_tensors_where_the_field_holds_them(a: Client, cluster: Cluster) -> None:
    a.kv_put("first", "p", {"x": torch.tensor(1.5)})
    together(cluster, a, [a.operations.kv_put(f"k{n}", "p", {"x": float(n)}) for n in range(5)])
    assert a.kv_batch_get([f"k{n}" for n in range(5)], "p")["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_large_objects_go_alone_from_the_second_time_on(a: Client, cluster: Cluster) -> None:
    for time in range(2):
        before = len(put_records(cluster))
        together(cluster, a, [a.operations.kv_put(f"{time}-{n}", "p", {"o": bytes(100_000)}) for n in range(4)])
        assert len(put_records(cluster)) == before + 4
    assert a.operations._puts.key_of("p", {"o": 1}, None) is None


def test_sent_again_over_a_new_connection_they_are_put_once(a: Client, cluster: Cluster) -> None:
    a.kv_put("first", "p", row(0))
    a.kv_put("second", "p", row(0))
    tasks = [a.start(a.operations.kv_put(f"k{n}", "p", row(n), {"n": n})) for n in range(20)]
    cluster.run(lambda: tasks[0].done)
    a.hold()
    cluster.run()
    assert not tasks[1].done
    a.reconnect()
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [outcome(task)[0] for task in tasks] == [[f"k{n}"] for n in range(20)]
    assert len(put_records(cluster)) == 5
    assert put_records(cluster)[-1].count == 18


def test_rows_are_encoded_as_if_each_were_alone() -> None:
    shapes = [(3,), (3,), (0,), (2,)]
    rows = [
        {
            "same": torch.arange(4).reshape(2, 2).t() + n,
            "ragged": torch.full(shape, float(n), requires_grad=True),
            "scalar": torch.tensor(n, dtype=torch.bfloat16),
            "complex": torch.tensor([1 + 2j]).conj(),
            "object": {"n": n},
        }
        for n, shape in enumerate(shapes)
    ]
    joined = encode.encode_rows(rows)
    usual = encode.encode_columns({name: [each[name] for each in rows] for name in rows[0]}, len(rows))
    assert (joined.schema, joined.dims, joined.nbytes) == (usual.schema, usual.dims, usual.nbytes)
    one, other = bytearray(joined.nbytes), bytearray(usual.nbytes)
    joined.write_into(memoryview(one))
    usual.write_into(memoryview(other))
    assert one == other


def test_many_elements_are_not_joined_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_STACKED", 5)
    rows = [{"x": torch.arange(3) + n} for n in range(4)]
    monkeypatch.setattr(torch, "stack", None)
    joined = encode.encode_rows(rows)
    memory = bytearray(joined.nbytes)
    joined.write_into(memoryview(memory))
    assert torch.frombuffer(memory, dtype=torch.int64)[:12].tolist() == [n + i for n in range(4) for i in range(3)]


X = st.integers(0, 2).map(torch.arange)
Y = st.sampled_from(["text", None, [1, 2], ""])
TAG = st.dictionaries(st.sampled_from(["s", "t"]), st.integers(0, 3), max_size=2)
FIELDS = {"": st.just({}), "x": st.fixed_dictionaries({"x": X}), "xy": st.fixed_dictionaries({"x": X, "y": Y})}


def puts(names: str) -> Any:
    """Puts with equal fields and distinct groups. Else the order of concurrent puts decides which one is refused."""
    put = st.tuples(
        st.integers(0, 5), FIELDS[names], TAG if not names else st.none() | TAG, st.none() | st.integers(0, 1)
    )
    return st.lists(put, min_size=1, max_size=6, unique_by=(lambda put: put[0], group_of))


def group_of(put: Any) -> Any:
    """The group of a put; of one without, something that no other put has."""
    return object() if put[3] is None else put[3]


STEP = st.one_of(st.sampled_from(sorted(FIELDS)).flatmap(puts), st.just("seal"), st.just("clear"))


@differential(60)
@given(st.lists(STEP, min_size=1, max_size=6))
def test_joined_puts_have_the_effect_of_the_same_puts_one_after_the_other(steps: list[Any]) -> None:
    """The replies, the errors, the tags and the values are the same. The keys of a step are distinct."""
    found = []
    for joined in (True, False):
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)) as cluster:
            found.append(_carry_out(cluster, steps, joined))
            cluster.check()
    assert found[0] == found[1]


def _carry_out(cluster: Cluster, steps: list[Any], joined: bool) -> list[Any]:
    client, told = cluster.client("c"), []
    client.create_partition("p", group_size=2)
    for step in steps:
        if step == "seal":
            client.seal("p")
            continue
        if step == "clear":
            client.kv_clear([f"k{n}" for n in range(0, 6, 2)], "p")
            continue
        operations = [
            client.operations.kv_put(f"k{n}", "p", fields or None, tag, group_id=group)
            for n, fields, tag, group in step
        ]
        if joined:
            told.append(together(cluster, client, operations))
        else:
            told.append([each for operation in operations for each in together(cluster, client, [operation])])
    listed = client.kv_list("p").get("p", {})
    told.append(sorted(listed.items()))
    for key in sorted(listed):
        for name in ("x", "y"):
            try:
                value = client.kv_batch_get(key, "p", name, missing="error", layout="list")[name][0]
            except InvalidArgumentError:
                continue
            told.append((key, name, value.tolist() if isinstance(value, torch.Tensor) else value))
    return told
