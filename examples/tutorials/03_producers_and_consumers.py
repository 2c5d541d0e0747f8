# %% [markdown]
# # Producers and consumers
#
# Run rollout, reward and update as processes, with backpressure: producers that are too far ahead wait.
#
# Two rollout workers generate answers, a reward worker scores them, and the update takes eight scored samples in each
# step.

# %%
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from tensordict import TensorDict

import transfer_queue as tq

TRAIN = "train_0"
STEPS, ROWS = 4, 8  # updates, and samples for each of them
SECONDS = 60  # the limit of every wait

# %% [markdown]
# ## Rollout: wait for space before you generate
#
# `get_meta(mode="insert")` reserves samples. With a `timeout`, a producer that is too far ahead waits here, before a
# token is generated. The put after it always succeeds.
#
# `seal` reports that this producer has no more samples. Fields of existing samples can still be put.


# %%
def rollout(config, batches: int) -> int:
    """Generate batches of four answers, and return their number."""
    tq.init(config)
    client = tq.get_client()
    for _ in range(batches):
        mine = client.get_meta("answer", 4, TRAIN, mode="insert", timeout=SECONDS)
        answers = torch.randint(0, 10, (4, 6))  # generation goes here
        client.put(TensorDict({"answer": answers}, batch_size=[4]), metadata=mine)
    client.seal(TRAIN)
    tq.close()
    return 4 * batches


# %% [markdown]
# ## Reward: wait for samples until the end
#
# `await_batch` waits for the next batch. It also returns whether the stream has ended, which means that the partition
# is sealed and all samples are dealt. An empty batch before the end means that nothing became ready within `timeout`.
# ([`StreamingDataLoader`](06-streaming-loader.md) is this loop with micro-batches.)


# %%
def reward(config) -> int:
    """Score answers until the stream ends, and return their number."""
    tq.init(config)
    client, scored = tq.get_client(), 0
    while True:
        batch, ended = client.await_batch("answer", 4, TRAIN, "reward", timeout=SECONDS)
        if ended:
            tq.close()
            return scored
        if not len(batch):
            continue  # no samples became ready within the timeout
        answers = client.get_data(batch, layout="dense")["answer"]
        rewards = answers.float().mean(dim=1)
        client.put(TensorDict({"reward": rewards}, batch_size=[len(batch)]), metadata=batch)
        scored += len(batch)


# %% [markdown]
# ## Update: let the producers continue
#
# `set_policy_version` tells the partition the new version of the policy; rollout workers that wait for it continue.
# Fetch (and acknowledge) what a step trains on before you set the version that it makes.


# %%
def update() -> list[int]:
    """Train, and return by how many samples the producers were ahead of each step."""
    client, ahead = tq.get_client(), []
    for step in range(STEPS):
        batch = client.get_meta(["answer", "reward"], ROWS, TRAIN, task_name="update", timeout=SECONDS)
        assert len(client.get_data(batch)["reward"]) == ROWS  # forward and backward go here
        [partition] = client.status().partitions
        assert partition.policy is not None
        ahead.append(partition.policy.admitted - step * ROWS)
        client.set_policy_version(TRAIN, step + 1)
    return ahead


# %% [markdown]
# ## The options of the partition
#
# - `free_when=["update"]`: a sample is cleared when the update has finished it. Fetching the next batch
#   says so. A task that fetches ahead passes `hold=True` and calls `finish` itself.
# - `max_staleness=1, rows_per_version=8`: at each version, at most (1 + 1) * 8 samples are accepted that the update had
#   not consumed before the version was set. No fetch returns a sample whose tag `policy_version` is more than one
#   version old. The task that counts is `trained_by`; by default, all tasks of `free_when`.
# - `producers=2`: two calls of `seal` seal the partition.
#
# The system itself accepts 24 samples (`total_storage_size`). 32 samples pass through it here.


# %%
def train(config) -> None:
    client = tq.get_client()
    client.create_partition(TRAIN, producers=2, free_when=["update"], max_staleness=1, rows_per_version=ROWS)
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        producers = [pool.submit(rollout, config, STEPS * ROWS // 8) for _ in range(2)]
        scored = pool.submit(reward, config)
        ahead = update()
        assert [producer.result() for producer in producers] == [16, 16]
        assert scored.result() == 32
    assert max(ahead) <= 2 * ROWS  # the samples of this step and of one more

    _, ended = client.await_batch(["answer", "reward"], ROWS, TRAIN, "update", timeout=SECONDS)
    assert ended  # sealed twice, and everything is dealt
    [partition] = client.status().partitions
    assert (partition.rows, partition.freed) == (0, 32)


# %% [markdown]
# ## When there is no space
#
# Without a `timeout`, a producer that is too far ahead gets a `StalenessError` at once, and nothing is put. Full memory
# raises `CapacityError`. With a `timeout`, both wait
# ([backpressure](../guides/sizing-memory.md#backpressure-if-producers-are-faster-than-consumers)).


# %%
def no_space() -> None:
    client = tq.get_client()
    rows = TensorDict({"answer": torch.zeros(8, 6)}, batch_size=[8])
    client.create_partition("ahead", max_staleness=0, rows_per_version=8)
    client.put(rows, partition_id="ahead")
    try:
        client.put(rows, partition_id="ahead")
    except tq.StalenessError as error:
        print(error)
    else:
        raise AssertionError("the partition accepted samples that are too far ahead of the policy")


# %%
if __name__ == "__main__":
    config = tq.init({"backend": {"SimpleStorage": {"total_storage_size": 24}}})
    train(config)
    no_space()
    tq.close()
