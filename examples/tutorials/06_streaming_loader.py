# %% [markdown]
# # The streaming loader
#
# A torch DataLoader over samples that are still being made: ranks, micro-batches by tokens, replay, resume.
#
# `StreamingDataset` belongs to a task and a data-parallel rank. It waits for its next batch, and yields it in
# micro-batches of `(data, meta)`. It ends when the partition is sealed and all is dealt.

# %%
import torch
from tensordict import TensorDict

import transfer_queue as tq

config = tq.init({"controller": {"sampler": tq.RankAwareSampler(dp_size=2)}})
client = tq.get_client()


def put_answers(partition_id: str, lengths: list[int]) -> None:
    """Answers of so many tokens, each token the number of its answer; `total_lengths` is the tag of their length."""
    meta = client.get_meta("tokens", len(lengths), partition_id, mode="insert")
    meta.update_custom_meta([{"total_lengths": length} for length in lengths])
    rows = [torch.full((length,), number) for number, length in enumerate(lengths)]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    client.put(TensorDict({"tokens": tokens, "reward": torch.ones(len(rows))}, batch_size=[len(rows)]), meta)
    client.seal(partition_id)


put_answers("train_0", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


def loader_of(task: str, dp_rank: int = 0, workers: int = 0, **cut) -> tq.StreamingDataLoader:
    """A loader of batches of three answers, in micro-batches of two where nothing else is said."""
    dataset = tq.StreamingDataset(
        config=config,
        batch_size=3,
        micro_batch_size=cut.pop("micro_batch_size", 2),
        data_fields=["tokens", "reward"],
        partition_id="train_0",
        task_name=task,
        dp_rank=dp_rank,
        **cut,
    )
    return tq.StreamingDataLoader(dataset, num_workers=workers)


def numbers(loader: tq.StreamingDataLoader) -> list[list[int]]:
    """Which answers each micro-batch has."""
    return [[int(row[0]) for row in data["tokens"].unbind()] for data, _ in loader]


# %% [markdown]
# ## Ranks share, replicas repeat
#
# With a rank-consistent sampler (`RankAwareSampler`, `GRPOGroupNSampler`, `SeqlenBalancedSampler`) each `dp_rank` gets
# batches of its own. The same rank asking again, as each of its tensor- or pipeline-parallel processes does, gets the
# same batches. `batch_size` is what one rank gets.

# %%
first, replica, second = (loader_of("update", dp_rank) for dp_rank in (0, 0, 1))
assert numbers(first) == [[0, 1], [2], [6, 7], [8]]
assert numbers(replica) == [[0, 1], [2], [6, 7], [8]]
assert numbers(second) == [[3, 4], [5], [9, 10], [11]]

# %% [markdown]
# ## Micro-batches by tokens, and packed
#
# `max_tokens` cuts a batch so that no micro-batch has more tokens; `micro_batch_size` then is the most rows. `pack`
# makes each micro-batch one row of concatenated tokens with what variable-length attention asks for.

# %%
loader = loader_of("by_tokens", dp_rank=1, micro_batch_size=3, max_tokens=8)
# 1 + 5 tokens; 9, more than the budget, stand alone; 3 + 5; 8
assert numbers(loader) == [[3, 4], [5], [9, 10], [11]]

data, meta = next(iter(loader_of("packed", micro_batch_size=3, pack=True)))
assert data["tokens"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
assert data["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
assert data["cu_seqlens"].tolist() == [0, 3, 4, 8]
assert data["max_seqlen"] == 4
assert data["reward"].tolist() == [1, 1, 1]  # one value a row stays so
assert len(meta) == 3

# %% [markdown]
# ## Workers fetch ahead
#
# With `num_workers` processes fetch batches while the rank computes. The sequence is the same with any number of them.

# %%
assert numbers(loader_of("with_workers", workers=2)) == [[0, 1], [2], [6, 7], [8]]

# %% [markdown]
# ## Epochs over the same batches
#
# What was fetched is kept, and `reset` goes back to its beginning: several PPO epochs over one rollout, without asking
# anybody. `keep_batches` bounds what is kept; 0 suits an endless stream.

# %%
loader = loader_of("ppo")
epochs = []
for _ in range(3):
    loader.reset()
    epochs.append(numbers(loader))
assert epochs[0] == epochs[1] == epochs[2] == [[0, 1], [2], [6, 7], [8]]

# %% [markdown]
# ## Save the place, go on there
#
# `state_dict` says which micro-batch comes next: a small dict for your checkpoint, beside model and optimizer. A new
# loader goes on there, in the middle of a batch too, and with another number of workers. The samples must still be
# there: do not clear a batch before a checkpoint is behind it.

# %%
loader = loader_of("saved")
for step, (data, _) in enumerate(loader):
    if step == 2:
        assert data["tokens"].unbind()[0][0] == 6
        saved = loader.state_dict()
        break
else:
    raise AssertionError("the loader ended too early")

resumed = loader_of("saved", workers=1)
resumed.load_state_dict(saved)
assert numbers(resumed) == [[8]]

# %% [markdown]
# ## The next partition
#
# One partition a training step is a common way to name them. `step` moves the same loader on.

# %%
put_answers("train_1", [2, 2, 2, 2, 2, 2])
first.step("train_1")
assert numbers(first) == [[0, 1], [2]]
assert first.state_dict()["partition_id"] == "train_1"
tq.close()
