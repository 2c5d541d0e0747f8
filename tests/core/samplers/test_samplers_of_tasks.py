"""Each task has its own sampler and its own number of ranks, and samples that a round holds for nobody are reported."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from harness import Harness, load_state, made, saved_of

from transfer_queue.cli.status_table import format_table
from transfer_queue.core.events.records import Dealt, RankAsked, SamplerRegistered
from transfer_queue.core.state import serialization
from transfer_queue.errors import CheckpointError, InvalidArgumentError, WaitTimeoutError
from transfer_queue.journal.segment import JournalRecord
from transfer_queue.messages.checkpoints import BeginCheckpoint
from transfer_queue.messages.claims import RankGone, ResetConsumption
from transfer_queue.messages.descriptors import PartitionOptions
from transfer_queue.messages.partitions import CreatePartition, Seal
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.system import RegisterSampler, Status
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    TokenBudgetSampler,
)
from transfer_queue.sampler.sampler_spec import spec_of

HELD = "{} held for dp_rank 1 of reward, which has never asked; reward has 1 rank: pass dp_size=1 or a sampler"


class Newest(BaseSampler):
    """A user's sampler: deals the last rows."""

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        rows = list(ready_indexes)[-batch_size:]
        return (rows, rows) if len(rows) == batch_size else ([], [])


class Counting(BaseSampler):
    """A user's sampler whose state is the number of its deals."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.deals = 0
        self.refuses = refuses

    def sample(self, ready_indexes: Any, batch_size: int, *args: Any, **kwargs: Any) -> Any:
        self.deals += 1
        rows = list(ready_indexes)[:batch_size]
        return rows, rows

    def save_checkpoint(self) -> dict[str, Any]:
        return {"deals": self.deals}

    def load_checkpoint(self, state: Any) -> None:
        if self.refuses:
            raise InvalidArgumentError("this state is refused")
        self.deals = state["deals"]


def register(h: Harness, task: str, sampler: BaseSampler, name: str = "w") -> None:
    spec = spec_of(sampler)
    assert spec is not None
    h.ask(RegisterSampler(task, *spec), name)


def all_of(h: Harness, task: str, count: int = 2, **more: Any) -> list[int]:
    """Return all rows that one rank of a task gets."""
    rows: list[int] = []
    for number in range(100):
        got = h.dealt(count, task, dp_rank=0, batch_index=number, **more)
        if not got:
            return rows
        rows += got
    raise AssertionError("it does not end")


def chosen(h: Harness, task: str) -> str:
    return type(h.controller.context.samplers.of_task(task)).__name__


# ---------------------------------------------------------------- which sampler a task has


def test_the_name_of_a_task_counts_before_patterns_and_the_first_pattern_counts() -> None:
    of_tasks = {
        "re*": RankAwareSampler(),
        "r?ward*": GRPOGroupNSampler(),
        "reward": PrioritySampler(),
        "tr[ab]in": TokenBudgetSampler(8),
    }
    h = Harness(SeqlenBalancedSampler(), task_samplers=of_tasks)
    assert chosen(h, "reward") == "PrioritySampler"
    assert chosen(h, "reward2") == "RankAwareSampler"
    assert chosen(h, "roward") == "GRPOGroupNSampler"
    assert chosen(h, "trbin") == "TokenBudgetSampler"
    assert (chosen(h, "train"), chosen(h, "Reward")) == ("TokenBudgetSampler", "SeqlenBalancedSampler")


def test_a_task_with_its_own_sampler_gets_every_sample_and_the_others_get_rounds() -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=2), task_samplers={"rew*": SequentialSampler()})
    h.put(8)
    h.ask(Seal("p"))
    assert all_of(h, "reward") == list(range(8))
    assert [len(h.dealt(2, "train", dp_rank=rank, batch_index=0) or []) for rank in (0, 1)] == [2, 2]


def test_the_sampler_of_a_call_and_the_order_of_a_partition_count_before_that_of_the_task() -> None:
    h = Harness(task_samplers={"t": Newest()})
    h.put(6)
    assert h.dealt(2) == [4, 5]
    assert h.dealt(2, sampler="SequentialSampler") == [0, 1]
    h.ask(CreatePartition("fifo", 0, PartitionOptions(order="fifo")))
    first, *_ = h.put(3, partition="fifo")
    assert h.dealt(1, partition="fifo") == [first]


def test_the_groups_of_explain_are_those_of_the_tasks_sampler() -> None:
    h = Harness(task_samplers={"train": GRPOGroupNSampler(4)})
    h.put(6)
    assert "form a group" in h.ask(Explain("p", row=4, task="train", fields=["x"])).value
    assert "form a group" not in h.ask(Explain("p", row=4, task="reward", fields=["x"])).value


@pytest.mark.parametrize("isolated", [False, True])
def test_two_tasks_with_users_samplers(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of two samplers do not wait for each other."""
    monkeypatch.setattr(Harness, "isolated", isolated)
    h = Harness(Counting(), task_samplers={"a": Newest(), "b": Newest()})
    h.put(6)
    h.asks_wait = True
    slow, other, third = h.claim(2, "a", name="x"), h.claim(2, "b", name="y"), h.claim(2, "c", name="z")
    assert [ask.sampler for ask in h.asks] == (["a", "b", ""] if isolated else [])
    while h.asks:
        h.asks.reverse()  # the last one answers first
        h.answer()
    assert (h.got(slow, "x"), h.got(other, "y"), h.got(third, "z")) == ([4, 5], [4, 5], [0, 1])
    assert sorted(cost.name for cost in h.ask(Status()).samplers) == ["Counting", "Newest"]


