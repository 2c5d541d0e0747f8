"""The tables of a replay buffer after changes that are incomplete, repeated or out of date."""

from __future__ import annotations

from typing import Any

from producing import ARGUMENTS
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from transfer_queue.client.conversion.change_events import PartitionChange
from transfer_queue.integrations.verl.partition_mirror import PartitionMirror


def prompt(status: str, step: int = 1) -> dict[str, Any]:
    return {"is_prompt": True, "status": status, "global_steps": step}


def change(
    version: int, tags: dict[str, dict[str, Any]], cleared: list[str] | None = None, complete: bool = True,
    dropped: bool = False, indexes: list[int] | None = None,
) -> PartitionChange:  # fmt: skip
    """Return what `wait_for_change` returns."""
    gone = list(cleared or [])
    return PartitionChange(
        version=version, changed=True, global_indexes=indexes or list(range(len(tags))), keys=list(tags),
        versions=[version] * len(tags), tags=list(tags.values()), cleared_indexes=[0] * len(gone), cleared_keys=gone,
        cleared_versions=[version] * len(gone), sealed=False, dropped=dropped, complete=complete,
    )  # fmt: skip


class Replies:
    """Answers the requests of a mirror in turn, and notes the versions that they name."""

    def __init__(self, *replies: PartitionChange) -> None:
        self.replies = list(replies)
        self.asked: list[int | None] = []

    def __call__(self, since: int | None) -> PartitionChange:
        self.asked.append(since)
        return self.replies.pop(0)


def mirror() -> tuple[ReplayBuffer, PartitionMirror]:
    buffer = ReplayBuffer(trainer_mode="sync", **ARGUMENTS)
    return buffer, PartitionMirror(buffer, "train")


def test_trajectories_come_in_the_order_of_their_creation() -> None:
    buffer, tables = mirror()
    tables.update(Replies(change(5, {"b_0_0": {"n": 2}, "a_0_0": {"n": 1}}, indexes=[7, 3])))
    tables.update(Replies(change(6, {"c_0_0": {"n": 3}, "b_0_0": {"n": 4}}, indexes=[9, 7])))
    assert list(buffer.partitions["train"].items()) == [("a_0_0", {"n": 1}), ("b_0_0", {"n": 4}), ("c_0_0", {"n": 3})]


def test_a_key_that_was_cleared_and_put_again_exists() -> None:
    buffer, tables = mirror()
    tables.update(Replies(change(5, {"a": prompt("running"), "a_0_0": {}})))
    tables.update(Replies(change(9, {"a": prompt("pending", 2)}, cleared=["a", "a_0_0", "never seen"])))
    assert buffer.pending_keys["train"] == {"a"}
    assert not buffer.running_keys["train"]
    assert buffer.prompt_global_steps["train"] == {"a": 2}
    assert not buffer.partitions["train"]


def test_forgotten_clears_make_it_start_again() -> None:
    buffer, tables = mirror()
    tables.update(Replies(change(5, {"a": prompt("running"), "b": prompt("pending"), "a_0_0": {}})))
    replies = Replies(change(90, {}, cleared=["b"], complete=False), change(91, {"b": prompt("finished")}))
    tables.update(replies)
    assert replies.asked == [5, None]
    assert buffer.finished_keys["train"] == {"b"}
    assert not buffer.running_keys["train"]
    assert not buffer.partitions["train"]
    assert tables.version == 91
    assert {key: prompt.version for key, prompt in tables.prompts.items()} == {"b": 91}


def test_a_partition_that_was_dropped_is_empty() -> None:
    buffer, tables = mirror()
    tables.update(Replies(change(5, {"a": prompt("running")})))
    replies = Replies(change(-1, {}, dropped=True), change(-1, {}))
    tables.update(replies)
    assert replies.asked == [5, None]
    assert not buffer.running_keys["train"]
    assert not buffer.prompt_global_steps["train"]
    tables.update(after := Replies(change(99, {"a": prompt("pending")})))
    assert after.asked == [-1]
    assert buffer.pending_keys["train"] == {"a"}
