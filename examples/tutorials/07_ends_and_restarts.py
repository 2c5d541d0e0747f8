# %% [markdown]
# # Ends and restarts
#
# How a stream ends on every rank, how a rank resumes after a crash, and how to save the whole system.

# %%
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tensordict import TensorDict

import transfer_queue as tq


def column(field: str, values: torch.Tensor) -> TensorDict:
    return TensorDict({field: values}, batch_size=[len(values)])


def loader_of(config, partition_id: str, dp_rank: int, finite: bool = False) -> tq.StreamingDataLoader:
    """Return a rank's loader of batches of four answers, in micro-batches of two."""
    return tq.StreamingDataLoader(
        tq.StreamingDataset(config, 4, 2, ["answer"], partition_id, "update", dp_rank, finite)
    )


# %% [markdown]
# ## Every rank gets the same number of batches
#
# A rank that has one batch more than the others would wait for them in its all-reduce forever. So after the seal, a
# batch is dealt only if every rank gets one. A remainder is divided over one last, smaller round. With
# `drop_last=True`, or if it has less than one sample for each rank, the task skips it.
#
# Here two producers put eleven answers for two ranks.


# %%
def ends(drop_last: bool, expected: list[list[int]]) -> str:
    config = tq.init({"controller": {"sampler": tq.RankAwareSampler(dp_size=2, drop_last=drop_last)}})
    client = tq.get_client()
    client.create_partition("train_0", producers=2)
    for count in (6, 5):
        assert not client.status().partitions[0].sealed
        last = client.put(column("answer", torch.arange(count)), partition_id="train_0")
        client.seal("train_0")
    loaders = [loader_of(config, "train_0", dp_rank) for dp_rank in (0, 1)]
    assert [[len(meta) for _, meta in loader] for loader in loaders] == expected
    why = client.explain("train_0", global_index=last.global_indexes[-1], task="update", fields="answer")
    tq.close()
    return why


# %% [markdown]
# Two more cases:
#
# - If an answer of a group was never put before the seal, the group is *orphaned*. No sampler of groups deals it, no
#   fetch waits for it, and `tq status` counts it.
# - If all samples exist before the training begins, `should_check_consumption_status=True` (`finite` here) ends a
#   loader without a seal when its task has consumed all of them. The rank that asks first may take all samples: ranks
#   that must end together need a seal.

# %% [markdown]
# ## A rank that dies and returns
#
# To resume after a crash, a rank saves the position of its loader with its checkpoint. The process that replaces it
# loads the position and gets the micro-batch that is next. This rank is killed in the middle of its second batch.


# %%
def trainer(config, checkpoint: Path, life: int) -> None:
    """Mark the samples that this process trains on; the first process ends after three micro-batches."""
    tq.init(config)
    loader = loader_of(config, "train_1", dp_rank=0, finite=True)
    if checkpoint.exists():
        loader.load_state_dict(torch.load(checkpoint))
    for step, (_, meta) in enumerate(loader, 1):
        tq.get_client().put(column("trained_in", torch.full((len(meta),), life)), metadata=meta)
        torch.save(loader.state_dict(), checkpoint)
        if (life, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
    tq.close()


def run(function, *arguments) -> int | None:
    process = get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def restarted(config) -> None:
    client = tq.get_client()
    client.put(column("answer", torch.arange(8)), partition_id="train_1")
    with TemporaryDirectory() as folder:
        assert run(trainer, config, Path(folder) / "place.pt", 1) == -signal.SIGKILL
        assert run(trainer, config, Path(folder) / "place.pt", 2) == 0
    trained = client.get_meta("trained_in", None, "train_1", mode="force_fetch")
    assert client.get_data(trained)["trained_in"].tolist() == [1, 1, 1, 1, 1, 1, 2, 2]


# %% [markdown]
# ## A producer that dies
#
# Samples that the producer has put remain. Samples that it has only reserved keep the stream open until the partition
# is sealed. They then expire, and the stream ends. `explain` and `tq status` say what is missing.

# %% [markdown]
# ## Save the whole system
#
# `save_checkpoint` saves one moment of the system while everything continues: samples, tags, what each task has
# consumed, and which batches were dealt. The previous checkpoint is replaced when the new one is complete. Save the
# positions of loaders (`state_dict`) beside it.
#
# `load_checkpoint` restores that moment, in this system or in a new one. Metadata that was fetched before the load is
# refused.


# %%
def saved(folder: Path) -> None:
    tq.kv_batch_put(["a", "b"], "notes", {"x": torch.arange(2)}, tags=[{"n": 0}, {"n": 1}])
    meta = tq.get_client().get_meta("x", None, "notes", mode="force_fetch")
    tq.save_checkpoint(folder / "checkpoint", metadata={"step": 7})
    tq.kv_clear(["a"], "notes")
    tq.load_checkpoint(folder / "checkpoint")
    assert tq.kv_list("notes") == {"notes": {"a": {"n": 0}, "b": {"n": 1}}}
    try:
        tq.get_client().get_data(meta)
    except tq.StaleMetadataError as error:
        assert "a checkpoint was loaded after this metadata was fetched" in str(error)


# %% [markdown]
# ## Move a partition into another run
#
# `save_checkpoint(..., partitions="replay")` saves only that partition, and `keys=` only some of its samples.
# `load_checkpoint(..., partitions="replay")` adds it to the running system, also from a checkpoint of the whole system.
# The samples keep their keys, tags, groups and what tasks have consumed (`reset_consumption` makes them ready again),
# and get new global indexes. The load fails if the partition exists and has one of the keys. The returned report names
# samples whose values were lost before the save.


# %%
def moved(folder: Path) -> None:
    tq.kv_batch_put(["a", "b"], "replay", {"x": torch.arange(2)}, tags=[{"n": 0}, {"n": 1}])
    tq.save_checkpoint(folder / "replay", partitions="replay")
    tq.kv_clear(["b"], "replay")
    report = tq.load_checkpoint(folder / "replay", partitions="replay", keys=["b"])
    assert (report.samples, report.lost) == ({"replay": 1}, {})
    assert tq.kv_batch_get(["a", "b"], "replay")["x"].tolist() == [0, 1]


# %%
if __name__ == "__main__":
    assert "was dealt to task 'update' in batch 1 of dp_rank 1" in ends(False, [[2, 2, 2], [2, 2, 1]])
    assert "is skipped by task 'update': remainder" in ends(True, [[2, 2], [2, 2]])

    config = tq.init({"controller": {"sampler": "RankAwareSampler"}})
    restarted(config)
    with TemporaryDirectory() as folder:
        saved(Path(folder))
        moved(Path(folder))
    tq.close()
