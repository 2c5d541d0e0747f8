# %% [markdown]
# # Groups and samplers
#
# Deal complete GRPO groups, balance ranks, limit tokens, prefer or skip samples, and replace useless groups.
#
# A sampler, set in `controller.sampler`, decides which ready samples make the next batch ([choose a
# sampler](../guides/choosing-a-sampler.md)).

# %%
import torch
from tensordict import TensorDict

import transfer_queue as tq


def start(sampler: tq.BaseSampler) -> tq.TransferQueueClient:
    """Start a system with this sampler. Fetches without enough ready samples return at once."""
    tq.close()
    tq.init({"controller": {"sampler": sampler, "polling_mode": True}})
    return tq.get_client()


def put(prompt: str, lengths: list[int], partition_id: str = "train_0", **tag) -> tq.BatchMeta:
    """Put answers of these lengths for one prompt, with the lengths and `tag` as their tags."""
    meta = client.get_meta("answer", len(lengths), partition_id, mode="insert")
    meta.update_custom_meta([{"prompt": prompt, "total_lengths": length, **tag} for length in lengths])
    rows = [torch.zeros(length) for length in lengths]
    answers = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return client.put(TensorDict({"answer": answers}, batch_size=[len(rows)]), meta, group_ids=[prompt] * len(rows))


def fetch(rows: int, fields: str | list[str] = "answer", partition_id: str = "train_0", **sampling) -> list[str]:
    """Return the prompts of the next samples for the task `update`."""
    meta = client.get_meta(fields, rows, partition_id, task_name="update", sampling_config=sampling)
    return [tag["prompt"] for tag in meta.custom_meta]


# %% [markdown]
# ## Complete groups
#
# Name the prompt of each sample with `group_ids=`. It then does not matter when, in which order and by which worker the
# answers to a prompt are put. `GRPOGroupNSampler` deals a group when all its answers have all the requested fields.

# %%
client = start(tq.GRPOGroupNSampler(n_samples_per_prompt=2))
first = put("a", [3])
put("b", [5, 1])
put("a", [4])
assert fetch(2) == ["a", "a"]  # the second answer of "a" came last; the group is complete, and the oldest
client.reset_consumption("train_0")

client.put(TensorDict({"reward": torch.tensor([1.0])}, batch_size=[1]), metadata=first)
assert fetch(2, ["answer", "reward"]) == []  # the other answer has no reward; `client.explain` says so

# %% [markdown]
# ## The same number of tokens for each rank
#
# `SeqlenBalancedSampler` deals complete groups to all ranks at once, so that their sums of the tag `total_lengths` are
# nearly equal. `batch_size` is the number of samples for one rank.

# %%
client = start(tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
for prompt, length in (("a", 90), ("b", 80), ("c", 20), ("d", 10)):
    put(prompt, [length, length])
assert fetch(4, dp_rank=0, batch_index=0) == ["a", "a", "d", "d"]  # 200 tokens
assert fetch(4, dp_rank=1, batch_index=0) == ["b", "b", "c", "c"]  # 200 tokens

# %% [markdown]
# ## Micro-batches by tokens
#
# `TokenBudgetSampler` fills each rank's batch with complete groups up to a budget. `batch_size` is then the maximum
# number of samples. All ranks get the same number of batches.

# %%
client = start(tq.TokenBudgetSampler(token_budget=100, n_samples_per_prompt=2, dp_size=2))
for prompt, length in (("a", 40), ("b", 30), ("c", 15), ("d", 10), ("e", 45)):
    put(prompt, [length, length])
assert fetch(8, dp_rank=0, batch_index=0) == ["a", "a", "d", "d"]  # 100 tokens
assert fetch(8, dp_rank=1, batch_index=0) == ["b", "b", "c", "c"]  # 90 tokens; "e" fits no rank, and is dealt next

# %% [markdown]
# ## Priority and freshness
#
# `PrioritySampler` and `FreshnessSampler` contain another sampler (`inner`). The first presents the samples with the
# highest priority first; without `aging`, a low priority may wait forever. The second skips samples that an old policy
# made, a complete group at a time.

# %%
groups = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
client = start(tq.FreshnessSampler(tq.PrioritySampler(tag="priority", inner=groups), max_staleness=1))
put("old", [1, 1], policy_version=3, priority=9.0)
put("dull", [1, 1], policy_version=5, priority=0.1)
put("urgent", [1, 1], policy_version=4, priority=2.0)
client.set_policy_version("train_0", 5)
assert fetch(2) == ["urgent", "urgent"]
assert fetch(2) == ["dull", "dull"]
assert fetch(2) == []
[train] = client.status().partitions
assert train.passed["update"] == {"stale: more than 1 policy versions behind": 2}

# %% [markdown]
# ## Dynamic sampling: drop and refill
#
# DAPO discards groups in which all rewards are equal and makes new ones. `drop` removes groups, also their members that
# come late, and counts them by reason. `want` sets how many complete groups a task needs. Producers call `wanted` to
# get the number of missing groups; with `most=` they promise to make at most that many. With a `timeout`, `wanted`
# waits until groups are missing.
#
# To make a dropped group once more under the same id, put all its samples in one call.

# %%
client = start(tq.GRPOGroupNSampler(n_samples_per_prompt=2))
client.create_partition("dapo", group_size=2)
client.want("dapo", groups=3, task_name="update")


def rollout(made: int) -> int:
    """Make the missing groups; the first two prompts are useless."""
    for number in range(made, made + client.wanted("dapo", "update", most=8)):
        meta = put(f"prompt_{number}", [2, 2], "dapo")
        rewards = torch.tensor([0.0, 0.0] if number < 2 else [0.0, 1.0])
        client.put(TensorDict({"reward": rewards}, batch_size=[2]), metadata=meta)
        made += 1
    return made


made = rollout(0)
assert made == 3
assert client.wanted("dapo", "update") == 0

for prompt in ("prompt_0", "prompt_1"):  # the reward task finds that all their rewards are equal
    assert client.drop("dapo", groups=prompt, reason="all rewards alike") == 2
assert client.wanted("dapo", "update") == 2
made = rollout(made)
assert made == 5
assert fetch(6, ["answer", "reward"], "dapo") == ["prompt_2"] * 2 + ["prompt_3"] * 2 + ["prompt_4"] * 2
[dapo] = client.status().partitions
assert dapo.dropped == {"all rewards alike": 4}
tq.close()
