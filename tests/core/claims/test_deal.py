"""Claims: polling and parked, in order of arrival, deadlines, ends, cancellation, retries."""

from __future__ import annotations

import msgspec
import pytest
from harness import Harness, rows_of

from transfer_queue.errors import InvalidArgumentError, ProtocolError, WaitTimeoutError
from transfer_queue.messages.base import Done, Failure
from transfer_queue.messages.claims import Cancel, Claim, ClaimReply
from transfer_queue.messages.envelopes import RequestEnvelope
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.queries import Lookup, ShowRows
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler

# ---------------------------------------------------------------- at once


@pytest.mark.design("replacing a value does not un-consume its row")
def test_a_replaced_value_does_not_unconsume(h: Harness) -> None:
    h.put(2)
    h.dealt(2)
    h.put(2, rows=[0, 1])
    assert h.dealt(1) == []


def test_the_reply_describes_its_rows(h: Harness) -> None:
    h.put(2, ("x", "y"), keys=["a", "b"], tags=[{"n": 1}, {}])
    reply = h.ask(Claim("p", "t", ["y", "x"], 2))
    assert isinstance(reply, ClaimReply)
    assert [field.name for field in reply.fields] == ["y", "x"]
    assert (reply.tags, reply.produced, reply.ended) == ([{"n": 1}, {}], None, False)


def test_show_deals_nothing(h: Harness) -> None:
    h.put(3, pre_allocate=1)
    h.create("empty")
    h.put(1, ("y",), rows=[1])
    reply = h.ask(ShowRows("p", ["x", "y", "nobody"]))
    assert (rows_of(reply), reply.produced) == ([0, 1, 2], b"\0\1\0")
    assert h.ask(ShowRows("p", ["nobody"])).produced == b"\0\0\0"
    assert rows_of(h.ask(ShowRows("empty", ["x"]))) == []
    assert h.dealt(3) == [0, 1, 2]


def test_a_claim_needs_fields(h: Harness) -> None:
    with pytest.raises(InvalidArgumentError):
        h.ask(Claim("p", "t", [], 1))


def test_a_claim_for_no_rows_is_answered_at_once(h: Harness) -> None:
    assert h.dealt(0, wait=10) == []


@pytest.mark.parametrize("wait", [None, 0.0, -3.0])
def test_a_claim_without_a_wait_is_answered_at_once(h: Harness, wait: float | None) -> None:
    assert h.dealt(1, wait=wait) == []
    assert h.controller.next_deadline() is None


# ---------------------------------------------------------------- parked


@pytest.mark.design(
    "a claim that cannot be met is parked with its deadline and answered by the publish that completes it"
)
def test_the_publish_that_completes_it_answers(h: Harness) -> None:
    sequence = h.claim(3, fields=("x", "y"), wait=10)
    assert h.state.partitions == {}, "a claim creates nothing"
    h.put(3)
    h.put(2, ("y",), rows=[0, 1])
    assert h.parked(sequence)
    h.put(1, ("y",), rows=[2])
    assert h.got(sequence) == [0, 1, 2]
    assert h.controller.context.parked.peers == {}


@pytest.mark.design("parked claims are served first come, first served per (partition, task)")
def test_claims_are_met_in_order_of_arrival(h: Harness) -> None:
    sequences = [h.claim(2, wait=10, name=name) for name in "abc"]
    other = h.claim(2, "u", wait=10, name="d")
    h.put(3)
    assert h.got(sequences[0], "a") == [0, 1]
    assert h.got(other, "d") == [0, 1]
    assert h.parked(sequences[1], "b")
    h.put(3)
    assert h.got(sequences[1], "b") == [2, 3]
    assert h.got(sequences[2], "c") == [4, 5]


def test_order_holds_over_different_fields(h: Harness) -> None:
    """A row that two claims of a task could get is dealt to the earlier one."""
    late_fields = h.claim(1, fields=("x", "y"), wait=10, name="a")
    early_fields = h.claim(1, fields=("x",), wait=10, name="b")
    h.put(1, ("x", "y"))
    assert h.got(late_fields, "a") == [0]
    assert h.parked(early_fields, "b")
    h.put(1)
    assert h.got(early_fields, "b") == [1]


