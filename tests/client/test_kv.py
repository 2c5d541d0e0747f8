"""The KV family by the sentences of the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from simulated import Start, numbers, ragged, rows_of, same, table
from transfer_queue.errors import DuplicateError, InvalidArgumentError, UnknownPartitionError
from transfer_queue.metadata import KVBatchMeta
from transfer_queue.testing import Client
from transfer_queue.wire.objects.object_values import DELETE


@pytest.mark.parametrize(("keys", "message"), [(["a", 1], "keys must be str, got 1"), (5, "keys must be a list")])
@pytest.mark.parametrize("call", ["kv_batch_put", "kv_batch_get", "kv_clear", "kv_retrieve_meta"])
def test_keys_that_are_no_list_of_str_are_refused(a: Client, call: str, keys: Any, message: str) -> None:
    values = (numbers(2),) if call == "kv_batch_put" else ()
    with pytest.raises(InvalidArgumentError, match=message):
        getattr(a, call)(keys, "p", *values)


class Exotic:
    """A tag value that only pickle carries."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exotic) and self.n == other.n

    __hash__ = None  # type: ignore[assignment]


class TestPut:
    def test_what_it_returns(self, a: Client) -> None:
        a.kv_put("k", "p", {"x": 1, "z": 1}, tag={"n": 1})
        meta = a.kv_batch_put(["l", "k"], "p", {"x": [1, 2], "y": [3, 4]}, tags=[{"m": 2}, {"m": 3}])
        assert meta == KVBatchMeta(["l", "k"], [{"m": 2}, {"n": 1, "m": 3}], "p", ["x", "y"])
        assert a.kv_batch_put(["k"], "p", {"w": [0]}).tags == [{"n": 1, "m": 3}]

    def test_fields_common_to_all_keys(self, a: Client) -> None:
        a.kv_put("k", "p", {"x": 1, "z": 1})
        assert a.kv_batch_put(["k", "l"], "p", tags=[{}, {"n": 1}]).fields == []
        assert a.kv_put("l", "p", {"z": 1}).fields == ["z"]
        assert a.kv_batch_put(["k", "l"], "p", tags=[{}, {}]).fields == ["z"]

    def test_a_tensordict_of_one_row(self, a: Client) -> None:
        a.kv_put("k", "p", TensorDict({"x": torch.ones(1, 3), "n": ragged(2)}, batch_size=[1]))
        assert a.kv_batch_get("k", "p")["x"].unbind()[0].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            (TensorDict({"x": torch.ones(2)}, batch_size=[2]), "batch size 1, got batch size .2."),
            (TensorDict({"x": torch.ones(2)}, batch_size=[]), "batch size 1"),
            ({"x": ragged(1, 2)}, "nested"),
            (5, "dict or a TensorDict"),
            (None, "fields or tags"),
            ({}, "fields or tags"),
            ({1: "x"}, "str"),
        ],
    )
    @pytest.mark.parametrize("parsed", [False, True])
    def test_what_kv_put_refuses(self, a: Client, fields: Any, words: str, parsed: bool) -> None:
        parser = (lambda columns: columns) if parsed else None
        with pytest.raises(ValueError, match=words):
            a.kv_put("k", "p", fields, data_parser=parser)
        assert a.kv_list() == {}

    def test_tags_alone(self, a: Client) -> None:
        nothing: list[Any] = [None, {}, TensorDict({}, batch_size=[1])]
        for fields in nothing:
            assert a.kv_put("k", "p", fields, tag={"n": 1}).fields == []
        assert a.kv_list("p") == {"p": {"k": {"n": 1}}}

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"tags": [{}]}, "each of the 2 keys, got 1"),
            ({"group_ids": ["g"]}, "each of the 2 rows, got 1"),
            ({"fields": None}, "fields or tags"),
            ({"keys": ["k", "k"]}, "Got duplicated keys"),
            ({"keys": ["k", 1]}, "str"),
            ({"fields": numbers(3)}, "must have 2 rows, got 3"),
            ({"tags": [{}, 5]}, "tag must be a dict"),
            ({"tags": [{}, {1: 2}]}, "must be str"),
        ],
    )
    def test_what_kv_batch_put_refuses(self, a: Client, arguments: dict[str, Any], words: str) -> None:
        good: dict[str, Any] = {"keys": ["k", "l"], "partition_id": "p", "fields": numbers(2)}
        with pytest.raises(ValueError, match=words):
            a.kv_batch_put(**{**good, **arguments})
        assert a.kv_list() == {}

    def test_duplicates_have_a_class(self, a: Client) -> None:
        with pytest.raises(DuplicateError):
            a.kv_batch_put(["k", "k"], "p", numbers(2))

    def test_one_key_as_str(self, a: Client) -> None:
        assert a.kv_batch_put("key", "p", numbers(1)).keys == ["key"]
        assert a.kv_batch_get("key", "p", select_fields="x")["x"].tolist() == [0]
        a.kv_clear("key", "p")
        assert a.kv_list("p") == {"p": {}}

    def test_data_parser(self, a: Client) -> None:
        def parse(columns: dict[str, Any]) -> dict[str, Any]:
            return {"url": [torch.full((len(url),), 1) for url in columns["url"]]}

        a.kv_put("k", "p", {"url": "abc"}, data_parser=parse)
        a.kv_batch_put(["l", "m"], "p", {"url": ["a", "ab"]}, data_parser=parse)
        assert [len(row) for row in rows_of(a.kv_batch_get(["m", "l", "k"], "p")["url"])] == [2, 1, 3]


