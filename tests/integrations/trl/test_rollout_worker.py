"""TransferQueueRolloutWorker without a trainer: what it gives, when it fails, and how it ends."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from toy import SECONDS, WEIGHTS, begin, take

import transfer_queue as tq
from transfer_queue.integrations.trl import (
    Completion,
    TransferQueueRolloutWorker,
    generate_rollouts,
    rollout_buffer,
    score_rollouts,
)
from transfer_queue.integrations.trl.policy_weights import fetch_weights, read_publication


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A get that waits looks after the producers more often."""
    monkeypatch.setattr(rollout_buffer, "WAIT", 0.2)


class Hanging(toy.FixedEngine):
    """An engine that reports the prompts that it got, and never answers."""

    def __init__(self, reports: Any) -> None:
        super().__init__()
        self.reports = reports

    def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Completion]]:
        self.reports.send([row["number"] for row in rows])
        threading.Event().wait()
        raise AssertionError


def hang(reports: Any) -> None:
    generate_rollouts(Hanging(reports), prompts_together=3, lease=1.0)


def test_the_prompts_of_a_killed_generator_are_answered_by_another_one(tmp_path: Path) -> None:
    worker = begin(tmp_path)
    reader, writer = multiprocessing.Pipe(duplex=False)
    first = multiprocessing.get_context("fork").Process(target=hang, args=(writer,))
    first.start()
    held = reader.recv()
    assert held
    with toy.producers():
        others = take(worker, toy.GROUP)
        assert others[0].metrics["reward"] >= 0
        first.kill()
        first.join()
        admitted = 3 * toy.BATCH // toy.GROUP  # of version 0, with max_staleness 2
        samples = others + take(worker, admitted * toy.GROUP - toy.GROUP)
        worker.stop()
    found = [_number(sample) for sample in samples]
    assert sorted(found) == sorted(list(range(admitted)) * toy.GROUP)
    assert all(found[at : at + toy.GROUP] == [found[at]] * toy.GROUP for at in range(0, len(found), toy.GROUP))
    for sample in samples:
        answers = toy.FixedEngine().answers(toy.rows(32)[_number(sample)], toy.GROUP)
        assert list(sample.input_ids) in [answer.prompt_ids + answer.completion_ids for answer in answers]


def _number(sample: Any) -> int:
    """The number of a sample's prompt, which is unique by its first answer."""
    prompt = "".join(message["content"] for message in sample.prompt)
    candidates = [row for row in toy.rows(32) if row["prompt"] == prompt]
    tokens = list(sample.input_ids)
    for row in candidates:
        if tokens in [a.prompt_ids + a.completion_ids for a in toy.FixedEngine().answers(row, toy.GROUP)]:
            return int(row["number"])
    raise AssertionError(tokens)


