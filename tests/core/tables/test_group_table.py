"""Groups: declared and by order of reservation; late members, clears, orphaned and oversized groups."""

from __future__ import annotations

import pytest
from harness import Harness, column, rows_of, through_file

from transfer_queue.core.state.restore import merge_state
from transfer_queue.core.state.state import State
from transfer_queue.errors import InvalidArgumentError, StorageKeyNotFoundError
from transfer_queue.messages.partitions import Seal
from transfer_queue.messages.puts import Drop, Reserve
from transfer_queue.messages.queries import Explain
from transfer_queue.messages.system import Status
from transfer_queue.sampler import (
    BaseSampler,
    FreshnessSampler,
    GRPOGroupNSampler,
    PrioritySampler,
    SeqlenBalancedSampler,
    TokenBudgetSampler,
)


@pytest.fixture
def g() -> Harness:
    """A controller that deals groups of two."""
    return Harness(GRPOGroupNSampler(2))


def explained(h: Harness, row: int, task: str | None = "t", fields: list[str] | None = None) -> str:
    return h.ask(Explain("p", row=row, task=task, fields=fields)).value  # type: ignore[no-any-return]


def orphaned(h: Harness) -> int:
    return h.ask(Status()).partitions[0].orphaned_groups  # type: ignore[no-any-return]


# ---------------------------------------------------------------- by order of reservation


def test_pre_allocated_rows_are_members_of_groups(g: Harness) -> None:
    g.put(3, pre_allocate=2)
    assert g.dealt(2) == [0, 1]
    g.put(1, pre_allocate=9)
    assert g.dealt(2) == [2, 3]


# ---------------------------------------------------------------- declared


def test_groups_can_be_declared_with_keys(g: Harness) -> None:
    g.put(2, keys=["a", "b"], groups=["g", "h"])
    g.put(3, ("y",), keys=["b", "c", "a"], groups=["h", "g", "g"])
    g.put(1, keys=["c"], groups=["g"])
    assert g.dealt(2, fields=("x", "y")) == [0, 2]


def test_a_row_cannot_leave_its_group(g: Harness) -> None:
    g.put(2, keys=["a", "b"], groups=["g", "g"])
    for request in (
        g.publish(1, ("y",), rows=[0], groups=["h"]),
        g.publish(2, ("y",), keys=["new", "b"], groups=["h", "h"]),
        g.publish(1, None, rows=[1], groups=["h"]),
    ):
        with g.refuses(InvalidArgumentError, "'g' cannot join group 'h'"):
            g.ask(request)


def test_rows_without_a_declared_group_are_never_dealt(g: Harness) -> None:
    g.put(2)
    g.put(2, groups=["g", "g"])
    assert g.dealt(4) == []
    assert g.dealt(2) == [2, 3]
    assert "has no group_id" in explained(g, 0)


def test_groups_are_ordered_by_their_first_member(g: Harness) -> None:
    g.put(4, groups=["a", "b", "b", "a"])
    assert g.dealt(2) == [0, 3]
    assert g.dealt(2) == [1, 2]


def test_an_oversized_group_is_refused_if_the_size_is_declared() -> None:
    h = Harness(GRPOGroupNSampler(2))
    h.create(group_size=2)
    h.put(3, keys=["a", "b", "c"], groups=["g", "g", "k"])
    h.ask(Reserve("p", 1, None, 0))
    for request in (
        h.publish(1, groups=["g"]),
        h.publish(2, groups=["k", "k"]),
        h.publish(3, groups=["new", "new", "new"]),
        h.publish(1, keys=["d"], groups=["g"]),
        h.publish(1, None, rows=[3], groups=["g"]),
        Reserve("p", 1, None, 0, ["g"]),
    ):
        with h.refuses(InvalidArgumentError, "at most 2 samples"):
            h.ask(request)
    h.put(2, ("y",), keys=["b", "a"], groups=["g", "g"])
    assert h.dealt(2) == [0, 1]


