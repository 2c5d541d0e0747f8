"""A document of every part of the live page, invented: `python -m tests.live.example_payload` writes `example.json`."""

from __future__ import annotations

import base64
from pathlib import Path

import msgspec

from transfer_queue.live import answers as a
from transfer_queue.live import payload as p

FILE = Path(__file__).with_name("example.json")
NOW = 1_790_000_000.0
GONE = NOW - 78.0
RANKS = {"rollout": 8, "reference": 2, "reward": 4, "train": 8}
FIELDS = {
    "prompt": "rollout", "tokens": "rollout", "logprobs": "rollout", "routed_experts": "rollout",
    "ref_logprobs": "reference", "reward": "reward", "advantage": "reward",
}  # fmt: skip
TAKES = {
    "rollout": [], "reference": ["tokens"], "reward": ["prompt", "tokens"],
    "train": ["tokens", "logprobs", "routed_experts", "ref_logprobs", "advantage"],
}  # fmt: skip


def runs(*pairs: tuple[int, int]) -> str:
    """Return run-length bytes in base64, from pairs of a count and a value."""
    return base64.b64encode(bytes(number for pair in pairs for number in pair)).decode()


def task(name: str, rate: float, works: float, waits: float, letters: str, gone: int = 0) -> p.TaskView:
    """Return a task."""
    names = ("works", "waits", "held", "idle", "gone")
    states = {state: letters.count(letter) for state, letter in zip(names, "Wwhix")}
    puts = [field for field, producer in FIELDS.items() if producer == name]
    ranks = RANKS[name]
    return p.TaskView(
        name, ranks, ranks - gone, gone, TAKES[name], puts, rate, rate if puts else 0.0,
        works, waits, 0.0, round(1 - works - waits, 3), states, letters,
    )  # fmt: skip


def label(number: int, rank: int) -> str:
    """Return the label of a lane."""
    return f"rank {rank}, pid {41200 + number}, node-0{number % 8}"


def lane(number: int, name: str, rank: int, since: float) -> p.LaneView:
    """Return a lane that works and waits in turn."""
    gone = GONE if name == "reward" and rank in (1, 3) else None
    end = 300.0 if gone is None else 222.0
    spans: list[tuple[float, float, int, int]] = []
    at = since
    while at < end:
        work, wait = {"train": (1.1, 1.9), "reference": (0.8, 0.3)}.get(name, (12.0, 0.2))
        spans.append((round(at, 2), round(min(at + work, end), 2), 1, 0))
        if at + work < end:
            spans.append((round(at + work, 2), round(min(at + work + wait, end), 2), 3, 1 if name == "train" else 2))
        at += work + wait
    if gone is not None:
        spans = [*(each for each in spans if each[0] < 222.0), (max(222.0, since), 300.0, 4, 0)]
    return p.LaneView(number, name, rank, 1, label(number, rank), gone, spans)


def timeline(since: float) -> p.Timeline:
    """Return the timeline from a moment on, in seconds."""
    places = [(name, rank) for name, count in RANKS.items() for rank in range(count)]
    lanes = [lane(number, name, rank, since) for number, (name, rank) in enumerate(places, 1)]
    versions = [p.Tick(NOW - 300 + 60 * number, 38 + number) for number in range(5)]
    order = list(range(1, len(lanes) + 1))
    return p.Timeline(NOW - 300, since, 300.0, order, lanes, ["", "advantage", "tokens"], versions, [])


def partition(number: int, rows: int, *, shown: bool = True) -> p.ListedPartition:
    """Return a partition."""
    missing = 168 if number == 42 else 0
    return p.ListedPartition(
        f"train_{number}", rows, rows == 1024, shown, missing,
        "advantage" if missing else "", 107_168 if missing else None,
    )  # fmt: skip


