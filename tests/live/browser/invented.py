"""Data of the live page that is invented: the states of a system, and one that is as large as the limits allow."""

from __future__ import annotations

import base64
import copy
import math
import random
import time
from typing import Any

from tests.live.browser.canned_server import example
from tests.live.example_payload import label

HOSTILE = (
    "<img src=x onerror=\"document.title='broken'\">",
    "\u202egnirts desrever",
    "x" * 300,
    "two\nlines\tand\x07a bell\x1b[31m",
    "</script><b>bold</b>&amp;",
    "`backticks` 'quotes' \"double\"",
    "",
)
"""Names that must be shown as text."""


def runs(values: list[int]) -> str:
    """Return run-length bytes in base64, of one value for each column."""
    pairs: list[int] = []
    for value in values:
        if pairs and pairs[-1] == value and pairs[-2] < 255:
            pairs[-2] += 1
        else:
            pairs += [1, value]
    return base64.b64encode(bytes(pairs)).decode()


def matrix(partition: str, put: float, done: float, seed: int = 0, columns: int = 128, per: int = 8) -> dict[str, Any]:
    """Return the answer about a partition of which a share was put, and a share consumed by `train`."""
    chance = random.Random(seed)

    def share(part: float) -> list[int]:
        # a step with a ragged edge
        return [
            255
            if part == 1 or at < part * columns * 0.9 or chance.random() < part * (1.25 - at / columns) - 0.15
            else 0
            for at in range(columns)
        ]

    first = share(put)
    scored = [min(a, b) for a, b in zip(first, share(done and put * 0.1 + done * 0.9))]
    reference = [min(a, b) for a, b in zip(first, share(put * 0.97))]
    trained = [min(a, b) for a, b in zip(scored, share(done))]
    claimed = [255 if value and chance.random() < 0.06 else 0 for value in scored]
    claimed = [0 if done_ else value for value, done_ in zip(claimed, trained)]
    fields = [(name, first) for name in ("prompt", "tokens", "logprobs", "routed_experts")]
    fields += [("ref_logprobs", reference), ("reward", scored), ("advantage", scored)]
    rows = {name: sum(value // 255 for value in values) * per for name, values in fields}
    waiting = [a - b for a, b in zip(first, scored)]
    ready = [a - max(b, c) for a, b, c in zip(scored, trained, claimed)]
    return {
        "partition": partition, "epoch": f"{partition}-{seed}", "rows": columns * per, "reserved": 0, "start": 0,
        "stop": columns * per, "columns": columns, "column_rows": per, "group_size": per, "index": [[0, 106312, per]],
        "fields": [{"name": n, "rows": rows[n], "share": runs(values), "lost": ""} for n, values in fields],
        "tasks": [
            {"name": "reference", "ready": "", "claimed": "", "consumed": runs(reference), "passed": ""},
            {"name": "reward", "ready": runs(waiting), "claimed": "", "consumed": runs(scored), "passed": ""},
            {"name": "train", "ready": runs(ready), "claimed": runs(claimed), "consumed": runs(trained), "passed": ""},
        ],
    }  # fmt: skip


def matrices() -> dict[str, Any]:
    """Return what `/api/matrix` answers about the three partitions of the example."""
    three = (("train_42", 1.0, 0.82), ("train_43", 0.85, 0.02), ("train_44", 0.2, 0.0))
    return {name: matrix(name, put, done, seed) for seed, (name, put, done) in enumerate(three, 1)}


def lane(number: int, task: str, rank: int, spans: list[tuple[float, float, int, int]], **more: Any) -> dict[str, Any]:
    """Return a lane of one rank."""
    return {
        "id": number, "task": task, "rank": rank, "ranks": 1, "label": label(number, rank),
        "gone_at": None, "spans": spans, "band": [], **more,
    }  # fmt: skip


def spans(chance: random.Random, work: float, rest: float, state: int, why: int, end: float = 300.0) -> list[Any]:
    """Return spans of work, each followed by one of another state, with lengths that vary."""
    made: list[tuple[float, float, int, int]] = []
    at = -chance.random() * work
    while at < end:
        long, pause = (base * math.exp(0.5 * chance.gauss(0, 1) - 0.12) for base in (work, rest))
        made.append((round(max(0.0, at), 2), round(min(at + long, end), 2), 1, 0))
        if rest and at + long < end:
            made.append((round(at + long, 2), round(min(at + long + pause, end), 2), state, why))
        at += long + pause
    return made


def slow() -> dict[str, Any]:
    """Return the full data of a system whose reward is slow, since two of four ranks are gone."""
    full: dict[str, Any] = example("full")
    chance = random.Random(3)
    why = full["timeline"]["why"]
    advantage, tokens = (why.index(name) for name in ("advantage", "tokens"))
    lanes = []
    steps = [(s, s + 24 + 4 * chance.random()) for s in range(6, 220, 34)]
    for each in full["timeline"]["lanes"]:
        task = each["task"]
        if task == "rollout":
            made = spans(chance, 30.0, 0.9, 2, why.index("policy") if "policy" in why else 0)
        elif task == "reference":
            made = spans(chance, 1.4, 0.5, 3, tokens)
        elif task == "reward":
            made = spans(chance, 18.0, 0.2, 3, tokens, 222.0 if each["gone_at"] else 300.0)
            made += [(222.0, 300.0, 4, 0)] if each["gone_at"] else []
        else:
            made, at = [], 0.0
            for begin, end in steps:
                made += [(at, begin, 3, advantage), (begin + chance.random(), end + chance.random(), 1, 0)]
                at = made[-1][1]
                made[-1] = (made[-2][1], at, 1, 0)
            while at < 300:
                made += [(at, at + 1.9 + 2 * chance.random(), 3, advantage)]
                made += [(made[-1][1], made[-1][1] + 1.1, 1, 0)]
                at = made[-1][1]
        lanes.append({**each, "spans": made})
    full["timeline"]["lanes"] = lanes
    full["rates"] = [
        {"t": full["now"] - 300 + 2 * at,
         "rows": 30.9 + 6 * math.sin(at / 4) if at < 111 else 15.6 + 4 * math.sin(at / 3),
         "queue": 12.0 + 8 * abs(math.sin(at / 5)) if at < 111 else 12 + (at - 111) * 26.0}
        for at in range(1, 151)
    ]  # fmt: skip
    verdict = full["verdict"]
    for part in ("text", "detail", "cause"):  # the time in the words is the one that the reader's clock shows
        verdict[part] = verdict[part].replace("03:11:26", time.strftime("%H:%M:%S", time.localtime(verdict["since"])))
    # as transfer_queue.Verdict.advice says it
    verdict["advice"] = "`reward` needs 4 ranks and has 2: 28.0 samples come each second, and one rank does 7.8."
    return full


def sample() -> dict[str, Any]:
    """Return a sample whose values may be shown."""
    made: dict[str, Any] = example("sample")
    now = made["now"]
    values = {
        "prompt": ("int64", [146], "785, 36910, 702, 220, 16, 22, 8, 1124, …"),
        "tokens": ("int64", [3077], "123550, 124163, 126002, 11, 374, 279, …"),
        "logprobs": ("float32", [3077], "-0.021, -1.307, -0.000, -0.442, -0.013, …"),
        "routed_experts": ("uint8", [3077, 48, 8], "17, 3, 96, 121, 44, 7, 12, 90, …"),
        "ref_logprobs": ("float32", [3077], "-0.024, -1.290, -0.000, -0.451, -0.011, …"),
    }
    sizes = {"int64": 8, "float32": 4, "uint8": 1}
    for field in made["fields"]:
        if field["present"]:
            kind, shape, head = values[field["name"]]
            field.update(type=kind, shape=shape, head=head, bytes=sizes[kind] * math.prod(shape), note="")
    made["fields"][4].update(put_by=f"reference {label(9, 0)}", put_at=now - 34)
    made["tags"] = [
        {"name": "policy_version", "value": "41"}, {"name": "prompt_id", "value": '"q15690"'},
        {"name": "worker", "value": '"rollout-3"'}, {"name": "data_source", "value": '"olympiad"'},
    ]  # fmt: skip
    made["history"].append({"t": now - 33.9, "what": "acknowledged", "who": f"reference {label(9, 0)}"})
    return made


def stopped() -> dict[str, Any]:
    """Return the data of a system in which nothing comes, because every rank of the reward is gone."""
    full = slow()
    now, gone = full["now"], full["now"] - 214
    dealt = now - 194
    cause = f"all reward workers are gone ({'; '.join(label(11 + rank, rank) for rank in range(4))}) since 03:11:26"
    full["verdict"] = {
        **full["verdict"], "state": "stopped", "queue_rows": 2240, "headline": f"Stopped: {cause}", "since": gone,
        "detail": "train waits 100 % of the time for `advantage`, which reward puts; 2,240 samples queue before it. "
        "8 samples of partition 'train_42' may be lost to task 'reward', because pid 41212 on node-04, which is gone, "
        "had claimed them without a lease: call reset_consumption('train_42', 'reward') to deliver all samples to this "
        "task again, and claim with lease= to avoid such losses.",
        "cause": cause, "advice": "",
    }  # fmt: skip
    full["rates"] = [
        {
            **each,
            "rows": each["rows"] if each["t"] < dealt else 0.0,
            "queue": min(2240.0, max(0.0, (each["t"] - gone) * 22)),
        }
        for each in full["rates"]
    ]
    for task in full["tasks"]:
        task.update(rate=0.0, put_rate=0.0)
        if task["name"] == "reward":
            task.update(alive=0, gone=4, works=0.0, rank_state="xxxx", states={"gone": 4})
        else:
            kind = "held" if task["name"] == "rollout" else "waits"
            task.update(
                works=0.0,
                waits=0.0,
                held=0.0,
                idle=0.0,
                rank_state=kind[0] * task["ranks"],
                states={kind: task["ranks"]},
            )
            task[kind] = 1.0
    for queue in full["queues"]:
        queue["rows"] = 2240 if queue["task"] == "reward" else 0
    policy = full["timeline"]["why"].index("policy") if "policy" in full["timeline"]["why"] else 0
    for each in full["timeline"]["lanes"]:
        until, state = {"reward": (86.0, 4), "rollout": (126.0 + 4 * each["rank"], 2)}.get(each["task"], (110.0, 3))
        kept = [span for span in each["spans"] if span[0] < until and span[2] != 4]
        kept = [(a, min(b, until), s, w) for a, b, s, w in kept]
        each["spans"] = [*kept, (until, 300.0, state, policy if state == 2 else 1 if state == 3 else 0)]
        each["gone_at"] = gone if each["task"] == "reward" else None
    full["timeline"]["versions"] = full["timeline"]["versions"][:3]
    wait = full["waits"][0]
    wait.update(count=8, ranks=[label(15 + rank, rank) for rank in range(8)], share=1.0, since=dealt)
    full["waits"][1].update(count=4, ranks=[label(11 + rank, rank) for rank in range(4)], since=gone, share=1.0)
    full["waits"][1]["words"] = f"Their connections ended without a close: {cause.split('(')[1].split(')')[0]}."
    held = {
        **wait, "task": "rollout", "kind": "held", "ranks": [label(1 + rank, rank) for rank in range(8)],
        "rows": 8, "fields": [], "field": "", "producer": "", "sample": None, "partition": "train_45",
        "since": now - 170,
        "words": "3,072 samples were admitted at version 37, and 3,072 may be until set_policy_version.",
    }  # fmt: skip
    full["waits"] = [*full["waits"][:2], held, *full["waits"][2:]]
    full["step"]["eta"] = None
    full["steps"].update(steps=full["steps"]["steps"][:-3], since=full["steps"]["steps"][-4]["end"])
    return full


def flowing() -> dict[str, Any]:
    """Return the data of a system in which nothing is slow."""
    full = slow()
    full["verdict"].update(
        state="flowing", headline="Flowing: `train` takes 30.9 samples each second", detail="", stage=None, field=None,
        queue_rows=0, since=None, cause="", advice="",
    )  # fmt: skip
    full["verdict"]["text"] = full["verdict"]["headline"] + "."
    full["rates"] = [{**each, "rows": 30.9, "queue": 12.0} for each in full["rates"]]
    for task in full["tasks"]:
        letters = "W" * task["ranks"]
        task.update(rate=30.9, alive=task["ranks"], gone=0, works=0.9, waits=0.1, idle=0.0, rank_state=letters)
    full["waits"] = full["waits"][2:]
    full["step"].update(sealed=False, eta=None)
    for each in full["timeline"]["lanes"]:
        each["gone_at"] = None
        each["spans"] = [span for span in each["spans"] if span[2] != 4]
    return full


def idle() -> dict[str, Any]:
    """Return the data of a system that does nothing, without policy versions, groups and leases."""
    full = flowing()
    full["verdict"].update(state="idle", headline="Idle: no claim is open", detail="The last event was 12 minutes ago.",
                           since=full["now"] - 720)  # fmt: skip
    full["steps"].update(by="partition", task="", steps=[], since=None)
    full.update(policy=None, ages=[], groups=[], waits=[], step=None, life=[], queues=[], tasks=[], fields=[])
    full["memory"]["leases"] = []
    full["timeline"].update(lanes=[], order=[], versions=[])
    full["rates"] = [{**each, "rows": 0.0, "queue": 0.0} for each in full["rates"]]
    return full


def empty() -> dict[str, Any]:
    """Return the data of a system in which nothing was put yet."""
    full = idle()
    full["state"].update(state="empty", words="")
    full["system"]["started"] = full["now"] - 40
    words = "`train` ranks 0 to 7 wait for partition `train_0` for 31 s, which does not exist yet."
    full["clients"] = {"connected": 3, "waiting": [words]}
    full["partitions"].update(count=0, rows=0, bytes=0, list=[], rest=0, rest_rows=0)
    return full


def restarting(full: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a delta that says that the controller does not reply."""
    words = "The controller does not reply: it is being restarted, or is overloaded."
    return {"state": {**full["state"], "state": "restarting", "since": full["now"], "words": words}}


def ended(full: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a delta that says that the system has ended."""
    words = (
        "The system grpo-moe-30b has ended: its starter, process 40112 (python train.py), has ended. "
        "Below is its last state."
    )
    return {"state": {**full["state"], "state": "ended", "since": full["now"], "words": words}}


def snapshot(full: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a delta that says that the page shows a file."""
    return {"state": {**full["state"], "state": "snapshot", "since": full["now"] + 2}}


def ranks() -> dict[str, Any]:
    """Return the data of 64 ranks, each with a line of its own, two of which have no number."""
    full, chance = slow(), random.Random(5)
    counts = {"rollout": 32, "reference": 8, "reward": 8, "train": 16}
    lanes = []
    for task in full["tasks"]:
        name, count = task["name"], counts[task["name"]]
        task.update(ranks=count, alive=count - task["gone"], rank_state=(task["rank_state"] * count)[:count])
        work, rest = {"rollout": (20.0, 1.0), "train": (1.1, 1.9)}.get(name, (4.0, 0.5))
        for rank in range(count):
            lanes.append(lane(len(lanes) + 1, name, rank, spans(chance, work, rest, 3, 1)))
    for number in (56, 57):
        lanes[number].update(rank=-1, label=f"pid {41200 + number}, a-node-with-a-long-name-{number}.cluster.local")
    full["timeline"].update(lanes=lanes, order=[each["id"] for each in lanes])
    full["waits"][0].update(count=12, of=16, ranks=[each["label"] for each in lanes[-12:]])
    return full


def hostile() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return full data and matrices in which every name of the user's is hostile."""
    full = slow()
    names = [
        "train_42",
        "train_43",
        "train_44",
        "rollout",
        "reference",
        "reward",
        "train",
        "prompt",
        "tokens",
        "logprobs",
    ]
    new = dict(zip(names, [*HOSTILE[:3], *HOSTILE[3:6], *(f"{name}{at}" for at, name in enumerate(HOSTILE[:4]))]))

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(each) for key, each in value.items()}
        if isinstance(value, list):
            return [renamed(each) for each in value]
        return new.get(value, value) if isinstance(value, str) else value

    made = {key: value if key in ("state", "system") else renamed(value) for key, value in full.items()}
    made["system"]["name"] = HOSTILE[0]
    made["verdict"].update(headline=f"`{HOSTILE[0]}` is the slowest stage", detail=HOSTILE[2])
    made["waits"][0]["words"] = f"Sample 1 of partition '{HOSTILE[1]}' misses {HOSTILE[0]} and {HOSTILE[2]}"
    return made, {renamed(name): renamed(answer) for name, answer in matrices().items()}


def joined(task: str, count: int, first: int = 3) -> list[dict[str, Any]]:
    """Return the single lanes of a band, of ranks from `first` on."""
    chance = random.Random(17)
    return [lane(at + 1, task, first + at, spans(chance, 0.9, 0.6, 3, 1)) for at in range(count)]


def large() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of 1,024 ranks (61 bands of 16 and 48 lanes at most 64), 1,000 partitions, a million samples."""
    full = slow()
    chance = random.Random(11)
    tasks = [f"task_{at}" for at in range(16)]
    fields = [f"field_{at}" for at in range(50)]
    puts = {task: fields[3 * at : 3 * at + 3] for at, task in enumerate(tasks)}
    template = full["tasks"][0]
    full["tasks"] = [
        {**template, "name": task, "ranks": 64, "alive": 64, "puts": puts[task], "rank_state": "Ww" * 32,
         "takes": [field for before in tasks[max(0, at - 2) : at] for field in puts[before]]}
        for at, task in enumerate(tasks)
    ]  # fmt: skip
    full["fields"] = [
        {"name": field, "put_by": [task for task in tasks if field in puts[task]], "rate": 900.0, "bytes": 1e6,
         "taken_by": [each["name"] for each in full["tasks"] if field in each["takes"]]}
        for field in fields
    ]  # fmt: skip
    full["queues"] = [{**full["queues"][0], "task": task, "rows": 1000 * at} for at, task in enumerate(tasks)]
    full["verdict"].update(stage="task_5", last="task_15")
    lanes = []
    for number in range(64):
        each = lane(number + 1, tasks[number // 4], number % 4, [])
        if number % 4 == 3:
            band = [(float(t), 60 + chance.randrange(20), 10, 5, 1) for t in range(1, 301)]
            each.update(ranks=61, rank=-1, label="", band=band)
        else:
            each["spans"] = spans(chance, 0.12, 0.08, 3, 1)
        lanes.append(each)
    full["timeline"].update(lanes=lanes, order=[each["id"] for each in lanes])
    shown = [f"train_{at}" for at in range(3)]
    others = [f"train_{at}" for at in range(3, 23)]
    part = full["partitions"]["list"][0]
    full["partitions"].update(
        count=1000, rows=1_000_000, rest=977, rest_rows=900_000,
        list=[{**part, "name": name, "rows": 333_333, "shown": name in shown} for name in [*shown, *others]],
    )  # fmt: skip
    answers = {}
    for name in shown:
        answer = matrix(name, 1.0, 0.5, 1, columns=341, per=978)
        mixed = runs([chance.randrange(256) for _ in range(341)])
        answer["group_size"] = 0
        answer["fields"] = [{"name": field, "rows": 300_000, "share": mixed, "lost": ""} for field in fields]
        answer["tasks"] = [
            {"name": task, "ready": mixed, "claimed": mixed, "consumed": mixed, "passed": ""} for task in tasks
        ]
        answers[name] = answer
    full["step"]["partition"] = shown[0]
    full["steps"]["steps"] = [{**full["steps"]["steps"][0], "name": f"v{n}", "seconds": 50.0 + n} for n in range(32)]
    return full, copy.deepcopy(answers)