def test_an_oversized_group_without_a_declared_size_is_never_dealt(g: Harness) -> None:
    g.put(2, groups=["g", "g"])
    g.put(1, groups=["g"])
    assert g.dealt(2) == []
    text = explained(g, 1)
    assert "which is too large: group 'g' has 3 samples, but the sampler deals groups of 2" in text
    sequence = g.claim(2, wait=5)
    g.tick(5)
    assert "3 available. Enough are ready, but the sampler cannot make a batch" in g.reply(sequence, "r").message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "sampler",
    [
        GRPOGroupNSampler(2),
        SeqlenBalancedSampler(2, 1),
        TokenBudgetSampler(4, 2),
        PrioritySampler(inner=GRPOGroupNSampler(2)),
        FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler(2)), 1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_partitions_may_have_different_group_sizes(sampler: BaseSampler) -> None:
    """The group_size of a partition takes precedence over the sampler's; batch_size is a multiple of it."""
    h = Harness(sampler)
    h.create("four", group_size=4)
    h.create("two", group_size=2)
    tag = {"total_lengths": 1}
    h.put(8, partition="four", groups=list("abababab"), tags=[tag] * 8)
    h.put(4, partition="two", groups=list("abab"), tags=[tag] * 4)
    h.put(4, partition="by order", tags=[tag] * 4)
    assert h.dealt(4, partition="four", batch_index=0, dp_rank=0) == [0, 2, 4, 6]
    assert h.dealt(2, partition="two", batch_index=0, dp_rank=0) == [8, 10]
    assert h.dealt(2, partition="by order", batch_index=0, dp_rank=0) == [12, 13]
    with pytest.raises(InvalidArgumentError, match=r"multiple of n_samples_per_prompt \(4\)"):
        h.dealt(2, partition="four", batch_index=1, dp_rank=0)
    h.ask(Seal("four"))
    assert h.dealt(4, partition="four", batch_index=1, dp_rank=0) == [1, 3, 5, 7]
    assert h.dealt(4, partition="four", batch_index=2, dp_rank=0) is None


def test_a_user_sampler_with_another_group_size_is_refused() -> None:
    class Mine(GRPOGroupNSampler):
        """Deals by itself, with its own group size only."""

    h = Harness(Mine(2))
    h.create(group_size=4)
    with pytest.raises(InvalidArgumentError, match=r"groups of 4 samples.*deals groups of 2"):
        h.dealt(4, dp_rank=0, batch_index=0)


# ---------------------------------------------------------------- a sampler without a group size


@pytest.mark.parametrize(
    "sampler",
    [
        GRPOGroupNSampler(),
        SeqlenBalancedSampler(),
        TokenBudgetSampler(3),
        PrioritySampler(inner=GRPOGroupNSampler()),
        FreshnessSampler(PrioritySampler(inner=GRPOGroupNSampler()), 1),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_without_a_size_declared_groups_are_dealt_completely(sampler: BaseSampler) -> None:
    h = Harness(sampler)
    tag = {"total_lengths": 1}
    h.put(6, groups=list("ababab"), tags=[tag] * 6)
    h.put(2, partition="none declared", tags=[tag] * 2)
    assert h.dealt(3, batch_index=0, dp_rank=0) == [0, 2, 4]
    with pytest.raises(InvalidArgumentError, match=r"multiple of n_samples_per_prompt \(3\).*up to 3 samples.*not set"):
        h.dealt(1, batch_index=1, dp_rank=0)
    assert h.dealt(1, partition="none declared", batch_index=0, dp_rank=0) == [6]
    assert h.dealt(3, batch_index=1, dp_rank=0) == [1, 3, 5]


def test_without_a_size_the_partition_or_the_claim_can_set_one() -> None:
    h = Harness()
    h.put(4, groups=list("aabb"))
    assert h.dealt(2, sampler="GRPOGroupNSampler") == [0, 1]
    assert h.dealt(2, sampler="GRPOGroupNSampler", n_samples_per_prompt=2) == [2, 3]
    grpo = Harness(GRPOGroupNSampler())
    grpo.create(group_size=3)
    grpo.put(2, groups=["a", "a"])
    assert grpo.dealt(3) == []
    grpo.put(1, groups=["a"])
    assert grpo.dealt(3) == [0, 1, 2]


def test_without_a_size_a_waiting_claim_uses_the_size_of_new_groups() -> None:
    h = Harness(GRPOGroupNSampler())
    fits, does_not = h.claim(4, wait=10), h.claim(3, "u", wait=10)
    h.put(3, groups=["a", "b", "b"])
    assert h.parked(fits)
    with pytest.raises(InvalidArgumentError, match=r"create_partition\(..., group_size=n\)"):
        h.result(does_not, "r")
    h.put(1, groups=["a"])
    assert h.got(fits) == [0, 3, 1, 2]


def test_without_a_size_the_last_size_is_kept_after_the_groups() -> None:
    h = Harness(GRPOGroupNSampler())
    h.put(2, groups=["a", "a"])
    h.clear([0, 1])
    h.restart()
    h.put(1, groups=["b"])
    assert h.dealt(2) == []
    assert "waits for 1 sample that was not put yet" in explained(h, 2)
    h.put(1, groups=["b"])
    assert h.dealt(2) == [2, 3]


def test_explain_names_a_group_of_which_samples_were_already_dealt() -> None:
    """Its first sample was dealt by itself, before the size of the group was known."""
    h = Harness(GRPOGroupNSampler())
    h.put(1, groups=["a"])
    assert h.dealt(1) == [0]
    h.put(1, groups=["a"])
    assert h.dealt(2) == []
    assert "of group 'a', 1 of which was already dealt to task 't'; the rest of a group is never dealt" in explained(
        h, 1
    )
    assert "ready for task" not in explained(h, 1)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (4, 4)])