def example_view() -> p.LiveView:
    """Return a full view: reward is the slowest stage."""
    detail = (
        "`train` waits 63 % of the time for `advantage`, which `reward` puts; 1,048 samples queue before it, 12.4 more "
        "each second; 2 of 4 `reward` workers are gone since 03:11:26."
    )
    verdict = p.VerdictView(
        "slow", f"`reward` is the slowest stage: {detail}", "`reward` is the slowest stage", detail, "reward",
        "advantage", "train", 1048, GONE, "2 of 4 `reward` workers are gone since 03:11:26",
        "to keep up with 28.0 samples each second, `reward` needs 4 ranks",
    )  # fmt: skip
    tasks = [
        task("rollout", 28.0, 0.97, 0.0, "WWWWWWWW"),
        task("reference", 27.6, 0.75, 0.25, "ww"),
        task("reward", 15.6, 1.0, 0.0, "WxWx", gone=2),
        task("train", 15.6, 0.37, 0.63, "wwWwwwwW"),
    ]
    queues = [
        p.QueueView("reference", 0, 0.2, 0.9),
        p.QueueView("reward", 1048, 24.0, 31.0),
        p.QueueView("train", 0, 6.8, 22.0),
    ]
    rate = {"rollout": 28.0, "reference": 27.6, "reward": 15.6}
    fields = [
        p.FieldView(name, [by], [each for each in TAKES if name in TAKES[each]], rate[by])
        for name, by in FIELDS.items()
    ]
    life = [
        p.LifePart("queue", "reward", 24.0), p.LifePart("work", "reward", 0.9),
        p.LifePart("queue", "train", 6.8), p.LifePart("work", "train", 1.1),
    ]  # fmt: skip
    words = (
        "Sample 107168 of partition 'train_42' misses the fields ['advantage'] (it has ['tokens', 'logprobs', "
        "'routed_experts', 'ref_logprobs']); is one of 8 samples of group 'q15690'; is ready for task 'reward' and "
        "waits for a claim that takes it."
    )
    waits = [
        p.WaitView("train", "wait", [label(15 + n, n) for n in (0, 1, 3, 4, 5, 6)], 6, 8, 8, TAKES["train"],
                   "advantage", "reward", "train_42", NOW - 4.2, 0.63, words, 107_168),
        p.WaitView("reward", "gone", [label(12, 1), label(14, 3)], 2, 4, 0, [], "", "", "", GONE, 0.5,
                   f"Their connections ended without a close: {label(12, 1)}; {label(14, 3)}.", None),
        p.WaitView("reference", "wait", [label(9, 0), label(10, 1)], 2, 2, 8, ["tokens"], "tokens", "rollout",
                   "train_43", NOW - 0.2, 0.25, "", None),
    ]  # fmt: skip
    rates = [
        p.RatePoint(NOW - 300 + 2 * n, 30.9 if n < 110 else 15.6, 12.0 if n < 110 else (n - 110) * 26.0)
        for n in range(150)
    ]
    groups = [
        p.GroupView("train_42", 8, "train", 107, 21, 0, 0, 0, 0),
        p.GroupView("train_43", 8, "train", 8, 104, 16, 0, 0, 0),
        p.GroupView("train_44", 8, "train", 0, 12, 116, 0, 0, 0),
    ]  # fmt: skip
    seconds = (66.0, 58.1, 59.7, 61.2, 57.9, 60.4, 88.3, 59.1, 60.2, 61.0, 58.8, 60.0)
    steps = [p.StepTime(f"v{n}", NOW - 31 - 60 * (42 - n), each) for n, each in zip(range(31, 43), seconds)]
    gib = 1 << 30
    units = [
        p.UnitView(n, f"node-0{n + 4}", "memory", gib, int(0.5 * gib), int(0.45 * gib), int(0.4 * gib), 0.0, 0, False)
        for n in range(4)
    ]
    servers = [p.ServerView("controller", True, 0.31, 0.00021, 0.0018, 66, 4)]
    servers += [p.ServerView(f"unit {n}", True, 0.06, 0.00004, 0.0006, 42, 0) for n in range(4)]
    partitions = [partition(42, 1024), partition(43, 896), partition(44, 96), partition(41, 1024, shown=False)]
    return p.LiveView(
        1,
        NOW,
        p.SystemInfo("grpo-moe-30b", NOW - 22_320, "started by pid 40112 (python train.py)", "0.2.0", False),
        p.SystemState("live", NOW - 22_320),
        verdict,
        rates,
        p.StepView("train_42", 856, 1024, True, 10.8),
        p.StepsView("version", "train", steps, NOW - 31),
        tasks,
        queues,
        fields,
        life,
        waits,
        timeline(0.0),
        p.PolicyView(42, NOW - 31, 2, "train_44", 2688, 3072),
        [p.AgeView(35 + n, [300 + 40 * (n % 3), 500, 224 - 40 * (n % 3)]) for n in range(8)],
        groups,
        p.PartitionsView(60, 3040 + 56 * 1024, 40 * gib, partitions, 56, 56 * 1024),
        p.MemoryView(
            units, [p.LeaseView("reference", 2, 16, 0.3), p.LeaseView("reward", 2, 16, 0.8)], 16, 0, 0, 0
        ),
        p.ServersView(servers, 5, 5, p.JournalView(0.4, 1200, ""), 0, "/run/user/1000/tq/grpo-moe-30b/logs"),
        p.ClientsView(22, []),
    )  # fmt: skip


