import gc
import sys

import msgspec
import numpy as np
import pytest
from echo import in_threads
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    NotInitializedError,
    StorageKeyNotFoundError,
    TransferQueueError,
    WaitTimeoutError,
)
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import ReportBatches
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import ListPartitions
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.reports.timeline import ValueRead
from transfer_queue.net.calls import CONTROLLER, Request
from transfer_queue.net.framing import FrameReader
from transfer_queue.net.session import FINISHED_RUNS, READS, RETRY_DELAYS, RetryPolicy, Session, raise_failure


def new_session(**options: object) -> Session:
    return Session("c", b"key", lambda target: "/somewhere/controller.sock", **options)


def envelope(frame: bytes) -> RequestEnvelope:
    ((body, payload),) = FrameReader().feed(frame)
    assert payload is None
    return msgspec.msgpack.decode(body, type=RequestEnvelope)


def acknowledged(session: Session) -> int:
    sequence, frame = session.begin_request(ListPartitions())
    session.finish(sequence)
    return envelope(frame).acknowledged


def test_sequences_ascend_and_carry_the_request() -> None:
    session = new_session()
    frames = [session.begin_request(ListPartitions()) for _ in range(3)]
    assert [sequence for sequence, _ in frames] == [1, 2, 3]
    assert [envelope(frame) for _, frame in frames] == [RequestEnvelope(i, 0, ListPartitions()) for i in (1, 2, 3)]


def test_what_withdrawn_claims_carried_is_in_the_next_request() -> None:
    session = new_session()
    session.notices.add(ReportBatches(handed_over=[("p", 1)]))
    for sequence in (1, 2, 3):
        assert session.begin_request(ListPartitions(), 0, CONTROLLER)[0] == sequence
        session.notices.add(ReportBatches(withdrawn=[sequence]))
    report = envelope(session.begin_request(ListPartitions(), 0, CONTROLLER)[1]).report
    assert report is not None
    assert report.handed_over == [("p", 1)]
    assert sorted(report.withdrawn) == [1, 2, 3]


def test_a_client_that_leaves_says_again_what_requests_under_way_carry() -> None:
    session = new_session()
    session.notices.add(ReportBatches(handed_over=[("p", 1)]))
    session.begin_request(ListPartitions(), 0, CONTROLLER)
    session.notices.add(ReportBatches(left=True))
    report = envelope(session.begin_request(ListPartitions(), 0, CONTROLLER)[1]).report
    assert report == ReportBatches(handed_over=[("p", 1)], left=True)


def test_requests_to_the_controller_report_gets_once() -> None:
    session = new_session()
    now = [10.0]
    session.clock = lambda: now[0]
    session.note_read(7.0, "p", ["x"], 8, 640)
    now[0] = 10.5
    unit, controller, later = (
        envelope(session.begin_request(ListPartitions(), 0, target)[1]).reads
        for target in (("unit", 0), CONTROLLER, CONTROLLER)
    )
    assert (unit, later) == ([], [])
    assert controller == [ValueRead(0.5, 3.0, "p", ["x"], 8, 640)]


def test_many_gets_are_reported_in_parts_the_newest_ones() -> None:
    session = new_session()
    for number in range(100):
        session.note_read(session.clock(), "p", ["x"], number, 0)
    found = []
    while reads := envelope(session.begin_request(ListPartitions(), 0, CONTROLLER)[1]).reads:
        assert len(reads) <= READS
        found += [each.rows for each in reads]
    assert found == list(range(100 - 4 * READS, 100))


def test_nothing_is_kept_of_what_is_finished() -> None:
    session = new_session()
    for _ in range(100):
        pair = [session.begin_request(ListPartitions())[0] for _ in range(2)]
        for sequence in reversed(pair):
            session.finish(sequence)
    assert (session._unfinished, session._run_ends, session._run_starts, session._news) == (set(), {}, {}, {})
    assert acknowledged(session) == 200


@given(steps=st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=80))
def test_every_finished_sequence_is_named_once_and_no_unfinished_one_ever(steps: list[int | None]) -> None:
    """A step begins a request (None) or finishes one; `known` are the sequences in all envelopes so far."""
    session = new_session()
    begun, finished, known = 0, set[int](), set[int]()
    for step in [*steps, *[None] * 40]:
        if step is not None:
            finished.update({step} & set(range(1, begun + 1)))
            session.finish(step)
            continue
        begun, frame = session.begin_request(ListPartitions())
        sent = envelope(frame)
        assert len(sent.finished) <= FINISHED_RUNS
        for first, last in sent.finished:
            assert sent.acknowledged < first <= last
            known.update(range(first, last + 1))
        known.update(range(1, sent.acknowledged + 1))
        assert known <= finished
        assert sent.acknowledged == min(set(range(1, begun + 1)) - finished) - 1
    assert known == finished