def test_the_error_names_sizes_that_differ(size: int, count: int) -> None:
    h = Harness(GRPOGroupNSampler(size))
    h.put(6, groups=list("aaabbb"))
    sequence = h.claim(count, wait=5)
    assert h.parked(sequence)
    words = (
        f"Group 'a' has 3 samples, but the sampler deals groups of {size}; 1 more group does not have this size either."
    )
    assert words in h.ask(Explain("p", task="t", fields=["x"])).value
    h.tick(5)
    assert words in h.reply(sequence, "r").message  # type: ignore[union-attr]
    if size == 1:
        assert "group 'b' has 3 samples, but the sampler deals groups of 1, so it can never be dealt" in explained(h, 3)


# ---------------------------------------------------------------- orphaned groups and ends


@pytest.mark.design("an orphaned group is reported, explained, ignored for the end")
def test_an_orphaned_group_is_reported_and_explained(g: Harness) -> None:
    g.put(4, groups=["g", "g", "k", "k"])
    g.clear([1])
    assert orphaned(g) == 1
    assert "group 'g', which is orphaned: 1 of its members was cleared" in explained(g, 0)
    assert g.dealt(2) == [2, 3]
    g.clear([0])
    assert orphaned(g) == 0, "a group is removed with its last member"
    g.put(2, groups=["g", "g"])
    assert g.dealt(2) == [4, 5], "and its id may be used again"


def test_orphaned_groups_by_order_are_explained(g: Harness) -> None:
    g.put(5)
    g.clear([1])
    assert "number 1 of the 2 samples that form a group by order of reservation, which is orphaned" in explained(g, 0)
    assert "waits for 1 sample that was not put yet" in explained(g, 4)
    g.ask(Seal("p"))
    assert "orphaned: 1 of its members was never put, and the partition is sealed" in explained(g, 4)


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.design("an orphaned group is reported, explained, ignored for the end")
def test_orphaned_groups_do_not_delay_the_end(g: Harness, declared: bool) -> None:
    """A member that was never written delays no claim once its group can never be complete."""
    groups = ["a", "a", "b", "b"] if declared else None
    g.ask(Reserve("p", 4, None, 0, groups))
    g.put(3, rows=[0, 2, 3])
    g.ask(Seal("p"))
    sequence = g.claim(4, wait=10)
    assert g.parked(sequence), "row 1 may still be put"
    g.clear([0])
    assert g.got(sequence) == [2, 3]
    assert g.dealt(4) is None
    assert g.dealt(1, sampler="SequentialSampler", task="u") == [2]
    assert g.dealt(2, sampler="SequentialSampler", task="u") == [], "single rows may still be put"


