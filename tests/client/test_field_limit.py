"""A partition has a limit of fields with values: a put or a load of more is refused, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from test_checkpoints import load, save
from test_selective_checkpoints import save_some

from simulated import Start, numbers, table
from transfer_queue.client.checkpoint.checkpoint_folder import METADATA, write_json
from transfer_queue.core.state import serialization
from transfer_queue.core.tables import fields as field_table
from transfer_queue.errors import CheckpointError, InvalidArgumentError
from transfer_queue.testing import Client

MAX_FIELDS = 40
"""The limit in these tests, so that the partitions are small; a system's is 4,096."""
REFUSED = rf"at most {MAX_FIELDS} fields.*nothing was changed. Put values that belong together into one field"


def limit(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for module in (field_table, serialization):
        monkeypatch.setattr(module, "MAX_FIELDS", most)


@pytest.fixture(autouse=True)
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert field_table.MAX_FIELDS == 4096
    limit(monkeypatch, MAX_FIELDS)


def fields(first: int, stop: int, rows: int = 1) -> TensorDict:
    return table(**{f"f{number}": torch.zeros(rows) for number in range(first, stop)})


def complete(folder: Path) -> None:
    """Write the file with which `tq.save_checkpoint` completes a checkpoint."""
    write_json(folder / METADATA, {"storage_saved": True, "user_metadata": {}})


def test_as_many_fields_are_allowed_and_no_further_one(a: Client) -> None:
    first = a.kv_put("a", "p", fields(0, MAX_FIELDS // 2))
    a.kv_put("b", "p", fields(MAX_FIELDS // 2, MAX_FIELDS))
    found = rf"partition 'p' would have more: it has {MAX_FIELDS}, and 'x' would be added; nothing was changed"
    for put in (
        lambda: a.kv_put("c", "p", {"x": torch.tensor(1)}),
        lambda: a.kv_put("a", "p", {"x": "text"}),
        lambda: a.kv_batch_put(["c"], "p", numbers(1)),
        lambda: a.put(numbers(1), partition_id="p"),
        lambda: a.put(numbers(1), metadata=a.kv_retrieve_meta("a", "p")),
    ):
        with pytest.raises(InvalidArgumentError, match=found):
            put()
    assert a.kv_list("p") == {"p": {"a": {}, "b": {}}}
    assert a.kv_put("c", "p", fields(0, MAX_FIELDS)).fields == sorted(fields(0, MAX_FIELDS).keys())
    a.kv_put("a", "other", numbers(1))
    a.kv_put("d", "p", tag={"step": 1})
    assert len(first.fields) == MAX_FIELDS // 2


@pytest.mark.parametrize("count", [MAX_FIELDS + 1, 3 * MAX_FIELDS])
def test_one_put_of_more_fields_is_refused(a: Client, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match=r"it has 0, and 'f0', 'f1', .*, \.\.\. would be added; nothing"):
        a.put(fields(0, count), partition_id="p")
    assert a.get_partition_list() == []
    inner = TensorDict({"x": fields(0, MAX_FIELDS)}, batch_size=[1])
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        a.put(inner, partition_id="p")  # the fields of a nested TensorDict, and one for itself


def test_a_field_without_live_values_does_not_count(a: Client) -> None:
    a.kv_put("a", "p", fields(0, MAX_FIELDS - 1))
    a.kv_put("b", "p", {"x": torch.tensor(1), "f0": torch.tensor(1.0)})
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        a.kv_put("c", "p", {"y": torch.tensor(1)})
    a.kv_clear("b", "p")
    a.kv_put("c", "p", {"y": torch.tensor(1)})
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        a.kv_put("b", "p", {"x": torch.tensor(1)})
    a.kv_clear("a", "p")
    a.kv_put("b", "p", fields(MAX_FIELDS, 2 * MAX_FIELDS - 1))


@pytest.fixture
def too_many(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for a checkpoint of a system without the limit, with one field too many in p."""
    with monkeypatch.context() as patched:
        limit(patched, 2 * MAX_FIELDS)
        client = start(seed=1).client("a")
        client.kv_put("a", "p", fields(0, MAX_FIELDS + 1))
        client.kv_put("a", "q", numbers(1))
        complete(save(client, tmp_path / "whole"))
        save_some(client, tmp_path / "some", ["p", "q"])
    return tmp_path


def test_a_checkpoint_with_more_is_refused(start: Start, too_many: Path) -> None:
    client = start(seed=2).client("b")
    client.kv_put("b", "p", numbers(1))
    refused = rf"partition 'p' has {MAX_FIELDS + 1} fields with values, and a partition can have at most {MAX_FIELDS}"
    with pytest.raises(CheckpointError, match=refused):
        load(client, too_many / "whole")
    with pytest.raises(CheckpointError, match=refused):
        client.load_samples(too_many / "some", ["p", "q"])
    assert client.kv_list() == {"p": {"b": {}}}
    client.load_samples(too_many / "whole", "q")
    assert client.kv_list() == {"p": {"b": {}}, "q": {"a": {}}}


def test_samples_that_would_be_too_many_together_are_not_loaded(start: Start, tmp_path: Path) -> None:
    client: Any = start(seed=1).client("a")
    client.kv_put("a", "p", fields(0, MAX_FIELDS))
    complete(save(client, tmp_path / "ck"))
    client.clear_partition("p")
    client.kv_put("b", "p", numbers(1))
    with pytest.raises(InvalidArgumentError, match=REFUSED):
        client.load_samples(tmp_path / "ck", "p")
    assert client.kv_list() == {"p": {"b": {}}}