def test_a_request_that_waits_for_long_holds_up_nothing() -> None:
    session = new_session()
    session.begin_request(ListPartitions())
    for last in range(2, 1002):
        sequence, frame = session.begin_request(ListPartitions())
        sent = envelope(frame)
        assert (sent.acknowledged, sent.finished) == (0, [(2, last - 1)] if last > 2 else [])
        session.finish(sequence)


def test_what_a_request_costs_does_not_grow_with_the_number_of_unfinished_ones() -> None:
    """The cost is counted in steps of the interpreter, so that the test does not depend on a clock."""

    def steps(unfinished: int) -> int:
        session = new_session()
        for _ in range(unfinished):
            session.begin_request(ListPartitions())
        session.finish(unfinished // 2)
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += 1
            return trace

        gc.disable()  # a collection runs callbacks and finalizers of other tests, which would be counted
        sys.settrace(trace)
        try:
            for _ in range(10):
                session.finish(session.begin_request(ListPartitions())[0])
        finally:
            sys.settrace(None)
            gc.enable()
        return count

    assert steps(5000) == steps(50)


def test_threads_never_share_a_sequence() -> None:
    session = new_session()
    seen: list[int] = []

    def work(_: int) -> None:
        for _ in range(500):
            sequence, _ = session.begin_request(ListPartitions())
            seen.append(sequence)
            session.finish(sequence)

    in_threads(work, 8)
    assert sorted(seen) == list(range(1, 4001))
    assert acknowledged(session) == 4000


def test_a_request_that_cannot_be_encoded_leaves_no_gap() -> None:
    session = new_session()
    with pytest.raises(InvalidArgumentError, match="cannot be sent"):
        session.begin_request(object())  # type: ignore[arg-type]
    assert acknowledged(session) == 1


def test_names_and_numbers_of_other_kinds_travel_as_plain_ones() -> None:
    _, odd = new_session().begin_request(Explain(np.str_("p"), np.int64(3), task=np.str_("t")))  # type: ignore[arg-type]
    _, plain = new_session().begin_request(Explain("p", 3, task="t"))
    assert odd == plain


def test_failures_become_their_exceptions() -> None:
    assert raise_failure(Done(1)) == Done(1)
    with pytest.raises(StorageKeyNotFoundError, match="row 3 was cleared"):
        raise_failure(Failure("StorageKeyNotFoundError", "row 3 was cleared"))
    with pytest.raises(TransferQueueError, match="strange"):
        raise_failure(Failure("NoSuchError", "strange"))


def test_tries_end_with_who_and_since_when_and_where_to_look() -> None:
    session = new_session(log_of=lambda target: f"/logs/{target[0]}.log")
    attempts = RetryPolicy(session, Request(("controller", 0), ListPartitions(), None))
    error = ConnectionResetError("gone")
    assert [attempts.next_delay(error) for _ in RETRY_DELAYS] == list(RETRY_DELAYS)
    with pytest.raises(ConnectionLostError) as raised:
        attempts.next_delay(error)
    for part in ("the controller at /somewhere/controller.sock", "since 2", "gone", "/logs/controller.log", "ListPar"):
        assert part in str(raised.value)


def test_past_the_deadline_there_is_no_further_try() -> None:
    attempts = RetryPolicy(new_session(grace=-5.0), Request(("unit", 2), ListPartitions(), 5.0))
    with pytest.raises(WaitTimeoutError, match=r"Timeout: the storage unit 2 at .* gave no reply to ListPartitions"):
        attempts.next_delay(TimeoutError())


def test_a_closed_session_makes_no_calls() -> None:
    session = new_session()
    attempts = RetryPolicy(session, Request(("unit", 2), ListPartitions(), 5.0))
    session.close()
    session.close()
    with pytest.raises(NotInitializedError, match="closed"):
        session.begin_request(ListPartitions())
    with pytest.raises(NotInitializedError, match="closed during the call"):
        attempts.next_delay(ConnectionResetError())