@pytest.mark.design("a large parked claim does not starve smaller ones")
def test_a_large_claim_does_not_starve_smaller_ones(h: Harness) -> None:
    large = h.claim(10, wait=100, name="large")
    for turn in range(4):
        small = h.claim(2, wait=100, name="small")
        h.put(2)
        assert h.got(small, "small") == [2 * turn, 2 * turn + 1]
    h.put(10)
    assert h.got(large, "large") == list(range(8, 18))


def test_deadlines(h: Harness) -> None:
    first, second = h.claim(5, wait=10, name="a"), h.claim(5, wait=3, name="b")
    assert h.controller.next_deadline() == 3
    h.tick(2.9)
    assert h.parked(second, "b")
    h.tick(3)
    with pytest.raises(WaitTimeoutError, match="Timeout"):
        h.result(second, "b")
    assert h.controller.next_deadline() == 10
    h.put(5)
    assert h.got(first, "a") == [0, 1, 2, 3, 4]
    assert h.controller.next_deadline() is None
    h.tick(50)


def test_a_claim_parked_again_has_only_its_new_deadline(h: Harness) -> None:
    sequence = h.claim(1, wait=5)
    h.disconnect("r")
    h.connect("r")
    h.now = 4.0
    h.send(Claim("p", "t", ["x"], 1, {}, 5), "r", sequence)
    h.tick(5)
    assert h.parked(sequence)
    assert h.controller.next_deadline() == 9
    h.tick(9)
    assert isinstance(h.reply(sequence, "r"), Failure)


def test_waits_that_end_early_leave_nothing_behind(h: Harness) -> None:
    for _ in range(100):
        sequence = h.claim(1, wait=1e9)
        h.put(1)
        assert h.got(sequence) is not None
    assert len(h.state.waiting._deadlines) <= 65


def test_the_text_of_a_timeout(h: Harness) -> None:
    h.put(3, keys=["a", "b", "c"])
    h.put(1, ("y",), rows=[1])
    sequence = h.claim(2, "train", fields=("x", "y", "z"), wait=5)
    h.tick(5)
    with pytest.raises(WaitTimeoutError) as raised:
        h.result(sequence, "r")
    text = str(raised.value)
    for part in ("Timeout", "'train'", "waited 5 s for 2 samples", "['x', 'y', 'z']", "'p'", "0 available"):
        assert part in text
    assert "Nearest to ready: sample 1 (key 'b') is missing the field 'z' (it has 'x', 'y')" in text
    assert "Sample 0 (key 'a') is missing the fields 'y', 'z'" in text


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ("other", r"'p'; 0 available: the partition does not exist.*'other'"),
        ("p", r"consumed every sample.*new ones are needed"),
    ],
    ids=["no partition", "all is consumed"],
)
def test_the_text_of_a_timeout_without_samples(h: Harness, partition: str, words: str) -> None:
    h.put(2, partition=partition)
    h.dealt(2, partition=partition)
    sequence = h.claim(2, wait=5)
    h.tick(5)
    with pytest.raises(WaitTimeoutError, match=words):
        h.result(sequence, "r")


# ---------------------------------------------------------------- the end


@pytest.mark.design("a loader ends in finite mode when the partition is wholly consumed")
def test_finite_ends_with_the_partition_consumed(h: Harness) -> None:
    assert h.dealt(1, finite=True) == [], "nothing at all is no end"
    h.put(2, pre_allocate=3)
    assert h.dealt(2, finite=True) == [0, 1]
    assert h.dealt(2, finite=True) == [], "a reserved row may still come"
    waiting = h.claim(2, finite=True, wait=10)
    h.put(1)
    assert h.parked(waiting)
    assert h.dealt(1, name="other") == [2]
    assert h.got(waiting) is None
    assert h.dealt(2) == []


def test_probes_deal_nothing(h: Harness) -> None:
    waiting = [h.claim(2, wait=10, probe=True, name=name) for name in "ab"]
    h.put(1)
    assert h.parked(waiting[0], "a")
    h.put(1)
    assert [h.got(sequence, name) for sequence, name in zip(waiting, "ab", strict=True)] == [[], []]
    assert h.dealt(2, probe=True) == []
    assert h.dealt(2) == [0, 1]
    waiting = [h.claim(2, wait=10, probe=True, name="a"), h.claim(2, wait=10, probe=True, finite=True, name="b")]
    h.ask(Seal("p"))
    assert h.got(waiting[0], "a") is None
    assert h.got(waiting[1], "b") is None
    assert h.dealt(2, probe=True) is None


