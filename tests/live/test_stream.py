"""The stream of the page: what it has, and that it is one computation for all who look."""

from __future__ import annotations

import base64
import json
import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

import transfer_queue as tq
from tests.live.live_system import SECONDS, Page, read_events, rows, served, view_when
from tests.tiny_tokenizer import write_tokenizer
from transfer_queue.live import payload
from transfer_queue.live.serving.hub import MAX_VIEWERS, QUEUED, Hub, Viewer

PARTS = {
    "system", "state", "verdict", "rates", "step", "steps", "tasks", "queues", "fields", "life", "waits", "timeline",
    "policy", "ages", "groups", "partitions", "memory", "servers", "clients",
}  # fmt: skip


def complete(view: dict[str, Any]) -> bool:
    return view.keys() >= PARTS and bool(view["groups"]) and bool(view["memory"]["units"])


@pytest.fixture(scope="module")
def view(page: Page) -> dict[str, Any]:
    return page.view_when(complete)


def test_the_first_event_has_all_parts_of_the_declared_types(page: Page) -> None:
    with page.stream() as events:
        kind, data = next(events)
    assert kind == "full"
    assert data.keys() >= PARTS
    msgspec.json.decode(json.dumps(data).encode(), type=payload.LiveView)


def test_a_delta_has_only_what_has_changed(page: Page) -> None:
    with page.stream() as events:
        view_when(events, complete)
        kind, data = next(events)
    assert kind == "delta"
    assert "system" not in data
    assert "partitions" not in data
    assert "policy" not in data
    msgspec.json.decode(json.dumps(data).encode(), type=payload.LiveView)


def test_the_flow_has_tasks_fields_and_queues(view: dict[str, Any]) -> None:
    tasks = {task["name"]: task for task in view["tasks"]}
    assert list(tasks) == ["rollout", "train"]
    assert tasks["rollout"]["puts"] == ["tokens", "logprobs", "reward"]
    assert tasks["train"]["takes"] == ["tokens", "reward"]
    fields = {field["name"]: field for field in view["fields"]}
    assert fields["reward"]["put_by"] == ["rollout"]
    assert fields["reward"]["taken_by"] == ["train"]
    (queue,) = view["queues"]
    assert (queue["task"], queue["rows"]) == ("train", 8)


def test_partitions_groups_memory_and_servers_are_those_of_the_system(view: dict[str, Any]) -> None:
    (partition,) = view["partitions"]["list"]
    assert (partition["name"], partition["rows"], partition["shown"]) == ("train_0", 32, True)
    (group,) = view["groups"]
    assert (group["size"], group["whole"], group["lack_field"], group["lack_member"]) == (8, 2, 2, 0)
    (unit,) = view["memory"]["units"]
    assert unit["live"] > 0
    assert [server["name"] for server in view["servers"]["servers"]] == ["controller", "unit 0"]
    assert view["servers"]["answered"] == 2
    assert view["state"]["state"] == "live"
    assert view["policy"] is None


def test_lanes_have_spans_of_their_ranks(view: dict[str, Any]) -> None:
    lanes = {lane["task"]: lane for lane in view["timeline"]["lanes"]}
    assert lanes["rollout"]["rank"] == 0
    states = {payload.STATES[span[2]] for span in lanes["train"]["spans"]}
    assert "works" in states
    for lane in lanes.values():
        edges = [edge for span in lane["spans"] for edge in span[:2]]
        assert edges == sorted(edges)


def test_a_claim_that_waits_is_explained(page: Page, client: tq.TransferQueueClient) -> None:
    client.put(rows(8, "tokens"), partition_id="waited_for")

    def wait() -> None:
        client.get_meta(["tokens", "value"], 8, "waited_for", task_name="critic", timeout=SECONDS)

    waiting = threading.Thread(target=wait)
    waiting.start()
    view = page.view_when(lambda view: any(each["words"] for each in view.get("waits", [])))
    (found,) = [each for each in view["waits"] if each["task"] == "critic"]
    assert (found["kind"], found["count"], found["partition"]) == ("wait", 1, "waited_for")
    assert "missing the field 'value'" in found["words"]
    lacking = client.get_meta(["tokens"], 8, "waited_for", mode="force_fetch", task_name="other")
    assert found["sample"] in lacking.global_indexes
    client.put(rows(8, "value"), lacking)
    waiting.join(SECONDS)
    assert not waiting.is_alive()
    client.clear_partition("waited_for")


