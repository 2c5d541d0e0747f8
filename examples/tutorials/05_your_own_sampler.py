# %% [markdown]
# # Write your own sampler
#
# A class with one method decides which ready samples a task gets next, and which samples that consumes.

# %%
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq

# %% [markdown]
# ## The class
#
# `sample` gets the global indexes of the samples that are ready for the task and that it has not consumed. It returns
# two lists: the samples of the batch, in order, and the samples that are consumed. `([], [])` means "not now": the
# fetch waits for more.
#
# As keyword arguments, `sample` gets the entries of the caller's `sampling_config`, and `partition`, from which it
# reads tags. It never sees fields, so a value on which its decision depends must be in a tag.
#
# This sampler prefers prompts that the policy solves half of the time, from which a GRPO group learns most.


# %%
class Curriculum(tq.BaseSampler):
    """Deals the samples whose tag `pass_rate` is nearest to a target."""

    def __init__(self, target: float = 0.5) -> None:
        super().__init__()
        self.target = target

    def sample(self, ready_indexes, batch_size, *args, partition, target=None, **kwargs):
        """Return the samples nearest to the target."""
        if len(ready_indexes) < batch_size:
            return [], []
        target = self.target if target is None else target
        tags = partition.get_custom_meta(ready_indexes)
        chosen = sorted(ready_indexes, key=lambda index: abs(tags[index]["pass_rate"] - target))[:batch_size]
        return chosen, chosen


# %% [markdown]
# ## Try it without a system
#
# The test of a sampler needs no system, no processes and no tensors.


# %%
class Rates(dict):
    """Pass rates by global index, in place of a partition."""

    def get_custom_meta(self, indexes):
        return {index: {"pass_rate": self[index]} for index in indexes}


rates = Rates({0: 0.0, 1: 1.0, 2: 0.6, 3: 0.5})
assert Curriculum().sample([0, 1, 2, 3], 2, partition=rates) == ([3, 2], [3, 2])
assert Curriculum(target=1.0).sample([0, 1], 1, partition=rates) == ([1], [1])
assert Curriculum().sample([0, 1], 3, partition=rates) == ([], [])

# %% [markdown]
# ## Use it in a system
#
# `controller.sampler` is an instance, a class (created without arguments), or an import path "package.module:Class",
# which can be written into a YAML file.
#
# The sampler runs in a separate process, so that a slow one delays only the fetches that use it. That process imports
# the module that contains the class. This may be the script itself, if its work is under `if __name__ == "__main__"`.
# One call may take `timeouts.sampler` seconds (30). If it takes longer, the fetch raises `SamplerError`, and the next
# call starts a new process, in which the sampler gets the state that its `save_checkpoint` returned last. What the
# sampler prints is in `sampler.log` in the folder `logs` of the system.


# %%
def put_prompts() -> None:
    """Put prompts 0 to 4 with the pass rates 0, 0.25, ... 1 as tags."""
    tags = [{"pass_rate": step / 4} for step in range(5)]
    fields = TensorDict({"prompt": torch.arange(5)}, batch_size=[5])
    tq.kv_batch_put([f"prompt_{n}" for n in range(5)], "train_0", fields=fields, tags=tags)


def deals() -> None:
    tq.init({"controller": {"sampler": Curriculum(target=0.5)}})
    client = tq.get_client()
    put_prompts()
    first = client.get_meta("prompt", 1, "train_0", task_name="rollout")
    assert client.get_data(first)["prompt"].tolist() == [2]

    hard = client.get_meta("prompt", 2, "train_0", task_name="rollout", sampling_config={"target": 0.0})
    assert client.get_data(hard)["prompt"].tolist() == [0, 1]
    tq.close()


# %% [markdown]
# ## Samples in several batches
#
# A sampler need not consume the samples that it returns. A replay buffer consumes none, so the same sample may be in
# several batches, at most once in each. A sampler can keep values between calls in the dict `self._states`.


# %%
class Replay(tq.BaseSampler):
    """Mixes the newest sample with older ones."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        """Return the newest sample and older ones, which differ from batch to batch."""
        if len(ready_indexes) < batch_size:
            return [], []
        *older, newest = ready_indexes
        turn = self._states["turn"] = self._states.get("turn", -1) + 1
        return [newest, *(older[(turn + place) % len(older)] for place in range(batch_size - 1))], []


def replays() -> None:
    tq.init({"controller": {"sampler": Replay}})
    client = tq.get_client()
    put_prompts()
    batches = [client.get_meta("prompt", 3, "train_0", task_name="update") for _ in range(2)]
    assert [client.get_data(batch)["prompt"].tolist() for batch in batches] == [[4, 0, 1], [4, 1, 2]]
    assert not client.check_consumption_status("update", "train_0")
    tq.close()


# %% [markdown]
# ## Errors reach the caller
#
# `sample` must return global indexes from `ready_indexes`, each at most once, and at most `batch_size` of them sampled.
# If it returns anything else, or raises an exception, the fetch raises a `SamplerError` with the sampler's own
# traceback. Nothing is dealt then, and the system continues. If the sampler raises a `ValueError`, the fetch raises a
# `SamplerError` that is also a `ValueError`.


# %%
def fails() -> None:
    """Put a sample without the tag that the sampler reads."""
    tq.init({"controller": {"sampler": f"{Path(__file__).stem}:Curriculum"}})
    client = tq.get_client()
    tq.kv_put("prompt_0", "train_0", fields={"prompt": torch.tensor(0)})
    try:
        client.get_meta("prompt", 1, "train_0", task_name="rollout")
    except tq.SamplerError as error:
        assert "KeyError: 'pass_rate'" in str(error)
    else:
        raise AssertionError("the sampler's mistake was hidden")

    tq.kv_put("prompt_0", "train_0", tag={"pass_rate": 0.5})
    assert len(client.get_meta("prompt", 1, "train_0", task_name="rollout")) == 1
    tq.close()


# %%
if __name__ == "__main__":
    deals()
    replays()
    fails()