def test_a_replaced_system_sampler_does_not_concern_tasks_with_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "isolated", True)
    h = Harness(Counting(), task_samplers={"a": Newest()})
    h.put(6)
    h.asks_wait = True
    own, systems = h.claim(2, "a", name="x"), h.claim(2, "b", name="y")
    h.take(h.controller.use_sampler(SequentialSampler()))
    assert h.parked(own, "x")
    assert h.got(systems, "y") == [0, 1]
    h.take(h.controller.on_sampler_answer(h.asks.pop(1).number, None, h.now))  # of the replaced one
    h.answer()
    assert h.got(own, "x") == [4, 5]


# ---------------------------------------------------------------- registered samplers


def test_a_registered_sampler_counts_for_its_task_in_all_partitions_and_after_a_restart() -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=2))
    register(h, "reward", SequentialSampler())
    for partition in ("p", "q"):
        h.put(4, partition=partition)
    assert len(all_of(h, "reward")) == 4
    h.restart()
    assert chosen(h, "reward") == "SequentialSampler"
    assert len(all_of(h, "reward", partition="q")) == 4
    assert chosen(h, "train") == "SeqlenBalancedSampler"


def test_equal_samplers_are_the_same_and_another_one_is_refused_with_both() -> None:
    h = Harness()
    register(h, "reward", RankAwareSampler(dp_size=2))
    register(h, "reward", RankAwareSampler(2, drop_last=False), name="another dataset")
    assert sum(isinstance(record, SamplerRegistered) for record in h.records) == 1
    for other, shown in (
        (RankAwareSampler(dp_size=3), r"RankAwareSampler\(dp_size=3\)"),
        (PrioritySampler(inner=GRPOGroupNSampler(4)), r"PrioritySampler\(inner=GRPOGroupNSampler\(n_samples_.*=4\)\)"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"has .* RankAwareSampler\(dp_size=2\).*but {shown} is"):
            register(h, "reward", other)
    assert chosen(h, "reward") == "RankAwareSampler"


def test_the_configuration_of_exactly_this_task_is_not_replaced_but_a_pattern_is() -> None:
    h = Harness(task_samplers={"reward": RankAwareSampler(dp_size=1), "judge": Newest(), "*": GRPOGroupNSampler()})
    register(h, "reward", RankAwareSampler(dp_size=1))
    with pytest.raises(InvalidArgumentError, match=r"RankAwareSampler\(dp_size=1\) \(controller.task_samplers\), but"):
        register(h, "reward", SequentialSampler())
    with pytest.raises(InvalidArgumentError, match=r"Newest \(controller.task_samplers\), but SequentialSampler\(\)"):
        register(h, "judge", SequentialSampler())
    assert not h.state.samplers
    register(h, "train", SequentialSampler())
    assert chosen(h, "train") == "SequentialSampler"


def test_claims_that_wait_are_decided_with_the_registered_sampler() -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=2))
    h.put(2)
    waits = h.claim(2, "reward", wait=10, name="a", dp_rank=0, batch_index=0)
    other = h.claim(2, "train", wait=10, name="b", dp_rank=0, batch_index=0)
    beyond = h.claim(2, "reward", wait=10, name="c", dp_rank=1, batch_index=0)
    assert h.parked(waits, "a")
    register(h, "reward", RankAwareSampler(dp_size=1))
    assert h.got(waits, "a") == [0, 1]
    assert h.parked(other, "b")
    with pytest.raises(InvalidArgumentError, match=r"dp_rank \(1\) must be less than dp_size \(1\)"):
        h.result(beyond, "c")