def test_two_viewers_get_the_same_views(page: Page) -> None:
    with page.stream() as first, page.stream() as second:
        next(first), next(second)
        seen = [{data["seq"]: data for _, data in (next(events) for _ in range(3))} for events in (first, second)]
    common = seen[0].keys() & seen[1].keys()
    assert common
    assert all(seen[0][number] == seen[1][number] for number in common)


def test_a_ninth_viewer_is_refused_until_one_leaves(page: Page) -> None:
    with page.browser() as browser:
        with ExitStack() as streams:
            opened = [streams.enter_context(browser.stream("GET", "/api/live")) for _ in range(MAX_VIEWERS)]
            assert [response.status_code for response in opened] == [200] * MAX_VIEWERS
            refused = browser.get("/api/live")
            assert refused.status_code == 503
            assert "8 times" in refused.json()["error"]
        status = 503
        while status == 503:  # the server sees with the next view that they have left
            with browser.stream("GET", "/api/live") as response:
                status = response.status_code
        assert status == 200


def test_a_viewer_that_does_not_read_begins_again() -> None:
    viewer = Viewer()
    viewer.begin(b"full 1", 1)
    for number in range(QUEUED):
        viewer.push(b"delta %d" % number)
    assert viewer.begins
    viewer.begin(b"full 2", 9)
    assert viewer._events == [b"full 2"]
    assert viewer.last == 9


def test_a_slow_viewer_does_not_hold_up_another_one(page: Page) -> None:
    host = page.base.removeprefix("http://")
    with page.browser() as browser, socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2]))) as slow:
        cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
        slow.sendall(f"GET /api/live HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n\r\n".encode())
        with browser.stream("GET", "/api/live") as response:
            events = read_events(response)
            assert [next(events)[0] for _ in range(4)] == ["full", "delta", "delta", "delta"]


def test_nothing_is_computed_without_a_viewer(client: tq.TransferQueueClient) -> None:
    class UnreadSource:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    import asyncio

    async def run() -> None:
        hub = Hub(UnreadSource())  # type: ignore[arg-type]
        running = asyncio.create_task(hub.run())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        hub.close()

    asyncio.run(run())


def test_the_matrix_has_the_shares_of_fields_and_tasks(page: Page) -> None:
    page.view_when(complete)
    with page.browser() as browser:
        found = browser.get("/api/matrix", params={"partition": "train_0", "columns": 4})
        matrix = found.json()
        assert (matrix["rows"], matrix["columns"], matrix["column_rows"], matrix["group_size"]) == (32, 4, 8, 8)
        fields = {field["name"]: shares(field["share"]) for field in matrix["fields"]}
        assert fields["tokens"] == [255] * 4
        assert fields["reward"] == [255, 255, 0, 0]
        tasks = {task["name"]: task for task in matrix["tasks"]}
        assert shares(tasks["train"]["consumed"]) == [255, 0, 0, 0]
        assert shares(tasks["train"]["ready"]) == [0, 255, 0, 0]
        assert tasks["train"]["claimed"] == ""
        again = browser.get("/api/matrix", params={"partition": "train_0", "columns": 4}, headers=tagged(found))
        assert (again.status_code, again.content) == (304, b"")
        part = browser.get("/api/matrix", params={"partition": "train_0", "from": 8, "to": 24, "columns": 16}).json()
        assert (part["start"], part["stop"], part["columns"]) == (8, 24, 16)
        assert browser.get("/api/matrix", params={"partition": "no"}).status_code == 404


def shares(text: str) -> list[int]:
    pairs = base64.b64decode(text)
    return [value for at in range(0, len(pairs), 2) for value in [pairs[at + 1]] * pairs[at]]


def tagged(response: httpx.Response) -> dict[str, str]:
    return {"If-None-Match": response.headers["etag"]}


def test_a_sample_has_its_fields_and_history_but_no_values(page: Page) -> None:
    with page.browser() as browser:
        found = browser.get("/api/sample", params={"partition": "train_0", "index": 0})
        assert found.status_code == 200
        assert "tag-value" not in found.text
        sample = found.json()
        fields = {field["name"]: field for field in sample["fields"]}
        assert (fields["tokens"]["type"], fields["tokens"]["shape"]) == ("int64", [4])
        assert fields["tokens"]["put_by"] == f"rollout rank 0, pid {os.getpid()}, {socket.gethostname()}"
        assert fields["tokens"]["head"] is None
        assert "values are hidden" in fields["tokens"]["note"]
        assert {tag["name"]: tag["value"] for tag in sample["tags"]} == {"policy_version": None, "secret": None}
        assert (sample["group"]["id"], sample["group"]["member"]) == ("q0", 0)
        assert [event["what"] for event in sample["history"]][:2] == ["put tokens, logprobs", "put reward"]
        assert "consumed" in sample["words"]
        assert browser.get("/api/sample", params={"partition": "train_0", "index": 10**9}).status_code == 404
        assert browser.get("/api/sample", params={"partition": "train_0", "key": "no"}).status_code == 404
        words = browser.get("/api/explain", params={"partition": "train_0", "index": 0}).json()["words"]
        assert words.startswith("Sample 0 of partition 'train_0'")


