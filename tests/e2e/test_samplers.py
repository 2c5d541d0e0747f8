"""A system whose sampler is made of several: instances travel into the controller, and by name with arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import transfer_queue as tq

SECONDS = 60


def put(client: Any, tags: list[dict[str, Any]], partition: str = "p") -> list[int]:
    """New samples with these tags."""
    meta = client.get_meta(["x"], len(tags), partition, mode="insert", timeout=SECONDS)
    meta.update_custom_meta(tags)
    client.put(TensorDict({"x": torch.tensor(meta.global_indexes)}, batch_size=[len(tags)]), meta)
    return list(meta.global_indexes)


def fetch(client: Any, count: int, **sampling: Any) -> Any:
    return client.get_meta(["x"], count, "p", task_name="t", sampling_config=sampling or None, timeout=SECONDS)


def test_freshness_around_priority_around_groups() -> None:
    sampler = tq.FreshnessSampler(tq.PrioritySampler(inner=tq.GRPOGroupNSampler(2)), max_staleness=1)
    tq.init({"system": {"name": "composed"}, "controller": {"sampler": sampler}})
    try:
        client = tq.get_client()
        client.create_partition("p", timeout=SECONDS)
        versions, priorities = [3, 3, 3, 1, 3, 2, 3, 3], [0, 1, 9, 9, 5, 0, 0, 0]
        tags = [{"policy_version": v, "priority": p} for v, p in zip(versions, priorities, strict=True)]
        put(client, tags)
        client.set_policy_version("p", 3)
        both = [fetch(client, 2, dp_rank=rank, batch_index=0) for rank in (0, 1)]
        assert [meta.global_indexes for meta in both] == [[4, 5], [0, 1]]
        assert client.get_data(both[0])["x"].tolist() == [4, 5]
        again = fetch(client, 2, dp_rank=0, batch_index=0)
        assert again.global_indexes == [4, 5], "as before, though newer ones are ready"
        client.seal("p")
        assert fetch(client, 2, dp_rank=0, batch_index=1).global_indexes == [], "one group for two ranks is nobody's"
        (partition,) = client.status().partitions
        assert partition.passed == {"t": {"stale: more than 1 policy versions behind": 2, "remainder": 2}}
    finally:
        tq.close()


def test_token_budget_by_name_and_arguments() -> None:
    args = {"max_staleness": 0, "inner": {"sampler": "TokenBudgetSampler", "sampler_args": {"token_budget": 10}}}
    conf = {"system": {"name": "named"}, "controller": {"sampler": "FreshnessSampler", "sampler_args": args}}
    tq.init(conf)
    try:
        client = tq.get_client()
        put(client, [{"total_lengths": 6}, {"total_lengths": 4}, {"total_lengths": 1}])
        assert fetch(client, 3, batch_index=0).global_indexes == [0, 1]
    finally:
        tq.close()


def test_a_rank_sampler_that_forwards_by_position() -> None:
    class Forwarding(tq.RankAwareSampler):
        def sample(self, ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id, *args, **kwargs):  # type: ignore[no-untyped-def]
            return super().sample(
                ready_indexes, batch_size, dp_rank, batch_index, task_name, partition_id, *args, **kwargs
            )

    tq.init({"system": {"name": "forwarding"}, "controller": {"sampler": Forwarding}})
    try:
        put(tq.get_client(), [{}] * 8)
        tq.get_client().seal("p")
        ranks = [tq.StreamingDataset(None, 2, 1, ["x"], "p", "t", dp_rank=rank) for rank in (0, 0, 1)]
        streams = [iter(dataset) for dataset in ranks]
        taken = [[int(next(stream)[0]["x"]) for stream in streams] for _ in range(4)]
        assert taken == [[0, 0, 2], [1, 1, 3], [4, 4, 6], [5, 5, 7]]
    finally:
        tq.close()


# In a module that imports no torch, because each controller imports it.
CLASSES = """
from transfer_queue import BaseSampler

class Again(BaseSampler):  # deals the first ready rows, which stay ready: they are sampled and not consumed
    wants_list = True
    def sample(self, ready_indexes, batch_size, *args, fail=False, **kwargs):
        if fail:
            raise KeyError("as asked")
        rows = ready_indexes[:batch_size]
        return rows, [row for row in rows if row < 0 or isinstance(ready_indexes, list) != self.wants_list]

class Lazily(Again):
    wants_list = False
"""
SCRIPT = """
if __name__ == "__main__":
    import json, torch, transfer_queue as tq
    from tensordict import TensorDict

    for sampler in (Again, Lazily, Again(), Lazily(), "script:Again", "script:Lazily", "beside:Again"):
        tq.init({"system": {"name": "again"}, "controller": {"sampler": sampler}})
        client = tq.get_client()
        client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), partition_id="p")
        got = [client.get_meta(["x"], 2, "p", task_name="t").global_indexes for _ in range(2)]
        try:
            client.get_meta(["x"], 1, "p", task_name="t", sampling_config={"fail": True})
        except tq.SamplerError as error:
            print(json.dumps([got, str(error)]))
        tq.close()
"""


def test_a_users_sampler(tmp_path: Path) -> None:
    """By class, instance and import path; a list or lazily; rows that stay ready; its error with its traceback.

    The controller finds what the script could import: the module of the script, and one beside it.
    """
    (tmp_path / "script.py").write_text(CLASSES + SCRIPT)
    (tmp_path / "beside.py").write_text(CLASSES)
    environment = {k: v for k, v in os.environ.items() if k != "TQ_ADDRESS"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=300, env=environment
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 7, done.stderr
    for (got, words), file in zip(said, ["script.py"] * 6 + ["beside.py"], strict=True):
        assert got == [[0, 1], [0, 1]]
        assert "KeyError: 'as asked'" in words
        assert file in words
        assert 'raise KeyError("as asked")' in words
