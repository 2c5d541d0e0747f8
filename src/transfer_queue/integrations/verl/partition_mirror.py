"""PartitionMirror: keeps verl's tables of one partition up to date with the changes of that partition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from transfer_queue.client.conversion.change_events import PartitionChange
from transfer_queue.errors import InvalidArgumentError

Changes = Callable[[int | None], PartitionChange]
"""Returns the changes of the partition since a version; all of its samples if it is None."""


class Prompt(NamedTuple):
    """What verl's tables contain of a prompt."""

    status: str
    global_steps: int
    version: int
    """The version of the partition at which the prompt last changed."""


class PartitionMirror:
    """The prompts and trajectories of a partition, and the tables in which a replay buffer of verl finds them.

    Args:
        buffer: The replay buffer with the tables. It may remove from them what it clears.
        partition_id: The partition.
    """

    def __init__(self, buffer: Any, partition_id: str) -> None:
        self.version: int | None = None
        """The version of the partition that the tables show; None if they show nothing."""
        self.prompts: dict[str, Prompt] = {}
        """The prompts by key, in the order of their creation."""
        self._partition_id = partition_id
        self._buffer = buffer
        self._by_status = {
            "pending": buffer.pending_keys,
            "running": buffer.running_keys,
            "finished": buffer.finished_keys,
            "failure": buffer.failure_keys,
        }

    def update(self, changes: Changes) -> None:
        """Apply the changes since the last update; start again if the partition does not report all of them."""
        change = changes(self.version)
        trajectories = self._buffer.partitions[self._partition_id]
        if change.dropped or not change.complete:
            self.prompts.clear()
            trajectories.clear()
            change = changes(None)
        for key in change.cleared_keys:
            self.prompts.pop(key, None)  # type: ignore[arg-type]  # None is no key of a prompt
            trajectories.pop(key, None)
        # Samples that are new since the last update come in the order of their creation, as in a list of all keys.
        changed = zip(change.global_indexes, change.keys, change.tags, change.versions)
        for _, key, tag, version in sorted(changed, key=lambda entry: entry[0]):
            if key is not None and tag.get("is_prompt", False):
                self.prompts[key] = self._prompt(key, tag, version)
            elif key is not None:
                trajectories[key] = tag
        self._fill_tables()
        self.version = change.version

    def _prompt(self, key: str, tag: dict[str, Any], version: int) -> Prompt:
        if tag["status"] not in self._by_status:
            known = ", ".join(self._by_status)
            given = f"{tag['status']!r} for {key!r}"
            raise InvalidArgumentError(f"the status of a prompt must be one of {known}, got {given}")
        return Prompt(tag["status"], tag["global_steps"], version)

    def _fill_tables(self) -> None:
        """Make new sets of prompts, as verl does.

        verl takes prompts of one step in the order of a set, which depends on how the set was made.
        """
        for status, table in self._by_status.items():
            table[self._partition_id] = {key for key, prompt in self.prompts.items() if prompt.status == status}
        steps = {key: prompt.global_steps for key, prompt in self.prompts.items()}
        self._buffer.prompt_global_steps[self._partition_id] = steps
