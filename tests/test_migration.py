"""Message fragments that migrating code matches, and names that it imports."""

import importlib
import re

import numpy as np
import pytest

import transfer_queue as tq
from transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient
from transfer_queue.dataloader import streaming_dataset
from transfer_queue.metadata.partition_snapshot import PartitionSnapshot
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler
from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions, karmarkar_karp


def dataset(**more):
    arguments = {"batch_size": 4, "micro_batch_size": 2, "data_fields": ["x"], "dp_rank": 0, **more}
    return tq.StreamingDataset(config=None, partition_id="p", task_name="t", **arguments)


def ranked(**more):
    return {"task_name": "t", "partition_id": "p", "dp_rank": 0, "batch_index": 0, **more}


FRAGMENTS = {
    "rank of a dataset": (lambda: dataset(dp_rank=-1), "dp_rank -1 must be greater than or equal to 0"),
    "rank of a claim": (
        lambda: RankAwareSampler().sample([0], 1, **ranked(dp_rank=-1)), "dp_rank -1 must be greater than or equal to 0"
    ),
    "fields": (lambda: dataset(data_fields=[]), "data_fields must be a list with at least one field name, got []"),
    "micro-batch": (lambda: dataset(micro_batch_size=0), "micro_batch_size must be a positive integer, got 0"),
    "batch": (lambda: dataset(batch_size=0), "batch_size must be a positive integer, got 0"),
    "group": (lambda: GRPOGroupNSampler(0), "n_samples_per_prompt must be positive, got 0"),
    "ranks": (lambda: SeqlenBalancedSampler(1, 0), "dp_size must be positive, got 0"),
    "parts of equal size": (lambda: karmarkar_karp([1, 2, 3], 2, True), "3 % 2 != 0"),
    "balanced parts of equal size": (lambda: get_seqlen_balanced_partitions([1, 2, 3], 2, True), "3 % 2 != 0"),
    "fewer items than parts": (
        lambda: get_seqlen_balanced_partitions([1], 2, False), "number of items:[1] < k_partitions:[2]"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "fragment"), FRAGMENTS.values(), ids=FRAGMENTS)
def test_messages_have_the_fragments_that_callers_match(call, fragment):
    with pytest.raises(ValueError, match=re.escape(fragment)):
        call()


def test_the_client_has_the_name_of_the_asynchronous_one():
    assert tq.AsyncTransferQueueClient is AsyncTransferQueueClient is TransferQueueClient


def test_the_snapshot_of_a_partition_has_its_name():
    controller = importlib.import_module("transfer_queue.controller")
    assert controller.DataPartitionStatus is PartitionSnapshot
    empty = controller.DataPartitionStatus("p", np.zeros(0, "i8"), [], np.zeros((0, 0), "i1"), {}, [], [])
    assert (empty.partition_id, empty.total_samples_num) == ("p", 0)


def test_the_sleep_interval_is_a_number_of_seconds():
    assert streaming_dataset.TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL >= 0
