"""A partition with `max_rows` accepts no more rows than its tasks have to consume; further puts wait in order."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from harness import Harness, column, rows_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from differential import stateful
from transfer_queue.errors import (
    DeadlockError,
    InvalidArgumentError,
    PartitionFullError,
    SealedError,
    UnknownPartitionError,
)
from transfer_queue.messages.claims import Claim, Finish
from transfer_queue.messages.partitions import ClearPartition, Seal
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.system import Status


def made(most: int = 2, **options: object) -> Harness:
    h = Harness()
    h.create(max_rows=most, **options)
    return h


def test_a_put_beyond_the_limit_is_refused_or_waits_for_a_clear():
    h = made()
    h.put(2)
    with pytest.raises(PartitionFullError, match=r"'p' is full: 2 rows wait .*, the limit is 2 \(max_rows\)"):
        h.put(1)
    with pytest.raises(PartitionFullError):
        h.ask(Reserve("p", 1, None, 0))
    h.put(2, ["y"], rows=range(2))  # new fields of old rows are no new rows
    waits = h.send(h.publish(1, wait=10.0), "w")
    assert h.parked(waits, "w")
    h.clear([0])
    assert rows_of(h.result(waits)) == [2]


def test_rows_that_a_reader_has_consumed_and_not_finished_do_not_count():
    h = made(1, free_when=["t"])
    assert h.put(1) == [0]
    assert h.dealt(1) == [0]
    assert h.state.partitions["p"].row_count == 1, "the reader may still read it"
    assert h.put(1) == [1]
    with pytest.raises(PartitionFullError):
        h.put(1)
    h.ask(Finish("p", "t", column([0]), "r"))
    assert h.state.partitions["p"].row_count == 1
    with pytest.raises(PartitionFullError):
        h.put(1)


def test_with_several_tasks_a_row_counts_until_all_have_consumed_it():
    h = made(1, free_when=["t", "u"])
    h.put(1)
    assert h.dealt(1, "t") == [0]
    with pytest.raises(PartitionFullError):
        h.put(1)
    assert h.dealt(1, "u", name="s") == [0]
    assert h.put(1) == [1]


def test_dropped_rows_free_space():
    h = made(2)
    h.put(2)
    waits = h.send(h.publish(2, wait=10.0), "w")
    h.ask(Drop("p", "stale", column([0, 1])))
    assert rows_of(h.result(waits)) == [2, 3]


def test_a_put_that_can_never_fit_is_refused():
    h = made(2)
    with pytest.raises(InvalidArgumentError, match=r"at most 2 rows .* this put alone adds 3"):
        h.ask(h.publish(3, wait=10.0))


def test_the_end_of_the_wait_and_of_the_partition_reach_the_puts_that_wait():
    h = made(1)
    h.put(1)
    waits = h.send(h.publish(1, wait=10.0), "w")
    h.tick(11.0)
    with pytest.raises(PartitionFullError, match="It waited 11 s"):
        h.result(waits)
    waits = h.send(h.publish(1, wait=10.0), "w")
    h.ask(Seal("p"), "v")
    with pytest.raises(SealedError):
        h.result(waits)
    h.create("q", max_rows=1)
    h.put(1, partition="q")
    waits = h.send(h.publish(1, partition="q", wait=10.0), "w")
    h.ask(ClearPartition("q"), "v")
    assert len(rows_of(h.result(waits))) == 1  # the partition that the put makes has no limit


def test_a_full_queue_is_no_deadlock_while_a_consumer_may_come():
    h = made(1, free_when=["t"])
    h.put(1)
    waits = h.send(h.publish(1, wait=1000.0), "w")
    other = h.claim(1, "t", partition="q", wait=1000.0)
    assert h.parked(waits, "w")
    assert h.parked(other, "r")
    assert h.dealt(1, name="late") == [0]
    assert rows_of(h.result(waits)) == [1]


def test_a_claim_for_more_rows_than_the_limit_is_a_deadlock():
    h = made(2)
    h.put(2)
    waits = h.send(h.publish(1, wait=1000.0), "w")
    h.claim(3, wait=1000.0)
    with pytest.raises(DeadlockError, match="task 't' waits for 3 samples"):
        h.result(waits)


def test_status_shows_the_limit_and_the_rows_that_count_for_it():
    h = made(2)
    h.put(1)
    (partition,) = h.look(Status()).partitions
    assert (partition.max_rows, partition.open_rows) == (2, 1)


def test_a_put_that_must_not_create_its_partition_is_refused():
    h = made(1)
    h.put(1)
    waits = h.send(msgspec.structs.replace(h.publish(1, wait=10.0), create=False), "w")
    h.ask(ClearPartition("p"))
    with pytest.raises(UnknownPartitionError, match=r"'p' does not exist .* Nothing was put"):
        h.result(waits, "w")
    with pytest.raises(UnknownPartitionError, match="Nothing was put"):
        h.ask(msgspec.structs.replace(h.publish(1), create=False), "w")
    assert not h.state.partitions


def test_explain_names_the_limit():
    h = made(1)
    h.put(1)
    assert "1 sample waits for the tasks, and max_rows is 1" in h.look(Explain("p", task="t", fields=["z"])).value


class BoundedQueue(RuleBasedStateMachine):
    """Producers and consumers of a partition with `max_rows`, beside a model: a FIFO queue with a limit."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.h = made(self.LIMIT, free_when=["t"], order="fifo")
        self.items: deque[int] = deque()
        self.puts: deque[tuple[str, int]] = deque()
        self.gets: deque[tuple[str, int]] = deque()
        self.leased: list[tuple[object, int]] = []
        self.next = 0
        self.names = 0

    def settle(self) -> None:
        """The model takes waiting puts and serves waiting gets, and the system must have done the same."""
        moved = True
        while moved:
            moved = False
            while self.gets and self.items:
                name, sequence = self.gets.popleft()
                assert self.h.got(sequence, name) == [self.items.popleft()]
                moved = True
            while self.puts and len(self.items) + len(self.leased) < self.LIMIT:
                name, sequence = self.puts.popleft()
                assert rows_of(self.h.result(sequence, name)) == [self.next]
                self.items.append(self.next)
                self.next += 1
                moved = True

    def name(self, kind: str) -> str:
        self.names += 1
        return f"{kind}{self.names}"

    @rule()
    def put(self) -> None:
        name = self.name("w")
        self.puts.append((name, self.h.send(self.h.publish(1, name=name, wait=1e6), name)))
        self.settle()

    @rule(reader=st.integers(0, 2))
    def get(self, reader: int) -> None:
        name = self.name("r") if any(n == f"r-{reader}" for n, _ in self.gets) else f"r-{reader}"
        self.gets.append((name, self.h.claim(1, name=name, wait=1e6)))
        self.settle()

    @precondition(lambda self: self.items and not self.gets)
    @rule()
    def lease(self) -> None:
        reply = self.h.lease(1, name=self.name("l"))
        assert rows_of(reply) == [self.items[0]]
        self.leased.append((reply, self.items.popleft()))

    @precondition(lambda self: self.leased)
    @rule(good=st.booleans())
    def end_lease(self, good: bool) -> None:
        reply, item = self.leased.pop()
        if good:
            assert self.h.ack(reply)
        else:
            assert self.h.nack(reply)
            self.items = deque(sorted([*self.items, item]))
        self.settle()

    @rule()
    def try_put(self) -> None:
        if len(self.items) + len(self.leased) < self.LIMIT:
            return
        with pytest.raises(PartitionFullError):
            self.h.put(1, name=self.name("n"))

    @invariant()
    def the_limit_holds(self) -> None:
        partition = self.h.state.partitions["p"]
        assert partition.open_rows == len(self.items) + len(self.leased) <= self.LIMIT
        assert [self.h.parked(sequence, name) for name, sequence in (*self.puts, *self.gets)] == [True] * (
            len(self.puts) + len(self.gets)
        )


