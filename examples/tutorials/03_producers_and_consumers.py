# %% [markdown]
# # Producers and consumers
#
# Rollout, reward and update as processes: nobody polls, nobody runs ahead, memory stays bounded.
#
# Two rollout workers generate answers, a reward worker scores them, and the update takes eight scored samples a
# step. All that they agree on are the names of a partition, of fields and of tasks.

# %%
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from tensordict import TensorDict

import transfer_queue as tq

TRAIN = "train_0"
STEPS, ROWS = 4, 8  # updates, and samples that each of them takes
SECONDS = 60  # what anybody waits before it is an error

# %% [markdown]
# ## Rollout: wait for room before you generate
#
# `get_meta(mode="insert")` reserves samples. It is the place where a producer is held back: with a `timeout` it waits
# until the partition takes more, before a token is generated. The put then always finds its place.
#
# `seal` says that this producer has no more samples. Fields of the samples that are there may still come.


# %%
def rollout(config, batches: int) -> int:
    """Generates batches of four answers; returns how many."""
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
# ## Reward: wait for samples, until there are no more
#
# A fetch that cannot be met waits in the controller and is answered by the put that completes it. `await_batch` also
# says when the end has come: the partition is sealed and everything is dealt. If it returns an empty batch and not the
# end, no samples became ready within `timeout`, and the loop asks again. (`StreamingDataLoader` is this loop with
# micro-batches; it has a page of its own.)


# %%
def reward(config) -> int:
    """Scores answers until no more come; returns how many."""
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
# ## Update: let the others go on
#
# After each step `set_policy_version` tells the partition that the policy has moved on, and with that the rollout
# workers that wait for it.


# %%
def update() -> list[int]:
    """Trains; returns how many samples the producers were ahead of each step."""
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
# ## The partition says what holds
#
# - `free_when=tq.consumed_by["update"]`: a sample is cleared when the update is through with it, which it says by
#   asking for the next batch. Nobody calls `clear`.
# - `max_staleness=1, rows_per_version=8`: new samples are taken in while fewer than (version + 1 + 1) * 8 were, so
#   that a sample that is trained on in its turn is at most one version old.
# - `producers=2`: two `seal`s seal it.
#
# The system itself takes 24 samples (`total_storage_size`), so that memory is bounded whatever partitions there are.
# Here 32 go through.


# %%
def train(config) -> None:
    client = tq.get_client()
    client.create_partition(
        TRAIN, producers=2, free_when=tq.consumed_by["update"], max_staleness=1, rows_per_version=ROWS
    )
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        producers = [pool.submit(rollout, config, STEPS * ROWS // 8) for _ in range(2)]
        scored = pool.submit(reward, config)
        ahead = update()
        assert [producer.result() for producer in producers] == [16, 16]
        assert scored.result() == 32
    assert max(ahead) <= 2 * ROWS  # the step's own samples, and those of one more

    _, ended = client.await_batch(["answer", "reward"], ROWS, TRAIN, "update", timeout=SECONDS)
    assert ended  # sealed twice, and everything is dealt
    [partition] = client.status().partitions
    assert (partition.rows, partition.freed) == (0, 32)


# %% [markdown]
# ## When there is no room
#
# Without a `timeout` a producer that is too far ahead gets an error at once, and nothing was put. With one it waits.
# Full memory is the same: `CapacityError` (of which `StalenessError` is one), or a wait.


# %%
def no_room() -> None:
    client = tq.get_client()
    rows = TensorDict({"answer": torch.zeros(8, 6)}, batch_size=[8])
    client.create_partition("ahead", max_staleness=0, rows_per_version=8)
    client.put(rows, partition_id="ahead")
    try:
        client.put(rows, partition_id="ahead")
    except tq.StalenessError as error:
        print(error)
    else:
        raise AssertionError("samples were taken in that are too far ahead of the policy")

    client.put(TensorDict({"answer": torch.zeros(16, 6)}, batch_size=[16]), partition_id="other")
    try:
        client.put(rows, partition_id="other")  # the 32nd sample of 24
    except tq.CapacityError as error:
        print(error)
    else:
        raise AssertionError("more samples were taken in than the system holds")


# %%
if __name__ == "__main__":
    config = tq.init({"backend": {"SimpleStorage": {"total_storage_size": 24}}})
    train(config)
    no_room()
    tq.close()
