"""Pipelines with known bottlenecks, as descriptions: stages, ranks, durations, and the verdict that is right.

A description says nothing about who runs it. `pipeline_simulation` makes the events and the status of one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stage:
    """A task of a pipeline, whose ranks all do the same in a loop: claim, work, put."""

    name: str
    ranks: int
    takes: tuple[str, ...]  # without fields: a stage that makes rows out of nothing
    puts: tuple[str, ...]
    batch: int  # rows of a claim of one rank
    seconds: float  # of work for one batch
    spread: float = 0.1  # durations are between seconds * (1 - spread) and seconds * (1 + spread)
    slow: dict[int, float] = field(default_factory=dict)  # rank -> how many times as long it takes
    gone: dict[int, float] = field(default_factory=dict)  # rank -> when its process dies
    closed: dict[int, float] = field(default_factory=dict)  # rank -> when it closes its client
    begins: float = 0.0  # when its processes start
    pause: tuple[float, float] = (0.0, 0.0)  # between these times no rank begins a batch
    hangs: float = math.inf  # work that begins after this time does not end
    timeout: float = math.inf  # after which a claim ends without rows, and the rank claims again
    known: bool = True  # whether it says its ranks


@dataclass(frozen=True)
class Expected:
    """What a verdict has to say."""

    state: str
    stage: str | None = None
    field: str | None = None
    cause: str = ""  # a part of the cause
    no_cause: bool = False  # the cause is empty


@dataclass(frozen=True)
class Scenario:
    """A pipeline, and what is right to say about it at any time between two times."""

    name: str
    stages: tuple[Stage, ...]
    expected: Expected
    between: tuple[float, float] = (150.0, 400.0)
    capacity: int | None = None  # rows that fit
    step: int = 32  # rows of a training step, after which the policy version rises
    staleness: int | None = None  # how many versions rollouts may be ahead; None: any number
    demand: int | None = None  # rollouts wait until fewer rows than that are not trained yet; None: they do not wait

    def with_stage(self, name: str, **changes: object) -> Scenario:
        stages = tuple(dataclasses.replace(each, **changes) if each.name == name else each for each in self.stages)
        return dataclasses.replace(self, stages=stages)


def grpo() -> tuple[Stage, ...]:
    """Rollout makes 8 rows a second, and each other stage can take as many."""
    return (
        Stage("rollout", 4, (), ("prompt", "response"), 8, 4.0),
        Stage("reference", 2, ("prompt", "response"), ("ref_log_prob",), 8, 2.0),
        Stage("reward", 4, ("response",), ("reward",), 4, 2.0),
        Stage("train", 2, ("response", "ref_log_prob", "reward"), (), 16, 4.0),
    )


PROMPTS = Stage("driver", 1, (), ("prompt",), 16384, 0.01, hangs=0.005)  # puts all prompts together


def _with_prompts(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    rollout = dataclasses.replace(stages[0], takes=("prompt",), puts=("response",))
    return rollout, *stages[1:]


def long_steps(slow: str, times: float) -> tuple[Stage, ...]:
    """Rollout puts many rows together, and a step takes 40 s."""
    stages = (
        Stage("rollout", 4, (), ("prompt", "response"), 64, 40.0, spread=0.2),
        Stage("reference", 2, ("prompt", "response"), ("ref_log_prob",), 16, 5.0),
        Stage("reward", 8, ("response",), ("reward",), 4, 5.0, spread=0.5),
        Stage("train", 2, ("response", "ref_log_prob", "reward"), (), 128, 40.0),
    )
    return tuple(
        dataclasses.replace(each, seconds=each.seconds * times) if each.name == slow else each for each in stages
    )


def _slow(name: str, times: float, **changes: object) -> Scenario:
    base = Scenario("", grpo(), Expected("slow", name))
    seconds = next(stage.seconds for stage in base.stages if stage.name == name)
    return base.with_stage(name, seconds=seconds * times, **changes)


def _named(scenario: Scenario, name: str, **changes: object) -> Scenario:
    return dataclasses.replace(scenario, name=name, **changes)


FIELDS = {"rollout": "response", "reference": "ref_log_prob", "reward": "reward"}
LONG_TAILS = {"spread": 0.8}


def scenarios() -> list[Scenario]:
    made = []
    for times in (1.5, 3.0):
        for stage, name in FIELDS.items():
            expected = Expected("slow", stage, name)
            made.append(_named(_slow(stage, times), f"{stage} takes {times} times as long", expected=expected))
        made.append(_named(_slow("train", times), f"train takes {times} times as long"))
    made += [
        _named(_slow("rollout", 2.0, spread=0.8), "rollout is slow and has long tails"),
        _named(_slow("reward", 2.0, spread=0.8), "reward is slow and has long tails"),
        _named(_slow("reward", 2.0, known=False), "reward is slow and its ranks are not known"),
        _named(_slow("reward", 2.0).with_stage("train", timeout=1.0), "reward is slow and claims of train time out",
               expected=Expected("slow", "reward", "reward")),
        _named(
            _slow("reward", 1.5, slow={2: 6.0}), "one rank of reward is slow",
            expected=Expected("slow", "reward", "reward", "rank 2 of reward takes"),
        ),
        _named(
            _slow("rollout", 1.5, slow={1: 6.0}), "one rank of rollout is slow",
            expected=Expected("slow", "rollout", "response", "rank 1 of rollout takes"),
        ),
        _named(
            _slow("train", 2.0), "train is slow and the capacity holds rollout", capacity=96,
            expected=Expected("slow", "train", None, "rollout is held because the capacity is used up"),
        ),
        _named(
            _slow("train", 2.0), "train is slow and the policy version holds rollout", staleness=2,
            expected=Expected("slow", "train", None, "rollout is held because the policy version has to advance"),
        ),
        _named(_slow("reference", 2.0), "reference is slow and the capacity holds rollout", capacity=96,
               expected=Expected("slow", "reference", "ref_log_prob")),
        _named(_slow("reward", 2.0), "reward is slow and the policy version holds rollout", staleness=2,
               expected=Expected("slow", "reward", "reward")),
        Scenario("rollout and train take turns", grpo(), Expected("slow", None), staleness=0, step=32),
        Scenario("no stage is slow", grpo(), Expected("flowing"), between=(30.0, 400.0)),
        _named(_slow("reward", 1.0, hangs=100.0), "all ranks of reward hang", between=(175.0, 380.0),
               expected=Expected("slow", "reward", "reward", "all 4 reward workers work on their last claim since")),
        *(
            _named(dataclasses.replace(each, stages=long_steps(each.expected.stage, times)),
                   f"with long steps, {each.expected.stage} takes {times} times as long",
                   between=(450.0, 900.0), step=256)
            for each in made[:4] for times in (1.5, 3.0)
        ),
        Scenario("with long steps, no stage is slow", long_steps("", 1.0), Expected("flowing"), (200.0, 900.0)),
        *(
            _named(each, each.name + ", and rollout claims prompts", stages=(PROMPTS, *_with_prompts(each.stages)))
            for each in made[:8]
        ),
        _named(_slow("reward", 0.1), "reward is faster than needed", expected=Expected("flowing")),
        _named(_slow("reference", 0.3), "reference is faster than needed", expected=Expected("flowing")),
        _named(_slow("rollout", 0.96), "rollout is held a little", expected=Expected("flowing"), staleness=4),
        _named(
            _slow("reward", 1.0, gone={0: 100.0, 3: 100.0}), "two of four ranks of reward die", between=(160.0, 380.0),
            expected=Expected("slow", "reward", "reward", "2 of 4 reward workers are gone (rank 0, pid 106,"),
        ),
        _named(
            _slow("reward", 1.0, gone={0: 100.0, 3: 100.0}, known=False), "two of four clients of reward die",
            between=(160.0, 380.0),
            expected=Expected("slow", "reward", "reward", "2 of 4 reward workers are gone (pid 106, node"),
        ),
        _named(
            _slow("reference", 1.0, gone={0: 100.0, 1: 100.0}), "reference dies", between=(100.1, 380.0),
            expected=Expected(
                "stopped", "reference", None,
                "all reference workers are gone (rank 0, pid 104, node; rank 1, pid 105, node) since",
            ),
        ),
        _named(
            _slow("rollout", 1.0, gone=dict.fromkeys(range(4), 100.0)), "rollout dies and all wait",
            between=(100.1, 380.0),
            expected=Expected("stopped", "rollout", None, "all rollout workers are gone (rank 0, pid 100"),
        ),
        _named(
            _slow("train", 1.0, gone={0: 100.0, 1: 100.0}), "train dies and the capacity holds rollout", capacity=96,
            between=(100.1, 380.0),
            expected=Expected("stopped", "train", None, "all train workers are gone (rank "),
        ),
        Scenario("train dies", _slow("train", 1.0, gone={0: 100.0, 1: 100.0}).stages,
                 Expected("stopped", "train", None, "all train workers are gone (rank "), between=(100.1, 380.0)),
        _named(
            _slow("train", 2.0), "train is slow and rollout waits for group demand", demand=96,
            expected=Expected("slow", "train", None, "rollout is held because no more groups are wanted"),
        ),
        _named(_slow("reward", 2.0), "reward is slow and rollout waits for group demand", demand=64,
               expected=Expected("slow", "reward", "reward")),
        _named(_slow("rollout", 2.0), "rollout is slow although it makes no more than is wanted", demand=96,
               expected=Expected("slow", "rollout", "response")),
        _named(
            _slow("reward", 1.0, closed={0: 100.0, 3: 100.0}), "two of four ranks of reward close",
            between=(160.0, 380.0), expected=Expected("slow", "reward", "reward", no_cause=True),
        ),
        _named(
            _slow("rollout", 1.0, closed=dict.fromkeys(range(4), 100.0)), "rollout closes and all wait",
            between=(190.0, 600.0), expected=Expected("stopped", "rollout", None, "every rollout worker has closed"),
        ),
        _named(
            _slow("reward", 1.0, closed={0: 100.0}, gone={3: 100.0}), "one rank of reward closes and one dies",
            between=(160.0, 380.0),
            expected=Expected("slow", "reward", "reward", "1 of 3 reward workers is gone (rank 3, pid 109, node)"),
        ),
        _named(_slow("reward", 0.4, closed={0: 100.0, 3: 100.0}), "ranks that are not needed close",
               between=(60.0, 600.0), expected=Expected("flowing")),
        _named(_slow("rollout", 30.0), "the first rollouts take long", between=(5.0, 55.0),
               expected=Expected("starting", None, "response")),
        _named(_slow("reward", 3.0), "reward is slow from the beginning", between=(12.0, 20.0),
               expected=Expected("starting", no_cause=True)),
        _named(
            _slow("reward", 0.4, gone={0: 100.0}), "a rank that is not needed dies", between=(100.1, 380.0),
            expected=Expected("flowing", None, None, "1 of 4 reward workers is gone (rank 0, pid 106, node) since"),
        ),
        _named(_slow("rollout", 30.0), "the first rollouts take very long", between=(61.0, 100.0),
               expected=Expected("stopped", None, "response", "no task has put `response`")),
        _named(_slow("rollout", 1.0, pause=(100.0, 150.0)), "rollout pauses", between=(135.0, 150.0),
               expected=Expected("slow", "rollout")),
        _named(_slow("rollout", 1.0, pause=(100.0, 110.0)), "rollout has paused long ago", between=(220.0, 400.0),
               expected=Expected("flowing")),
    ]  # fmt: skip
    return made