class TestGet:
    @pytest.fixture
    def keys(self, a: Client) -> list[str]:
        a.kv_batch_put(["k", "l", "m"], "p", table(x=torch.arange(3), y=torch.ones(3)))
        a.kv_put("k", "p", {"z": 1})
        return ["k", "l", "m"]

    def test_in_the_order_of_the_keys(self, b: Client, keys: list[str]) -> None:
        assert b.kv_batch_get(["m", "k", "m", "l"], "p")["x"].tolist() == [2, 0, 2, 1]

    @pytest.mark.parametrize(("wanted", "partition"), [(["?"], "p"), ([], "p"), (["k"], "nowhere")])
    def test_not_found(self, b: Client, keys: list[str], wanted: list[str], partition: str) -> None:
        with pytest.raises(ValueError, match="not found"):
            b.kv_batch_get(wanted, partition)

    @pytest.mark.parametrize(
        ("wanted", "partition", "hint"), [("kk", "p", "Did you mean 'k'"), ("k", "pp", "pp' does not exist .*mean 'p'")]
    )
    def test_the_error_names_similar_keys_and_partitions(
        self, b: Client, keys: list[str], wanted: str, partition: str, hint: str
    ) -> None:
        with pytest.raises(ValueError, match=f"not found.*{hint}"):
            b.kv_batch_get(wanted, partition)

    def test_many_keys_are_not_all_told(self, b: Client, keys: list[str]) -> None:
        with pytest.raises(ValueError, match=r"and 15 more.*not found"):
            b.kv_batch_get([f"?{i}" for i in range(20)], "p")

    def test_the_fields_that_all_have(self, b: Client, keys: list[str]) -> None:
        assert sorted(b.kv_batch_get(keys, "p").keys()) == ["x", "y"]
        assert sorted(b.kv_batch_get("k", "p").keys()) == ["x", "y", "z"]
        assert sorted(b.kv_batch_get(keys, "p", select_fields=["z", "y", "y"]).keys()) == ["y"]

    @pytest.mark.parametrize("selected", [["z"], [], ["?"]])
    def test_none_of_the_selected_is_left(self, b: Client, keys: list[str], selected: list[str]) -> None:
        back = b.kv_batch_get(keys, "p", select_fields=selected)
        assert (list(back.keys()), back.batch_size) == ([], torch.Size([0]))

    @pytest.mark.parametrize("no_keys", [[], ()])
    def test_no_keys(self, b: Client, keys: list[str], no_keys: Any) -> None:
        words = "no keys were given.*not found in partition 'p'; pass at least one key"
        with pytest.raises(ValueError, match=words):
            b.kv_batch_get(no_keys, "p")
        with pytest.raises(ValueError, match=words):
            b.kv_batch_get_by_meta(KVBatchMeta(partition_id="p", fields=["x"]))

    def test_not_ready(self, a: Client, keys: list[str]) -> None:
        a.kv_put("n", "p", {"w": 1})
        for selected in (None, ["x"]):
            with pytest.raises(ValueError, match="not ready"):
                a.kv_batch_get(["n", "k"], "p", select_fields=selected)
        a.kv_put("o", "p", tag={"n": 1})
        with pytest.raises(ValueError, match="not ready"):
            a.kv_batch_get(["o"], "p")

    def test_consumes_nothing(self, a: Client, keys: list[str]) -> None:
        a.kv_batch_get(keys, "p")
        assert len(a.get_meta(["x"], 3, "p", task_name="t")) == 3

    def test_by_meta(self, a: Client, b: Client, keys: list[str]) -> None:
        meta = a.kv_batch_put(["m", "l"], "p", tags=[{}, {}])
        assert meta.fields == ["x", "y"]
        assert b.kv_batch_get_by_meta(meta)["x"].tolist() == [2, 1]
        assert list(b.kv_batch_get_by_meta(meta, "y").keys()) == ["y"]
        assert list(b.kv_batch_get_by_meta(meta, ["x"]).keys()) == ["x"]

    @pytest.mark.parametrize(
        ("meta", "selected", "words"),
        [
            (KVBatchMeta(["k"], [{}], "p", ["x"]), ["x", "q"], "select_fields.*'q'.*not found"),
            (KVBatchMeta(["k"], [{}], "p", None), None, "select_fields.*not found"),
            (KVBatchMeta(["k"], [{}], "p", None), ["x"], "select_fields.*not found"),
            (KVBatchMeta(["k"], [{}], None, ["x"]), None, "partition_id"),
        ],
    )
    def test_by_meta_refuses(
        self, a: Client, keys: list[str], meta: KVBatchMeta, selected: list[str] | None, words: str
    ) -> None:
        with pytest.raises(ValueError, match=words):
            a.kv_batch_get_by_meta(meta, selected)


