"""The replay buffers sample what verl's own ones sample, wait for changes, and say which prompts are stuck."""

from __future__ import annotations

import doctest
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from producing import ARGUMENTS, finish, put_trajectories, set_status, submit
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

import transfer_queue as tq
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.integrations.verl import EventDrivenReplayBuffer, EventDrivenReplayBufferAsync, replay_buffer

STOCK = {EventDrivenReplayBuffer: ReplayBuffer, EventDrivenReplayBufferAsync: ReplayBufferAsync}
SECONDS = 60.0


def made(kind: type, **arguments: Any) -> Any:
    """Return a replay buffer."""
    mode = "colocate_async" if issubclass(kind, ReplayBufferAsync) else "sync"
    return kind(trainer_mode=mode, **{**ARGUMENTS, **arguments})


class Spy:
    """Counts what a client is asked for, and passes it on."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.rows: list[int] = []
        """The number of samples in each reply about changes."""
        self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def wait_for_change(self, partition_id: str, since: Any, where: Any, *, timeout: float) -> Any:
        """Ask the client, and count the rows of the reply."""
        self.waits += timeout > 0
        change = self._client.wait_for_change(partition_id, since, where, timeout=timeout)
        self.rows.append(len(change.keys) + len(change.cleared_keys))
        return change


@pytest.fixture
def spy(client: Any, monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The client of the replay buffers, which may not list the keys of all partitions."""
    spy = Spy(client)
    monkeypatch.setattr(replay_buffer, "get_client", lambda: spy)
    monkeypatch.delattr(tq, "kv_list")
    return spy


# ---------------------------------------------------------------- the same batches

PROMPTS = [f"p{number}" for number in range(6)]
OF_A_PROMPT = ["submit", "run", "put", "finish", "finish", "fail"]
OF_ALL = ["train", "train", "look", "drop the partition"]
ACTION = st.one_of(
    st.tuples(st.sampled_from(OF_A_PROMPT), st.sampled_from(PROMPTS), st.integers(0, 4)),
    st.tuples(st.sampled_from(OF_ALL), st.just(""), st.integers(1, 4)),
)


class Run:
    """Carries out actions with a replay buffer, and notes what it returns."""

    def __init__(self, kind: type, group_filter: bool) -> None:
        self.added = 0
        metric = "reward" if group_filter and issubclass(kind, ReplayBufferAsync) else None
        self.buffer = made(kind, refill_fn=self.refill, filter_groups_metric=metric, poll_interval=0.0)
        self.status: dict[str, str] = {}
        self.step = 1
        self.outcomes: list[Any] = []
        self.sampled: list[str] = []

    def refill(self, count: int) -> None:
        """Add prompts that are finished at once, so that no sample call waits."""
        self.outcomes.append(("refilled", count))
        for _ in range(count):
            self.added += 1
            submit([f"added{self.added}"], self.step)
            finish(f"added{self.added}", 2, self.step, rewards=[0.0, 1.0])
            self.status[f"added{self.added}"] = "finished"

    def act(self, action: str, prompt: str, number: int) -> None:
        """Carry out one action. A prompt that does not exist yet is submitted first."""
        if prompt and prompt not in self.status:
            submit([prompt], 1 + number)
            self.status[prompt] = "pending"
        known = self.status.get(prompt)
        if known in ("pending", "running"):
            if action == "run":
                self.status[prompt] = "running"
            elif action in ("finish", "fail"):
                self.status[prompt] = "finished" if action == "finish" else "failure"
            if action != "run" and number:
                put_trajectories(prompt, number, rewards=[0.0, float(number > 2)])
            set_status(prompt, self.status[prompt])
        elif action == "train":
            self.train(number)
        elif action == "look" and hasattr(self.buffer, "get_sampleable_count"):
            self.step += number
            self.outcomes.append(result_of(self.buffer.get_sampleable_count, self.step, "train"))
        elif action == "drop the partition":
            tq.get_client().clear_partition("train")
            self.status.clear()

    def train(self, count: int) -> None:
        """Sample a batch if one is there; write a field to it, and clear the previous one, as verl's trainer does."""
        terminal = [prompt for prompt, status in self.status.items() if status in ("finished", "failure")]
        if len(terminal) < count:
            return
        found = result_of(self.buffer.sample, global_steps=self.step, partition_id="train", batch_size=count)
        self.outcomes.append(found)
        if isinstance(found, tuple):
            batch = found[0]
            if batch.keys:
                tq.kv_batch_put(batch.keys, "train", tags=[{"trained": self.step} for _ in batch.keys])
            if self.sampled:
                tq.kv_clear(self.sampled, "train")
            self.sampled = batch.keys
        left = tq.kv_list("train", where={"is_prompt": True}).get("train", {})
        self.status = {prompt: tag["status"] for prompt, tag in left.items()}
        self.step += 1


