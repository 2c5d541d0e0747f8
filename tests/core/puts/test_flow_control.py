"""Producers that would be too far ahead of the policy have to wait."""

from __future__ import annotations

import pytest
from harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.errors import InvalidArgumentError, StalenessError, UnknownPartitionError
from transfer_queue.messages.partitions import SetPolicyVersion
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.system import Status


def made(**options: int) -> Harness:
    h = Harness()
    h.create(max_staleness=1, rows_per_version=4, **options)
    return h


def test_new_rows_are_admitted_up_to_the_staleness():
    h = made()
    h.put(8)
    with pytest.raises(StalenessError, match=r"8 rows, and its limit at policy version 0 is 8 .*1 more"):
        h.put(1)
    h.put(8, ["y"], rows=range(8))  # new fields of old rows are no new rows


def test_a_waiting_put_continues_with_a_new_policy_version():
    h = made()
    h.put(8)
    waits = h.send(h.publish(4, wait=10.0), "w")
    assert h.parked(waits, "w")
    inserts = h.send(Reserve("p", 1, None, 0, wait=10.0), "v")
    h.ask(SetPolicyVersion("p", 1))
    assert len(h.result(waits, "w").rows) == 32
    assert h.parked(inserts, "v"), "12 rows are all that version 1 lets in"
    h.tick(11.0)
    with pytest.raises(StalenessError, match="It waited"):
        h.result(inserts, "v")


def test_dropped_rows_do_not_count():
    h = made(group_size=2)
    h.put(8, groups=[f"g{i // 2}" for i in range(8)])
    waits = h.send(h.publish(2, groups=["h", "h"], wait=10.0), "w")
    assert h.ask(Drop("p", "all alike", groups=["g1"])).value == 2
    assert h.result(waits, "w") is not None


def test_a_version_never_goes_back():
    h = made()
    h.ask(SetPolicyVersion("p", 3))
    h.ask(SetPolicyVersion("p", 3))
    with pytest.raises(InvalidArgumentError, match="cannot go back to 2"):
        h.ask(SetPolicyVersion("p", 2))
    with pytest.raises(UnknownPartitionError, match="'q'"):
        h.ask(SetPolicyVersion("q", 1))


def test_it_shows_in_status_and_explain():
    h = made()
    h.put(8)
    h.send(h.publish(1, wait=10.0), "w")
    (partition,) = h.look(Status()).partitions
    assert (partition.policy.version, partition.policy.admitted, partition.policy.limit) == (0, 8, 8)
    assert partition.waiting_puts == 1
    words = h.look(Explain("p", task="t", fields=["z"])).value
    assert "New samples wait for the policy: 8 samples were admitted" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_staleness": 1}, "go together"),
        ({"rows_per_version": 1}, "go together"),
        ({"max_staleness": 1, "rows_per_version": 0}, "rows_per_version must be positive"),
        ({"keep_rows": 0}, "keep_rows must be positive"),
        ({"keep_seconds": -1.0}, "keep_seconds must be positive"),
        ({"replicas": 0}, "replicas must be positive"),
    ],
)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        Harness().create(**options)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "policy"]), st.integers(1, 6)), max_size=30), st.integers(0, 2))
def test_no_row_is_ever_trained_on_too_stale(steps, staleness):
    """Rows are trained on in order, four a version: the version that each was put at is at most `staleness` behind."""
    h = Harness()
    h.create(max_staleness=staleness, rows_per_version=4)
    version = 0
    put_at: list[int] = []
    for what, count in steps:
        if what == "policy":
            if len(put_at) >= 4 * (version + 1):  # a version's rows must be there to train it
                version += 1
                h.ask(SetPolicyVersion("p", version))
            continue
        try:
            h.put(count)
        except StalenessError:
            assert len(put_at) + count > (version + staleness + 1) * 4
        else:
            put_at += [version] * count
    for position, at in enumerate(put_at):
        assert position // 4 - at <= staleness