class TestListAndClear:
    def test_list(self, a: Client, b: Client) -> None:
        a.kv_batch_put(["l", "k"], "p", numbers(2), tags=[{"n": 1}, {}])
        a.kv_put("k", "q", {"x": 1})
        a.kv_put("a", "p", {"x": torch.tensor(3)})
        listed = b.kv_list()
        assert listed == {"p": {"l": {"n": 1}, "k": {}, "a": {}}, "q": {"k": {}}}
        assert list(listed["p"]) == ["l", "k", "a"]
        assert b.kv_list("q") == {"q": {"k": {}}}
        assert b.kv_list("nowhere") == {}

    def test_without_keys(self, a: Client) -> None:
        a.put(numbers(1), partition_id="p")
        a.kv_put("k", "q", {"x": 1})
        a.kv_clear(["k"], "q")
        assert a.kv_list() == {"p": {}, "q": {}}

    def test_clear(self, a: Client, b: Client) -> None:
        a.kv_put("k", "p", {"x": 1})
        a.kv_put("l", "p", {"y": 1}, tag={"n": 1})
        a.kv_put("m", "p", tag={"n": 1})
        b.kv_clear(["m", "?", "k", "l"], "p")
        b.kv_clear(["k"], "nowhere")
        b.kv_clear([], "p")
        assert a.kv_list() == {"p": {}}
        with pytest.raises(ValueError, match="not found"):
            a.kv_batch_get(["k"], "p")

    def test_a_key_again(self, a: Client) -> None:
        a.kv_put("k", "p", {"x": 1}, tag={"n": 1})
        a.kv_clear("k", "p")
        assert a.kv_put("k", "p", {"y": 2}).tags == [{}]
        assert a.kv_retrieve_meta("k", "p").global_indexes == [1]