def example_delta() -> p.LiveView:
    """Return what changes a second later."""
    return p.LiveView(
        2, NOW + 1, rates=[p.RatePoint(NOW + 1, 15.2, 1060.0)],
        step=p.StepView("train_42", 872, 1024, True, 9.7),
        timeline=timeline(299.0),
    )  # fmt: skip


def example_matrix() -> a.MatrixAnswer:
    """Return the matrix of the partition that is claimed: 128 columns of a group of 8."""
    fields = [a.MatrixField(name, 1024, runs((128, 255)), "") for name in list(FIELDS)[:5]]
    fields += [a.MatrixField(name, 856, runs((100, 255), (7, 128), (21, 0)), "") for name in ("reward", "advantage")]
    tasks = [
        a.MatrixTask("reference", "", "", runs((128, 255)), ""),
        a.MatrixTask(
            "reward", runs((109, 0), (19, 255)), runs((107, 0), (2, 255), (19, 0)), runs((107, 255), (21, 0)), ""
        ),
        a.MatrixTask("train", "", runs((98, 0), (2, 255), (28, 0)), runs((98, 255), (30, 0)), ""),
    ]
    return a.MatrixAnswer("train_42", "7f3a-19", 1024, 0, 0, 1024, 128, 8, 8, [(0, 106_312, 8)], fields, tasks)


def example_sample() -> a.SampleAnswer:
    """Return a sample that lacks a field."""
    here = {"type": "int64", "bytes": 12_288, "unit": 1, "tier": "memory", "put_by": f"rollout {label(4, 3)}"}
    note = "values are hidden: start tq live with --values"
    there = [
        a.SampleFieldView(name, True, shape=[1536], put_at=NOW - 35, note=note, **here)  # type: ignore[arg-type]
        for name in list(FIELDS)[:5]
    ]
    lacking = [a.SampleFieldView(name, False, "", None, None, None, "", "", None) for name in ("reward", "advantage")]
    history = [
        a.SampleEventView(NOW - 35, "put prompt, tokens, logprobs, routed_experts", f"rollout {label(4, 3)}"),
        a.SampleEventView(NOW - 34.5, "claimed", f"reference {label(9, 0)}"),
        a.SampleEventView(NOW - 34.2, "put ref_logprobs", f"reference {label(9, 0)}"),
    ]
    words = example_view().waits[0].words  # type: ignore[union-attr]
    return a.SampleAnswer(
        "train_42", 107_168, "q15690/0", NOW, words, "tq explain train_42 --index 107168 --task train",
        [*there, *lacking], [a.SampleTagView("policy_version", None), a.SampleTagView("worker", None)],
        a.SampleGroupView("q15690", 8, 0), history, "", "live",
        [a.SampleTaskView("reward", "ready", [], "", ""), a.SampleTaskView("train", "waiting", ["advantage"], "", "")],
        list(range(107_168, 107_176)),
    )  # fmt: skip


def example() -> bytes:
    """Return the document."""
    parts = {
        "full": example_view(), "delta": example_delta(), "matrix": example_matrix(), "sample": example_sample(),
        "explain": a.ExplainAnswer("the claim waits: 3 of 8 samples are ready."),
        "problem": a.Problem("partition 'x' does not exist"),
    }  # fmt: skip
    lines = [msgspec.json.encode(name) + b":" + p.to_json(part) for name, part in parts.items()]
    return b"{" + b",\n".join(lines) + b"}\n"


if __name__ == "__main__":
    FILE.write_bytes(example())
