# %% [markdown]
# # Leases and restarts
#
# Samples that a consumer fetched and did not finish are delivered again, and a system whose servers are killed
# continues.

# %%
import os
import signal
from multiprocessing import get_context
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq


def answers(count: int) -> TensorDict:
    return TensorDict({"answer": torch.arange(count)}, batch_size=[count])


def killed(function, *arguments) -> None:
    """Run a function in another process, which kills itself."""
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


# %% [markdown]
# ## A consumer that dies
#
# A fetch consumes what it returns: if its process died a moment later, no other process would get these samples. With
# `lease=seconds` they are *claimed* instead, and `ack` consumes them. The client renews the lease in the background as
# long as the program keeps the metadata, so the lease may be much shorter than the work. If it ends without an ack, the
# samples are delivered again to the next claim. A claim that waits for them is answered at the moment in which the
# lease ends.


# %%
def dies(config) -> None:
    tq.init(config)
    meta = tq.get_client().get_meta("answer", 4, "train_0", task_name="reward", lease=0.5)
    assert meta.deliveries == [1, 1, 1, 1]
    os.kill(os.getpid(), signal.SIGKILL)


def delivered_again(config) -> None:
    client = tq.get_client()
    client.put(answers(4), partition_id="train_0")
    killed(dies, config)
    meta = client.get_meta("answer", 4, "train_0", task_name="reward", lease=30)
    assert meta.deliveries == [2, 2, 2, 2]
    (task,) = client.status().partitions[0].tasks
    assert (task.claimed, task.consumed) == (4, 0)
    assert client.ack(meta)
    (task,) = client.status().partitions[0].tasks
    assert (task.claimed, task.consumed) == (0, 4)


# %% [markdown]
# ## Give samples back
#
# `nack` gives samples back at once, all of them or some. With `delivered=False` the delivery does not count. An ack
# that comes too late has no effect and returns False, because other processes may have received the samples by then.
# Put a result as a field of the sample before the ack: a second delivery then only puts it again.


# %%
def given_back() -> None:
    client = tq.get_client()
    client.put(answers(4), partition_id="train_1")
    meta = client.get_meta("answer", 4, "train_1", task_name="reward", lease=30)
    done, rest = meta.select_samples([0, 1]), meta.select_samples([2, 3])
    assert client.nack(rest)
    client.put(TensorDict({"reward": torch.ones(2)}, batch_size=[2]), metadata=done)
    assert client.ack(done)
    again = client.get_meta("answer", 2, "train_1", task_name="reward", lease=30)
    assert (again.global_indexes, again.deliveries) == (rest.global_indexes, [2, 2])
    assert not client.ack(rest)  # these belong to the second delivery now
    assert client.ack(again)


# %% [markdown]
# ## Poison
#
# A sample that kills every process that works on it would be delivered forever. After `max_deliveries` deliveries
# without an ack, the task skips it; `tq status` counts it, and `explain` says why. The default is 16
# (`controller.max_deliveries`, or `create_partition(max_deliveries=...)` for a partition).


# %%
def poison() -> None:
    client = tq.get_client()
    client.create_partition("train_2", max_deliveries=2)
    put = client.put(answers(1), partition_id="train_2")
    for delivery in (1, 2):
        meta = client.get_meta("answer", 1, "train_2", task_name="reward", lease=30)
        assert meta.deliveries == [delivery]
        client.nack(meta)
    why = client.explain("train_2", global_index=put.global_indexes[0], task="reward", fields="answer")
    assert "is skipped by task 'reward': poison (delivered 2 times, never acknowledged)" in why


# %% [markdown]
# ## A loader that delivers at least once
#
# `delivery="at_least_once"` gives each batch of a loader a lease, and acknowledges it when the training process asks
# for the first item after it. This trainer is killed in the middle of its second batch. The trainer that replaces it
# gets that batch again from its beginning, and not the first batch.


# %%
def loader(config) -> tq.StreamingDataLoader:
    """Return a loader of batches of four answers, in micro-batches of two."""
    dataset = tq.StreamingDataset(
        config, 4, 2, ["answer"], "train_3", "update", 0, delivery="at_least_once", lease_seconds=0.5
    )
    return tq.StreamingDataLoader(dataset)


def trainer(config) -> None:
    for step, (data, _) in enumerate(loader(config), 1):
        assert data["answer"].tolist() == [2 * step - 2, 2 * step - 1]
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def trained_at_least_once(config) -> None:
    client = tq.get_client()
    client.put(answers(8), partition_id="train_3")
    client.seal("train_3")
    killed(trainer, config)
    items = [(data["answer"].tolist(), meta.deliveries) for data, meta in loader(config)]
    assert items == [([4, 5], [2, 2]), ([6, 7], [2, 2])]


# %% [markdown]
# With a rank-consistent sampler (such as `RankAwareSampler`) a batch belongs to its `dp_rank`. No other
# rank gets the samples that this rank has not acknowledged, until `client.declare_rank_gone(partition_id, task_name,
# dp_rank)` reports that the rank will not return. A replica of the rank gets each of its batches again by its number,
# also the acknowledged ones. So a trainer that replaces a killed one, and begins with batch 0, trains on all of them
# again, unless it loads the `state_dict` of the loader that was saved with its model ([ends and
# restarts](07-ends-and-restarts.md)).

# %% [markdown]
# ## Servers that die
#
# The controller records its decisions before it replies. If it is killed, it is restarted and continues with the same
# state, including leases and their tokens. A killed storage unit continues with its memory. A call that is made
# meanwhile waits and is answered, and its request takes effect once.


# %%
def kill_server(name: str) -> None:
    """Kill a server of the system that this process has started; the server's log names its process."""
    log = Path(os.environ["TQ_ADDRESS"], "logs", f"{name}.log").read_text()
    os.kill(int(log.rsplit("up, process ", 1)[1].split()[0]), signal.SIGKILL)


def servers_die() -> None:
    client = tq.get_client()
    client.put(answers(4), partition_id="train_4")
    meta = client.get_meta("answer", 4, "train_4", task_name="reward", lease=30)
    kill_server("controller")
    kill_server("unit-0")
    assert client.get_data(meta)["answer"].tolist() == [0, 1, 2, 3]
    client.put(answers(4), partition_id="train_4")
    assert client.ack(meta)
    (task,) = client.status().partitions[-1].tasks
    assert task.consumed == 4


# %% [markdown]
# The memory of a lost storage unit, or of a lost machine, needs other means: two copies of each value
# (`backend.SimpleStorage.replicas: 2`) survive a lost unit, and a checkpoint ([ends and
# restarts](07-ends-and-restarts.md)) survives a lost machine.

# %%
if __name__ == "__main__":
    config = tq.init()
    delivered_again(config)
    given_back()
    poison()
    trained_at_least_once(config)
    servers_die()
    tq.close()
