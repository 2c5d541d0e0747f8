"""Partitions with `free_when` free their rows once all tasks have finished them."""

from __future__ import annotations

import pytest
from harness import Harness, column
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_queue.messages.claims import Finish, ResetConsumption
from transfer_queue.messages.partitions import Seal
from transfer_queue.sampler import RankAwareSampler, SequentialSampler


def made(replicas: int = 1, sampler=None, **more) -> Harness:
    h = Harness(sampler or SequentialSampler(), **more)
    h.create(free_when=["a", "b"], replicas=replicas)
    return h


def test_asking_for_more_frees_rows_although_no_row_is_ready():
    """Otherwise the next row could wait for the space that is to be freed."""
    h = made(capacity=2)
    h.put(2)
    puts = h.send(h.publish(1, wait=100.0))
    for task in "ab":
        h.dealt(2, task, name=task)
        h.claim(1, task, name=task, wait=100.0)
    assert h.result(puts) is not None
    assert h.live() == [2]


def test_other_tasks_do_not_matter():
    h = made()
    h.put(1)
    h.dealt(1, "c", name="c")
    for task in "ab":
        h.dealt(1, task, name=task)
        assert h.dealt(1, task, name=task) == []
    assert h.live() == []


def test_a_fetch_that_holds_its_batches_frees_rows_only_by_finish():
    h = Harness()
    h.create(free_when=["a"])
    h.put(2)
    for row in (0, 1):
        sequence = h.claim(1, "a", name="a", hold=True)
        assert h.got(sequence, "a") == [row]
        assert h.reply(sequence, "a").held
    assert h.live() == [0, 1]
    h.ask(Finish("p", "a", column([0]), "a"), "trainer")
    h.ask(Finish("p", "a", column([0, 1]), "stranger"), "trainer")
    assert h.live() == [1]


def test_every_replica_must_finish():
    h = Harness(RankAwareSampler())
    h.create(free_when=["a"], replicas=2)
    h.put(4)
    for name in ("one", "two"):
        assert h.dealt(2, "a", name=name, dp_rank=0, batch_index=0) == [0, 1]
    assert h.dealt(2, "a", name="one", dp_rank=0, batch_index=1) == [2, 3]
    assert h.live() == [0, 1, 2, 3]
    assert h.dealt(2, "a", name="two", dp_rank=0, batch_index=0) == [0, 1], "asking for it again renews the reference"
    assert h.dealt(2, "a", name="two", dp_rank=0, batch_index=1) == [2, 3]
    assert h.live() == [2, 3]


def test_a_row_is_not_freed_while_a_replica_still_reads_it():
    h = Harness(RankAwareSampler())
    h.create(free_when=["a"])
    h.put(2)
    for name in ("one", "two"):
        h.dealt(2, "a", name=name, dp_rank=0, batch_index=0)
    h.claim(2, "a", name="one", dp_rank=0, batch_index=1, wait=10.0)
    assert h.live() == [0, 1]
    h.claim(2, "a", name="two", dp_rank=0, batch_index=1, wait=10.0)
    assert h.live() == []


def test_a_reset_forgets_finished_rows():
    h = Harness()
    h.create(free_when=["a", "b"])
    h.put(1)
    h.dealt(1, "a", name="a")
    h.ask(ResetConsumption("p", "a"))
    h.dealt(1, "b", name="b")
    assert h.dealt(1, "b", name="b") == []
    assert h.live() == [0]
    assert h.dealt(1, "a", name="a") == [0]
    assert h.dealt(1, "a", name="a") == []
    assert h.live() == []


def test_one_client_can_refer_to_a_row_for_two_ranks():
    """A sampler may deal a row more than once."""

    class Again(SequentialSampler):
        def sample(self, ready_indexes, batch_size, *args, **kwargs):
            return list(ready_indexes[:batch_size]), list(ready_indexes[:batch_size]) if kwargs["dp_rank"] else []

    h = Harness(Again())
    h.create(free_when=["a"])
    h.put(1)
    assert h.dealt(1, "a", name="a", dp_rank=0) == [0]
    assert h.dealt(1, "a", name="a", dp_rank=1) == [0]
    h.ask(Finish("p", "a", column([0]), "a"))
    assert h.live() == []


def test_a_sealed_partition_is_empty_at_its_end():
    h = Harness()
    h.create(free_when=["a"])
    h.put(2)
    h.ask(Seal("p"))
    assert h.dealt(2, "a", name="a") == [0, 1]
    assert h.dealt(2, "a", name="a") is None
    assert h.live() == []


@pytest.mark.design("free_when=consumed_by[tasks] per partition frees rows by themselves")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "fetch", "hold", "finish", "leave", "clear"]), st.integers(0, 2)), max_size=40
    )
)
def test_a_row_lives_exactly_as_long_as_it_is_needed(steps):
    """Compared with a model: a row exists while a task has not consumed it or a client refers to it."""
    h = Harness()
    h.create(free_when=["a", "b"])
    there: set[int] = set()
    got = {task: set() for task in "ab"}
    held: dict[tuple[str, int], set[int]] = {}

    def settle() -> None:
        for row in list(there):
            if all(row in got[task] for task in "ab") and not any(row in rows for rows in held.values()):
                there.discard(row)

    for what, number in steps:
        task = "ab"[number % 2]
        name = f"{task}{number}"
        mine = held.setdefault((task, number), set())
        if what == "put":
            there |= set(h.put(number + 1))
        elif what in ("fetch", "hold"):
            if what == "fetch":
                mine.clear()
                settle()
            rows = h.dealt(1, task, name=name, hold=what == "hold")
            assert rows == sorted(there - got[task])[:1]
            mine |= set(rows)
            got[task] |= set(rows)
        elif what == "finish" and mine:
            row = min(mine)
            h.ask(Finish("p", task, column([row]), name))
            mine.discard(row)
        elif what == "leave" and name in h.clients:
            h.disconnect(name)
            h.connect(name)
            mine.clear()
        elif what == "clear" and there:
            row = min(there)
            h.clear([row])
            there.discard(row)
            for rows in held.values():
                rows.discard(row)
        settle()
        assert h.live() == sorted(there) if "p" in h.state.partitions else not there
