# %% [markdown]
# # Metadata
#
# Fetch samples by task instead of by key: metadata says which samples, and values move only when you ask for them.
#
# A fetch returns a `BatchMeta`: global indexes, field names, dtypes, shapes and tags, but no values. This page follows
# four samples in one process.

# %%
import torch
from tensordict import TensorDict

import transfer_queue as tq

tq.init({"controller": {"polling_mode": True}})  # on this page, a fetch without enough ready samples returns at once
client = tq.get_client()

# %% [markdown]
# ## Reserve, then put
#
# A put of new samples returns their metadata. You can also reserve samples first (`mode="insert"`) and put later. No
# task sees them until they have the fields that it asks for.

# %%
reserved = client.get_meta(["prompt"], batch_size=2, partition_id="train_0", mode="insert")
assert len(reserved) == 2

prompts = torch.randint(0, 100, (2, 4))
client.put(TensorDict({"prompt": prompts}, batch_size=[2]), metadata=reserved)
more = client.put(TensorDict({"prompt": prompts + 1}, batch_size=[2]), partition_id="train_0")

# %% [markdown]
# ## Each task gets each sample once
#
# A task is a name. `rollout` and `filter` fetch the same samples independently of each other. A second fetch of the
# same task returns other samples, because a fetch consumes them. `get_data` reads the values, as often as you like.

# %%
batch = client.get_meta(["prompt"], batch_size=3, partition_id="train_0", task_name="rollout")
assert len(client.get_meta(["prompt"], 4, "train_0", task_name="filter")) == 4
rest = client.get_meta(["prompt"], 1, "train_0", task_name="rollout")
assert set(batch.global_indexes).isdisjoint(rest.global_indexes)
assert torch.equal(client.get_data(batch)["prompt"][0], prompts[0])

# %% [markdown]
# ## Divide metadata, send it, put with it
#
# Metadata is small and can be pickled. `chunk` divides it for workers, `concat` joins it, and `select_samples` and
# `select_fields` select parts. A put with `metadata=` adds fields to exactly these samples.

# %%
for chunk in tq.BatchMeta.concat([batch, rest]).chunk(2):
    prompt = client.get_data(chunk.select_fields("prompt"))["prompt"]
    answer = torch.stack([row.flip(0) for row in prompt.unbind()])
    chunk = client.put(TensorDict({"answer": answer}, batch_size=[len(chunk)]), metadata=chunk)
    assert chunk.field_names == ["answer", "prompt"]

# %% [markdown]
# ## See which samples lack a field
#
# A fetch returns only samples that have all its fields. Here three samples get a reward, so a fetch of four gets none.
# The production status shows which sample lacks the field, and `explain` says why.

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
assert "is missing the field 'reward'" in why

# %% [markdown]
# ## Tags travel with metadata
#
# `custom_meta` is the tag of each sample. Change it and put; the changed entries are merged. `set_custom_meta` replaces
# tags without writing a field.

# %%
last = client.get_meta(["answer"], 1, "train_0", task_name="reward")
last.update_custom_meta([{"total_lengths": 8, "policy_version": 3}])
client.put(TensorDict({"reward": torch.tensor([0.5])}, batch_size=[1]), metadata=last)

last.update_custom_meta([{"policy_version": 4}])
client.set_custom_meta(last)

# %% [markdown]
# ## Read without consuming
#
# `mode="force_fetch"` returns all samples, consumed or not, and consumes nothing.

# %%
everything = client.get_meta(fields, None, "train_0", mode="force_fetch")
assert everything.is_ready
assert everything.custom_meta[3] == {"total_lengths": 8, "policy_version": 4}
assert client.get_data(everything)["reward"].tolist() == [0.0, 1.0, 1.0, 0.5]

# %% [markdown]
# ## Consume again
#
# `reset_consumption` makes all samples ready for a task again, for example for a second epoch.

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
# A cleared sample is gone for every task. A read of metadata that names it raises an error with its index, which is
# never used for another sample.

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
