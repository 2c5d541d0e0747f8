"""Acknowledgements that wait at the same time: one request, and an answer for each."""

from __future__ import annotations

import torch

from simulated import Start
from transfer_queue.core.events.records import LeaseAcked
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.claims import Ack, AckMany
from transfer_queue.metadata import BatchMeta
from transfer_queue.sampler import GRPOGroupNSampler
from transfer_queue.testing import Client, Cluster


def claim(client: Client, count: int = 1) -> BatchMeta:
    return client.get_meta("x", count, "p", task_name="t", lease=60)


def test_each_lease_is_acknowledged(a: Client, cluster: Cluster) -> None:
    a.kv_batch_put([f"k{n}" for n in range(9)], "p", {"x": torch.arange(9)})
    held = [claim(a) for _ in range(9)]
    assert a.ack(held[4])
    before = cluster.controller.context.measures.counters["requests"]
    tasks = [a.start(a.operations.ack(meta)) for meta in held]
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [task.result() for task in tasks] == [n != 4 for n in range(9)]
    assert cluster.controller.context.measures.counters["requests"] == before + 2
    acked = [record for record in cluster.records if isinstance(record, LeaseAcked)]
    assert len(acked) == 9
    assert a.check_consumption_status("t", "p")


def test_acks_of_one_request_see_each_other(a: Client, cluster: Cluster) -> None:
    """Rows that two replicas must finish are consumed with the second ack of the same request."""
    a.kv_batch_put([f"k{n}" for n in range(4)], "p", {"x": torch.arange(4)})
    held = claim(a, 4)
    ((lease, rows),) = held._leased()
    parts = [rows[:1], rows[1:3], rows[1:2], rows[3:]]
    reply = a.call(a.state.ask(AckMany([Ack("p", lease.token, part.tobytes()) for part in parts]), object, None))
    assert reply.value == [True, True, False, True]
    assert a.check_consumption_status("t", "p")


def test_each_has_its_own_error(start: Start) -> None:
    cluster = start(sampler=GRPOGroupNSampler(2))
    client = cluster.client("c")
    client.kv_batch_put(list("abcd"), "p", {"x": torch.arange(4)}, group_ids=[0, 0, 1, 1])
    one, other = claim(client, 2), claim(client, 2)
    metas = [other.select_samples([0]), one, other.select_samples([1]), other]
    tasks = [client.start(client.operations.ack(meta)) for meta in metas]
    cluster.wait(lambda: all(task.done for task in tasks))
    assert [type(task.error) for task in tasks] == [InvalidArgumentError, type(None), InvalidArgumentError, type(None)]
    assert [tasks[1].result(), tasks[3].result()] == [True, True]
