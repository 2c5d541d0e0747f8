# %% [markdown]
# # Keys and values
#
# Samples under keys: put fields and tags, read them from any process, be told when they change.
#
# This is the part to begin with. It has no tasks and no samplers: you name a sample, and everybody who knows the name
# can read it, add to it and clear it. Use it where your own code decides who works on what.

# %%
import multiprocessing

import torch
from tensordict import TensorDict

import transfer_queue as tq

# %% [markdown]
# ## A rollout worker
#
# It runs as a process of its own. `config` is what `tq.init()` returned in the process that started the system; it is
# all that a worker needs to attach. Here it makes two answers for each prompt, of different lengths, one at a time, and
# says in a *tag* what state the sample is in.


# %%
def rollout(config, prompts: int) -> None:
    """Puts two answers for each prompt under the keys `<prompt>/<n>`."""
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
# ## A judge that is told, and asks nobody twice
#
# `subscribe` yields an event for each sample that changes. `where` picks them by their tags in the controller, so the
# judge hears of answers that wait for it and of nothing else. It begins with what is there already, so it does not
# matter who starts first, and between events it sleeps in the controller: there is no loop with a `sleep` in it.
#
# A put on a known key adds its fields to those that are there, and merges its tag.


# %%
def judge(answers: int) -> dict[str, float]:
    """Scores so many answers as they come; key -> reward."""
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
# ## What is there now
#
# `kv_list` gives the tags by key, in order of creation; with `where`, of those samples alone. It moves no values: it is
# cheap to ask which samples there are, and to fetch just those.


# %%
def look(rewards: dict[str, float]) -> None:
    """Lists and reads what the two have made."""
    tags = tq.kv_list("train_0", where={"status": "scored"})["train_0"]
    assert len(tags) == len(rewards) == 6
    assert tags["0/1"] == {"status": "scored", "length": 4}
    assert tq.kv_list("train_0", where={"status": "scored", "length": 3})["train_0"].keys() == {"0/0"}

    # Rows come in the order of the keys. They differ in length, so a column is a jagged tensor; other layouts are
    # one word away. Objects come as they went in.
    batch = tq.kv_batch_get(keys=["2/1", "0/0"], partition_id="train_0")
    assert batch["answer"].is_nested
    assert [len(row) for row in batch["answer"].unbind()] == [6, 3]
    assert batch["text"] == ["0 1 2 3 4 5", "0 1 2"]
    assert torch.allclose(batch["reward"], torch.tensor([rewards["2/1"], rewards["0/0"]]))

    padded = tq.kv_batch_get(["2/1", "0/0"], "train_0", select_fields=["answer"], layout="padded")
    assert padded["answer"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 0, 0]]


# %% [markdown]
# ## Many at once, and away with them
#
# `kv_batch_put` writes columns: one row a key. What it returns, a `KVBatchMeta`, names keys, tags and fields without
# any values; it pickles, so it is what you send to another process instead of the batch.
#
# Cleared samples give their memory back. Nothing is cleared by itself unless the partition was made so, so clear what
# you no longer need.


# %%
def finish() -> None:
    """Adds a field to all samples in one call, then clears them."""
    keys = list(tq.kv_list("train_0")["train_0"])
    meta = tq.kv_batch_put(
        keys,
        "train_0",
        fields=TensorDict({"advantage": torch.linspace(-1, 1, len(keys))}, batch_size=[len(keys)]),
        tags=[{"status": "done", "length": tq.DELETE} for _ in keys],  # DELETE takes an entry out of a tag
    )
    assert meta.tags[0] == {"status": "done"}
    assert set(meta.fields or []) == {"answer", "text", "reward", "advantage"}
    assert tq.kv_batch_get_by_meta(meta.select_keys(["1/0"]))["advantage"].shape == (1,)

    tq.kv_clear(keys, "train_0")
    assert tq.kv_list("train_0")["train_0"] == {}
    try:
        tq.kv_batch_get(["0/0"], "train_0")
    except ValueError as error:
        assert "not found" in str(error)  # every error says what was wanted, what was there and what to do
    else:
        raise AssertionError("a cleared sample was read")


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
