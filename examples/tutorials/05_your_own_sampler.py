# %% [markdown]
# # Your own sampler
#
# A class with one method decides which of the ready samples a task gets next, and which are consumed by that.

# %%
from pathlib import Path

import torch
from tensordict import TensorDict

import transfer_queue as tq

# %% [markdown]
# ## The class
#
# `sample` is given the global indexes of the samples that are ready for the task that asks, and that it has not
# consumed. It returns two lists: what the batch holds, in its order, and what is consumed. `([], [])` means: not now;
# the fetch then waits for more.
#
# By keyword it gets what the caller wrote into `sampling_config`, and `partition`, through which it reads the samples'
# tags. Both contain the values that were put: arrays, tensors, tuples, sets, dicts. `sample` never sees the samples'
# fields, so a value that it needs for its decision must be in a tag.
#
# This one prefers prompts that the policy solves half of the time, which teach a GRPO group most.


# %%
class Curriculum(tq.BaseSampler):
    """Deals the samples whose tag `pass_rate` is nearest to a target."""

    def __init__(self, target: float = 0.5) -> None:
        super().__init__()
        self.target = target

    def sample(self, ready_indexes, batch_size, *args, partition, target=None, **kwargs):
        """The nearest to the target of the caller, or else to that of the sampler."""
        if len(ready_indexes) < batch_size:
            return [], []
        target = self.target if target is None else target
        tags = partition.get_custom_meta(ready_indexes)
        chosen = sorted(ready_indexes, key=lambda index: abs(tags[index]["pass_rate"] - target))[:batch_size]
        return chosen, chosen


# %% [markdown]
# ## Try it alone
#
# A sampler is an object with a method; a test of it needs no system, no processes and no tensors.


# %%
class Rates(dict):
    """Stands for a partition: global index -> pass rate."""

    def get_custom_meta(self, indexes):
        return {index: {"pass_rate": self[index]} for index in indexes}


rates = Rates({0: 0.0, 1: 1.0, 2: 0.6, 3: 0.5})
assert Curriculum().sample([0, 1, 2, 3], 2, partition=rates) == ([3, 2], [3, 2])
assert Curriculum(target=1.0).sample([0, 1], 1, partition=rates) == ([1], [1])
assert Curriculum().sample([0, 1], 3, partition=rates) == ([], [])

# %% [markdown]
# ## Let the system use it
#
# `controller.sampler` takes an instance, a class, which is made without arguments, or an import path
# "package.module:Class", which fits into a YAML file. All three are used below.
#
# The sampler runs in a process of its own, next to the controller, so that a slow sampler holds up only the fetches
# that use it. That process imports the module that contains the class. The module may be the script itself, if the work
# of the script is under `if __name__ == "__main__"`. One call may take `timeouts.sampler` seconds (30). If it takes
# longer, the controller ends the process, and the fetch raises a `SamplerError`. The next call starts a new process, in
# which the sampler gets the state that its `save_checkpoint` returned last. What the sampler prints and logs is in
# `sampler.log`, next to `controller.log` in the system's folder `logs`. With `controller.sampler_isolation: inline`
# the sampler runs in the controller itself: a small fetch is answered 0.3 ms sooner, and all other clients wait while
# `sample` runs.


# %%
def put_prompts() -> None:
    """Prompts 0 to 4 with pass rates 0, 0.25, ... 1; tags come together with the fields."""
    tags = [{"pass_rate": step / 4} for step in range(5)]
    fields = TensorDict({"prompt": torch.arange(5)}, batch_size=[5])
    tq.kv_batch_put([f"prompt_{n}" for n in range(5)], "train_0", fields=fields, tags=tags)


def deals() -> None:
    tq.init({"controller": {"sampler": Curriculum(target=0.5)}})
    client = tq.get_client()
    put_prompts()
    first = client.get_meta("prompt", 1, "train_0", task_name="rollout")
    assert client.get_data(first)["prompt"].tolist() == [2]

    # what stands in sampling_config comes by keyword
    hard = client.get_meta("prompt", 2, "train_0", task_name="rollout", sampling_config={"target": 0.0})
    assert client.get_data(hard)["prompt"].tolist() == [0, 1]
    tq.close()


# %% [markdown]
# ## Samples more than once
#
# A sampler need not consume the samples that it returns. A replay buffer consumes none, so the same sample may be in
# several batches. In one batch each sample is at most once. `self._states` is a dict in which a sampler can keep values
# between calls.


# %%
class Replay(tq.BaseSampler):
    """Mixes the newest sample with older ones."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        """Return the newest sample, then older ones; each batch has other older ones."""
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
# ## Mistakes reach their caller
#
# The controller checks everything that `sample` returns. It must be global indexes out of `ready_indexes`, each at most
# once, with at most `batch_size` of them sampled. If it is anything else, or if the sampler raises an exception or
# calls `sys.exit()`, the fetch raises a `SamplerError` with the sampler's own traceback. Then nothing is dealt, and the
# system goes on. If the sampler raises a `ValueError`, the error that the fetch raises is a `ValueError`, too.


# %%
def fails() -> None:
    """A sample comes without the tag that the sampler reads."""
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
