"""`kv_update`: the values that the function gets, what is written, and what happens if other clients are faster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from test_checkpoints import load, save

from simulated import numbers
from transfer_queue.client.operations.update_operations import FIRST_PAUSE, LONGEST_PAUSE, longest_pause
from transfer_queue.errors import InvalidArgumentError, LockLostError, VersionConflictError, WaitTimeoutError
from transfer_queue.testing import Client, Cluster

Values = dict[str, Any]


def more(values: Values) -> Values:
    return {"n": values["n"] + 1}


async def coroutine(values: Values) -> Values:
    return values


def refused(message: str) -> Any:
    return pytest.raises(InvalidArgumentError, match=message)


class TestValues:
    def test_a_function_gets_values_as_a_put_takes_them(self, a: Client) -> None:
        put = {
            "tensor": torch.tensor([1.5, 2.0]), "scalar": torch.tensor(3), "number": 7, "text": "ä", "none": None,
            "list": [1, [2]], "dict": {"deep": [1]}, "array": np.arange(3, dtype="i2"), "nested": {"t": torch.ones(2)},
        }  # fmt: skip
        a.kv_put("k", "p", put)
        got: Values = {}
        assert a.kv_update("k", "p", list(put), got.update) is None
        assert list(got) == list(put)
        for name in ("number", "text", "none", "list", "dict"):
            assert got[name] == put[name]
            assert type(got[name]) is type(put[name])
        assert torch.equal(got["tensor"], put["tensor"])
        assert torch.equal(got["scalar"], put["scalar"])
        assert got["array"].dtype == "i2"
        assert got["array"].tolist() == [0, 1, 2]
        assert torch.equal(got["nested"]["t"], torch.ones(2))

    def test_rows_of_a_batch_are_got_without_the_batch_axis(self, a: Client) -> None:
        a.kv_batch_put(["k", "l"], "p", TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2]))
        changed = a.kv_update("l", "p", "x", lambda values: {"x": values["x"] * 10})
        assert changed is not None
        assert changed["x"].tolist() == [30, 40, 50]
        assert a.kv_batch_get(["k", "l"], "p", layout="dense")["x"].tolist() == [[0, 1, 2], [30, 40, 50]]

    def test_only_the_returned_fields_are_written_also_new_ones(self, a: Client) -> None:
        a.kv_put("k", "p", {"n": 1, "other": "kept"}, tag={"old": 1})
        assert a.kv_update("k", "p", "n", lambda values: {"m": values["n"] + 1}, tag={"new": 2}) == {"m": 2}
        data = a.kv_batch_get("k", "p")
        assert (data["n"][0], data["m"][0], data["other"][0]) == (1, 2, "kept")
        assert a.kv_list("p") == {"p": {"k": {"old": 1, "new": 2}}}

    @pytest.mark.parametrize("nothing", [None, {}])
    def test_without_fields_nothing_is_written(self, a: Client, nothing: Values | None) -> None:
        a.kv_put("k", "p", {"n": 1})
        version = a.wait_for_change("p", timeout=0).version
        assert a.kv_update("k", "p", "n", lambda values: nothing) == nothing
        assert not a.wait_for_change("p", version, timeout=0)

    def test_a_tag_alone(self, a: Client) -> None:
        a.kv_put("k", "p", {"n": 1})
        assert a.kv_update("k", "p", "n", lambda values: {}, tag={"seen": True}) == {}
        assert a.kv_list("p") == {"p": {"k": {"seen": True}}}

    def test_a_nested_tensordict(self, a: Client) -> None:
        inner = TensorDict({"t": torch.tensor([[1, 2]])}, batch_size=[1])
        a.kv_batch_put(["k"], "p", TensorDict({"x": inner}, batch_size=[1]))
        a.kv_update("k", "p", "x", lambda values: {"sum": values["x"]["t"].sum()})
        assert a.kv_batch_get("k", "p", "sum")["sum"].tolist() == [3]


class TestEmpty:
    def test_a_new_key_begins_with_empty(self, a: Client) -> None:
        for count in (1, 2, 3):
            assert a.kv_update("k", "p", "n", more, empty={"n": 0}) == {"n": count}

    def test_a_key_without_the_field_begins_with_empty(self, a: Client) -> None:
        a.kv_put("k", "p", {"m": 5})
        got = a.kv_update("k", "p", ["m", "n"], lambda v: {"n": v["n"] + v["m"]}, empty={"m": 0, "n": 100})
        assert got == {"n": 105}

    def test_a_reserved_key_begins_with_empty(self, a: Client) -> None:
        a.kv_retrieve_meta(["k"], "p", create=True)
        assert a.kv_update("k", "p", "n", more, empty={"n": 0}) == {"n": 1}

    def test_empty_is_not_changed_by_the_function(self, a: Client) -> None:
        empty = {"l": [1], "t": torch.zeros(2)}

        def change(values: Values) -> Values:
            values["l"].append(2)
            values["t"] += 1
            return values

        a.kv_update("k", "p", ["l", "t"], change, empty=empty)
        assert empty["l"] == [1]
        assert empty["t"].tolist() == [0, 0]

    def test_without_empty_an_unknown_key_or_field_is_an_error_and_nothing_is_called(self, a: Client) -> None:
        def fail(values: Values) -> Values:
            raise AssertionError("called")

        with refused("key 'k' was not found in partition 'p'; pass empty="):
            a.kv_update("k", "p", "n", fail)
        a.kv_put("k", "p", {"m": 5})
        with refused(r"key 'k' of partition 'p' is not ready: it lacks the fields \['n'\]"):
            a.kv_update("k", "p", ["m", "n"], fail)
        assert list(a.kv_list()["p"]) == ["k"]


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"key": 3}, "key must be a str"),
            ({"fields": [3]}, "fields must be field names"),
            ({"fn": 3}, "fn must be an ordinary function"),
            ({"fn": coroutine}, "fn must be an ordinary function"),
            ({"empty": 3}, "empty must be a dict with a value for each of the fields"),
            ({"empty": {"m": 3}}, "empty must be a dict with a value for each of the fields"),
            ({"tag": 3}, "tag"),
            ({"fence": "x"}, "fence"),
            ({"timeout": "x"}, "timeout"),
            ({"timeout": 0}, "timeout must be a positive number of seconds, or None, got 0"),
            ({"timeout": -1.0}, "timeout must be a positive number of seconds, or None, got -1.0"),
            ({"fn": lambda values: 3}, "fn must return a dict of the fields to write, or None, got 3 of type int"),
        ],
    )
    def test_a_wrong_argument_is_named(self, a: Client, arguments: Values, message: str) -> None:
        a.kv_put("k", "p", {"n": 1})
        with refused(message):
            a.kv_update(**{"key": "k", "partition_id": "p", "fields": "n", "fn": more, **arguments})

    def test_an_error_of_the_function_reaches_the_caller_and_nothing_is_written(self, a: Client) -> None:
        a.kv_put("k", "p", {"n": 1})
        with pytest.raises(ZeroDivisionError):
            a.kv_update("k", "p", "n", lambda values: {"n": 1 // 0})
        assert a.kv_update("k", "p", "n", more) == {"n": 2}


class TestConflicts:
    @pytest.mark.parametrize(
        "disturb",
        [
            lambda b: b.kv_put("k", "p", {"n": 10}),
            lambda b: b.kv_put("k", "p", {"m": 1}),
            lambda b: b.kv_put("k", "p", tag={"t": 1}),
            lambda b: (b.kv_clear("k", "p"), b.kv_put("k", "p", {"n": 1})),
        ],
    )
    def test_a_change_in_between_lets_the_function_run_again(
        self, a: Client, b: Client, disturb: Callable[[Client], object]
    ) -> None:
        a.kv_put("k", "p", {"n": 1})
        seen: list[int] = []

        def change(values: Values) -> Values:
            if not seen:
                disturb(b)
            seen.append(values["n"])
            return {"n": values["n"] + 1}

        assert a.kv_update("k", "p", "n", change) == {"n": seen[-1] + 1}
        assert len(seen) == 2
        assert seen[0] == 1

    def test_a_key_that_is_cleared_in_between_is_not_found(self, a: Client, b: Client) -> None:
        a.kv_put("k", "p", {"n": 1})

        def change(values: Values) -> Values:
            b.kv_clear("k", "p")
            return values

        with refused("not found"):
            a.kv_update("k", "p", "n", change)
        assert a.kv_list("p") == {"p": {}}

    def test_two_clients_that_create_a_key_agree(self, a: Client, b: Client) -> None:
        def change(values: Values) -> Values:
            if not values["n"]:
                b.kv_update("k", "p", "n", more, empty={"n": 0})
            return more(values)

        assert a.kv_update("k", "p", "n", change, empty={"n": 0}) == {"n": 2}

    def test_an_update_that_always_loses_ends_with_its_timeout(self, cluster: Cluster, a: Client, b: Client) -> None:
        a.kv_put("k", "p", {"n": 1})

        def change(values: Values) -> Values:
            b.kv_put("k", "p", {"n": values["n"] + 1})
            return {"n": -1}

        began = cluster.clock.now
        with pytest.raises(WaitTimeoutError, match="changed the sample 'k' of partition 'p' in each of") as raised:
            a.kv_update("k", "p", "n", change, timeout=3.0)
        assert isinstance(raised.value.__cause__, VersionConflictError)
        assert 2.5 < cluster.clock.now - began <= 3.0
        assert a.kv_batch_get("k", "p")["n"][0] > 10

    def test_pauses_become_longer_up_to_a_limit_after_any_number_of_attempts(self) -> None:
        pauses = [longest_pause(attempts) for attempts in range(1, 3000)]
        assert pauses == sorted(pauses)
        assert pauses[0] == 2 * FIRST_PAUSE
        assert pauses[-1] == LONGEST_PAUSE

    def test_concurrent_updates_of_one_key_all_count(self, cluster: Cluster) -> None:
        clients = [cluster.client(f"c{n}") for n in range(6)]
        tasks = [
            client.start(client.operations.kv_update("k", "p", "n", more, empty={"n": 0}))
            for client in clients for _ in range(5)
        ]  # fmt: skip
        cluster.wait(lambda: all(task.done for task in tasks))
        assert sorted(task.result()["n"] for task in tasks) == list(range(1, 31))


class TestFences:
    def test_an_update_with_the_token_of_an_ended_lock_changes_nothing(self, a: Client) -> None:
        with a.kv_lock("k", "p") as lock:
            assert a.kv_update("k", "p", "n", more, empty={"n": 0}, fence=lock) == {"n": 1}
        with pytest.raises(LockLostError):
            a.kv_update("k", "p", "n", more, fence=lock.token)
        assert a.kv_update("k", "p", "n", more) == {"n": 2}


def test_a_loaded_checkpoint_in_between_lets_the_function_run_again(a: Client, b: Client, tmp_path: Path) -> None:
    a.kv_put("k", "p", {"n": 1})
    save(a, tmp_path)
    seen: list[int] = []

    def change(values: Values) -> Values:
        if not seen:  # the sample has the same version after the load
            load(b, tmp_path)
        seen.append(values["n"])
        return more(values)

    assert a.kv_update("k", "p", "n", change) == {"n": 2}
    assert seen == [1, 1]


def test_awaitable(a: Client) -> None:
    async def run() -> list[Any]:
        return [await a.async_kv_update("k", "p", "n", more, empty={"n": 0}) for _ in range(3)]

    assert asyncio.run(run()) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_samples_without_keys_are_not_touched(a: Client) -> None:
    a.put(numbers(2), partition_id="p")
    a.kv_update("k", "p", "x", lambda values: {"x": values["x"] + 1}, empty={"x": torch.tensor(0)})
    assert a.get_data(a.get_meta(["x"], None, "p", mode="force_fetch"), layout="dense")["x"].tolist() == [0, 1, 1]
