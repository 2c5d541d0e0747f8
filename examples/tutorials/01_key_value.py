# %% [markdown]
# # Keys and values
#
# Put samples under keys with fields and tags, read them from any process, and get notified when they change.
#
# Begin here. You name a sample, and every process that knows the name can read it, add fields to it and clear it. Use
# this interface if your own code decides which process works on which sample.

# %%
import multiprocessing

import torch
from tensordict import TensorDict

import transfer_queue as tq

# %% [markdown]
# ## A rollout worker
#
# The worker runs in its own process. It needs only `config` to attach, which `tq.init()` returned in the process that
# started the system. It makes two answers for each prompt, and sets a *tag* with the state of the sample.


# %%
def rollout(config, prompts: int) -> None:
    """Put two answers for each prompt under the keys `<prompt>/<n>`."""
    tq.init(config)
    for prompt in range(prompts):
        for n in range(2):
            answer = torch.arange(3 + prompt + n)  # the model's tokens
            tq.kv_put(
                key=f"{prompt}/{n}",
                partition_id="train_0",
                fields={"answer": answer, "text": " ".join(map(str, answer.tolist()))},
                tag={"status": "generated", "length": len(answer)},
            )
    tq.close()


# %% [markdown]
# ## A judge that is notified
#
# `subscribe` yields an event for each sample that changes, here only for those whose tag matches `where`. The events
# begin with the samples that exist already, so it does not matter which process starts first. Nothing polls.
#
# A put under a known key adds its fields to the existing ones and merges its tag.


# %%
def judge(answers: int) -> dict[str, float]:
    """Score this number of answers, and return the rewards by key."""
    rewards: dict[str, float] = {}
    for event in tq.get_client().subscribe("train_0", where={"status": "generated"}):
        assert event.key is not None
        sample = tq.kv_batch_get(keys=[event.key], partition_id="train_0")
        reward = sample["answer"][0].float().mean()
        rewards[event.key] = reward.item()
        tq.kv_put(event.key, "train_0", fields={"reward": reward}, tag={"status": "scored"})
        if len(rewards) == answers:
            break
    return rewards


# %% [markdown]
# ## List what exists
#
# `kv_list` returns the tags by key, in order of creation, and moves no values.


# %%
def look(rewards: dict[str, float]) -> None:
    """List and read what the two processes have made."""
    tags = tq.kv_list("train_0", where={"status": "scored"})["train_0"]
    assert len(tags) == len(rewards) == 6
    assert tags["0/1"] == {"status": "scored", "length": 4}

    # Rows have the order of the keys, in a jagged tensor; `layout=` chooses another form.
    batch = tq.kv_batch_get(keys=["2/1", "0/0"], partition_id="train_0")
    assert batch["answer"].is_nested
    assert [len(row) for row in batch["answer"].unbind()] == [6, 3]
    assert batch["text"] == ["0 1 2 3 4 5", "0 1 2"]
    assert torch.allclose(batch["reward"], torch.tensor([rewards["2/1"], rewards["0/0"]]))


# %% [markdown]
# ## Put many at once, and clear
#
# `kv_batch_put` writes columns: one row for each key. It returns a `KVBatchMeta` without values, which you can send to
# another process instead of the batch. If your code puts row by row, `client.buffered()` collects the rows, and
# concurrent puts (`tq.async_kv_put`) travel together.
#
# Clear samples that you no longer need. A partition clears nothing by itself unless it was created with an option for
# that.


# %%
def finish() -> None:
    """Add a field to all samples in one call, then clear them."""
    keys = list(tq.kv_list("train_0")["train_0"])
    meta = tq.kv_batch_put(
        keys,
        "train_0",
        fields=TensorDict({"advantage": torch.linspace(-1, 1, len(keys))}, batch_size=[len(keys)]),
        tags=[{"status": "done", "length": tq.DELETE} for _ in keys],  # DELETE removes an entry of a tag
    )
    assert meta.tags[0] == {"status": "done"}
    assert set(meta.fields or []) == {"answer", "text", "reward", "advantage"}
    assert tq.kv_batch_get_by_meta(meta.select_keys(["1/0"]))["advantage"].shape == (1,)

    tq.kv_clear(keys, "train_0")
    assert tq.kv_list("train_0")["train_0"] == {}


# %%
if __name__ == "__main__":
    config = tq.init()  # the first call starts a system; later ones, in any process, attach to it
    worker = multiprocessing.get_context("spawn").Process(target=rollout, args=(config, 3), daemon=True)
    worker.start()
    rewards = judge(answers=6)
    worker.join()
    look(rewards)
    finish()
    tq.close()