def test_a_group_that_a_seal_leaves_incomplete_is_orphaned(g: Harness) -> None:
    g.create(group_size=2)
    g.ask(Reserve("p", 3, None, 0, ["a", "a", "b"]))
    g.put(2, rows=[0, 1])
    g.ask(Seal("p"))
    assert orphaned(g) == 1
    assert "1 of its members was never put, and the partition is sealed" in explained(g, 2)
    assert g.dealt(2) == [0, 1]
    assert g.dealt(2) is None


def test_explain_names_what_a_group_waits_for(g: Harness) -> None:
    g.create(group_size=4)
    g.put(2, groups=["a", "a"])
    g.put(1, ("y",), groups=["a"])
    text = explained(g, 0, fields=["x"])
    assert "one of 3 samples of group 'a' (group_size 4), which waits for sample 2 (missing 'x')" in text
    assert "1 sample that was not put yet" in text


# ---------------------------------------------------------------- dropped, and put again


@pytest.fixture
def q() -> Harness:
    """A controller that deals groups of four, and a partition in which 3 of 4 samples of group "g" were dropped."""
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4)
    h.put(3, groups=["g"] * 3)
    h.ask(Drop("p", "all alike", groups=["g"]))
    return h


def missing(h: Harness) -> dict[str, int]:
    return h.state.partitions["p"].groups.unborn


def dropped(h: Harness) -> dict[str, int]:
    return h.state.partitions["p"].drops.rows


def late_then_whole(h: Harness, rows: list[int]) -> None:
    """The group of these rows is complete; the late member of the old attempt is dropped, before or after the deal."""
    reply = h.ask(h.publish(1, groups=["g"]))
    assert "If they belong to a new attempt, put all 4 samples of a group in one call" in reply.warning
    assert dropped(h)["of a dropped group"] == 1
    assert h.dealt(4, dp_rank=0, batch_index=0) == rows
    assert missing(h) == {}


def test_a_whole_new_attempt_under_the_same_id_is_a_new_group(q: Harness) -> None:
    late_then_whole(q, q.put(4, groups=["g"] * 4))


def test_a_late_member_that_comes_first_is_dropped(q: Harness) -> None:
    q.put(1, groups=["g"])
    assert missing(q) == {}
    assert q.dealt(4, dp_rank=0, batch_index=0) == []
    assert q.dealt(4, dp_rank=0, batch_index=0) == []
    rows = [q.put(1, groups=["g"])[0] for _ in range(4)]
    assert q.dealt(4, dp_rank=0, batch_index=0) == rows, "nothing can be late any more"


def test_a_new_attempt_by_keys_is_a_new_group(q: Harness) -> None:
    rows = q.put(4, keys=list("abcd"), groups=["g"] * 4)
    q.put(4, ("y",), keys=list("abcd"), groups=["g"] * 4)
    q.put(1, ("z",), keys=["b"], groups=["g"])
    late_then_whole(q, rows)


def test_a_new_attempt_of_existing_rows_is_a_new_group(q: Harness) -> None:
    rows = q.put(4)
    q.ask(q.publish(4, None, rows=rows, groups=["g"] * 4))
    late_then_whole(q, rows)


def test_a_reserved_new_attempt_is_a_new_group(q: Harness) -> None:
    rows = rows_of(q.ask(Reserve("p", 4, None, 0, ["g"] * 4)))
    q.put(4, rows=rows)
    late_then_whole(q, rows)


def test_a_reserved_late_member_is_gone(q: Harness) -> None:
    rows = rows_of(q.ask(Reserve("p", 1, None, 0, ["g"])))
    with pytest.raises(StorageKeyNotFoundError, match="nothing was put"):
        q.put(1, rows=rows)
    assert missing(q) == {}


def test_reserved_members_are_dropped_with_their_group() -> None:
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4)
    rows = rows_of(h.ask(Reserve("p", 4, None, 0, ["g"] * 4)))
    h.put(2, rows=rows[:2])
    h.ask(Drop("p", "all alike", groups=["g"]))
    assert missing(h) == {}
    with pytest.raises(StorageKeyNotFoundError, match="nothing was put"):
        h.put(2, rows=rows[2:])
    again = h.put(4, groups=["g"] * 4)
    assert h.dealt(4, dp_rank=0, batch_index=0) == again