def test_the_end_of_a_probes_wait_is_not_an_error(h: Harness) -> None:
    sequence = h.claim(2, wait=10, probe=True)
    h.tick(10)
    assert h.got(sequence) == []


# ---------------------------------------------------------------- connections, retries


@pytest.mark.design("a parked claim whose connection ended is cancelled before it can be met")
def test_a_claim_ends_with_its_connection_before_it_can_be_met(h: Harness) -> None:
    lost, kept = h.claim(2, wait=10, name="a"), h.claim(2, wait=10, name="b")
    h.disconnect("a")
    assert not h.parked(lost, "a")
    h.put(2)
    assert h.got(kept, "b") == [0, 1]
    assert h.reply(lost, "a") is None


@pytest.mark.design("the same request id on a new connection re-attaches to it")
def test_the_same_request_on_a_new_connection_attaches_again(h: Harness) -> None:
    request = Claim("p", "t", ["x"], 2, {}, 10.0)
    sequence = h.send(request, "a")
    rival = h.claim(2, wait=10, name="b")
    old = h.clients["a"].peer
    new = h.connect("a")
    h.send(request, "a", sequence)
    h.disconnect("a", old)
    assert h.parked(sequence, "a"), "it kept its place"
    h.put(2)
    assert rows_of(h.replies[new, sequence]) == [0, 1]
    assert (old, sequence) not in h.replies
    assert h.parked(rival, "b")


def test_an_old_copy_does_not_take_the_request_back_to_its_dead_connection(h: Harness) -> None:
    request = Claim("p", "t", ["x"], 1, {}, 10.0)
    old = h.client("a").peer
    new = h.connect("a")
    sequence = h.send(request, "a")
    h.take(h.controller.handle("a", old, RequestEnvelope(sequence, 0, request), h.now))
    h.disconnect("a", old)
    h.put(1)
    assert rows_of(h.replies[new, sequence]) == [0]


@pytest.mark.design("every request gets exactly one reply, and a retry the same answer")
def test_a_retry_of_a_dealt_claim_gets_the_same_rows(h: Harness) -> None:
    h.put(4)
    request = Claim("p", "t", ["x"], 2)
    sequence = h.send(request, "a")
    first = h.reply(sequence, "a")
    h.disconnect("a")
    h.connect("a")
    h.send(request, "a", sequence)
    assert h.reply(sequence, "a") == first
    assert h.dealt(2) == [2, 3]


def test_a_long_wait_does_not_keep_all_later_replies(h: Harness) -> None:
    h.send(Claim("q", "t", ["x"], 1, {}, 1e9))
    client = h.clients["w"]
    for _ in range(100):
        h.put(1)
        client.finished = [(2, client.sequence)]
    kept = h.state.clients["w"]
    assert list(kept.replies) == [client.sequence]
    assert kept.finished.to_comparable() == {"starts": [2], "ends": [client.sequence - 1]}
    request = h.publish(1)
    h.send(request, sequence=50)
    with pytest.raises(ProtocolError, match="acknowledged before"):
        h.result(50)
    assert h.state.partitions["p"].rows.count == 100
    client.finished, client.acknowledged = [], 60
    h.put(1)
    assert kept.finished.to_comparable() == {"starts": [61], "ends": [100]}


def test_replies_of_queries_and_polls_are_not_kept(h: Harness) -> None:
    h.dealt(1)
    h.ask(ShowRows("p", ["x"]), "w") if "p" in h.state.partitions else None
    h.dealt(1, wait=5.0, probe=True) if h.put(1) else None
    assert set(h.state.clients) == {"unit-0", "w"}


