"""get_meta in all its modes, waiting and polling; progress, seals, reservations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from simulated import Start, numbers, ragged, table
from transfer_queue.errors import (
    InvalidArgumentError,
    UnknownPartitionError,
    WaitTimeoutError,
)
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Client, Cluster

POLLING = {"controller": {"polling_mode": True}}


class TestFetch:
    def test_ready_samples_in_order(self, a: Client, b: Client) -> None:
        put = a.put(numbers(6), partition_id="p")
        meta = b.get_meta(["x"], 4, "p", task_name="train")
        assert meta.global_indexes == put.global_indexes[:4] == [0, 1, 2, 3]
        assert meta.partition_ids == ["p"] * 4
        assert meta.field_names == ["x"]
        assert meta.is_ready
        assert meta.production_status.tolist() == [1] * 4

    def test_describes_the_fields(self, a: Client) -> None:
        a.put(table(x=torch.zeros(2, 3, dtype=torch.float16), n=ragged(1, 4), o=["one", None]), partition_id="p")
        schema = a.get_meta(["x", "n", "o"], 2, "p", task_name="t").field_schema
        assert (schema["x"]["dtype"], tuple(schema["x"]["shape"])) == (torch.float16, (3,))
        assert schema["x"]["is_nested"] is False
        assert schema["n"]["is_nested"] is True
        assert [tuple(shape) for shape in schema["n"]["per_sample_shapes"]] == [(1,), (4,)]
        assert schema["o"]["is_non_tensor"] is True

    def test_the_task_may_stand_in_the_sampling_config(self, a: Client) -> None:
        a.put(numbers(1), partition_id="p")
        a.get_meta(["x"], 1, "p", sampling_config={"task_name": "t"})
        assert a.check_consumption_status("t", "p")

    def test_zero_wanted(self, a: Client) -> None:
        assert len(a.get_meta(["x"], 0, "p", task_name="t")) == 0
        assert a.get_partition_list() == []

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"mode": "steal"}, "got 'steal'"),
            ({"data_fields": []}, "data_fields"),
            ({"data_fields": [1]}, "data_fields"),
            ({"batch_size": -1}, "negative"),
            ({"batch_size": None}, "batch_size"),
            ({"batch_size": 1.5}, "batch_size"),
            ({"task_name": None}, "task_name"),
        ],
    )
    def test_arguments_that_cannot_be_right(self, a: Client, arguments: dict[str, Any], words: str) -> None:
        good = {"data_fields": ["x"], "batch_size": 1, "partition_id": "p", "task_name": "t"}
        with pytest.raises(InvalidArgumentError, match=words):
            a.get_meta(**{**good, **arguments})


class TestWaiting:
    def test_waiting_creates_nothing(self, b: Client, cluster: Cluster) -> None:
        task = b.start(b.operations.get_meta(["x"], 1, "p", task_name="t", timeout=5))
        cluster.run()
        assert b.get_partition_list() == []
        cluster.advance(5)
        assert task.done

    def test_timeout(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(numbers(3), partition_id="p")
        task = b.start(b.operations.get_meta(["x"], 4, "p", task_name="train", timeout=5))
        cluster.advance(4.99)
        assert not task.done
        cluster.advance(0.01)
        with pytest.raises(WaitTimeoutError) as caught:
            task.result()
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, RuntimeError)
        for word in ("Timeout", "'train'", "'x'", "4 samples", "3 available"):
            assert word in str(caught.value)
        assert a.get_meta(["x"], 3, "p", task_name="train").size == 3  # it took nothing

    def test_a_timeout_names_a_similar_field_and_what_is_missing(self, a: Client, b: Client) -> None:
        a.put(numbers(3, name="answer"), partition_id="p")
        with pytest.raises(WaitTimeoutError, match="No sample has the field 'anwser'; did you mean 'answer'"):
            b.get_meta(["anwser"], 3, "p", task_name="t", timeout=1)
        with pytest.raises(WaitTimeoutError, match="1 more must come; if none will, call seal"):
            b.get_meta(["answer"], 4, "p", task_name="t", timeout=1)

    def test_timeout_by_environment(self, b: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "7")
        with pytest.raises(WaitTimeoutError):
            b.get_meta(["x"], 1, "p", task_name="t")
        assert cluster.clock.now == 7

    @pytest.mark.parametrize("polling", [False, True])
    def test_no_time_to_wait(self, start: Start, polling: bool) -> None:
        """It ends like any other wait: an empty answer is for those who poll."""
        client = start(conf={"controller": {"polling_mode": polling}}).client("c")
        client.put(numbers(1), partition_id="p")
        with pytest.raises(WaitTimeoutError, match=r"2 samples.*1 available"):
            client.get_meta(["x"], 2, "p", task_name="t", timeout=0)
        assert client.get_meta(["x"], 1, "p", task_name="t", timeout=0).size == 1

    def test_default_timeout(self, b: Client, cluster: Cluster) -> None:
        with pytest.raises(WaitTimeoutError):
            b.get_meta(["x"], 1, "p", task_name="t")
        assert cluster.clock.now == 60

    def test_await_ready_since_a_version(self, a: Client, b: Client, cluster: Cluster) -> None:
        assert a.await_ready(["x"], 2, "p", "t", timeout=0).version == -1
        a.put(numbers(2), partition_id="p")
        seen = a.await_ready(["x"], 2, "p", "t", timeout=60).version
        task = b.start(b.operations.await_ready(["x"], 2, "p", "t", since=seen, timeout=60))
        cluster.run()
        assert not task.done  # such a fetch could be met, but nothing has changed
        a.put(numbers(1), partition_id="q")
        cluster.run()
        assert not task.done  # elsewhere
        a.put(numbers(1), partition_id="p")
        cluster.run()
        assert task.result().version > seen

    def test_await_ready_since_a_version_ends_with_the_partition(self, a: Client, b: Client, cluster: Cluster) -> None:
        a.put(numbers(2), partition_id="p")
        seen = a.await_ready(["x"], 2, "p", "t", timeout=60).version
        task = b.start(b.operations.await_ready(["x"], 4, "p", "t", since=seen, timeout=60))
        a.get_meta(["x"], 2, "p", task_name="t")
        a.seal("p")
        cluster.run()
        assert task.result().ended is True

    def test_await_batch_waits_without_a_timeout_too(self, a: Client, b: Client, cluster: Cluster) -> None:
        batch = b.start(b.operations.await_batch(["x"], 2, "p", "t"))
        ready = b.start(b.operations.await_ready(["x"], 2, "p", "u"))
        cluster.run()
        assert not batch.done
        assert not ready.done
        a.put(numbers(2), partition_id="p")
        cluster.run()
        assert batch.result()[0].size == 2
        assert ready.result().ended is False


class TestPolling:
    @pytest.fixture
    def cluster(self, start: Start) -> Cluster:
        return start(seed=2, conf=POLLING)

    @pytest.mark.parametrize("there", [0, 3])
    def test_answers_at_once_with_nothing(self, a: Client, cluster: Cluster, there: int) -> None:
        if there:
            a.put(numbers(there), partition_id="p")
        meta = a.call(a.operations.get_meta(["x"], 4, "p", task_name="t"))
        assert (meta.size, meta.field_names) == (0, ["x"] if there else [])
        assert cluster.clock.now == 0

    def test_an_unknown_field_is_nothing_ready(self, a: Client) -> None:
        a.put(numbers(4), partition_id="p")
        assert len(a.call(a.operations.get_meta(["x", "z"], 1, "p", task_name="t"))) == 0

    def test_with_a_timeout_it_waits(self, a: Client, cluster: Cluster) -> None:
        with pytest.raises(WaitTimeoutError):
            a.get_meta(["x"], 4, "p", task_name="t", timeout=2)
        assert cluster.clock.now == 2


class TestSamplers:
    def test_groups(self, start: Start) -> None:
        client = start(sampler=GRPOGroupNSampler(n_samples_per_prompt=2)).client("c")
        client.put(numbers(4), partition_id="p", group_ids=["u", "v", "u", "v"])
        assert client.get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 2]
        with pytest.raises(ValueError, match=r"must be a multiple of n_samples_per_prompt .*task 't'.*task_samplers"):
            client.get_meta(["x"], 3, "p", task_name="t")
        with pytest.raises(InvalidArgumentError, match="each of the 2 rows, got 3"):
            client.put(numbers(2), partition_id="p", group_ids=[1, 2, 3])


class TestInsert:
    def test_reserves(self, a: Client) -> None:
        meta = a.get_meta(["x"], 3, "p", mode="insert")
        assert meta.global_indexes == [0, 1, 2]
        assert meta.production_status.tolist() == [0, 0, 0]
        assert not a.check_production_status(["x"], "p")
        assert a.get_consumption_status("t", "p")[0].tolist() == [0, 1, 2]  # type: ignore[union-attr]
        a.put(numbers(3), meta)
        assert meta.is_ready
        assert a.check_production_status(["x"], "p")
        assert a.get_meta(["x"], 3, "p", task_name="t").global_indexes == [0, 1, 2]

    def test_it_needs_no_field(self, a: Client) -> None:
        """The fields come with the puts. Other modes look for fields, so they need at least one."""
        meta = a.get_meta([], 2, "p", mode="insert")
        assert (meta.global_indexes, meta.field_names, meta.is_ready) == ([0, 1], [], False)
        a.put(numbers(2, start=5), meta)
        assert a.get_data(a.get_meta("x", 2, "p", task_name="t"))["x"].tolist() == [5, 6]
        for mode in ("fetch", "force_fetch"):
            with pytest.raises(InvalidArgumentError, match="data_fields must be a list with at least one field name"):
                a.get_meta([], 1, "p", mode=mode, task_name="t")


class TestForceFetch:
    def test_shows_all(self, a: Client) -> None:
        first = a.put(numbers(2), partition_id="p")
        a.put(table(y=torch.zeros(2)), partition_id="p")
        a.get_meta(["x"], 1, "p", task_name="t")
        shown = a.get_meta(["x"], None, "p", mode="force_fetch")
        assert shown.global_indexes == [0, 1, 2, 3]
        assert shown.production_status.tolist() == [1, 1, 0, 0]
        assert a.get_meta(["x"], 1, "p", task_name="t").global_indexes == first.global_indexes[1:]

    def test_fields_that_do_not_exist_do_not_count(self, a: Client) -> None:
        a.put(numbers(2), partition_id="p")
        assert a.get_meta(["x", "zzz"], 1, "p", mode="force_fetch").production_status.tolist() == [1, 1]

    def test_unknown_partition(self, a: Client) -> None:
        with pytest.raises(UnknownPartitionError, match="'nowhere'"):
            a.get_meta(["x"], None, "nowhere", mode="force_fetch")
        assert issubclass(UnknownPartitionError, RuntimeError)


class TestProgress:
    def test_production_status(self, a: Client) -> None:
        meta = a.put(numbers(3), partition_id="p")
        a.put(table(y=torch.zeros(1)), meta.select_samples([1]))
        rows, matrix = a.get_production_status(["y", "x"], "p")
        assert rows is not None
        assert matrix is not None
        assert (rows.dtype, matrix.dtype) == (torch.int64, torch.int8)
        assert rows.tolist() == [0, 1, 2]
        assert matrix.tolist() == [[0, 1], [1, 1], [0, 1]]

    def test_unknown_ones(self, a: Client) -> None:
        assert a.get_production_status(["x"], "p") == (None, None)
        assert a.get_consumption_status("t", "p") == (None, None)
        assert not a.check_production_status(["x"], "p")
        assert not a.check_consumption_status("t", "p")
        a.put(numbers(1), partition_id="p")
        assert a.get_production_status(["x", "y"], "p") == (None, None)
        assert not a.check_production_status(["x", "y"], "p")

    def test_consumption_status(self, a: Client) -> None:
        a.put(numbers(3), partition_id="p")
        a.get_meta(["x"], 2, "p", task_name="t")
        rows, consumed = a.get_consumption_status("t", "p")
        assert rows is not None
        assert consumed is not None
        assert (rows.tolist(), consumed.tolist(), consumed.dtype) == ([0, 1, 2], [1, 1, 0], torch.int8)

    def test_reset_consumption(self, a: Client) -> None:
        a.put(numbers(2), partition_id="p")
        for task in ("t", "u"):
            a.get_meta(["x"], 2, "p", task_name=task)
        assert a.reset_consumption("p", "t") is True
        assert (a.check_consumption_status("t", "p"), a.check_consumption_status("u", "p")) == (False, True)
        assert a.reset_consumption("p") is True
        assert not a.check_consumption_status("u", "p")
        assert a.reset_consumption("nowhere") is True
        assert a.get_meta(["x"], 2, "p", task_name="t").global_indexes == [0, 1]

    def test_explain_and_status(self, a: Client) -> None:
        a.put(numbers(2), partition_id="p")
        assert "y" in a.explain("p", 0, task="t", fields=["x", "y"])
        [progress] = a.status().partitions
        assert (progress.name, progress.rows) == ("p", 2)
        assert [(field.name, field.produced) for field in progress.fields] == [("x", 2)]
