"""Dealing to ranks: the same batch for all replicas, no sample twice, in any order of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler

RANKS, BATCHES = 3, 3
BUILD = {
    "rank_aware": RankAwareSampler,
    "grpo": lambda: GRPOGroupNSampler(2),
    "seqlen": lambda: SeqlenBalancedSampler(2, RANKS),
}
asks = st.lists(st.tuples(st.integers(0, RANKS - 1), st.integers(0, BATCHES - 1)), max_size=30)


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@given(asks=asks)
def test_replicas_agree_in_any_order_of_calls(build, asks):
    """Replicas agree in any order of calls, and no sample is in two batches."""
    sampler, ready, dealt = build(), set(range(2 * RANKS * BATCHES)), {}
    for rank, batch in asks:
        sampled, consumed = sampler.sample(
            sorted(ready), 2, dp_rank=rank, batch_index=batch, task_name="t", partition_id="p"
        )
        assert len(sampled) == 2
        assert sampled == consumed
        assert sampler.has_cached_result("p", "t", {"dp_rank": rank, "batch_index": batch})
        assert dealt.setdefault((rank, batch), sampled) == sampled
        # the whole deal is taken, of all ranks
        for share in sampler.save_checkpoint()["states"]["p"]["t"].values():
            for entry in share.values():
                ready -= set(entry if isinstance(sampler, RankAwareSampler) else entry[1])
    everything = [index for rows in dealt.values() for index in rows]
    assert len(everything) == len(set(everything))


def test_a_balanced_deal_keeps_all_shares_or_none():
    sampler = SeqlenBalancedSampler(2, 2)
    assert sampler.sample(list(range(6)), 4, dp_rank=1, task_name="t", partition_id="p") == ([], [])
    assert sampler.save_checkpoint() == SeqlenBalancedSampler(2, 2).save_checkpoint()


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
def test_a_failed_call_keeps_nothing(build):
    sampler = build()
    with pytest.raises(InvalidArgumentError):
        sampler.sample(list(range(8)), 2, dp_rank=-1, batch_index=0, task_name="t", partition_id="p")
    assert sampler.save_checkpoint() == build().save_checkpoint()
