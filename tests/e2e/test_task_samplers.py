"""A system whose sampler deals rounds for two ranks, and tasks with other numbers of ranks and other samplers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import light_sampler
import transfer_queue as tq
from transfer_queue.cli.status_table import format_table

ROWS, BATCH = 24, 4
OWN = {
    "named": "SequentialSampler",
    "of the class": tq.SequentialSampler,
    "an instance": tq.RankAwareSampler(dp_size=1),
    "pattern *": {"sampler": "SeqlenBalancedSampler", "sampler_args": {"dp_size": 1}},
    "a user's": light_sampler.FirstOnes,
    "a user's instance": light_sampler.FirstOnes(),
    "a user's path": "light_sampler:FirstOnes",
}


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    controller = {"sampler": "SeqlenBalancedSampler", "sampler_args": {"dp_size": 2}, "task_samplers": OWN}
    yield tq.init({"system": {"name": "task-samplers"}, "controller": controller})
    tq.close()


def put_answers(partition: str) -> None:
    client = tq.get_client()
    for _ in range(ROWS // 4):
        tags = [{"total_lengths": length + 1} for length in range(4)]
        client.put(TensorDict({"answer": torch.ones(4, 6)}, batch_size=[4]), partition_id=partition, tags=tags)
    client.seal(partition)


def put_rewards(dataset: tq.StreamingDataset, workers: int = 0) -> int:
    """Put a reward for each sample that the dataset yields; returns their number."""
    rewarded = 0
    for data, meta in tq.StreamingDataLoader(dataset, num_workers=workers):
        tq.get_client().put(TensorDict({"reward": data["answer"].mean(1)}, batch_size=[len(meta)]), metadata=meta)
        rewarded += len(meta)
    return rewarded


def train(config: Any, partition: str, rank: int) -> list[int]:
    dataset = tq.StreamingDataset(config, BATCH, BATCH, ["answer", "reward"], partition, "train", dp_rank=rank)
    return [row for _, meta in tq.StreamingDataLoader(dataset) for row in meta.global_indexes]


def check_everything_arrives(config: Any, partition: str, make: Callable[[], tq.StreamingDataset], **more: Any) -> None:
    """One process gives rewards, and both ranks of the trainer get every sample between them."""
    with ThreadPoolExecutor() as pool:
        ranks = [pool.submit(train, config, partition, rank) for rank in range(2)]
        rewarded = pool.submit(lambda: put_rewards(make(), **more))
        pool.submit(put_answers, partition).result()
        assert rewarded.result(timeout=60) == ROWS
        got = [rank.result(timeout=60) for rank in ranks]
    assert list(map(len, got)) == [ROWS // 2, ROWS // 2]
    assert len({*got[0], *got[1]}) == ROWS


def reward(config: Any, partition: str, task: str, **more: Any) -> tq.StreamingDataset:
    return tq.StreamingDataset(config, BATCH, 2, ["answer"], partition, task, dp_rank=0, **more)


@pytest.mark.parametrize(
    "more",
    [
        {"dp_size": 1},
        {"sampler": "SequentialSampler"},
        {"sampler": tq.SequentialSampler},
        {"sampler": tq.RankAwareSampler(dp_size=1)},
        {"sampler": tq.SeqlenBalancedSampler(), "dp_size": 1},
        {"sampler": {"sampler": "PrioritySampler", "sampler_args": {"inner": "RankAwareSampler"}}, "dp_size": 1},
        {"sampler": "GRPOGroupNSampler", "delivery": "at_least_once"},
    ],
    ids=["dp_size", "name", "class", "instance", "both", "mapping", "leases"],
)
def test_a_task_with_one_rank_beside_a_trainer_with_two(config: Any, more: dict[str, Any], request: Any) -> None:
    name = request.node.callspec.id
    check_everything_arrives(config, name, lambda: reward(config, name, f"reward {name}", **more))


@pytest.mark.parametrize("task", [*OWN, "pattern 7"])
def test_the_configuration_names_the_samplers_of_tasks(config: Any, task: str) -> None:
    check_everything_arrives(config, f"of {task}", lambda: reward(config, f"of {task}", task))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_loader_use_the_sampler_of_the_task(config: Any) -> None:
    put_answers("workers")
    dataset = reward(config, "workers", "with workers", sampler="SequentialSampler")
    assert put_rewards(dataset, workers=2) == ROWS


def test_a_function_that_fetches_batches_gets_them_from_the_sampler_of_the_task(config: Any) -> None:
    """Its claims need not name a sampler, because the controller knows that of the task."""

    def fetch(tq_client: Any, batch_index: int, **names: Any) -> Any:
        config = {"dp_rank": 0, "batch_index": batch_index}
        meta = tq_client.get_meta(["answer"], BATCH, names["partition_id"], task_name="fetch", sampling_config=config)
        return (tq_client.get_data(meta) if len(meta) else None), meta

    more = {"fetch_batch_fn": fetch, "should_check_consumption_status": True, "sampler": tq.RankAwareSampler(dp_size=1)}
    check_everything_arrives(config, "fetched", lambda: reward(config, "fetched", "fetch", **more))


def test_a_second_dataset_that_asks_for_another_sampler_is_refused_with_both(config: Any) -> None:
    reward(config, "refused", "refused", sampler=tq.RankAwareSampler(dp_size=1))
    reward(config, "elsewhere", "refused", sampler=tq.RankAwareSampler(1))
    reward(config, "refused", "refused")
    with pytest.raises(tq.TransferQueueError, match=r"RankAwareSampler\(dp_size=1\) \(.*but SequentialSampler\(\) is"):
        reward(config, "refused", "refused", sampler="SequentialSampler")
    with pytest.raises(ValueError, match=r"SequentialSampler\(\) \(controller.task_samplers\), but RankAware"):
        reward(config, "refused", "named", sampler="RankAwareSampler")
    with pytest.raises(ValueError, match=r"dp_size \(2\) must be equal to .* which is 1"):
        next(iter(reward(config, "refused", "refused", dp_size=2)))


@pytest.mark.parametrize("own", [light_sampler.FirstOnes, light_sampler.FirstOnes(), "light_sampler:FirstOnes"])
def test_a_sampler_of_your_own_is_not_sent_by_a_dataset(config: Any, own: Any) -> None:
    words = r"FirstOnes, which is not built in.*tq.init\(\{'controller': \{'task_samplers': \{'mine': FirstOnes\}\}\}\)"
    with pytest.raises(ValueError, match=words):
        reward(config, "mine", "mine", sampler=own)
    with pytest.raises(ValueError, match="PrioritySampler, which is not built in, or has a sampler inside"):
        reward(config, "mine", "mine", sampler=tq.PrioritySampler(inner=light_sampler.FirstOnes()))
    with pytest.raises(ValueError, match="'Nobody'; allowed: SequentialSampler"):
        reward(config, "mine", "mine", sampler="Nobody")


def test_samples_for_a_rank_that_never_asks_are_reported_everywhere(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = tq.get_client()
    put_answers("held")
    with caplog.at_level(logging.WARNING):
        assert put_rewards(reward(config, "held", "half")) == ROWS // 2
    words = "12 samples are held for dp_rank 1 of half, which has never asked; half has 1 rank: pass dp_size=1"
    assert words in caplog.text
    for task, fields in (("half", ["answer"]), ("train", ["answer", "reward"])):
        explained = client.explain("held", task=task, fields=fields)
        assert words in explained
        assert "consumed every sample" not in explained
    assert words in format_table(client.status())
    assert words in client.verdict().text
    with pytest.raises(TimeoutError, match=words):
        client.get_meta(
            ["advantage"], 1, "held", task_name="train", sampling_config={"sampler": "SequentialSampler"}, timeout=0.05
        )


# ---------------------------------------------------------------- the start of a system


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"reward": "Nobody"}, r"controller.task_samplers.reward: .*'Nobody'; allowed: SequentialSampler"),
        ({"reward": 5}, r"controller.task_samplers.reward is 5; allowed: the name of a built-in sampler"),
        ({"": "SequentialSampler"}, r"allowed: a mapping from the name or a pattern of tasks"),
        ({"r": {"name": "RankAwareSampler"}}, r"task_samplers.r is .*a mapping with the keys sampler and sampler_args"),
        ({"r": {"sampler": "RankAwareSampler", "sampler_args": {"ranks": 2}}}, r"task_samplers.r: .*ranks"),
        (
            {"r": {"sampler": tq.RankAwareSampler(), "sampler_args": {"dp_size": 2}}},
            "nothing if the sampler is an inst",
        ),
    ],
)
def test_a_wrong_configuration_starts_nothing(wrong: Any, words: str, config: Any) -> None:
    from transfer_queue.config.settings import Settings
    from transfer_queue.sampler.factory import sampler_objects

    conf = {"controller": {"task_samplers": wrong}}
    with pytest.raises(ValueError, match=words):
        sampler_objects(Settings.from_config(conf), conf)


def test_a_configuration_in_force_is_compared_with_that_of_a_caller(config: Any) -> None:
    assert config == {"controller": {"task_samplers": OWN}}
    assert config != {"controller": {"task_samplers": {**OWN, "named": "RankAwareSampler"}}}
    assert config != {"controller": {"task_samplers": {}}}


def test_a_dataset_registers_its_sampler_in_each_system_that_it_is_used_with(config: Any) -> None:
    """The last test, because it ends the system of the others."""
    dataset = reward(None, "again", "again", sampler="SequentialSampler")
    tq.close()
    controller = {"sampler": "SeqlenBalancedSampler", "sampler_args": {"dp_size": 2}}
    tq.init({"system": {"name": "task-samplers-2"}, "controller": controller})
    put_answers("again")
    assert put_rewards(dataset) == ROWS