def result_of(call: Any, *arguments: Any, **named: Any) -> Any:
    """Return what a call returns, or the text of its error: verl refuses groups without trajectories."""
    try:
        return call(*arguments, **named)
    except RuntimeError as error:
        return str(error)


def outcomes(kind: type, actions: list[tuple[str, str, int]], group_filter: bool) -> list[Any]:
    """Return what a replay buffer returned in a run of its own."""
    run = Run(kind, group_filter)
    for action in actions:
        run.act(*action)
    for partition in tq.get_client().get_partition_list():
        tq.get_client().clear_partition(partition)
    return run.outcomes


@pytest.mark.parametrize("kind", STOCK)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(actions=st.lists(ACTION, min_size=5, max_size=40), group_filter=st.booleans())
def test_the_batches_are_those_of_verl(system: Any, kind: type, actions: list[Any], group_filter: bool) -> None:
    assert outcomes(kind, actions, group_filter) == outcomes(STOCK[kind], actions, group_filter)


def test_group_filtering_of_the_synchronous_trainer_is_that_of_verl(client: Any) -> None:
    """Groups whose rewards are equal are dropped and refilled, and surplus groups are discarded."""

    def run(kind: type) -> Any:
        events: list[Any] = []

        def refill(count: int) -> None:
            events.append(count)
            for number in range(count):
                name = f"more{len(events)}.{number}"
                submit([name])
                finish(name, rewards=[0.0, 1.0])

        buffer = made(
            kind, refill_fn=refill, filter_groups_metric="reward", train_batch_size=2, gen_batch_size=1,
            max_inflight_gen_batches=2, poll_interval=0.0,
        )  # fmt: skip
        submit(["same", "other"])
        finish("same", rewards=[1.0])
        finish("other", rewards=[0.0])
        batch, metrics = buffer.sample(1, "train", 1)
        client.clear_partition("train")
        return batch, metrics, events

    found, wanted = run(EventDrivenReplayBuffer), run(ReplayBuffer)
    assert found == wanted
    assert found[2], "nothing was refilled"


def test_partitions_are_apart(client: Any) -> None:
    buffer = made(EventDrivenReplayBuffer)
    submit(["a"])
    finish("a", 2)
    submit(["v"], partition="val")
    finish("v", 1, partition="val")
    assert buffer.sample(1, "val", 1)[0].keys == ["v_0_0"]
    assert buffer.sample(1, "train", 1)[0].keys == ["a_0_0", "a_1_0"]
    submit(["w"], partition="val")
    finish("w", 1, partition="val")
    assert buffer.sample(2, "val", 1)[0].keys == ["w_0_0"]


def test_an_unknown_status_is_an_error(client: Any) -> None:
    submit(["a"])
    set_status("a", "lost")
    with pytest.raises(InvalidArgumentError, match="'lost' for 'a'"):
        made(EventDrivenReplayBuffer).sample(1, "train", 1)


# ---------------------------------------------------------------- the wait


