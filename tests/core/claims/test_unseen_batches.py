"""Batches that nobody has seen: what a claim without a key got stays with its client until that has handed it over.

A notice ends it. A return, a cancelled claim, or the end of the client makes the rows ready again, as if they had not
been dealt.
"""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness, column, rows_of, through_file

from transfer_queue.core.absent_clients import ABSENCE_SECONDS, FIRST_CHECK
from transfer_queue.core.appliers import apply_record
from transfer_queue.core.claims.row_leases import Leases
from transfer_queue.core.columns.schema import BrokenInvariant
from transfer_queue.core.events import records as r
from transfer_queue.core.state.check import check_state
from transfer_queue.core.state.restore import merge_state
from transfer_queue.core.state.state import State
from transfer_queue.messages.base import Failure
from transfer_queue.messages.claims import (
    Cancel,
    Claim,
    ClaimReply,
    Finish,
    Nack,
    Renew,
    ReportBatches,
)
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.queries import CheckConsumption, ConsumptionStatus
from transfer_queue.messages.reports.timeline import Leave
from transfer_queue.messages.reports.unit_reports import WriterGone
from transfer_queue.testing.state_recount import check_invariants


def consumed(h: Harness, task: str = "t") -> list[int]:
    """The states of consumption of all rows, in the order of their indexes."""
    return list(h.look(ConsumptionStatus("p", task)).matrix)


def held(h: Harness, partition: str = "p") -> list[int]:
    """The tokens of the batches that were not handed over."""
    return list(h.state.partitions[partition].unseen_batches.by_token)


def of(*replies: ClaimReply) -> list[tuple[str, int]]:
    """The batches of these replies, as a notice names them."""
    return [("p", reply.token) for reply in replies]


class TestClaims:
    def test_a_lease_is_one_and_not_the_other(self, h: Harness) -> None:
        h.put(2)
        got = h.unseen(2, lease=10.0)
        assert list(h.state.partitions["p"].leases.by_token) == [got.token]
        assert not held(h)
        assert consumed(h) == [0, 0]

    def test_a_repeated_claim_gets_the_same_batch_and_token(self, h: Harness) -> None:
        h.put(4)
        sequence = h.claim(2, hand_over=True)
        first = h.result(sequence, "r")
        h.connect("r")
        h.send(Claim("p", "t", ["x"], 2, hand_over=True), "r", sequence)
        assert h.result(sequence, "r") == first
        assert held(h) == [first.token]
        h.notify(handed_over=of(first))
        h.connect("r")
        h.send(Claim("p", "t", ["x"], 2, hand_over=True), "r", sequence)
        assert h.result(sequence, "r") == first
        assert not held(h)


class TestNotices:
    def test_a_notice_ends_it_and_nothing_returns_the_rows_later(self, h: Harness) -> None:
        h.put(2)
        got = h.unseen(2)
        h.notify(handed_over=of(got))
        assert not held(h)
        assert consumed(h) == [1, 1]
        h.notify(returned=of(got))
        assert h.ask(Nack("p", got.token, got.rows), "r").value is False
        h.ask(Cancel(h.clients["r"].sequence), "r")
        h.ask(Leave(), "r")
        h.disconnect("r")
        assert consumed(h) == [1, 1]

    def test_of_two_notices_about_a_batch_the_first_counts(self, h: Harness) -> None:
        h.put(2)
        got = h.unseen(2)
        h.notify(handed_over=of(got), returned=of(got))
        assert consumed(h) == [1, 1]

    def test_unknown_partitions_and_tokens_are_ignored(self, h: Harness) -> None:
        h.put(1)
        for kind in ("handed_over", "finished", "returned"):
            h.notify(**{kind: [("p", 0), ("p", 1 << 40), ("nowhere", 1)]})
        h.notify(withdrawn=[0, 5, 1 << 40])
        assert consumed(h) == [0]

    @pytest.mark.parametrize("body", [Cancel(1), Seal("p"), Claim("p", "t", ["x"], 1), ClearPartition("none")])
    def test_no_other_request_is_a_notice(self, h: Harness, body: object) -> None:
        h.put(1)
        before = h.state.snapshot()
        h.send(body, "r", 0)  # type: ignore[arg-type]
        reply = h.reply(0, "r")
        assert isinstance(reply, Failure)
        assert reply.kind == "ProtocolError"
        assert h.state.snapshot() == before

    def test_a_report_with_a_sequence_gets_a_reply(self, h: Harness) -> None:
        h.put(1)
        got = h.unseen(1)
        assert h.ask(ReportBatches(returned=of(got)), "r") is not None
        assert consumed(h) == [0]

    def test_they_do_not_count_as_leases(self, h: Harness) -> None:
        h.put(4)
        h.notify(returned=of(h.unseen(2)))
        h.notify(handed_over=of(h.unseen(2)))
        series = h.controller.context.services[Leases].series()
        assert not any(series.values())

    def test_a_renewal_says_that_it_is_in_force(self, h: Harness) -> None:
        h.put(1)
        got = h.unseen(1)
        h.tick(1000.0)
        assert h.ask(Renew(of(got)), "r").value == [True]
        h.notify(handed_over=of(got))
        assert h.ask(Renew(of(got)), "r").value == [False]


