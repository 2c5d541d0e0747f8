"""put: new samples, fields of existing ones, tags, groups, parsers, and what a put that failed leaves: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from simulated import numbers, ragged, same, table
from transfer_queue.errors import (
    FieldTypeError,
    InvalidArgumentError,
    ProtocolError,
    StorageKeyNotFoundError,
    UncarriableValueError,
    WaitTimeoutError,
)
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.puts import Publish
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.unit.unit_effects import SendReply
from transfer_queue.testing import Client, Cluster
from transfer_queue.wire.blocks.encode import EncodedBlock

MIB = 1 << 20


class TestNewSamples:
    def test_metadata_of_what_was_put(self, a: Client) -> None:
        meta = a.put(table(x=torch.zeros(2, 3), n=ragged(1, 2), o=["s", {"k": 1}]), partition_id="p")
        assert meta.global_indexes == [0, 1]
        assert meta.partition_ids == ["p", "p"]
        assert meta.field_names == ["n", "o", "x"]
        assert meta.is_ready
        assert meta.get_dtypes("x") == [torch.float32] * 2
        assert meta.get_shapes("n") == [torch.Size([1]), torch.Size([2])]

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (TensorDict({"x": torch.zeros(())}, batch_size=[]), "no batch dimension"),
            (TensorDict({}, batch_size=[2]), "no"),
            ([1, 2], "TensorDict"),
            ({"x": torch.zeros(2), "y": torch.zeros(3)}, "'y' must have 2 rows, got 3"),
        ],
    )
    def test_what_is_no_batch(self, a: Client, data: Any, words: str) -> None:
        with pytest.raises(InvalidArgumentError, match=words):
            a.put(data, partition_id="p")
        assert a.get_partition_list() == []

    def test_neither_partition_nor_metadata(self, a: Client) -> None:
        with pytest.raises(InvalidArgumentError, match="partition_id"):
            a.put(numbers(1))

    def test_the_source_may_change_afterwards(self, a: Client, b: Client) -> None:
        source = torch.arange(4)
        meta = a.put(table(x=source), partition_id="p")
        source.zero_()
        assert b.get_data(meta)["x"].tolist() == [0, 1, 2, 3]


class TestExistingSamples:
    def test_returns_the_metadata_it_was_given(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        assert a.put(table(y=torch.ones(2)), meta) is meta
        assert meta.field_names == ["x", "y"]
        assert same(a.get_data(meta)["y"], torch.ones(2))

    def test_replaces(self, a: Client, b: Client, cluster: Cluster) -> None:
        meta = a.put(numbers(4), partition_id="p")
        before = cluster.controller.state.blocks.live_bytes
        b.put(table(x=torch.tensor([70, 30])), meta.select_samples([3, 1]))
        assert a.get_data(meta)["x"].tolist() == [0, 30, 2, 70]
        b.put(numbers(4), meta)
        assert cluster.controller.state.blocks.live_bytes == before

    @pytest.mark.parametrize("timeout", ["5", float("nan"), float("inf"), [1]])
    def test_a_timeout_that_is_none(self, a: Client, timeout: Any) -> None:
        meta = a.put(numbers(1), partition_id="p")
        for call in (
            lambda: a.put(numbers(1), partition_id="p", timeout=timeout),
            lambda: a.set_custom_meta(meta, timeout=timeout),
            lambda: a.get_meta(["x"], 1, "p", task_name="t", timeout=timeout),
            lambda: a.await_batch(["x"], 1, "p", "t", timeout=timeout),
            lambda: a.get_data(meta, timeout=timeout),
            lambda: a.kv_list(timeout=timeout),
        ):
            with pytest.raises(InvalidArgumentError, match="timeout must be a number of seconds, finite"):
                call()

    @pytest.mark.parametrize("name", [None, 5, b"p"])
    def test_a_partition_without_a_name(self, a: Client, name: Any) -> None:
        for call in (
            lambda: a.kv_put("k", name, {"x": torch.ones(1)}),
            lambda: a.get_meta(["x"], 1, name, task_name="t"),
            lambda: a.create_partition(name),
            lambda: a.clear_partition(name),
        ):
            with pytest.raises(InvalidArgumentError, match="partition_id must be a str"):
                call()
        assert a.kv_list() == {}

    def test_what_is_no_list(self, a: Client) -> None:
        wrong: Any = 5
        for call, what in (
            (lambda: a.put(numbers(1), partition_id="p", group_ids=wrong), "group_ids must be a list"),
            (lambda: a.kv_batch_get(wrong, "p"), "keys must be a list"),
            (lambda: a.get_meta(wrong, 1, "p", task_name="t"), "data_fields must be a list"),
            (lambda: a.get_meta(["x"], 1, "p", task_name="t", sampling_config=wrong), "sampling_config must be a dict"),
        ):
            with pytest.raises(InvalidArgumentError, match=what):
                call()
        assert a.kv_list() == {}

    def test_metadata_of_no_samples(self, a: Client) -> None:
        nothing = BatchMeta()
        assert a.put(numbers(0), nothing) is nothing
        with pytest.raises(InvalidArgumentError, match="'x' must have 0 rows, got 2"):
            a.put(numbers(2), nothing)

    def test_another_number_of_rows(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        with pytest.raises(InvalidArgumentError, match="'y' must have 2 rows, got 3"):
            a.put(numbers(3, name="y"), meta)
        assert meta.field_names == ["x"]

    def test_a_cleared_sample(self, a: Client, b: Client) -> None:
        meta = a.put(numbers(3), partition_id="p")
        b.clear_samples(meta.select_samples([1]))
        with pytest.raises(StorageKeyNotFoundError, match=r"\[1\]"):
            a.put(numbers(3, name="y"), meta)
        assert meta.field_names == ["x"]
        assert a.get_production_status(["y"], "p") == (None, None)


class TestTags:
    def test_entries_changed_since_travel_and_merge(self, a: Client, b: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        meta.update_custom_meta([{"n": 1, "keep": True}, {}])
        a.set_custom_meta(meta)
        mine, theirs = (b.get_meta(["x"], None, "p", mode="force_fetch") for _ in range(2))
        theirs.update_custom_meta([{"n": 2}, {"m": 3}])
        b.put(numbers(2, name="y"), theirs)
        mine.custom_meta[0]["mine"] = "!"
        b.put(numbers(2, name="z"), mine)
        shown = a.get_meta(["x"], None, "p", mode="force_fetch")
        assert shown.custom_meta == [{"n": 2, "keep": True, "mine": "!"}, {"m": 3}]

    def test_what_was_sent_is_not_sent_again(self, a: Client, cluster: Cluster) -> None:
        meta = a.put(numbers(1), partition_id="p")
        meta.update_custom_meta([{"n": 1}])
        a.put(numbers(1, name="y"), meta)
        other = a.get_meta(["x"], None, "p", mode="force_fetch")
        other.update_custom_meta([{"n": 2}])
        a.put(numbers(1, name="z"), other)
        a.put(numbers(1, name="w"), meta)
        assert a.get_meta(["x"], None, "p", mode="force_fetch").custom_meta == [{"n": 2}]

    def test_tags_alone(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        meta.update_custom_meta([{"n": 1}, {}])
        a.put(TensorDict({}, batch_size=[2]), meta)
        assert a.get_meta(["x"], None, "p", mode="force_fetch").custom_meta == [{"n": 1}, {}]

    def test_a_reservation_stays_unready_when_only_tags_come(self, a: Client) -> None:
        meta = a.get_meta(["x"], 1, "p", mode="insert")
        meta.update_custom_meta([{"n": 1}])
        a.put(TensorDict({}, batch_size=[1]), meta)
        assert not meta.is_ready
        assert a.get_meta(["x"], None, "p", mode="force_fetch").custom_meta == [{"n": 1}]

    def test_over_two_partitions(self, a: Client) -> None:
        metas = [a.put(numbers(1), partition_id=p) for p in "pq"]
        both = BatchMeta.concat(metas)
        both.update_custom_meta([{"of": "p"}, {"of": "q"}])
        a.put(numbers(2, name="y"), both)
        both.update_custom_meta([{}, {"more": 1}])
        a.set_custom_meta(both)
        tags = [a.get_meta(["x"], None, p, mode="force_fetch").custom_meta for p in "pq"]
        assert tags == [[{"of": "p"}], [{"of": "q", "more": 1}]]

    def test_set_custom_meta_replaces(self, a: Client) -> None:
        meta = a.put(numbers(2), partition_id="p")
        meta.update_custom_meta([{"old": 1}, {"old": 2}])
        a.set_custom_meta(meta)
        meta.clear_custom_meta()
        meta.custom_meta[0]["new"] = 3
        a.set_custom_meta(meta)
        assert a.get_meta(["x"], None, "p", mode="force_fetch").custom_meta == [{"new": 3}, {}]


class TestGroups:
    def test_of_existing_samples(self, a: Client) -> None:
        meta = a.get_meta(["x"], 2, "p", mode="insert")
        a.put(numbers(2), meta, group_ids=["u", "v"])
        with pytest.raises(InvalidArgumentError, match="'u'"):
            a.put(numbers(2, name="y"), meta, group_ids=["v", "v"])
        with pytest.raises(InvalidArgumentError, match="each of the 2 rows, got 1"):
            a.put(numbers(2, name="y"), meta, group_ids=["v"])


class TestDataParser:
    def test_is_called_once_over_two_partitions(self, a: Client) -> None:
        both = BatchMeta.concat([a.put(numbers(1), partition_id=p) for p in "pq"])
        calls = []

        def parse(columns: dict[str, Any]) -> dict[str, Any]:
            calls.append(list(columns["url"]))
            return {"url": [text.upper() for text in columns["url"]]}

        a.put(table(url=["u", "v"]), both, data_parser=parse)
        assert calls == [["u", "v"]]
        assert a.get_data(both).get("url").tolist() == ["U", "V"]

    def test_its_own_fault_reaches_the_caller(self, a: Client) -> None:
        def parse(columns: dict[str, Any]) -> dict[str, Any]:
            raise LookupError("no such image")

        with pytest.raises(LookupError, match="no such image"):
            a.put(numbers(2), partition_id="p", data_parser=parse)
        assert a.get_partition_list() == []


class TestNothingIsLeft:
    """Each way for a put to fail: no row, no byte, no index, no extent, and the next put is as if it had not been."""

    @pytest.fixture
    def before(self, a: Client, cluster: Cluster) -> Callable[[], tuple[Any, ...]]:
        a.put(table(x=torch.arange(2), o=["s", "t"]), partition_id="p")

        def look() -> tuple[Any, ...]:
            state = cluster.controller.state
            partitions = {name: partition.to_comparable() for name, partition in state.partitions.items()}
            return partitions, state.next_index, state.blocks.live_bytes, cluster.unit.table.leased

        return look

    @pytest.mark.parametrize(
        ("columns", "kind"),
        [
            ({"x": torch.zeros(3, dtype=torch.uint16)}, FieldTypeError),
            ({"x": ["a", "b", "c"]}, FieldTypeError),
            ({"o": torch.zeros(3)}, FieldTypeError),
            ({"y": torch.zeros(3), "x": torch.zeros(3, dtype=torch.uint32)}, FieldTypeError),
            ({"y": torch.zeros(3), "o": [1, 2, (n for n in "ab")]}, UncarriableValueError),
            ({"y": torch.zeros(3, MIB), "x": ["a", "b", "c"]}, FieldTypeError),
        ],
    )
    def test_refused_values(
        self, a: Client, before: Callable[[], tuple[Any, ...]], columns: dict[str, Any], kind: type[Exception]
    ) -> None:
        was = before()
        with pytest.raises(kind):
            a.put(columns, partition_id="p")  # type: ignore[arg-type]
        assert before() == was
        assert a.put(numbers(1), partition_id="p").global_indexes == [2]

    def test_an_uncarriable_value_is_named(self, a: Client) -> None:
        with pytest.raises(TypeError, match=r"(?s)'o'.*row 1.*generator"):
            a.put(table(o=["fine", (n for n in "ab")]), partition_id="p")

    @pytest.mark.parametrize("rows", [1, MIB])
    def test_a_write_that_fails_half_way(
        self, a: Client, before: Callable[[], tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, rows: int
    ) -> None:
        was = before()
        write = EncodedBlock.write_into

        def fail(self: EncodedBlock, memory: Any) -> None:
            write(self, memory)
            raise MemoryError("half-way")

        monkeypatch.setattr(EncodedBlock, "write_into", fail)
        with pytest.raises(MemoryError, match="half-way"):
            a.put(numbers(rows), partition_id="p")
        monkeypatch.undo()
        assert before() == was
        assert a.put(numbers(1), partition_id="p").global_indexes == [2]

    def test_interrupted_while_writing(
        self, a: Client, b: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(self: EncodedBlock, memory: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(EncodedBlock, "write_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            a.put(numbers(MIB), partition_id="p")
        monkeypatch.undo()
        assert a.get_partition_list() == []
        assert a.put(numbers(1), partition_id="q").global_indexes == [0]
        a.close()
        b.clear_partition("q")
        assert cluster.unit.table.leased == 0

    def test_a_partition_that_did_not_exist(self, a: Client, cluster: Cluster) -> None:
        with pytest.raises(UncarriableValueError):
            a.put(table(o=[(n for n in "ab")]), partition_id="p")
        assert a.get_partition_list() == []
        assert cluster.unit.table.leased == 0

    def test_one_partition_of_two_cannot_store_its_values(self, a: Client) -> None:
        both = BatchMeta.concat([a.put(numbers(1), partition_id=p) for p in "pq"])
        with pytest.raises(UncarriableValueError):
            a.put(table(o=["fine", (n for n in "ab")]), both)
        for name in "pq":
            assert a.get_production_status(["o"], name) == (None, None)

    def test_keyed(self, a: Client, before: Callable[[], tuple[Any, ...]]) -> None:
        was = before()
        with pytest.raises(FieldTypeError):
            a.kv_batch_put(["k", "l"], "p", {"x": ["s", "t"]}, tags=[{"n": 1}, {}])
        with pytest.raises(UncarriableValueError):
            a.kv_put("k", "p", {"o": (n for n in "ab")})
        with pytest.raises(UncarriableValueError):
            a.kv_put("k", "p", {"y": 1}, tag={"n": (n for n in "ab")})
        assert before() == was

    @pytest.mark.parametrize("kind", [WaitTimeoutError, ProtocolError])
    def test_what_may_have_been_carried_out_is_not_overwritten(
        self, a: Client, cluster: Cluster, kind: type[Exception]
    ) -> None:
        """Nobody can tell whether it was published; here it was, and its bytes stay."""
        a.put(numbers(1), partition_id="q")
        operation = a.operations.put(numbers(4), partition_id="p")
        call = next(operation)
        assert isinstance(call.body, Publish)
        assert len(cluster.controller.handle("a", 10**6, RequestEnvelope(10**6, 0, call.body), 0.0)) == 1
        with pytest.raises(kind):
            operation.throw(kind("the reply was lost"))
        a.put(numbers(8, 100), partition_id="q")
        shown = a.get_meta(["x"], None, "p", mode="force_fetch")
        assert a.get_data(shown)["x"].tolist() == [0, 1, 2, 3]
        a.clear_partition("p")
        a.clear_partition("q")
        a.close()
        assert cluster.unit.table.leased == 0

    def test_a_refusal_is_told_though_the_unit_cannot_be_reached(self, a: Client, cluster: Cluster) -> None:
        a.put(numbers(1), partition_id="p")
        operation = a.operations.put(table(x=torch.zeros(MIB)), partition_id="p")
        _until(cluster, operation, Publish)
        call = operation.throw(FieldTypeError("refused"))
        assert call.target == ("unit", 0)
        with pytest.raises(FieldTypeError, match="refused"):
            operation.throw(WaitTimeoutError("no answer"))
        a.clear_partition("p")
        a.close()
        assert cluster.unit.table.leased == 0


def _until(cluster: Cluster, operation: Any, kind: type) -> None:
    """Carries out the calls of an operation of client "a" up to its first request of this kind."""
    call = next(operation)
    number = 10**6
    while not isinstance(call.body, kind):
        number += 1
        [effect] = cluster.unit.handle("a", 10**6, number, call.body, 0.0)
        assert isinstance(effect, SendReply)
        call = operation.send(effect.reply)


@pytest.mark.parametrize("wrong", [None, "x", 3, {}])
def test_what_is_no_metadata(a: Client, wrong: Any) -> None:
    calls: list[Any] = [a.get_data, a.clear_samples, a.set_custom_meta, a.kv_batch_get_by_meta]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="BatchMeta"):
            call(wrong)
    if wrong is not None:
        with pytest.raises(InvalidArgumentError, match="BatchMeta"):
            a.put(numbers(1), wrong)


def test_tags_become_visible_with_their_samples(a: Client) -> None:
    """No sampler ever sees a new sample without its tag."""
    meta = a.put(numbers(2), partition_id="p", tags=[{"total_lengths": 3}, {}])
    assert meta.get_all_custom_meta() == [{"total_lengths": 3}, {}]
    assert a.get_meta(["x"], 2, "p", task_name="t").get_all_custom_meta() == [{"total_lengths": 3}, {}]
    a.put(numbers(2, name="y"), meta, tags=[{"score": 1.0}, {"score": 2.0}])
    shown = a.get_meta(["y"], None, "p", mode="force_fetch")
    assert shown.get_all_custom_meta() == [{"total_lengths": 3, "score": 1.0}, {"score": 2.0}]
    for wrong in ([{}], {"a": 1}, 3):
        with pytest.raises(InvalidArgumentError):
            a.put(numbers(2), partition_id="p", tags=wrong)  # type: ignore[arg-type]


def test_very_many_fields_are_put_and_got(a: Client, b: Client) -> None:
    names = [f"f{number}" for number in range(300)]
    for size in (1, 2, 2):
        put = table(**{name: torch.full((2, size), number) for number, name in enumerate(names)})
        meta = a.put(put, partition_id="p")
        assert bool((b.get_data(meta) == put).all())
    some = table(f3=torch.zeros(2, 5))
    a.put(some, metadata=meta)
    assert bool((b.get_data(meta.select_fields(["f3"])) == some).all())
