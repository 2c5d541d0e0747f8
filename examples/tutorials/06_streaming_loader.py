# %% [markdown]
# # The streaming loader
#
# Use a torch DataLoader over samples that are still being made: ranks, micro-batches by tokens, epochs, resuming.
#
# `StreamingDataset` belongs to a task and a data-parallel rank. It yields batches in micro-batches of `(data, meta)`,
# and ends when the partition is sealed and all samples are dealt.

# %%
import torch
from tensordict import TensorDict

import transfer_queue as tq

config = tq.init({"controller": {"sampler": tq.RankAwareSampler(dp_size=2)}})
client = tq.get_client()


def put_answers(partition_id: str, lengths: list[int]) -> None:
    """Put answers of these lengths; each token is the number of its answer."""
    meta = client.get_meta("tokens", len(lengths), partition_id, mode="insert")
    meta.update_custom_meta([{"total_lengths": length} for length in lengths])
    rows = [torch.full((length,), number) for number, length in enumerate(lengths)]
    tokens = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    client.put(TensorDict({"tokens": tokens, "reward": torch.ones(len(rows))}, batch_size=[len(rows)]), meta)
    client.seal(partition_id)


put_answers("train_0", [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])


def loader_of(task: str, dp_rank: int = 0, workers: int = 0, **cut) -> tq.StreamingDataLoader:
    """Return a loader of batches of three answers, by default in micro-batches of two."""
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
    """Return the answers of each micro-batch."""
    return [[int(row[0]) for row in data["tokens"].unbind()] for data, _ in loader]


# %% [markdown]
# ## Ranks and their replicas
#
# With a rank-consistent sampler, each `dp_rank` gets different batches, and each tensor- or pipeline-parallel process
# of the same rank gets the same batches. `batch_size` is the number of samples for one rank.

# %%
first, replica, second = (loader_of("update", dp_rank) for dp_rank in (0, 0, 1))
assert numbers(first) == [[0, 1], [2], [6, 7], [8]]
assert numbers(replica) == [[0, 1], [2], [6, 7], [8]]
assert numbers(second) == [[3, 4], [5], [9, 10], [11]]

# %% [markdown]
# ## Micro-batches by tokens, and packed
#
# With `max_tokens`, no micro-batch has more tokens; `micro_batch_size` is then the maximum number of rows. `pack` turns
# each micro-batch into one row of concatenated tokens, with the fields that variable-length attention needs.

# %%
loader = loader_of("by_tokens", dp_rank=1, micro_batch_size=3, max_tokens=8)
# 1 + 5 tokens; 9 tokens, which exceed the limit, are a micro-batch alone; 3 + 5; 8
assert numbers(loader) == [[3, 4], [5], [9, 10], [11]]

data, meta = next(iter(loader_of("packed", micro_batch_size=3, pack=True)))
assert data["tokens"].tolist() == [[0, 0, 0, 1, 2, 2, 2, 2]]
assert data["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
assert data["cu_seqlens"].tolist() == [0, 3, 4, 8]
assert data["max_seqlen"] == 4
assert data["reward"].tolist() == [1, 1, 1]
assert len(meta) == 3

# %% [markdown]
# ## Workers fetch ahead
#
# With `num_workers`, processes fetch batches while the rank computes. The sequence is the same. In an event loop, write
# `async for`: it does not block the loop, and a wait can be cancelled without the loss of a sample.

# %%
assert numbers(loader_of("with_workers", workers=2)) == [[0, 1], [2], [6, 7], [8]]

# %% [markdown]
# ## Epochs over the same batches
#
# The dataset keeps the batches that it has fetched, and `reset` returns to the beginning, for several PPO epochs over
# one rollout. `keep_batches` limits the number of kept batches; use 0 for an endless stream.

# %%
loader = loader_of("ppo")
epochs = []
for _ in range(3):
    loader.reset()
    epochs.append(numbers(loader))
assert epochs[0] == epochs[1] == epochs[2] == [[0, 1], [2], [6, 7], [8]]

# %% [markdown]
# ## Save the position and resume
#
# `state_dict` returns which micro-batch is next: a small dict for your checkpoint, beside model and optimizer. A new
# loader resumes there, also in the middle of a batch, and with any sampler and number of workers. It reads exactly the
# samples of the open batch, so clear a batch only when a later checkpoint is saved; a warning names samples that are
# gone.
#
# After a load, `reset` fetches the batches before the position again if the sampler is rank-consistent. Otherwise it
# raises `BatchGoneError`.

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
# If each training step has a partition of its own, `step` moves the same loader to the next one.

# %%
put_answers("train_1", [2, 2, 2, 2, 2, 2])
first.step("train_1")
assert numbers(first) == [[0, 1], [2]]
assert first.state_dict()["partition_id"] == "train_1"
tq.close()
