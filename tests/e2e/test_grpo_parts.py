"""The parts of examples/grpo that can be checked without a run."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo"

with pytest.MonkeyPatch.context() as path:
    path.syspath_prepend(EXAMPLE)  # its modules import each other by their bare names, as they do when run.py is run
    import figures
    import model
    import objective
    import sampling
    import scoring
    import settings
    import task
for name in ("task", "model", "sampling", "objective", "settings", "figures", "events", "scoring"):
    sys.modules.pop(name, None)


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more of them cost more than they save on rows this small
    made = model.Transformer(len(task.ALPHABET))
    for weight in made.parameters():
        if weight.ndim == 2:
            weight.data *= 4  # far from uniform, so that a wrong column or mask shows
    return made


def problems(count, held_out=False):
    rng = random.Random(5)
    return [task.draw(rng, held_out) for _ in range(count)]


# ------------------------------------------------------------ task


def test_text_survives_encoding():
    assert task.decode(task.encode(task.ALPHABET)) == task.ALPHABET
    for problem in problems(200):
        assert task.decode(task.encode(problem.prompt + problem.answer)) == problem.prompt + problem.answer


def test_the_checker_is_exact():
    assert task.Problem((3, 8, 4)).answer == "11,15."
    assert task.Problem((1, 2)).answer == "3."
    assert task.correct("3+8+4=", "11,15.")
    for wrong in ("11,15", "11,14.", "15.", "11,15,15.", "011,15.", "11,15..", "", "."):
        assert not task.correct("3+8+4=", wrong), wrong


def test_every_change_of_a_right_answer_is_wrong():
    for problem in problems(50):
        for position in range(len(problem.answer)):
            for character in task.ALPHABET:
                changed = problem.answer[:position] + character + problem.answer[position + 1 :]
                assert task.correct(problem.prompt, changed) == (changed == problem.answer)


def test_the_warm_up_shows_right_answers_and_answers_with_last_digits_only():
    rng = random.Random(3)
    examples = [task.demonstration(rng) for _ in range(2000)]
    long = [(prompt, answer) for prompt, answer in examples if any(len(total) > 1 for total in sums(prompt))]
    right = sum(task.correct(prompt, answer) for prompt, answer in long) / len(long)
    assert right == pytest.approx(1 - task.FLAWED, abs=0.05)
    for prompt, answer in long:
        digits = [total[-1] for total in sums(prompt)]
        assert task.correct(prompt, answer) or answer == ",".join(digits) + "."
    assert not any(task.parse(prompt).held_out for prompt, _ in examples)


def sums(prompt):
    return task.parse(prompt).answer.removesuffix(".").split(",")


def test_reward_is_the_share_of_right_running_sums():
    assert task.reward("3+8+4=", "11,15.") == 1.0
    assert task.reward("3+8+4=", "11,14.") == 0.5
    assert task.reward("3+8+4=", "11,15,15.") == pytest.approx(2 / 3)
    assert task.reward("3+8+4=", "11.") == 0.5
    assert task.reward("3+8+4=", ".") == 0.0


def test_held_out_problems_are_never_drawn_for_training():
    trained = {problem.prompt for problem in problems(2000)}
    kept = {problem.prompt for problem in problems(500, held_out=True)}
    assert not trained & kept


def test_answer_lengths_are_long_tailed_and_fit():
    lengths = sorted(len(problem.answer) for problem in problems(2000))
    assert lengths[len(lengths) // 2] <= 6
    assert lengths[-len(lengths) // 50] >= 20
    longest = task.Problem((9,) * task.MAX_TERMS)
    assert len(longest.answer) <= task.LONGEST_ANSWER
    assert len(longest.prompt) + task.LONGEST_ANSWER <= model.LONGEST


# ------------------------------------------------------------ model and sampling


def test_about_a_million_parameters(transformer):
    assert 0.8e6 < sum(weight.numel() for weight in transformer.parameters()) < 1.2e6


def test_weights_travel_as_one_vector(transformer):
    other = model.Transformer(len(task.ALPHABET))
    model.load(other, model.flatten(transformer))
    tokens = torch.tensor([task.encode("1+2=")])
    assert torch.equal(other(tokens), transformer(tokens))


def test_cached_greedy_generation_equals_uncached(transformer):
    prompts = [problem.prompt for problem in problems(6)]
    assert len(set(map(len, prompts))) > 2  # padded, therefore
    for position, answers in sampling.generate(transformer, prompts, n=2, temperature=0):
        tokens = task.encode(prompts[position])
        plain = []
        with torch.no_grad():
            while not plain or (plain[-1] != task.END and len(plain) < task.LONGEST_ANSWER):
                plain.append(int(transformer(torch.tensor([tokens + plain]))[0, -1].argmax()))
        assert [answer.tokens for answer in answers] == [plain, plain]


def test_sampled_logprobs_equal_those_of_a_whole_pass(transformer):
    prompts = [problem.prompt for problem in problems(12)]
    groups = dict(sampling.generate(transformer, prompts, n=3))
    assert sorted(groups) == list(range(len(prompts)))
    rows = [(prompts[p], answer) for p, answers in groups.items() for answer in answers]
    sequences = [torch.tensor(task.encode(prompt) + answer.tokens) for prompt, answer in rows]
    with torch.no_grad():
        again = objective.answer_logprobs(transformer, sequences, [len(answer.tokens) for _, answer in rows])
    for (_, answer), logprobs in zip(rows, again, strict=True):
        assert answer.finished
        torch.testing.assert_close(torch.tensor(answer.logprobs), logprobs, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------ objective


def test_advantages_are_normalised_within_their_group():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]])
    advantages = objective.advantages(rewards)
    torch.testing.assert_close(advantages.mean(1), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages[[0, 2]].std(1, correction=0), torch.ones(2), atol=1e-3, rtol=0)
    assert torch.equal(advantages[1], torch.zeros(4))
    assert advantages[0].tolist() == pytest.approx([-1, 1, -1, 1], abs=1e-3)


def test_the_loss_raises_what_was_good_and_lowers_what_was_bad():
    old = torch.tensor([-1.0, -1.0])
    new = old.clone().requires_grad_()
    objective.grpo_loss(new, old, reference=old, advantage=torch.tensor([1.0, -1.0])).total.backward()
    assert new.grad[0] < 0 < new.grad[1]  # descent moves against the gradient


def test_the_clip_stops_a_ratio_that_has_gone_far_enough():
    old = torch.zeros(4)
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    new = ratio.log().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    loss = objective.grpo_loss(new, old, reference=new.detach(), advantage=advantage)
    loss.total.backward()
    assert new.grad[:2].tolist() == [0.0, 0.0]  # gone the way of the advantage: clipped
    assert (new.grad[2:] != 0).all()  # gone the wrong way: pulled back
    assert loss.clipped == 4.0
    assert loss.tokens == 4


def test_the_penalty_pulls_towards_the_reference():
    reference = torch.tensor([-2.0, -2.0, -2.0])
    new = torch.tensor([-1.0, -3.0, -2.0], requires_grad=True)
    loss = objective.grpo_loss(new, new.detach(), reference, advantage=torch.zeros(3))
    loss.total.backward()
    assert new.grad[0] > 0 > new.grad[1]
    assert new.grad[2] == 0
    assert loss.kl > 0


def test_supervised_loss_counts_the_answer_alone(transformer):
    drawn = problems(6)
    sequences = [torch.tensor(task.encode(problem.prompt + problem.answer)) for problem in drawn]
    logprobs = objective.answer_logprobs(transformer, sequences, [len(problem.answer) for problem in drawn])
    loss = objective.supervised_loss(transformer, [(problem.prompt, problem.answer) for problem in drawn])
    torch.testing.assert_close(loss, -torch.cat(logprobs).mean())


# ------------------------------------------------------------ scoring


@pytest.fixture
def waits(monkeypatch):
    taken: list[float] = []
    monkeypatch.setattr(scoring, "time", SimpleNamespace(sleep=taken.append, time=time.time))
    return taken


def test_a_group_waits_as_long_for_its_sandbox_in_every_run_with_a_seed(tmp_path, waits):
    run = settings.Settings(system="", out=tmp_path, deadline=0.0, sandbox=0.1)
    drawn = problems(300)
    for _ in range(2):
        for step, problem in enumerate(drawn):
            scoring.score(run, step, [problem.prompt] * 8, [problem.answer, *["."] * 7], {})
    first, second = waits[: len(drawn)], waits[len(drawn) :]
    assert first == second
    assert sum(first) / len(first) == pytest.approx(0.1, rel=0.3)
    assert max(first) > 4 * 0.1 > 4 * sorted(first)[len(first) // 2]


def test_the_results_of_a_group_are_in_its_event(tmp_path, waits):
    run = settings.Settings(system="", out=tmp_path, deadline=0.0, sandbox=0.0)
    event: dict[str, object] = {}
    advantage = scoring.score(run, 0, ["3+8+4="] * 8, ["11,15.", "11,14.", *["."] * 6], event)
    assert waits == [0.0]
    assert event["correct"] == [True, *[False] * 7]
    assert event["reward"] == [1.0, 0.5, *[0.0] * 6]
    assert event["answer_lengths"] == [6, 6, *[1] * 6]
    assert advantage.argsort(descending=True)[:2].tolist() == [0, 1]


# ------------------------------------------------------------ figures


def test_idle_is_the_time_in_which_a_worker_has_no_samples(tmp_path):
    made = figures.Figures(settings.Settings(system="", out=tmp_path, deadline=0.0))
    common = {"step": 0, "samples": 0, "cpu": 0.1}
    made.add([{"stage": "rollout", "worker": "rollout 0", "start": 0.0, "end": 4.0, **common}])
    for start, end, sandbox in ((4.0, 7.0, 2.5), (5.0, 8.0, 2.5), (9.0, 10.0, 0.5)):  # two of them overlap
        scored = {"reward": [], "correct": [], "answer_lengths": [], "sandbox": sandbox}
        made.add([{"stage": "reward", "worker": "reward", "start": start, "end": end, **scored, **common}])
    assert made.wall() == 10.0
    assert figures.busy_seconds(made.pieces()) == {"rollout 0": 4.0, "reward": 5.0}
    assert made.idle() == pytest.approx(1 - 9 / (len(figures.WORKERS) * 10))
    assert [piece.stage for piece in made.pieces(9.0)] == ["sandbox", "reward"]
    (part,) = (piece.within(9.2, 9.4) for piece in made.pieces(9.0) if piece.stage == "sandbox")
    assert (part.start, part.end) == (9.2, 9.4)


def test_accuracies_have_the_time_at_which_their_version_was_published(tmp_path):
    made = figures.Figures(settings.Settings(system="", out=tmp_path, deadline=0.0), accuracies={0: 0.2, 2: 0.6})
    common = {"stage": "update", "worker": "trainer 0", "samples": 0, "cpu": 0.1}
    for version, end in ((1, 12.0), (2, 15.0)):
        made.add([{**common, "step": version - 1, "version": version, "start": 10.0, "end": end, "last": version == 2}])
    assert made.measured() == [(0, 0.0, 0.2), (2, 5.0, 0.6)]
    assert made.accuracy == 0.6


def test_imbalance_of_what_was_dealt_and_of_what_order_would_have_dealt(tmp_path):
    run = settings.Settings(system="", out=tmp_path, deadline=0.0, prompts=1)
    assert run.samples == 8
    assert run.rank_batch == 2
    lengths = {0: 10, 1: 10, 2: 2, 3: 2, 4: 10, 5: 10, 6: 2, 7: 2}
    made = figures.Figures(run)
    for worker, indexes in (("trainer 0", [0, 2, 4, 6]), ("trainer 1", [1, 3, 5, 7])):
        made.add(
            [
                {
                    "stage": "train", "worker": worker, "step": 0, "start": 1.0, "end": 2.0, "cpu": 0.5,
                    "samples": 4, "indexes": indexes, "lengths": [lengths[i] for i in indexes], "staleness": [1] * 4,
                }
            ]
        )  # fmt: skip
    # in turn, two samples at a time: rank 0 gets 0, 1, 4, 5 (40 tokens), rank 1 the rest (8)
    assert made.imbalance() == {"balanced": 0.0, "in_order": pytest.approx(40 / 24 - 1)}
    assert made.staleness == {1: 8}
    assert made.seconds("busy") == {"train": 2.0}
    assert made.seconds("cpu") == {"train": 1.0}
    assert made.wall() == 1.0
    assert made.rank_tokens() == {"balanced": [[24, 24]], "in_order": [[40, 8]]}