def test_a_cleared_sample_is_explained_by_its_index_even_if_its_key_was_asked_for(
    client: tq.TransferQueueClient, page: Page
) -> None:
    client.kv_put("gone", "cleared", {"text": "x"})
    index = client.describe_sample("cleared", key="gone").index
    client.kv_clear(["gone"], "cleared")
    with page.browser() as browser:
        sample = browser.get("/api/sample", params={"partition": "cleared", "key": "gone"}).json()
    assert sample["state"] == "cleared"
    assert sample["words"] == client.describe_sample("cleared", key="gone").explanation
    assert f"ample {index} " in sample["words"]
    client.clear_partition("cleared")


def test_ranks_that_have_lines_of_their_own_cannot_be_opened(page: Page) -> None:
    page.view_when(complete)
    with page.browser() as browser:
        found = browser.get("/api/lanes", params={"task": "train"})
        assert found.status_code == 404
        assert found.json()["error"] == "no ranks of the task 'train' are joined to a line"
        assert browser.get("/api/lanes").status_code == 400
        assert browser.get("/api/lanes", params={"task": "train", "from": "x"}).status_code == 400
        assert browser.get("/api/lanes", params={"task": "x" * 2000}).status_code == 400


class Pickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("the page has unpickled a value",)


def test_values_are_shown_only_on_request_and_never_unpickled(
    client: tq.TransferQueueClient, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "x" * 3000
    client.kv_put("one", "values", {"text": text, "object": Pickled(), "number": 0.5}, tag={"note": "hello"})
    client.kv_put("two", "values", {"big": torch.zeros(1 << 15)})
    with served(values=True) as page, page.browser() as browser:
        sample = browser.get("/api/sample", params={"partition": "values", "key": "one"}).json()
        assert "error" not in sample, sample
        fields = {field["name"]: field for field in sample["fields"]}
        assert fields["text"]["text"] == text[:2000]
        assert fields["object"]["note"].startswith("pickled, ")
        assert fields["number"]["head"] == "0.5"
        assert sample["tags"] == [{"name": "note", "value": "hello"}]
        big, *_ = browser.get("/api/sample", params={"partition": "values", "key": "two"}).json()["fields"]
        assert "too large" in big["note"]
    assert "unpickled" not in capfd.readouterr().out
    client.clear_partition("values")


def test_token_ids_are_shown_as_text_with_a_tokenizer(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tokenizer = str(write_tokenizer(tmp_path))
    client.kv_put("one", "texts", {"tokens": torch.tensor([2, 3, 4] * 20), "labels": torch.tensor([2, -100])})
    with served(values=True, tokenizer=tokenizer) as page, page.browser() as browser:
        sample = browser.get("/api/sample", params={"partition": "texts", "key": "one"}).json()
    fields = {field["name"]: field for field in sample["fields"]}
    assert fields["tokens"]["head"].startswith("2, 3, 4, 2, ")
    assert fields["tokens"]["decoded"] == " ".join(["what is two"] * 20)
    assert (fields["labels"]["head"], fields["labels"]["decoded"]) == ("2, -100", None)
    with served(tokenizer=tokenizer) as page, page.browser() as browser:  # values stay hidden
        hidden = browser.get("/api/sample", params={"partition": "texts", "key": "one"})
    assert "what is two" not in hidden.text
    client.clear_partition("texts")


def test_the_stream_ends_with_a_farewell(client: tq.TransferQueueClient) -> None:
    with served() as page, page.browser() as browser, browser.stream("GET", "/api/live") as response:
        events = read_events(response)
        assert next(events)[0] == "full"
        farewell: list[Any] = []
        reader = threading.Thread(target=lambda: farewell.extend(kind for kind, _ in events))
        reader.start()
        page.stop()
        reader.join(SECONDS)
    assert farewell[-1] == "bye"
