"""Puts with expected versions: they are carried out if and only if no key was put, cleared or created since."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Harness, column

from transfer_queue.errors import InvalidArgumentError, StaleMetadataError, VersionConflictError
from transfer_queue.messages.claims import Ack
from transfer_queue.messages.partitions import ClearPartition
from transfer_queue.messages.puts import ClearKeys, Reserve
from transfer_queue.messages.queries import Lookup

KEY = ["k"]


def version(h: Harness, *keys: str) -> bytes:
    """The versions of these keys, 0 for those that do not exist, as a put names them."""
    found = {key: h.look(Lookup("p", None, [key], versions=True)).versions for key in keys or KEY}
    return b"".join(each or column([0]) for each in found.values())


def put(h: Harness, expected: bytes, **more: object) -> list[int]:
    return h.put(1, keys=KEY, expected=expected, **more)


def test_a_put_at_the_expected_version_is_carried_out_once(h: Harness) -> None:
    h.put(1, keys=KEY)
    before = version(h)
    put(h, before)
    with pytest.raises(VersionConflictError, match=r"1 of 1 keys of partition 'p' .* among them \['k'\]"):
        put(h, before)
    put(h, version(h))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.put(1, keys=KEY),
        lambda h: h.put(1, ("other",), keys=KEY),
        lambda h: h.put(1, None, keys=KEY, tags=[{"a": 1}]),
        lambda h: h.put(1, None, rows=[0], tags=[{"a": 1}]),
        lambda h: h.ask(ClearKeys("p", KEY)),
        lambda h: (h.ask(ClearKeys("p", KEY)), h.put(1, keys=KEY)),
        lambda h: (h.ask(ClearPartition("p")), h.put(1, keys=KEY)),
    ],
    ids=["put", "other field", "tag by key", "tag by index", "cleared", "put again", "partition made again"],
)
def test_every_change_of_the_sample_is_a_conflict_that_changes_nothing(
    h: Harness, change: Callable[[Harness], object]
) -> None:
    h.put(1, keys=KEY)
    expected = version(h)
    change(h)
    with h.refuses(VersionConflictError):
        put(h, expected)


@pytest.mark.parametrize(
    "event",
    [
        lambda h: h.put(3),
        lambda h: h.put(1, keys=["another"]),
        lambda h: h.dealt(1),
        lambda h: h.lease(1),
        lambda h: h.ask(Ack("p", (lease := h.lease(1)).token, lease.rows), "r"),
        lambda h: h.restart(),
    ],
    ids=["other rows", "another key", "claimed", "leased", "acknowledged", "restart"],
)
def test_what_does_not_change_the_sample_is_no_conflict(h: Harness, event: Callable[[Harness], object]) -> None:
    h.put(1, keys=KEY)
    expected = version(h)
    event(h)
    put(h, expected)


def test_version_zero_means_that_the_key_must_not_exist(h: Harness) -> None:
    put(h, column([0]))
    with pytest.raises(VersionConflictError):
        put(h, column([0]))


def test_a_reserved_key_exists(h: Harness) -> None:
    h.ask(Reserve("p", 1, KEY, 0))
    with pytest.raises(VersionConflictError):
        put(h, column([0]))
    put(h, version(h))


def test_one_changed_key_refuses_the_whole_put(h: Harness) -> None:
    h.put(2, keys=["a", "b"])
    expected = version(h, "a", "b", "new")
    h.put(1, keys=["b"])
    with h.refuses(VersionConflictError, r"1 of 3 keys .*\['b'\]"):
        h.put(3, keys=["a", "b", "new"], expected=expected)
    h.put(3, keys=["a", "b", "new"], expected=version(h, "a", "b", "new"))


def test_versions_of_another_epoch_are_refused(h: Harness) -> None:
    h.put(1, keys=KEY)
    with pytest.raises(StaleMetadataError):
        put(h, version(h), epoch=7)


def test_a_put_that_waits_for_space_checks_the_versions_when_it_gets_space() -> None:
    h = Harness(capacity=1)
    h.put(1)
    first = h.send(h.publish(1, keys=KEY, name="v", wait=100.0), "v")
    second = h.send(h.publish(1, keys=KEY, expected=column([0]), wait=100.0), "w")
    h.clear([0])
    assert h.result(first, "v") is not None
    with pytest.raises(VersionConflictError):
        h.result(second, "w")


@pytest.mark.parametrize(("keys", "expected"), [(KEY, b""), (KEY, column([0, 0])), (None, column([0]))])
def test_versions_that_do_not_match_the_keys_are_an_error(h: Harness, keys: list[str] | None, expected: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="a key and a version per row"):
        h.put(1, keys=keys, expected=expected)
