"""Leases: rows are claimed until they are acknowledged, and delivered again if they are not."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Harness, rows_of, through_file

from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.deadlines import LEAST
from transfer_queue.errors import BatchGoneError, InvalidArgumentError
from transfer_queue.messages.claims import ClaimReply, RankGone, Renew, ResetConsumption
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.queries import CheckConsumption, ConsumptionStatus, Explain
from transfer_queue.messages.reports.progress import TaskProgress
from transfer_queue.messages.system import Status
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SequentialSampler
from transfer_queue.sampler.base import BaseSampler


def task(h: Harness) -> TaskProgress:
    (found,) = [t for t in h.look(Status()).partitions[0].tasks if t.name == "t"]
    return found


def deliveries(reply: ClaimReply) -> list[int] | None:
    return None if reply.deliveries is None else np.frombuffer(reply.deliveries, "<i4").tolist()


def consumed(h: Harness) -> list[int]:
    reply = h.look(ConsumptionStatus("p", "t"))
    return np.frombuffer(reply.matrix, "i1").tolist()


# ---------------------------------------------------------------- one consumer


@pytest.mark.parametrize("lease", [0.0, -1.0])
def test_an_impossible_lease_is_an_error(h: Harness, lease: float) -> None:
    with pytest.raises(InvalidArgumentError, match="lease must be from 0"):
        h.lease(1, lease=lease)


def test_a_renewed_lease_continues(h: Harness) -> None:
    h.put(2)
    reply = h.lease(2, lease=10.0)
    for now in (8.0, 16.0, 24.0):
        h.tick(now)
        assert h.ask(Renew([("p", reply.token)])).value == [True]
    assert h.controller.next_deadline() is not None
    h.tick(33.9)
    assert h.dealt(1) == []
    h.tick(34.0)
    assert h.ask(Renew([("p", reply.token)])).value == [False]
    assert h.dealt(2) == [0, 1]
    assert h.controller.next_deadline() is None


def test_deadlines_of_acknowledged_leases_do_not_accumulate(h: Harness) -> None:
    h.put(1)
    lease = h.state.partitions["p"].leases.by_token[h.lease(1).token]
    for _ in range(3 * LEAST):
        h.controller.context.services[Leases].begin("p", lease)
    assert len(h.controller.context.services[Leases].deadlines._heap) <= LEAST + 1


# ---------------------------------------------------------------- dealt batches


@pytest.fixture
def ranks() -> Harness:
    return Harness(RankAwareSampler())


def test_the_rows_of_a_rank_that_is_gone_are_ready_for_every_rank(ranks: Harness) -> None:
    ranks.put(6)
    acked = ranks.lease(2, dp_rank=1, batch_index=0)
    ranks.ack(acked)
    lost = ranks.lease(2, dp_rank=1, batch_index=1)
    ranks.ask(Seal("p"))
    mine = ranks.lease(2, name="a", dp_rank=0, batch_index=0)
    ranks.ack(mine)
    waits = ranks.claim(2, name="a", wait=1000.0, lease=10.0, dp_rank=0, batch_index=1)
    assert ranks.parked(waits, "a"), "rows that may become ready again are not the end"
    ranks.tick(50.0)
    assert ranks.parked(waits, "a")
    assert ranks.ask(RankGone("p", "t", 1)).value == 2
    again = ranks.result(waits, "a")
    assert (rows_of(again), deliveries(again)) == (rows_of(lost), [2, 2])
    assert not ranks.ack(lost)
    assert ranks.ack(again, name="a")
    assert ranks.dealt(2, name="a", dp_rank=0, batch_index=2) is None, "no share is reserved for a rank that is gone"
    assert ranks.dealt(2, dp_rank=1, batch_index=0) == rows_of(acked), "its acknowledged batch remains"
    with pytest.raises(BatchGoneError, match="declared gone"):
        ranks.lease(2, dp_rank=1, batch_index=1)
    assert ranks.ask(RankGone("p", "t", 1)).value == 0


def test_leases_of_a_rank_are_in_the_same_order_after_a_restart(ranks: Harness) -> None:
    """The oldest lease is first, also if the first lease of a batch has ended and another one continues."""
    ranks.put(4)
    first = ranks.lease(2, dp_rank=0, batch_index=0, replicas=2)
    tokens = [ranks.lease(2, dp_rank=0, batch_index=batch, name="s", replicas=2).token for batch in (1, 0)]
    ranks.nack(first)
    for state in (ranks.state, through_file(ranks.state)):
        assert [lease.token for lease in state.partitions["p"].leases.leases_of_rank("t", 0)] == tokens


def test_replicas_need_a_dealt_batch(h: Harness) -> None:
    with pytest.raises(InvalidArgumentError, match="leave replicas out"):
        h.lease(1, replicas=2)
    with pytest.raises(InvalidArgumentError, match="replicas must be 1 or more"):
        h.lease(1, replicas=0)
    with pytest.raises(InvalidArgumentError, match="needs a lease"):
        h.result(h.claim(1, replicas=1), "r")


# ---------------------------------------------------------------- groups


def test_a_lease_of_several_groups_is_acknowledged_by_complete_groups() -> None:
    h = Harness(GRPOGroupNSampler(2))
    h.put(4, groups=["a", "b", "a", "b"])
    reply = h.lease(4)
    assert rows_of(reply) == [0, 2, 1, 3]
    with pytest.raises(InvalidArgumentError):
        h.ack(reply, [0, 1])
    h.clear([1])
    assert h.ack(reply, [3]), "it is all that is left of its group"
    h.tick(10.0)
    assert rows_of(h.lease(2)) == [0, 2]


def test_a_claimed_row_is_not_the_end() -> None:
    for sampler in (None, GRPOGroupNSampler(2), RankAwareSampler()):
        h = Harness(sampler)
        h.put(4)
        h.ask(Seal("p"))
        reply = h.lease(2, dp_rank=0, batch_index=0)
        assert h.ack(h.lease(2, dp_rank=0, batch_index=1))
        waits = h.claim(2, wait=100.0, dp_rank=0, batch_index=2)
        assert h.parked(waits)
        assert h.ack(reply)
        assert h.got(waits) is None


# ---------------------------------------------------------------- poison


def test_rows_that_are_never_acknowledged_are_skipped(h: Harness) -> None:
    h.create(max_deliveries=3)
    h.put(2)
    h.ask(Seal("p"))
    for delivery in (1, 2, 3):
        reply = h.lease(2)
        assert deliveries(reply) == (None if delivery == 1 else [delivery] * 2)
        h.ack(reply, [1]) if delivery == 3 else h.nack(reply)
    h.nack(reply)
    assert h.dealt(1) is None
    assert h.look(Status()).partitions[0].passed == {"t": {"poison": 1}}
    assert "is skipped by task 't': poison (delivered 3 times, never acknowledged)" in h.look(Explain("p", row=0)).value
    assert h.look(CheckConsumption("p", "t")).value
    h.ask(ResetConsumption("p"))
    assert deliveries(h.lease(2)) is None


def test_the_group_of_a_poison_row_is_skipped() -> None:
    """Samples of a group have the same number of deliveries, unless the sampler had no groups before a restart."""
    h = Harness(SequentialSampler())
    h.create(max_deliveries=2)
    h.put(4)
    h.nack(h.lease(1))
    h.samplers[""] = GRPOGroupNSampler(2)
    h.restart()
    h.nack(h.lease(4))
    assert h.look(Status()).partitions[0].passed == {"t": {"poison": 2}}
    assert rows_of(h.lease(2)) == [2, 3]


def test_a_dealt_batch_with_skipped_rows_is_an_error(ranks: Harness) -> None:
    ranks.create(max_deliveries=2)
    ranks.put(4)
    for _ in range(2):
        ranks.nack(ranks.lease(2, dp_rank=0, batch_index=0))
    with pytest.raises(BatchGoneError, match="too often without an ack"):
        ranks.lease(2, dp_rank=0, batch_index=0)
    assert rows_of(ranks.lease(2, dp_rank=0, batch_index=1)) == [2, 3]
    assert ranks.ask(RankGone("p", "t", 0)).value == 2


# ---------------------------------------------------------------- together with other features


def test_the_replicas_of_the_partition_apply_to_leases() -> None:
    h = Harness(RankAwareSampler())
    h.create(free_when=["t"], replicas=2)
    h.put(2)
    one, two = (h.lease(2, name=name, dp_rank=0, batch_index=0) for name in ("a", "b"))
    assert h.ack(one)
    assert h.state.partitions["p"].row_count == 2
    assert h.ack(two)
    assert h.state.partitions["p"].row_count == 0


def test_a_reader_without_a_lease_keeps_rows_that_another_has_acknowledged(ranks: Harness) -> None:
    ranks.create(free_when=["t"])
    ranks.put(2)
    reply = ranks.lease(2, dp_rank=0, batch_index=0)
    assert ranks.dealt(2, name="plain", dp_rank=0, batch_index=0) == [0, 1]
    assert not ranks.ack(reply)
    assert ranks.state.partitions["p"].row_count == 2
    ranks.disconnect("plain")
    assert ranks.state.partitions["p"].row_count == 0


class Both(BaseSampler):
    """Deals two rows, and consumes another one together with the first of them."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        ready = list(ready_indexes)
        return ready[:2], [ready[0], ready[2]]


def test_a_user_sampler_claims_the_dealt_rows_and_consumes_the_others() -> None:
    h = Harness(Both())
    h.put(3)
    reply = h.lease(3)
    assert rows_of(reply) == [0, 1]
    assert consumed(h) == [0, 0, 1]
    assert task(h).claimed == 1
    assert h.ack(reply)
    assert consumed(h) == [1, 0, 1]


def test_explain_names_the_client_that_holds_a_row(ranks: Harness) -> None:
    ranks.put(2)
    ranks.lease(2, name="trainer", dp_rank=3, batch_index=5)
    words = ranks.look(Explain("p", row=0, task="t")).value
    assert "in batch 5 of dp_rank 3 under a lease of client trainer, and is not acknowledged" in words
    ranks.tick(10.0)
    words = ranks.look(Explain("p", row=0, task="t")).value
    assert "is not acknowledged yet (1 earlier delivery was not acknowledged either)" in words
    words = ranks.look(Explain("p", task="t", fields=["x"])).value
    assert "2 of them are not acknowledged yet (among them batch 5 of dp_rank 3)" in words
