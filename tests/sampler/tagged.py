"""A partition for samplers without a system: tags by global index, and a policy version."""

from __future__ import annotations

from typing import Any


class Partition:
    """asked: the number of rows whose tags were read."""

    def __init__(self, tags: dict[int, dict[str, Any]], policy_version: int = 0) -> None:
        self.partition_id = "p"
        self.tags = tags
        self.policy_version = policy_version
        self.asked = 0

    def get_custom_meta(self, indexes: list[int]) -> dict[int, dict[str, Any]]:
        self.asked += len(indexes)
        return {index: self.tags[index] for index in indexes if index in self.tags}


def tagged(tag: str, values: dict[int, Any], policy_version: int = 0) -> Partition:
    """Return a partition in which these rows have the tag."""
    return Partition({index: {tag: value} for index, value in values.items()}, policy_version)