class TestKeysAndIndexes:
    def test_retrieve_meta(self, a: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", table(x=torch.arange(2)), tags=[{"n": 1}, {}])
        a.kv_put("l", "p", {"y": 1})
        meta = a.kv_retrieve_meta(["l", "?", "k"], "p")
        assert (meta.global_indexes, meta.field_names) == ([1, 0], ["x"])
        assert meta.custom_meta == [{}, {"n": 1}]
        assert a.get_data(meta)["x"].tolist() == [1, 0]
        assert len(a.kv_retrieve_meta(["k"], "nowhere")) == 0
        assert a.get_partition_list() == ["p"]

    def test_retrieve_meta_creating(self, a: Client) -> None:
        a.kv_put("k", "p", {"x": torch.tensor(1)})
        meta = a.kv_retrieve_meta(["l", "k"], "p", create=True)
        assert (meta.global_indexes, meta.field_names) == ([1, 0], [])
        a.put(table(x=torch.tensor([5, 6])), meta)
        assert a.kv_batch_get(["k", "l"], "p")["x"].tolist() == [6, 5]

    def test_retrieve_keys(self, a: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", numbers(2))
        a.put(numbers(1), partition_id="p")
        assert a.kv_retrieve_keys([1, 2, 0], "p") == ["l", None, "k"]
        assert a.kv_retrieve_keys(0, "p") == ["k"]
        assert a.kv_retrieve_keys([], "p") == []
        with pytest.raises(UnknownPartitionError):
            a.kv_retrieve_keys([0], "nowhere")


class TestTags:
    @pytest.mark.parametrize("count", [5, 12])
    def test_a_put_returns_the_merged_tags_of_all_its_rows(self, a: Client, count: int) -> None:
        keys = [f"k{i}" for i in range(count)]

        def put(of_row: Callable[[int], dict[str, Any]], order: list[str] = keys) -> list[dict[str, Any]]:
            tags = a.kv_batch_put(order, "p", tags=[of_row(i) for i in range(count)]).tags
            listed = a.kv_list("p")["p"]
            assert same(tags, [listed[key] for key in order])
            return tags

        assert put(lambda i: {"n": i, "s": "new"}) == [{"n": i, "s": "new"} for i in range(count)]
        put(lambda i: {"n": float(i), "s": None})  # nothing is left of the tags before
        put(lambda i: {"n": True, "s": [i]}, keys[::-1])
        put(lambda i: {"n": i})
        put(lambda i: {"n": i, "s": DELETE})
        put(lambda i: {"n": -i} if i % 2 else {})
        put(lambda i: {"n": i, "more": i})
        put(lambda i: {"n": 0, "more": "text"})

    def test_scalars_become_numbers(self, a: Client) -> None:
        a.kv_put("k", "p", tag={"a": np.int64(3), "b": torch.tensor(2.5), "c": np.bool_(True), "d": [np.float32(0.5)]})
        assert same(a.kv_list("p")["p"]["k"], {"a": 3, "b": 2.5, "c": True, "d": [0.5]})

    @pytest.mark.parametrize(
        "value",
        [
            None, 2**63, 2**70, -(2**63) - 1, "", "ünï", b"\x00", [], {}, {"a": [1, {"b": None}]}, 1.5, float("inf"),
            (1, 2), {1: 2}, {3, 4}, 1 + 2j, np.arange(4), torch.arange(3), Exotic(3), [Exotic(4)],
            {"deep": [{"er": Exotic(5)}]}, [np.arange(2), (1,)],
        ],
    )  # fmt: skip
    def test_other_values_travel_as_they_are(self, a: Client, b: Client, value: Any) -> None:
        """Wherever a tag comes back: from a put, from a listing, in metadata."""
        put = a.kv_put("k", "p", {"x": 1}, tag={"v": value}).tags[0]["v"]
        listed = b.kv_list("p")["p"]["k"]["v"]
        shown = b.kv_retrieve_meta("k", "p").custom_meta[0]["v"]
        dealt = b.get_meta(["x"], 1, "p", task_name="t").custom_meta[0]["v"]
        for back in (put, listed, shown, dealt):
            assert same(back, value)

    def test_delete(self, a: Client) -> None:
        a.kv_put("k", "p", tag={"a": 1, "b": 2})
        assert a.kv_put("k", "p", tag={"a": DELETE, "c": 3}).tags == [{"b": 2, "c": 3}]
        a.kv_put("k", "p", tag={"zzz": DELETE})
        assert a.kv_list("p") == {"p": {"k": {"b": 2, "c": 3}}}

    def test_what_a_put_returns_of_new_keys(self, a: Client) -> None:
        """The controller does not say it: the client knows what it has put."""
        meta = a.kv_batch_put(["k", "l"], "p", {"y": [1, 2], "x": [3, 4]}, tags=[{"a": DELETE, "b": {"c": (1, 2)}}, {}])
        assert (meta.fields, meta.tags) == (["x", "y"], [{"b": {"c": (1, 2)}}, {}])
        assert [a.kv_list("p")["p"][key] for key in meta.keys] == meta.tags
        more = a.kv_batch_put(["m", "k"], "p", {"z": [5, 6]}, tags=[{"n": 1}, {"n": 2}])
        assert (more.fields, more.tags) == (["z"], [{"n": 1}, {"b": {"c": (1, 2)}, "n": 2}])
        assert (a.kv_put("n", "p", tag={"a": 1}).fields, a.kv_put("o", "p", {"x": 1}).tags) == ([], [{}])

    def test_samplers_see_exotic_tags_without_opening_them(self, start: Start) -> None:
        from transfer_queue.sampler import SeqlenBalancedSampler

        cluster = start(sampler=SeqlenBalancedSampler(dp_size=1))
        client = cluster.client("c")
        client.kv_batch_put(["k"], "p", numbers(1), tags=[{"total_lengths": np.int32(5), "o": Exotic(1)}])
        assert client.get_meta(["x"], 1, "p", task_name="t").custom_meta == [{"total_lengths": 5, "o": Exotic(1)}]