def test_a_new_attempt_takes_pre_allocated_rows() -> None:
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4, pre_allocate=9)
    h.put(3, groups=["g"] * 3)
    h.ask(Drop("p", "all alike", groups=["g"]))
    rows = h.put(4, groups=["g"] * 4)
    assert rows == [3, 4, 5, 6]
    late_then_whole(h, rows)


def test_puts_that_were_joined_are_looked_at_one_by_one(q: Harness) -> None:
    """One late row and a whole attempt of two groups: joined puts have one row, but need not."""
    names = ["g", *["g"] * 4, *["h"] * 4]
    request = q.publish(9, keys=list("abcdefghi"), groups=names, puts=[1, 4, 4])
    assert q.ask(request).warning is not None
    assert missing(q) == {}
    assert q.dealt(8, dp_rank=0, batch_index=0) == list(range(4, 12))
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4)
    rows = h.put(4, keys=list("abcd"), groups=["g"] * 4, puts=[1] * 4)
    assert h.dealt(4, dp_rank=0, batch_index=0) == rows


def test_a_group_is_dropped_and_put_again_many_times(q: Harness) -> None:
    for _ in range(3):
        q.put(4, groups=["g"] * 4)
        q.ask(Drop("p", "all alike", groups=["g"]))
        assert missing(q) == {"g": 1}
    late_then_whole(q, q.put(4, groups=["g"] * 4))
    q.ask(Drop("p", "all alike", groups=["g"]))
    q.put(2, groups=["g"] * 2)
    q.ask(Drop("p", "all alike", groups=["g"]))
    assert missing(q) == {"g": 2}
    for _ in range(2):
        q.put(1, groups=["g"])
    assert missing(q) == {}


@pytest.mark.parametrize("count", [2, 3])
def test_a_part_of_a_new_attempt_is_refused(q: Harness, count: int) -> None:
    with q.refuses(InvalidArgumentError, r"dropped while 1 of its 4 samples .* Put all 4 samples"):
        q.put(count, groups=["g"] * count)


def test_a_group_of_which_another_attempt_lives_is_full(q: Harness) -> None:
    q.put(4, groups=["g"] * 4)
    for count in (2, 4, 5):
        with pytest.raises(InvalidArgumentError, match=f"it has 4, and this put adds {count}"):
            q.put(count, groups=["g"] * count)


@pytest.mark.parametrize("how", ["restart", "checkpoint"])
def test_a_dropped_group_is_remembered(q: Harness, how: str) -> None:
    if how == "restart":
        q.restart()
        late_then_whole(q, q.put(4, groups=["g"] * 4))
        return
    state = State()
    for unit in q.state.units.values():
        state.add_unit(unit)
    merge_state(state, through_file(q.state))
    assert state.partitions["p"].groups.unborn == {"g": 1}


def test_a_group_whose_members_are_all_dropped_is_over() -> None:
    """Whether it was named or its samples were, and in how many steps."""
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4)
    rows = h.put(3, groups=["g"] * 3)
    h.ask(Drop("p", "all alike", column(rows[:2])))
    assert missing(h) == {}
    h.ask(Drop("p", "all alike", column(rows[2:])))
    assert missing(h) == {"g": 1}
    late_then_whole(h, h.put(4, groups=["g"] * 4))


def test_a_group_that_the_retention_drops_is_over() -> None:
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4, keep_rows=6)
    h.put(3, groups=["g"] * 3)
    h.put(4, groups=["h"] * 4)
    assert dropped(h) == {"retention: keep_rows": 3}
    assert missing(h) == {"g": 1}
    h.put(1, groups=["g"])
    assert missing(h) == {}


def test_late_members_do_not_count_for_limits() -> None:
    h = Harness(GRPOGroupNSampler(4))
    h.create(group_size=4, max_staleness=0, rows_per_version=8, max_rows=8)
    h.put(3, groups=["g"] * 3)
    h.ask(Drop("p", "all alike", groups=["g"]))
    h.put(1, groups=["g"])
    h.put(8, groups=["g"] * 4 + ["h"] * 4)
    assert h.state.partitions["p"].window.counted == 8
