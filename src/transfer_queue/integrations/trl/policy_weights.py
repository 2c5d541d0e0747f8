"""The weights of the policy under a key of the queue, with their version and whether the training has stopped."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from transfer_queue.attachment import current_client
from transfer_queue.errors import InvalidArgumentError

KEY = "policy"
_VERSION_FIELD = "#version"  # a parameter's name cannot begin with this character


class Publication(NamedTuple):
    """The content of the tag of the published weights."""

    number: str
    """Differs in each publication, also if a resumed training publishes a version again."""
    version: int
    """The version of the policy."""
    group_size: int
    """The number of completions of each prompt."""
    stopped: bool
    """Whether the training has stopped."""


def partition_of(partition_id: str) -> str:
    """Return the name of the partition with the weights for a partition of rollouts."""
    return f"{partition_id}.weights"


def publish_weights(
    weights: Iterable[tuple[str, torch.Tensor]], partition_id: str, version: int, group_size: int
) -> None:
    """Publish weights for the generators, together with their version.

    Args:
        weights: Names and tensors. Each tensor is copied to the memory of the host.
        partition_id: The partition of the rollouts.
        version: The version of the policy.
        group_size: The number of completions of each prompt.
    """
    fields: dict[str, Any] = {name: tensor.detach().cpu() for name, tensor in weights}
    if not fields:
        raise InvalidArgumentError("weights must have at least one tensor, got none")
    fields[_VERSION_FIELD] = torch.tensor(version)
    tag = {"number": uuid.uuid4().hex, "version": version, "group_size": group_size, "stopped": False}
    current_client().kv_put(KEY, partition_of(partition_id), fields, tag)


def fetch_weights(partition_id: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return the published weights by name, and their version.

    Args:
        partition_id: The partition of the rollouts.
    """
    data = current_client().kv_batch_get(KEY, partition_of(partition_id), layout="list")
    weights = {str(name): data[name][0] for name in data.keys()}  # noqa: SIM118  (a TensorDict iterates over rows)
    version = int(weights.pop(_VERSION_FIELD))
    return weights, version


def read_publication(partition_id: str) -> Publication | None:
    """Return what was published last, without the weights; None if nothing was."""
    partition = partition_of(partition_id)
    tag = current_client().kv_list(partition).get(partition, {}).get(KEY)
    return None if tag is None else Publication(tag["number"], tag["version"], tag["group_size"], tag["stopped"])


def mark_stopped(partition_id: str) -> None:
    """Notify the producers that the training has stopped."""
    if read_publication(partition_id) is not None:
        current_client().kv_put(KEY, partition_of(partition_id), tag={"stopped": True})


def await_training(partition_id: str, timeout: float | None = None) -> Publication | None:
    """Wait until a training has published weights and has not stopped. Return None after the timeout.

    Args:
        partition_id: The partition of the rollouts.
        timeout: Seconds to wait. Default: TQ_CONTROLLER_GET_METADATA_TIMEOUT (60 s).
    """
    publication = read_publication(partition_id)
    if publication is None or publication.stopped:
        where = {"stopped": False}
        current_client().wait_for_change(partition_of(partition_id), where=where, timeout=timeout)
        publication = read_publication(partition_id)
    return None if publication is None or publication.stopped else publication
