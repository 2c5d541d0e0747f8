"""A user's sampler gets the values that users have put, not their encoded form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tensordict import TensorDict

from transfer_queue.errors import SamplerError
from transfer_queue.metadata.tag_values import same_value
from transfer_queue.sampler import BaseSampler, SamplerWrapper
from transfer_queue.testing import Cluster

VALUES = {
    "array": np.arange(6.0).reshape(2, 3),
    "tensor": torch.arange(4, dtype=torch.bfloat16),
    "tuple": (1, (2.5, "x")),
    "set": {1, 2},
    "dtype": torch.float16,
    "int keys": {1: "a", 2: {3: np.ones(2)}},
    "nested": {"list": [np.zeros(3), (1,), {"deep": torch.ones(2)}]},
    "plain": [1, 2.5, "three", None, True, b"six", {"seven": [8]}],
}


class Seeing(BaseSampler):
    """Deals in order, and records the values that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.validated: dict[str, Any] = {}
        self.tags: dict[int, dict[str, Any]] = {}

    def validate(self, batch_size: int, sampling_config: Any) -> None:
        self.validated = dict(sampling_config)

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, partition: Any = None, **config: Any) -> Any:
        self.config = config
        self.tags = partition.get_custom_meta(ready_indexes)
        return ready_indexes[:batch_size], ready_indexes[:batch_size]


class Around(SamplerWrapper):
    """A user's sampler around the one that sees."""

    def view(self, ready_indexes: Any, config: Any) -> Any:
        return ready_indexes


@pytest.mark.parametrize("around", [False, True])
def test_a_users_sampler_gets_the_values_that_were_put(tmp_path: Path, around: bool) -> None:
    seeing = Seeing()
    with Cluster(tmp_path, sampler=Around(seeing) if around else seeing) as cluster:
        client = cluster.client("c")
        meta = client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
        meta.update_custom_meta([dict(VALUES), {"only": np.float32(1.5)}])
        client.set_custom_meta(meta)
        got = client.get_meta(["x"], 1, "p", task_name="t", sampling_config=dict(VALUES))
        assert got.global_indexes == [0]
        shown = {name: seeing.config[name] for name in VALUES}
        assert same_value(shown, VALUES)
        assert {name: type(value) for name, value in shown.items()} == {n: type(v) for n, v in VALUES.items()}
        assert same_value({name: seeing.validated[name] for name in VALUES}, VALUES)
        assert same_value(seeing.tags[0], VALUES)
        assert seeing.tags[1] == {"only": 1.5}
        assert not any(isinstance(v, msgspec.msgpack.Ext) for v in [*seeing.config.values(), *seeing.tags[0].values()])
        again = client.get_meta(["x"], 1, "p", mode="force_fetch")
        assert same_value(again.custom_meta[0], VALUES), "what was put stays as it is"


def test_an_exception_of_a_sampler_is_a_runtime_error_for_the_caller(tmp_path: Path) -> None:
    class Raises(Seeing):
        def sample(self, *args: Any, **config: Any) -> Any:
            raise {"value": ValueError, "exit": SystemExit, "key": KeyError}[config["how"]]("as asked")

    with Cluster(tmp_path, sampler=Raises()) as cluster:
        client = cluster.client("c")
        client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
        for how, kind in (("value", ValueError), ("exit", SamplerError), ("key", SamplerError)):
            with pytest.raises(RuntimeError, match="as asked") as raised:
                client.get_meta(["x"], 1, "p", task_name="t", sampling_config={"how": how})
            assert isinstance(raised.value, kind)
        assert client.get_consumption_status("t", "p")[1].tolist() == [0, 0]  # type: ignore[union-attr]