def test_clients_that_left_long_ago_are_forgotten(h: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer_queue.core.context.MAX_DEPARTED", 2)
    for name in "abcd":
        h.put(1, name=name)
    for name in "abc":
        h.disconnect(name)
    assert set(h.state.clients) == {"unit-0", "b", "c", "d"}
    h.connect("b")
    h.disconnect("d")
    assert set(h.state.clients) == {"unit-0", "b", "c", "d"}
    assert h.controller.context.connections.peers.keys() == {"unit-0", "b"}


def test_cancel(h: Harness) -> None:
    sequence = h.claim(1, wait=10)
    behind = h.claim(1, wait=10)
    assert h.ask(Cancel(sequence), "r") == Done(True)
    with pytest.raises(WaitTimeoutError, match="cancelled"):
        h.result(sequence, "r")
    assert h.ask(Cancel(behind), "somebody else") == Done(False)
    h.put(1)
    assert h.got(behind) == [0]
    assert h.ask(Cancel(sequence), "r") == Done(False)
    assert h.ask(Cancel(999), "r") == Done(False)


# ---------------------------------------------------------------- malformed sampling

HOSTILE = [
    {"dp_rank": [1], "batch_index": {"a": 1}},
    {"ready_indexes": 1},
    {"batch_size": 5, "self": 3},
    {"partition": "mine", "task_name": 4, "partition_id": None},
    {"dp_rank": 1 << 63, "batch_index": 0},
    {"dp_rank": True, "batch_index": 0},
    {"sampler": ["x"]},
    {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": -1},
    {"sampler": "GRPOGroupNSampler", "n_samples_per_prompt": "4"},
    {"sampler": "RankAwareSampler"},
    {"sampler": "os.system"},
]


@pytest.mark.parametrize("sampling", HOSTILE, ids=str)
@pytest.mark.parametrize(
    "build", [None, RankAwareSampler, lambda: GRPOGroupNSampler(2), lambda: SeqlenBalancedSampler(1, 2)]
)  # fmt: skip
def test_invalid_sampling_fails_only_its_claim(build: type[BaseSampler] | None, sampling: dict[str, object]) -> None:
    h = Harness(build() if build is not None else None)
    h.put(1)
    sequence = h.send(Claim("p", "t", ["x"], 4, sampling, 10.0), "r")
    h.put(2)
    h.ask(Claim("p", "t", ["x"], 1, {"sampler": "SequentialSampler"}), "honest")
    h.put(7)
    h.ask(Seal("p"))
    h.tick(10)
    assert h.reply(sequence, "r") is not None


def test_a_probe_that_has_seen_a_version_waits_for_a_change(h: Harness) -> None:
    """A client that could not use the ready rows asks again with the version that it saw."""
    h.put(2)
    seen = h.result(h.claim(2, probe=True, wait=10), "r").version
    assert seen == h.state.partitions["p"].version
    again = h.send(Claim("p", "t", ["x"], 2, wait=10.0, probe=True, since=seen), "r")
    assert h.parked(again)
    h.ask(h.publish(1, None, rows=[0], tags=[{"n": 1}]))
    assert h.result(again, "r").version > seen


@pytest.mark.design("nobody sleeps or polls, one waiting consumer holds up no one")
def test_waiting_claims_do_not_delay_other_requests(h: Harness) -> None:
    """Two hundred claims wait: other requests are answered at once, and there is no work before a deadline."""
    waiting = [h.claim(1, "late", ("never",), name=f"r{i}", wait=100) for i in range(200)]
    h.put(2)
    assert h.dealt(2) == [0, 1]
    assert h.controller.next_deadline() == 100
    h.put(1, ("never",), rows=[1])
    assert [h.reply(s, f"r{i}") is not None for i, s in enumerate(waiting)] == [True] + [False] * 199


def test_a_claim_for_one_rank_does_not_wait_behind_one_for_all() -> None:
    """A balanced batch takes rows for all ranks, a claim without a batch_index for one, which is met earlier."""
    h = Harness(SeqlenBalancedSampler(1, 2))
    h.put(1, ("other",))
    whole = h.claim(1, name="r0", wait=10, dp_rank=0, batch_index=0)
    single = h.claim(1, name="r1", wait=10, dp_rank=0)
    h.put(1)
    assert h.reply(whole, "r0") is None
    assert h.reply(single, "r1") is not None


def test_a_kept_reply_has_no_locations_of_values(h: Harness) -> None:
    """A kept reply may be sent again much later, when the values or their arena may be gone."""
    h.put(3)
    sequence = h.send(Claim("p", "t", ["x"], 2, places=True), "r")
    reply = h.result(sequence, "r")
    assert reply.places == h.look(Lookup("p", reply.rows, None, ["x"]))
    h.send(Claim("p", "t", ["x"], 2, places=True), "r", sequence)
    again = h.result(sequence, "r")
    assert again == msgspec.structs.replace(reply, places=None)
    assert h.result(h.claim(1), "r").places is None