class TestReturns:
    @pytest.mark.parametrize("how", ["notice", "nack", "cancel", "withdrawal", "leave", "left"])
    def test_the_rows_are_ready_again_and_meet_a_claim_that_waits(self, h: Harness, how: str) -> None:
        rows = h.put(3)
        sequence = h.claim(2, hand_over=True)
        got = h.result(sequence, "r")
        waiting = h.claim(3, name="other", wait=100.0)
        assert h.parked(waiting, "other")
        if how == "notice":
            h.notify(returned=of(got))
        elif how == "nack":
            assert h.ask(Nack("p", got.token, column(rows[:1])), "r").value is True  # as a whole
        elif how == "cancel":
            h.ask(Cancel(sequence), "r")
        elif how == "withdrawal":
            h.notify(withdrawn=[sequence])
        elif how == "left":
            h.notify("third", left=True)
            assert h.parked(waiting, "other")
            h.notify(left=True)
        else:
            h.ask(Leave(), "r")
            h.disconnect("r")
        assert h.got(waiting, "other") == rows
        assert not held(h)
        assert h.state.partitions["p"].consumed_ever["t"] == 3

    def test_the_number_of_deliveries_does_not_grow(self, h: Harness) -> None:
        h.create(max_deliveries=1)
        rows = h.put(1)
        for _ in range(3):
            h.notify(returned=of(h.unseen(1)))
        got = h.lease(1)
        assert (rows_of(got), got.deliveries) == (rows, None)

    def test_a_withdrawn_claim_that_arrives_later_gets_nothing(self, h: Harness) -> None:
        """It was written to a connection that broke, and which the controller reads after the notice."""
        h.put(1)
        h.client("r").sequence = 1
        h.notify(withdrawn=[1])
        h.send(Claim("p", "t", ["x"], 1, hand_over=True), "r", 1)
        assert isinstance(h.reply(1, "r"), Failure)
        assert consumed(h) == [0]
        assert h.dealt(1) != []

    def test_a_withdrawn_lease_ends_without_a_delivery(self, h: Harness) -> None:
        h.put(1)
        sequence = h.claim(1, lease=50.0, hand_over=True)
        h.notify(withdrawn=[sequence])
        got = h.lease(1, name="other")
        assert got.deliveries is None

    def test_only_its_own_client_withdraws_a_claim(self, h: Harness) -> None:
        h.put(1)
        sequence = h.claim(1, hand_over=True)
        h.notify("other", withdrawn=[sequence])
        assert consumed(h) == [1]

    def test_a_returned_lease_is_ready_again(self, h: Harness) -> None:
        rows = h.put(1)
        got = h.lease(1)
        h.notify(returned=of(got))
        again = h.lease(1, name="other")
        assert rows_of(again) == rows
        assert again.deliveries is None


class TestEnds:
    def test_an_unseen_batch_counts_as_consumed_for_ends(self, h: Harness) -> None:
        h.put(2)
        got = h.unseen(2)
        assert h.look(CheckConsumption("p", "t")).value is True
        assert h.result(h.claim(1, name="other", finite=True, wait=5.0), "other").ended
        h.ask(Seal("p"))
        assert h.dealt(1, name="other", wait=5.0) is None
        h.notify(returned=of(got))
        assert h.look(CheckConsumption("p", "t")).value is False
        assert h.dealt(2, name="other") == rows_of(got)


class TestFreedRows:
    def test_rows_that_were_not_handed_over_are_neither_finished_nor_freed(self, h: Harness) -> None:
        h.create(free_when=["t"])
        rows = h.put(3)
        first = h.unseen(1)
        second = h.unseen(1)  # a fetch of the same client finishes its batch before, unless that is unseen
        h.ask(Finish("p", "t", column(rows), "r"), "r")
        assert consumed(h) == [1, 1, 0]
        h.notify(handed_over=of(first))
        h.dealt(1)
        assert h.state.partitions["p"].rows.count == 2, "the first is finished now"
        h.notify(returned=of(second))
        assert h.dealt(1, name="other") == rows[1:2]

    def test_a_finished_batch_is_freed_at_once(self, h: Harness) -> None:
        h.create(free_when=["t"])
        h.put(2)
        first, second = h.unseen(1), h.unseen(1)
        h.notify(finished=of(first))
        assert consumed(h) == [1]
        h.notify(finished=of(second, first))
        assert consumed(h) == []

    def test_the_finished_batch_of_another_clients_claim_is_freed(self, h: Harness) -> None:
        h.create(free_when=["t"])
        h.put(1)
        got = h.unseen(1, name="worker")
        h.notify("loader", finished=of(got))
        assert consumed(h) == []

    def test_a_returned_row_is_not_held_by_its_former_client(self, h: Harness) -> None:
        h.create(free_when=["t"])
        h.put(1)
        got = h.unseen(1)
        h.notify(returned=of(got))
        again = h.unseen(1, name="other")
        h.notify("other", finished=of(again))
        assert consumed(h) == []

    def test_each_task_of_several_must_have_finished(self, h: Harness) -> None:
        h.create(free_when=["t", "u"])
        h.put(1)
        first, second = h.unseen(1), h.unseen(1, "u")
        h.notify(finished=of(first))
        h.notify(returned=of(second))
        assert consumed(h) == [1]
        h.notify(finished=of(h.unseen(1, "u")))
        assert consumed(h) == []

    def test_a_returned_row_counts_in_max_rows_again(self, h: Harness) -> None:
        h.create(free_when=["t"], max_rows=1)
        h.put(1)
        got = h.unseen(1)
        rows = h.put(1)  # a row that somebody has got does not count
        h.notify(returned=of(got))
        put = h.send(h.publish(1, wait=50.0), "w")
        assert h.reply(put) is None
        h.notify(finished=of(h.unseen(1)))
        assert h.reply(put) is None
        h.notify(finished=of(h.unseen(1)))
        assert rows_of(h.reply(put)) != rows

    def test_rows_of_a_client_that_left_are_not_freed(self, h: Harness) -> None:
        h.create(free_when=["t"])
        rows = h.put(2)
        seen = h.unseen(1)
        h.unseen(1)
        h.notify(handed_over=of(seen))
        h.ask(Leave(), "r")
        h.disconnect("r")
        assert h.dealt(1, name="other") == rows[1:]