def sample_in_thread(buffer: Any, **call: Any) -> Iterator[Any]:
    """Start `sample` in a thread; the second value is its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(buffer.sample(**call)), daemon=True)
    thread.start()
    yield thread
    thread.join(SECONDS)
    assert not thread.is_alive(), "sample did not return"
    yield found[0]


def until_it_waits(client: Any, spy: Spy) -> None:
    """Return when the replay buffer has asked for changes and waits for them."""
    deadline = time.monotonic() + SECONDS
    while not spy.waits:
        assert time.monotonic() < deadline, "the replay buffer does not wait"


@pytest.mark.parametrize("kind", STOCK)
def test_a_status_ends_the_wait(client: Any, spy: Spy, kind: type) -> None:
    """One request waits, and is answered by the last status alone; trajectories do not wake the caller."""
    submit(["a", "b"])
    finish("a")
    set_status("b", "running")
    running = sample_in_thread(made(kind), global_steps=1, partition_id="train", batch_size=2)
    next(running)
    until_it_waits(client, spy)
    put_trajectories("b", 3)
    set_status("b", "finished")
    batch, _ = next(running)
    assert batch.keys == ["a_0_0", "a_1_0", "b_0_0", "b_1_0", "b_2_0"]
    assert spy.waits == 1


def test_the_wait_begins_before_the_partition_exists(client: Any, spy: Spy) -> None:
    running = sample_in_thread(made(EventDrivenReplayBuffer), global_steps=1, partition_id="train", batch_size=1)
    next(running)
    until_it_waits(client, spy)
    submit(["a"])
    finish("a", 1)
    assert next(running)[0].keys == ["a_0_0"]


def test_only_changes_are_read(client: Any, spy: Spy) -> None:
    """A second call receives what changed since the first one, and nothing of other partitions."""
    tq.kv_batch_put([f"k{i}_0_0" for i in range(3000)], "other", tags=[{"status": "success"}] * 3000)
    submit([f"p{i}" for i in range(100)])
    buffer = made(EventDrivenReplayBuffer)
    finish("p7", 2)
    assert buffer.sample(1, "train", 1)[0].keys == ["p7_0_0", "p7_1_0"]
    assert spy.rows == [102]
    finish("p9", 2)
    assert buffer.sample(1, "train", 1)[0].keys == ["p9_0_0", "p9_1_0"]
    assert spy.rows == [102, 4]  # p7 was cleared; p9 and its trajectories changed


# ---------------------------------------------------------------- a long wait


def poll(buffer: Any, reported: float = 0.0) -> float:
    """Do what verl's `sample` does while it waits. reported: When the wait was reported last. Returns the new time."""
    buffer._sync_metadata_from_transfer_queue()
    return float(buffer._wait_for_next_poll("train", reported))


def test_a_long_wait_names_the_prompts_that_are_stuck(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The prompt that is unchanged for longest comes first, with the client that wrote it last."""
    buffer = made(EventDrivenReplayBuffer, sampler_kwargs={"report_after": 7})
    submit(["first", "second", "done"])
    set_status("second", "running")
    put_trajectories("second", 2)
    finish("done")
    asked = time.time()
    with caplog.at_level(logging.WARNING):
        reported = poll(buffer, asked - 8)
    assert reported >= asked
    text = caplog.records[-1].getMessage()
    title, first, second = text.split("\n")
    assert title == "Still waiting for prompts of partition 'train': 1 finished, 0 failed, 1 running, 1 pending."
    assert first.startswith("  first: pending, trajectories so far: 0, unchanged for ")
    assert second.startswith("  second: running, trajectories so far: 2, unchanged for ")
    for line in (first, second):
        assert f"last written by pid {os.getpid()}, {socket.gethostname()}" in line
        assert "(since " in line


def test_a_writer_with_a_task_is_named_by_it(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    from transfer_queue.attachment import CURRENT
    from transfer_queue.client import TransferQueueClient

    with TransferQueueClient(CURRENT.system, task="agent_loop", rank=3) as other:
        other.kv_put("a", "train", tag={"is_prompt": True, "status": "running", "global_steps": 1})
        buffer = made(EventDrivenReplayBuffer, sampler_kwargs={"report_after": 1})
        buffer._sync_metadata_from_transfer_queue()
        buffer._wait_for_next_poll("train", 0.0)
        assert f"last written by agent_loop rank 3, pid {os.getpid()}, {socket.gethostname()}" in caplog.text


def test_many_stuck_prompts_are_counted(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    buffer = made(EventDrivenReplayBuffer, sampler_kwargs={"report_after": 1})
    submit([f"p{i}" for i in range(replay_buffer.MAX_PROMPTS + 3)])
    poll(buffer)
    assert "and 3 more unfinished prompts" in caplog.text
    assert "p7: pending" in caplog.text
    assert "p8: pending" not in caplog.text


def test_a_wait_without_unfinished_prompts_says_so(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    buffer = made(EventDrivenReplayBuffer, sampler_kwargs={"report_after": 1})
    submit(["a"])
    finish("a")
    poll(buffer)
    assert "fewer prompts were submitted than the batch needs" in caplog.text


@pytest.mark.parametrize("wrong", [0, -1, "soon", True, float("nan")])
def test_the_seconds_of_a_report_are_checked(wrong: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="report_after must be a positive number"):
        made(EventDrivenReplayBuffer, sampler_kwargs={"report_after": wrong})


@pytest.mark.parametrize("kind", STOCK)
def test_docstring_examples_run(client: Any, kind: type) -> None:
    submit(["uid"])
    finish("uid", 1)
    [test] = doctest.DocTestFinder(recurse=False).find(kind, kind.__name__, globs={kind.__name__: kind})
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
