"""Micro-batches by tokens through the controller: four ranks of two replicas each, while rows are still put."""

from __future__ import annotations

import random

import pytest
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st

from differential import differential
from transfer_queue.messages.partitions import Seal
from transfer_queue.sampler import TokenBudgetSampler

BUDGET, RANKS, REPLICAS = 30, 4, 2
AHEAD = 3  # batch indexes that are asked before their turn


class Trainers:
    """All replicas of all ranks. batches: what was dealt, by batch_index in order of the deals, then by rank."""

    def __init__(self, h: Harness, batch_size: int) -> None:
        self.h = h
        self.batch_size = batch_size
        self.batches: dict[int, dict[int, list[int]]] = {}

    def ask(self, index: int, rank: int, replica: int) -> list[int] | None:
        """Fetch for one replica. All replicas of a rank get the same."""
        name = f"{rank}.{replica}"
        sequence = self.h.claim(self.batch_size, name=name, dp_rank=rank, batch_index=index)
        while self.h.works:  # deals of many groups are made beside the loop
            self.h.work()
        got = self.h.got(sequence, name)
        known = self.batches.get(index, {}).get(rank)
        assert known is None or got == known
        if got:
            self.batches.setdefault(index, {})[rank] = got
        return got


@pytest.mark.parametrize("size", [1, 2])
@differential(15, costly=True)
@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 3), st.randoms(use_true_random=False))
def test_ranks_stay_in_lockstep_in_any_order_of_claims(
    size: int, lengths: list[int], held: int, chance: random.Random
) -> None:
    """Rounds are complete, within the budget, in order and equal for replicas; the rest is the remainder."""
    lengths = lengths[: len(lengths) // size * size]
    h = Harness(TokenBudgetSampler(BUDGET, size, RANKS))
    h.create()
    trainers = Trainers(h, held * size)
    first = 0
    while first < len(lengths):
        part = lengths[first : first + chance.randint(1, 15)]
        h.put(len(part), tags=[{"total_lengths": length} for length in part])
        first += len(part)
        for _ in range(chance.randint(0, 6)):
            index = chance.randint(0, len(trainers.batches) + AHEAD)
            trainers.ask(index, chance.randrange(RANKS), chance.randrange(REPLICAS))
    h.ask(Seal("p"))
    most = len(lengths) // (RANKS * size) + len(trainers.batches) + AHEAD + 1
    asks = [(index, rank, replica) for index in range(most) for rank in range(RANKS) for replica in range(REPLICAS)]
    chance.shuffle(asks)
    for ask in asks:
        assert trainers.ask(*ask) != [], "after the seal there is a batch or the end"

    left = [list(range(row, row + size)) for row in range(0, len(lengths), size)]
    for shares in trainers.batches.values():
        assert set(shares) == set(range(RANKS)), "no rank has a batch more"
        taken = []
        for rows in shares.values():
            groups = [rows[at : at + size] for at in range(0, len(rows), size)]
            assert len(groups) <= held
            assert sum(lengths[row] for row in rows) <= BUDGET or len(groups) == 1
            taken += groups
        assert sorted(taken) == left[: len(taken)], "the first that are left, whole"
        left = left[len(taken) :]
    assert len(left) < RANKS
    assert h.state.partitions["p"].passed.counts_of("t").get("remainder", 0) == len(left) * size