TestBoundedQueue = stateful(BoundedQueue, 20, 25)


def test_a_claim_may_take_fewer_rows_than_it_asks_for():
    h = made(8)
    few = Claim("p", "t", ["x"], 4, least=2)
    h.put(1)
    assert rows_of(h.ask(few, "r")) == []
    waits = h.send(Claim("p", "t", ["x"], 4, wait=10.0, least=2), "r")
    assert h.parked(waits)
    h.put(2)
    assert h.got(waits) == [0, 1, 2]
    h.put(5)
    assert rows_of(h.ask(few, "r")) == [3, 4, 5, 6]
    h.ask(Seal("p"))
    last = h.ask(few, "r")
    assert (rows_of(last), last.ended) == ([], True), "one row is left, fewer than the claim can use"
    assert h.dealt(1) == [7]


def test_the_smallest_number_of_rows_is_positive_and_not_above_the_largest():
    h = made()
    for least in (0, 5):
        with pytest.raises(InvalidArgumentError, match=r"least must be from 1 to batch_size \(4\)"):
            h.ask(Claim("p", "t", ["x"], 4, least=least), "r")


@pytest.mark.parametrize(
    ("order", "rows"), [("fifo", [0, 1, 2, 3]), ("lifo", [3, 2, 1, 0]), ("priority", [1, 3, 0, 2])]
)
def test_the_order_of_a_partition_replaces_the_systems_sampler(order: str, rows: list[int]):
    h = Harness()
    h.create(order=order)
    h.put(4, tags=[{"priority": number} for number in (1, 2, 1, 2)])
    assert [h.dealt(1) for _ in range(2)] == [[row] for row in rows[:2]]
    assert h.dealt(2) == rows[2:]
