# %% [markdown]
# # Metadata
#
# Fetch samples by task instead of by key: metadata says which samples, values move when you ask for them.
#
# The controller knows which field of which sample is there, and which task has consumed which sample. It answers with a
# `BatchMeta`: global indexes, field names, dtypes, shapes and tags, no values. This page goes through the life of four
# samples in one process; the calls are the same in many.

# %%
import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init({"controller": {"polling_mode": True}})  # a fetch that cannot be met answers at once, which suits a page
client = tq.get_client()

# %% [markdown]
# ## Reserve, then put
#
# A put of new samples returns their metadata. Or reserve first (`mode="insert"`) and put later: the samples have their
# indexes before the rollout has written a token, and no task sees them until they have the fields it asks for.

# %%
reserved = client.get_meta(["prompt"], batch_size=2, partition_id="train_0", mode="insert")
assert len(reserved) == 2
assert reserved.field_names == []

prompts = torch.randint(0, 100, (2, 4))
client.put(TensorDict({"prompt": prompts}, batch_size=[2]), metadata=reserved)
more = client.put(TensorDict({"prompt": prompts + 1}, batch_size=[2]), partition_id="train_0")

# %% [markdown]
# ## Each task gets each sample once
#
# A task is a name. `rollout` and `filter` below fetch the same samples and do not disturb each other; a second fetch of
# the same task gets other samples. A fetch returns metadata, and counts as consumption. `get_data` reads the
# values, as often as you like.

# %%
batch = client.get_meta(["prompt"], batch_size=3, partition_id="train_0", task_name="rollout")
assert len(client.get_meta(["prompt"], 4, "train_0", task_name="filter")) == 4
rest = client.get_meta(["prompt"], 1, "train_0", task_name="rollout")
assert set(batch.global_indexes).isdisjoint(rest.global_indexes)
assert torch.equal(client.get_data(batch)["prompt"][0], prompts[0])

# %% [markdown]
# ## Cut it, send it, put by it
#
# Metadata is small and pickles. `chunk` cuts it for workers, `concat` joins it, `select_samples` and `select_fields`
# pick. Whoever holds a piece puts new fields into just these samples: here two rollout workers take one chunk each.

# %%
for chunk in tq.BatchMeta.concat([batch, rest]).chunk(2):
    prompt = client.get_data(chunk.select_fields("prompt"))["prompt"]
    answer = torch.stack([row.flip(0) for row in prompt.unbind()])
    chunk = client.put(TensorDict({"answer": answer}, batch_size=[len(chunk)]), metadata=chunk)
    assert chunk.field_names == ["answer", "prompt"]

# %% [markdown]
# ## Who lacks what
#
# A fetch asks for fields, and is met by samples that have all of them. Three samples get a reward; the trainer asks for
# four and gets none. Production status shows which; `explain` says it in words.

# %%
scored = client.get_meta(["answer"], 3, "train_0", task_name="reward")
client.put(TensorDict({"reward": torch.tensor([0.0, 1.0, 1.0])}, batch_size=[3]), metadata=scored)

fields = ["prompt", "answer", "reward"]
assert len(client.get_meta(fields, 4, "train_0", task_name="update")) == 0
indexes, produced = client.get_production_status(fields, "train_0")
assert indexes is not None
assert produced is not None
assert produced.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0]]
assert not client.check_production_status(fields, "train_0")

why = client.explain("train_0", global_index=int(indexes[3]), task="update", fields=fields)
print(why)
assert "misses the fields ['reward']" in why

# %% [markdown]
# ## Tags travel with metadata
#
# `custom_meta` is the tag of each sample: small things that decide, such as a length or the version of the policy.
# Change it and put; what changed is merged. `set_custom_meta` replaces tags without writing any field.

# %%
last = client.get_meta(["answer"], 1, "train_0", task_name="reward")
last.update_custom_meta([{"total_lengths": 8, "policy_version": 3}])
client.put(TensorDict({"reward": torch.tensor([0.5])}, batch_size=[1]), metadata=last)

last.update_custom_meta([{"policy_version": 4}])
client.set_custom_meta(last)

# %% [markdown]
# ## Look without consuming
#
# `mode="force_fetch"` gives all samples, consumed or not, and takes nothing from anybody: for a checkpoint of
# yours, for statistics, for looking around.

# %%
everything = client.get_meta(fields, None, "train_0", mode="force_fetch")
assert everything.is_ready
assert everything.custom_meta[3] == {"total_lengths": 8, "policy_version": 4}
assert client.get_data(everything)["reward"].tolist() == [0.0, 1.0, 1.0, 0.5]

# %% [markdown]
# ## Consume, and consume anew
#
# Consumption is kept by task. `reset_consumption` lets a task have everything again: a second epoch over the same data.

# %%
assert not client.check_consumption_status("update", "train_0")
first = client.get_meta(fields, 4, "train_0", task_name="update")
assert client.check_consumption_status("update", "train_0")
client.reset_consumption("train_0", task_name="update")
second = client.get_meta(fields, 4, "train_0", task_name="update")
assert first.global_indexes == second.global_indexes

# %% [markdown]
# ## Clear
#
# Cleared samples are gone for every task. A piece of metadata that names them is an error at the next read, with
# the index in it; their indexes are never given to other samples.

# %%
client.clear_samples(first[:2])
try:
    client.get_data(first)
except KeyError as error:
    print(error)
else:
    raise AssertionError("a cleared sample was read")
client.clear_partition("train_0")
assert client.get_partition_list() == []
tq.close()