@pytest.mark.parametrize(
    "request_",
    [
        RegisterSampler("t", "Nobody"),
        RegisterSampler("t", "os.system", '{"command": "true"}'),
        RegisterSampler("t", "RankAwareSampler", '{"dp_size": 0}'),
        RegisterSampler("t", "RankAwareSampler", '{"ranks": 2}'),
        RegisterSampler("t", "RankAwareSampler", '{"dp_size": "2"}'),
        RegisterSampler("t", "RankAwareSampler", "[]"),
        RegisterSampler("t", "RankAwareSampler", "{"),
        RegisterSampler("t", "PrioritySampler", '{"inner": "os:system"}'),
        RegisterSampler("t", "PrioritySampler", '{"inner": {"sampler": "os:system", "sampler_args": {}}}'),
        RegisterSampler("t", "PrioritySampler", '{"inner":' * 5000 + "1" + "}" * 5000),
        RegisterSampler(
            "t", "PrioritySampler", '{"inner":{"sampler":"PrioritySampler","sampler_args":' * 200 + "{}" + "}}" * 200
        ),
    ],
)
def test_a_wrong_request_changes_nothing(request_: RegisterSampler) -> None:
    h = Harness()
    with pytest.raises(InvalidArgumentError):
        h.ask(request_)
    assert not h.state.samplers


@pytest.mark.parametrize("merge", [False, True])
def test_the_samplers_of_a_checkpoint_are_added_and_those_of_this_system_stay(merge: bool) -> None:
    other = Harness()
    other.extents = 50
    register(other, "reward", RankAwareSampler(dp_size=1))
    register(other, "judge", SequentialSampler())
    other.put(2)
    h = Harness()
    register(h, "reward", GRPOGroupNSampler())
    load_state(h, saved_of(other), merge)
    h.result(1, "loader")
    assert (chosen(h, "reward"), chosen(h, "judge")) == ("GRPOGroupNSampler", "SequentialSampler")
    made.clear()  # the merged state has columns of the other one


def test_a_checkpoint_with_an_unknown_sampler_is_refused() -> None:
    h = Harness()
    register(h, "reward", SequentialSampler())
    tree = serialization.save_state(h.state)
    tree["samplers"] = {"reward": ["Nobody", "{}"]}
    with pytest.raises(CheckpointError):
        serialization.load_untrusted(tree)


def test_a_registered_sampler_orders_by_tags_that_it_names() -> None:
    h = Harness()
    register(h, "t", PrioritySampler("score"))
    assert h.state.watched == ["score"]
    h.restart()
    assert h.state.watched == ["score"]


