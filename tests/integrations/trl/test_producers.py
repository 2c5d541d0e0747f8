"""Advantages, reward functions, and the engine that generates with transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from toy import begin, take
from transformers import AutoModelForCausalLM, AutoTokenizer

import transfer_queue as tq
from transfer_queue.integrations.trl import TransformersEngine, score_rollouts
from transfer_queue.integrations.trl.producers import advantages_of


def test_advantages_are_those_of_trl() -> None:
    rewards = [1.0, 0.0, 0.5, 0.25]
    advantages, metrics = advantages_of({"a": rewards, "b": [0.5] * 4})
    total = np.array(rewards) + 0.5
    assert advantages == ((total - total.mean()) / (total.std() + 1e-8)).tolist()
    assert metrics[2] == {"reward": 1.0, "reward_std": float(total.std()), "rewards/a": 0.5, "rewards/b": 0.5}


def test_a_completion_that_no_function_can_judge_has_no_advantage() -> None:
    nan = math.nan
    advantages, metrics = advantages_of({"a": [1.0, nan, nan, 0.0], "b": [nan, nan, 2.0, 0.0]})
    judged = np.array([1.0, 2.0, 0.0])
    wanted = (judged - 1.0) / (judged.std() + 1e-8)
    assert advantages == [wanted[0], 0.0, wanted[1], wanted[2]]
    assert math.isnan(metrics[1]["reward"])
    assert advantages_of({"a": [nan, nan]})[0] == [0.0, 0.0]


def test_reward_functions_get_what_trl_passes_and_may_be_coroutines(tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []

    def first(**arguments: Any) -> list[float]:
        calls.append(arguments)
        return [0.0, 1.0, 2.0, 3.0]

    async def second(prompts: list[str], **others: Any) -> list[float | None]:
        return [None] * len(prompts)

    worker = begin(tmp_path)
    with toy.producers(rewards=[first, second]):
        samples = take(worker, toy.GROUP)
        worker.stop()
    answers = toy.FixedEngine().answers(toy.rows(1)[0], toy.GROUP)
    assert calls[0] == {
        "prompts": ["0="] * toy.GROUP,
        "completions": [answer.content for answer in answers],
        "completion_ids": [answer.completion_ids for answer in answers],
        "digit": ["0"] * toy.GROUP,
        "number": [0] * toy.GROUP,
    }
    assert [sample.metrics["reward"] for sample in samples] == [0.0, 1.0, 2.0, 3.0]
    assert math.isnan(samples[0].metrics["rewards/second"])
    for sample, answer in zip(samples, answers):
        assert list(sample.completion_mask) == [0, 0] + [1] * len(answer.completion_ids)
        assert np.array_equal(np.float32(sample.old_log_probs), np.float32([0, 0, *answer.logprobs]))


def test_a_reward_function_that_returns_too_few_rewards_is_named(tmp_path: Path) -> None:
    def short(**arguments: Any) -> list[float]:
        return [1.0]

    worker = begin(tmp_path)
    answers = toy.FixedEngine()
    with toy.producers(answers, rewards=False):
        with pytest.raises(ValueError, match="'short' must return 4 rewards, one for each completion, got 1"):
            score_rollouts(short)
        worker.stop()


def engine_of(folder: Path, **changes: Any) -> tuple[TransformersEngine, Any, Any]:
    toy.task.make_model(folder, seed=0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return TransformersEngine(model, tokenizer, **{"max_new_tokens": 4} | changes), model, tokenizer


def test_log_probabilities_are_those_of_the_model_at_the_temperature(tmp_path: Path) -> None:
    engine, model, tokenizer = engine_of(tmp_path, temperature=0.7)
    torch.manual_seed(1)
    found = engine.generate([{"prompt": "1="}, {"prompt": "=123="}], 16)
    assert [len(group) for group in found] == [16, 16]
    lengths = set()
    for answer in [answer for group in found for answer in group]:
        ids = torch.tensor([answer.prompt_ids + answer.completion_ids])
        with torch.no_grad():
            wanted = (model(ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted[len(answer.prompt_ids) - 1 :])
        assert tokenizer.eos_token_id not in answer.completion_ids[:-1]
        assert answer.content == tokenizer.decode(answer.completion_ids, skip_special_tokens=True)
        lengths.add((len(answer.completion_ids), answer.completion_ids[-1] == tokenizer.eos_token_id))
    assert len(lengths) > 2
    assert all(length == 4 or ended for length, ended in lengths)


def test_messages_are_answered_with_messages(tmp_path: Path) -> None:
    engine, _, tokenizer = engine_of(tmp_path)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
    ((answer,),) = engine.generate([{"prompt": [{"role": "user", "content": "7"}]}], 1)
    assert answer.prompt_ids == tokenizer("7=")["input_ids"]
    assert [message["role"] for message in answer.content] == ["assistant"]


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    engine, model, _ = engine_of(tmp_path)
    weights = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    engine.load_weights(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(tq.TransferQueueError, match=r"no parameters .*other"):
        engine.load_weights({"other": torch.zeros(1)})
