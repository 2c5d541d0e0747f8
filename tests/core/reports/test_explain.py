"""Explanations of why a sample is not delivered."""

from __future__ import annotations

import pytest
from harness import Harness

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.messages.locks import TakeLock
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.puts import Reserve
from transfer_queue.messages.queries import Explain
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler


def explain(h: Harness, partition: str = "p", **which: object) -> str:
    return h.ask(Explain(partition, **which)).value  # type: ignore[no-any-return, arg-type]


def test_no_partition(h: Harness) -> None:
    assert "Partition 'p' does not exist (never created, or dropped). No partition exists." in explain(h, row=0)
    h.put(1, partition="q")
    assert "The partitions are: 'q'." in explain(h, row=0)


def test_no_sample(h: Harness) -> None:
    h.put(2, keys=["a", "b"])
    h.put(1, partition="q")
    h.clear([0])
    assert "Sample 'a' of partition 'p' does not exist: it was never put, or it was cleared" in explain(h, key="a")
    assert "it was cleared, or its partition was dropped. An index is never used again" in explain(h, row=0)
    assert "it is in partition 'q'" in explain(h, row=2)
    for row in (3, -1, (1 << 63) - 1):
        assert "no sample has this index yet" in explain(h, row=row)
    h.ask(ClearPartition("q"))
    assert "its partition was dropped" in explain(h, row=2)


def test_a_task_is_explained_by_the_fields_of_its_claim_that_waits(h: Harness) -> None:
    h.put(2)
    h.claim(2, fields=["x", "y"], task="train", wait=50.0)
    assert "sample 0 is missing the field 'y' (it has 'x')" in explain(h, task="train")
    with pytest.raises(InvalidArgumentError, match=r"no claim of task 'trian' waits in .* did you mean 'train'\?"):
        explain(h, task="trian")
    assert explain(h, task="trian", fields=["x"]).startswith("All 2 samples")


def test_a_locked_key(h: Harness) -> None:
    h.ask(TakeLock("p", ["a", "later"], 100.0), "locker")
    h.send(TakeLock("p", ["a"], 100.0, 50.0), "waiting")
    h.tick(3.0)
    locked = "Key 'a' is locked for 3 s by client locker (token 1); requests that wait for it: 1."
    assert explain(h, key="a").endswith(f"does not exist (never created, or dropped). No partition exists. {locked}")
    h.put(1, keys=["a"])
    assert explain(h, key="a").endswith(f". {locked}")
    assert explain(h, row=0).endswith(f". {locked}")
    assert "locked" not in explain(h, key="b")


def test_not_written(h: Harness) -> None:
    h.create(pre_allocate=1)
    assert "Sample 0 of partition 'p' is pre-allocated, and no put has taken it yet." in explain(h, row=0)
    h.ask(Reserve("p", 2, None, 0))
    assert "Sample 1 of partition 'p' is reserved by client w; nothing was written yet." in explain(h, row=1)
    assert "is missing the field 'x' (it has no field)" in explain(h, row=1, fields=["x"])


def test_fields(h: Harness) -> None:
    h.put(1, ("x", "y"), keys=["a"])
    h.put(1, ("z",))
    assert "is missing the field 'z' (it has 'x', 'y')" in explain(h, key="a")
    assert "is missing the field 'z' (it has 'x', 'y')." in explain(h, key="a", fields=["z"])
    assert "has the field 'y'" in explain(h, row=0, fields=["y"])


def test_consumption(h: Harness) -> None:
    h.put(2)
    h.dealt(1)
    assert "was consumed by task 't'" in explain(h, row=0)
    assert "is not consumed by task 't'" in explain(h, row=1)
    text = explain(h, row=1, task="t", fields=["x"])
    assert text.endswith("is not consumed by task 't'; it is ready for task 't' and waits for a claim that takes it.")
    assert "is ready for" not in explain(h, row=0, task="t", fields=["x"])
    assert "is not consumed by task 'u'" in explain(h, row=0, task="u")


def test_a_sample_of_an_incomplete_group_is_not_ready() -> None:
    """A sample without a group is not ready either, since the sampler does not deal it."""
    h = Harness(GRPOGroupNSampler(2))
    h.put(2, groups=["g", "g"])
    h.put(1, ("y",), rows=[0])
    h.put(1)
    wanted = {"task": "t", "fields": ["x", "y"]}
    text = explain(h, row=0, **wanted)
    assert text.endswith("group 'g', which waits for sample 1 (missing 'y'); it is not consumed by task 't'.")
    assert explain(h, row=0, task="t", fields=["x"]).endswith(
        "is ready for task 't' and waits for a claim that takes it."
    )
    assert explain(h, row=2, task="t", fields=["x"]).endswith("never deal it; it is not consumed by task 't'.")
    h.put(1, ("y",), rows=[1])
    assert "is ready for task 't'" in explain(h, row=0, **wanted)


def test_a_sample_without_fields_is_not_ready(h: Harness) -> None:
    h.ask(Reserve("p", 1, None, 0))
    assert explain(h, row=0, task="t").endswith("nothing was written yet; it is not consumed by task 't'.")


def test_dealt_batches() -> None:
    h = Harness(RankAwareSampler())
    h.put(2)
    h.dealt(1, dp_rank=3, batch_index=7)
    assert "was dealt to task 't' in batch 7 of dp_rank 3" in explain(h, row=0)


def test_a_whole_partition(h: Harness) -> None:
    h.put(4, keys=["a", "b", "c", "d"])
    h.put(1, ("y",), rows=[2])
    text = explain(h, task="t", fields=["x", "y", "z"])
    assert text.startswith("Nearest to ready: sample 2 (key 'c') is missing the field 'z' (it has 'x', 'y')")
    assert ". Sample 0 (key 'a') is missing the fields 'y', 'z'" in text
    assert "key 'd'" not in text, "three are enough"
    assert explain(h, task="t", fields=["x"]) == "All 4 samples that task 't' has not consumed are ready."
    h.lease(1, name="killed")
    assert explain(h, task="t", fields=["x"]) == (
        "All 3 samples that task 't' has not received are ready; received and not acknowledged yet: 1 "
        "(under a lease of client killed)."
    )
    h.dealt(3)
    assert "1 of them is not acknowledged yet (under a lease of client killed)" in explain(h, task="t", fields=["x"])
    with pytest.raises(InvalidArgumentError, match="global_index or a key"):
        explain(h)


@pytest.mark.parametrize("declared", [True, False])
def test_an_explanation_names_what_a_group_waits_for_once(declared: bool) -> None:
    """The samples that are nearest to ready are often of one group."""
    h = Harness(GRPOGroupNSampler(2))
    h.put(4, groups=["g", "g", "f", "f"] if declared else None)
    text = explain(h, task="t", fields=["x", "y"])
    assert text.count("is missing the field 'y'") == 3
    assert text.count("which waits for sample 0 (missing 'y'), sample 1 (missing 'y')") == 1
    assert text.count("which waits for sample 2 (missing 'y'), sample 3 (missing 'y')") == 1


def test_the_text_of_a_timeout_names_the_seal(h: Harness) -> None:
    h.put(1)
    h.ask(Seal("p"))
    sequence = h.claim(2, fields=("x", "y"), wait=5)
    h.tick(5)
    assert "The partition is sealed: no new samples can be put." in h.reply(sequence, "r").message  # type: ignore[union-attr]