# ---------------------------------------------------------------- states of users' samplers


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("refuses", [False, True])
def test_the_states_of_all_users_samplers_are_saved_and_loaded(
    isolated: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one sampler refuses its state, all of them keep theirs, and nothing is loaded."""
    monkeypatch.setattr(Harness, "isolated", isolated)
    h = Harness(Counting(), task_samplers={"a": Counting()})
    h.put(6)
    for task in ("a", "a", "b"):
        h.dealt(1, task)
    h.send(BeginCheckpoint("1" * 32))
    (write,) = h.writes
    tree = write.tree()
    forms = {"": tree["sampler"], **tree["task_samplers"]}
    states = {name: msgspec.msgpack.decode(form["state"]) for name, form in forms.items()}
    assert {name: state["deals"] for name, state in states.items()} == {"": 1, "a": 2}

    into = Harness(Counting(), task_samplers={"a": Counting(refuses)})
    into.extents = 50
    into.put(1)
    into.dealt(1, "b")
    load_state(into, tree)
    deals = {name: sampler.deals for name, sampler in into.users.items() if isinstance(sampler, Counting)}
    if refuses:
        with pytest.raises(InvalidArgumentError, match="this state is refused"):
            into.result(1, "loader")
        assert deals == {"": 1, "a": 0}
    else:
        into.result(1, "loader")
        assert deals == {"": 1, "a": 2}
        assert into.state.partitions["p"].row_count == 6
    made.clear()


# ---------------------------------------------------------------- the number of ranks


def samplers_for_ranks(dp_size: int | None) -> dict[str, BaseSampler]:
    """Return each built-in sampler, made for this number of ranks; None: made without one."""
    return {
        "sequential": SequentialSampler(),
        "rank": RankAwareSampler(dp_size=dp_size),
        "groups": GRPOGroupNSampler(2, dp_size=dp_size),
        "balanced": SeqlenBalancedSampler(2, dp_size=dp_size),
        "budget": TokenBudgetSampler(100, 2, dp_size=dp_size),
        "priority": PrioritySampler(inner=SeqlenBalancedSampler(2, dp_size=dp_size)),
        "fresh": FreshnessSampler(RankAwareSampler(dp_size=dp_size), max_staleness=1),
    }


def filled(sampler: BaseSampler | None = None) -> Harness:
    h = Harness(sampler)
    h.put(12)
    h.ask(h.publish(12, None, rows=range(12), tags=[{"total_lengths": 1}] * 12))
    h.ask(Seal("p"))
    return h


@pytest.mark.parametrize("given", [None, 2, 3])
@pytest.mark.parametrize("name", samplers_for_ranks(None))
def test_the_number_of_ranks_of_a_task_counts_before_that_of_the_systems_sampler(name: str, given: int | None) -> None:
    h = filled(samplers_for_ranks(given)[name])
    assert len(all_of(h, "reward", dp_size=1)) == 12
    for rank in (0, 1):
        got = [h.dealt(2, "train", dp_rank=rank, batch_index=number, dp_size=2) for number in range(3)]
        assert [len(rows or []) for rows in got] == [2, 2, 2]
    assert sorted(h.state.partitions["p"].dealt["train"].issued if name != "sequential" else [0, 1]) == [0, 1]


@pytest.mark.parametrize("name", [name for name in samplers_for_ranks(2) if name != "sequential"])
def test_another_number_than_that_of_the_tasks_own_sampler_is_refused_with_both(name: str) -> None:
    h = filled()
    register(h, "reward", samplers_for_ranks(2)[name])
    with pytest.raises(InvalidArgumentError, match=r"dp_size \(1\) must be equal to .* task's sampler, which is 2"):
        h.dealt(2, "reward", dp_rank=0, batch_index=0, dp_size=1)
    register(h, "judge", samplers_for_ranks(None)[name])
    assert len(all_of(h, "judge", dp_size=1)) == 12


def test_two_numbers_of_ranks_in_one_task_are_refused() -> None:
    h = filled(SeqlenBalancedSampler(dp_size=2))
    assert h.dealt(2, "reward", dp_rank=0, batch_index=0, dp_size=1)
    with pytest.raises(InvalidArgumentError, match="all ranks of task 'reward' must pass the same dp_size"):
        h.dealt(2, "reward", name="b", dp_rank=1, batch_index=0)


# ---------------------------------------------------------------- samples for ranks that never ask


def test_explain_status_and_the_end_name_the_samples_that_nobody_asks_for() -> None:
    h = filled(SeqlenBalancedSampler(dp_size=2))
    assert len(all_of(h, "reward")) == 6
    words = HELD.format("6 samples are")
    consumed = h.ask(Explain("p", task="reward", fields=["x"])).value
    assert words in consumed
    assert "consumed every sample" not in consumed
    assert "in batch 0 of dp_rank 1, which has never asked" in h.ask(Explain("p", row=2, task="reward")).value
    status = h.ask(Status())
    (task,) = status.partitions[0].tasks
    assert (task.held, task.ranks) == ({1: 6}, 1)
    assert words in format_table(status)
    assert words in status._repr_html_()
    ended = h.result(h.claim(2, "reward", dp_rank=0, batch_index=9), "r")
    assert ended.ended
    assert words in ended.warning


def test_a_task_that_waits_for_what_another_one_puts_is_told_too() -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=2))
    h.put(4)
    all_of(h, "reward")
    for words in (
        h.ask(Explain("p", task="train", fields=["x", "reward"])).value,
        h.ask(Explain("p", task="train", fields=["x", "reward"], count=2)).value,
    ):
        assert HELD.format("2 samples are") in words
    waits = h.claim(2, "train", ["x", "reward"], wait=1, dp_rank=0, batch_index=0)
    h.tick(2)
    with pytest.raises(WaitTimeoutError, match=re.escape(HELD.format("2 samples are"))):
        h.result(waits, "r")


def test_a_rank_that_asks_later_gets_its_samples_and_the_words_end() -> None:
    h = Harness(SeqlenBalancedSampler(dp_size=3))
    h.put(6)
    h.dealt(2, "reward", dp_rank=0, batch_index=0)
    words = h.ask(Explain("p", task="reward", fields=["x"])).value
    assert "for dp_ranks 1, 2 of reward, which have never asked" in words
    assert h.dealt(2, "reward", name="b", dp_rank=1, batch_index=0) == [2, 3]
    words = h.ask(Explain("p", task="reward", fields=["x"])).value
    assert "for dp_rank 2 of reward, which has never asked; reward has 2 ranks: pass dp_size=2" in words
    h.restart()
    assert h.ask(Status()).partitions[0].tasks[0].held == {2: 2}
    h.clear([4])
    assert "1 sample is held" in h.ask(Explain("p", task="reward", fields=["x"])).value
    assert h.dealt(2, "reward", name="c", dp_rank=2, batch_index=0) == [4, 5]
    assert "consumed every sample" in h.ask(Explain("p", task="reward", fields=["x"])).value
    assert sum(isinstance(record, RankAsked) for record in h.records) == 2


def test_ranks_that_wait_or_were_dealt_batches_before_have_asked() -> None:
    h = Harness(RankAwareSampler(dp_size=2))
    waits = [h.claim(2, wait=10, name=str(rank), dp_rank=rank, batch_index=0) for rank in (0, 1)]
    h.put(4)
    assert [h.got(each, str(rank)) for rank, each in enumerate(waits)] == [[0, 1], [2, 3]]
    h.put(4)
    h.dealt(2, dp_rank=0, batch_index=1)
    assert not h.ask(Status()).partitions[0].tasks[0].held
    assert all(not record.unasked for record in h.records if isinstance(record, Dealt))


def test_a_rank_that_is_declared_gone_and_a_reset_leave_no_words() -> None:
    for request in (RankGone("p", "t", 1), ResetConsumption("p", "t")):
        h = Harness(RankAwareSampler(dp_size=2))
        h.put(4)
        h.lease(2, dp_rank=0, batch_index=0)
        assert h.ask(Status()).partitions[0].tasks[0].held == {1: 2}
        h.ask(request)
        assert not any(task.held for task in h.ask(Status()).partitions[0].tasks)


def test_records_of_earlier_releases_name_no_rank() -> None:
    old = msgspec.msgpack.encode(["Dealt", "p", "t", 0, 2, [[0, b""], [1, b""]], b""])
    record = msgspec.msgpack.decode(old, type=JournalRecord)
    assert isinstance(record, Dealt)
    assert record.unasked == []