def _dies(worker: Any, reports: Any) -> None:
    reports.send([list(map(int, sample.input_ids)) for sample in take(worker, toy.BATCH)])
    worker.rollout_buffer.release(toy.BATCH // 2)
    reports.send("released")
    threading.Event().wait()


def test_samples_of_a_killed_trainer_that_it_has_not_used_come_again(tmp_path: Path) -> None:
    worker = begin(tmp_path, worker={"lease": 1.0})
    reader, writer = multiprocessing.Pipe(duplex=False)
    with toy.producers():
        first = multiprocessing.get_context("fork").Process(target=_dies, args=(worker, writer))
        first.start()
        seen = reader.recv()
        assert reader.recv() == "released"
        first.kill()
        first.join()
        again = [list(sample.input_ids) for sample in take(worker, 3 * toy.BATCH - toy.BATCH // 2)]
        worker.stop()
    unused = seen[toy.BATCH // 2 :]
    assert sorted(again) == sorted(_all_tokens(3 * toy.BATCH // toy.GROUP, without=seen[: toy.BATCH // 2]))
    assert all(tokens in again for tokens in unused)


def _all_tokens(prompts: int, without: list[list[int]]) -> list[list[int]]:
    """The tokens of all answers to the first prompts, without some of them."""
    found = [
        answer.prompt_ids + answer.completion_ids
        for row in toy.rows(prompts)
        for answer in toy.FixedEngine().answers(row, toy.GROUP)
    ]
    for tokens in without:
        found.remove(tokens)
    return found


def test_generators_get_the_weights_with_their_version(tmp_path: Path) -> None:
    worker = begin(tmp_path)
    weights, version = fetch_weights("rollouts")
    assert version == worker.version == 0
    assert set(weights) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)
    engine = toy.FixedEngine()
    with toy.producers(engine):
        samples = take(worker, toy.BATCH)
        worker.rollout_buffer.release(toy.BATCH)
        worker.send_weights([("scale", torch.tensor(3.0)), ("layer.weight", WEIGHTS["layer.weight"])])
        worker.update_model_version(2)
        samples += take(worker, 3 * toy.BATCH)
        worker.stop()
    assert engine.loaded == 2
    assert fetch_weights("rollouts")[0]["scale"] == 3.0
    assert {sample.model_version for sample in samples} == {1, 2}  # as TRL counts, from 1


def test_prompts_are_admitted_only_as_far_ahead_as_the_staleness_allows(tmp_path: Path) -> None:
    worker = begin(tmp_path, prompts=1000)
    with toy.producers():
        take(worker, 3 * toy.BATCH)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=1.0)
        (progress,) = (p for p in tq.get_client().status().partitions if p.name == "rollouts")
        assert progress.policy is not None
        assert progress.policy.admitted == 3 * toy.BATCH
        worker.rollout_buffer.release(toy.BATCH)
        worker.send_weights(WEIGHTS.items())
        worker.update_model_version(2)
        take(worker, toy.BATCH)
        worker.stop()


@pytest.mark.parametrize("missing", ["generate", "score"])
def test_a_training_without_producers_fails(tmp_path: Path, missing: str) -> None:
    worker = begin(tmp_path, worker={"producer_timeout": 1.0})
    loops = {"generate": lambda: generate_rollouts(toy.FixedEngine()), "score": lambda: score_rollouts(toy.task.reward)}
    present = threading.Thread(target=loops["score" if missing == "generate" else "generate"])
    present.start()
    with pytest.raises(TimeoutError, match=rf"no process has worked for task '{missing}'.*for 1 s.*start a process"):
        worker.rollout_buffer.get(timeout=SECONDS)
    with pytest.raises(TimeoutError, match=missing):
        worker.check_health(300.0)
    worker.stop()
    present.join(SECONDS)
    assert not present.is_alive()


def test_a_training_whose_generator_is_killed_fails_if_there_is_no_other(tmp_path: Path) -> None:
    worker = begin(tmp_path, worker={"producer_timeout": 1.0})
    reader, writer = multiprocessing.Pipe(duplex=False)
    only = multiprocessing.get_context("fork").Process(target=hang, args=(writer,))
    only.start()
    reader.recv()
    scores = threading.Thread(target=score_rollouts, args=(toy.task.reward,))
    scores.start()
    with pytest.raises(queue.Empty):  # the generator is slow, but alive
        worker.rollout_buffer.get(timeout=3.0)
    only.kill()
    only.join()
    with pytest.raises(TimeoutError, match="task 'generate'"):
        worker.rollout_buffer.get(timeout=SECONDS)
    worker.stop()
    scores.join(SECONDS)


def test_a_training_whose_prompts_have_ended_fails(tmp_path: Path) -> None:
    worker = begin(tmp_path, prompts=5, worker={"epochs": 2})
    with toy.producers():
        samples = take(worker, 10 * toy.GROUP)
        assert worker.rollout_buffer.qsize() == 0
        with pytest.raises(TimeoutError, match="sealed, and the trainer has all of its samples"):
            worker.rollout_buffer.get(timeout=SECONDS)
        with pytest.raises(TimeoutError, match="sealed"):
            worker.check_health(300.0)
        worker.rollout_buffer.release(len(samples))
        with pytest.raises(TimeoutError, match="sealed"):
            worker.check_health(300.0)
        worker.stop()


def test_a_real_training_whose_prompts_have_ended_fails(tmp_path: Path) -> None:
    args = toy.arguments(tmp_path)
    worker = TransferQueueRolloutWorker(toy.rows(10), args, epochs=1)
    trainer = toy.make_trainer(tmp_path, args, **worker.trainer_arguments())
    with toy.producers(), pytest.raises(TimeoutError, match="sealed, and the trainer has all of its samples"):
        trainer.train()


def test_an_error_of_the_dataset_reaches_the_trainer(tmp_path: Path) -> None:
    worker = TransferQueueRolloutWorker([{"prompt": "1="}, 7], toy.arguments(tmp_path))
    worker.send_weights(WEIGHTS.items())
    worker.update_model_version(1)
    worker.start()
    with pytest.raises(TypeError, match="int"):
        worker.rollout_buffer.get(timeout=SECONDS)
    worker.stop()


def test_stop_ends_producers_that_work_and_those_that_wait(tmp_path: Path) -> None:
    worker = begin(tmp_path, prompts=1000)
    with toy.producers(generators=3):  # which asserts that the threads end
        take(worker, toy.BATCH)
        worker.stop()
        worker.stop()
    publication = read_publication("rollouts")
    assert publication is not None
    assert publication.stopped


def test_producers_that_start_after_a_training_wait_for_the_next_one(tmp_path: Path) -> None:
    begin(tmp_path).stop()
    with toy.producers() as threads:
        worker = begin(tmp_path)
        take(worker, toy.BATCH)
        assert all(thread.is_alive() for thread in threads)
        worker.stop()


def test_the_order_of_prompts_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    orders = []
    for seed in (1, 1, 2):
        worker = begin(tmp_path, prompts=6, worker={"seed": seed}, max_staleness=4)
        with toy.producers():
            orders.append([_number(sample) for sample in take(worker, 12 * toy.GROUP)][:: toy.GROUP])
            worker.stop()
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0][:6]) == sorted(orders[0][6:]) == list(range(6))
    assert orders[0][:6] != orders[0][6:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_staleness": 0}, "max_staleness must be at least 1"),
        ({"per_device_train_batch_size": 2, "max_staleness": 1}, "max_staleness must be at least 2"),
    ],
)
def test_a_configuration_that_would_wait_for_itself_is_refused(tmp_path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TransferQueueRolloutWorker(toy.rows(8), toy.arguments(tmp_path, **changes))


def test_an_engine_that_returns_too_few_completions_is_named(tmp_path: Path) -> None:
    class Short(toy.FixedEngine):
        def answers(self, row: Mapping[str, Any], count: int) -> list[Completion]:
            return super().answers(row, count - 1)

    worker = begin(tmp_path)
    with pytest.raises(ValueError, match=r"must return 4 completions for each of \d prompts, got groups of \[3"):
        generate_rollouts(Short())
    worker.stop()


def test_samples_that_the_trainer_leaves_out_make_space_at_once(tmp_path: Path) -> None:
    """They were not trained on, so they count as dropped; those that it trained on make space with the next version."""
    worker = begin(tmp_path, prompts=1000)
    with toy.producers():
        take(worker, 3 * toy.BATCH)
        worker.rollout_buffer.release(toy.BATCH, range(toy.BATCH - toy.GROUP))
        take(worker, toy.GROUP)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get(timeout=1.0)
        (progress,) = (p for p in tq.get_client().status().partitions if p.name == "rollouts")
        assert progress.dropped == {rollout_buffer.LEFT_OUT: toy.GROUP}
        worker.stop()


def test_a_trainer_that_leaves_samples_out_goes_on(tmp_path: Path) -> None:
    """TRL leaves out what is too old for it, here every sample of some versions."""
    args = toy.arguments(tmp_path, max_steps=6)
    worker = TransferQueueRolloutWorker(toy.rows(64), args)
    make, left_out = worker.rollout_buffer._sample, []

    def sample(values: Mapping[str, Any], tag: Mapping[str, Any]) -> Any:
        made = make(values, tag)
        if tag["group"] % 3 == 1:
            left_out.append(tag["group"])
            made.model_version -= 1000
        return made

    worker.rollout_buffer._sample = sample  # type: ignore[method-assign]
    trainer = toy.make_trainer(tmp_path, args, **worker.trainer_arguments())
    with toy.producers():
        trainer.train()
    assert trainer.state.global_step == 6
    (progress,) = (p for p in tq.get_client().status().partitions if p.name == "rollouts")
    assert progress.dropped[rollout_buffer.LEFT_OUT] > 0
    assert left_out