class TestAbsence:
    def test_a_dead_process_is_noticed_early(self) -> None:
        alive = {"r", "other"}
        h = Harness(lives=alive.__contains__)
        rows = h.put(2)
        h.unseen(2)
        waiting = h.claim(2, name="other", wait=1000.0)
        h.disconnect("r")
        for _ in range(20):
            h.tick(h.now + ABSENCE_SECONDS)
        assert h.parked(waiting, "other"), "its process lives"
        alive.discard("r")
        h.tick(h.now + FIRST_CHECK + 1.0)
        assert h.got(waiting, "other") == rows

    def test_a_client_that_a_unit_reports_dead_returns_its_batches_at_once(self, h: Harness) -> None:
        rows = h.put(2, name="r")
        h.unseen(2)
        h.disconnect("r")
        h.ask(WriterGone("r", 0, []), "unit-0")
        h.tick(h.now)
        assert h.dealt(2, name="other") == rows

    @pytest.mark.parametrize("returns", [True, False])
    def test_a_restored_controller_waits_for_the_clients(self, h: Harness, returns: bool) -> None:
        rows = h.put(2)
        got = h.unseen(2)
        h.restart()
        assert held(h) == [got.token]
        if not returns:
            h.disconnect("r")
        h.tick(h.now + ABSENCE_SECONDS + 1)
        assert h.dealt(2, name="other") == ([] if returns else rows)

    def test_a_restored_controller_forgets_a_client_that_never_returns(self, h: Harness) -> None:
        rows = h.put(1)
        h.unseen(1)
        h.restart(["unit-0", "w"])
        h.tick(h.now + ABSENCE_SECONDS + 1)
        assert h.dealt(1, name="other") == rows


class TestSavedStates:
    def test_a_loaded_state_delivers_them_again(self, h: Harness) -> None:
        h.put(3)
        got = h.unseen(2)
        state, loaded, record = State(), through_file(h.state), r.StateLoaded(b"", h.now)
        for unit in h.state.units.values():
            state.add_unit(unit)
        state.prepared = record, {"time": h.now, "origin": "o"}, loaded
        apply_record(state, record)
        partition = state.partitions["p"]
        assert not partition.unseen_batches.by_token
        assert partition.consumption_states("t", partition.rows.live_positions()).tolist() == [0, 0, 0]
        assert state.next_token > got.token
        check_invariants(state)

    def test_a_partition_that_is_added_delivers_them_again(self, h: Harness) -> None:
        h.put(3)
        h.notify(handed_over=of(h.unseen(1)))
        h.unseen(1)
        state = State()
        for unit in h.state.units.values():
            state.add_unit(unit)
        merge_state(state, through_file(h.state))
        partition = state.partitions["p"]
        assert not partition.unseen_batches.by_token
        assert partition.consumption_states("t", partition.rows.live_positions()).tolist() == [1, 0, 0]
        check_invariants(state)

    @pytest.mark.parametrize("change", ["token", "twice", "task", "consumed", "length"])
    def test_a_damaged_state_is_refused(self, h: Harness, change: str) -> None:
        h.put(3)
        got = h.unseen(2)
        state = through_file(h.state)
        batches = state.partitions["p"].unseen_batches.by_token
        whole = batches[got.token]
        batches[got.token] = {
            "token": lambda: msgspec.structs.replace(whole, token=0),
            "twice": lambda: msgspec.structs.replace(whole, rows=whole.rows[8:] + whole.rows[8:]),
            "task": lambda: msgspec.structs.replace(whole, task="nobody"),
            "consumed": lambda: msgspec.structs.replace(whole, rows=column([2])),
            "length": lambda: msgspec.structs.replace(whole, rows=whole.rows[:-1]),
        }[change]()
        with pytest.raises(BrokenInvariant, match="not handed over"):
            check_state(state)
