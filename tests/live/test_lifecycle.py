"""What the page shows while the controller restarts, when the system ends, and when another one takes its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import transfer_queue as tq
from server_processes import server_process
from tests.live.live_system import SECONDS, Page, read_events, rows, served, view_when
from transfer_queue.cli import main
from transfer_queue.interface import CURRENT

NAME = "live-lifecycle"


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    tq.close()


@pytest.fixture
def client() -> tq.TransferQueueClient:
    """Of the system of the test before, without its samples, or of a new one if that test has ended it."""
    tq.init({"system": {"name": NAME}}, task="rollout", rank=0)
    client = tq.get_client()
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    return client


@pytest.fixture
def nothing_runs() -> None:
    tq.close()


def state_is(*states: str) -> Any:
    return lambda view: view.get("state", {}).get("state") in states


def test_an_empty_system_says_who_waits(client: tq.TransferQueueClient) -> None:
    with served() as page:
        view = page.view_when(state_is("empty"))
        assert view["clients"]["connected"] == 1  # neither the storage unit nor the page
        assert "Nothing was put yet" in view["state"]["words"]
        assert (view["partitions"]["list"], view["policy"], view["groups"]) == ([], None, [])
        assert [(task["name"], task["rank_state"]) for task in view["tasks"]] == [("rollout", "i")]
        client.put(rows(8, "x"), partition_id="p")
        page.view_when(state_is("live"))


def test_a_killed_controller_is_shown_and_recovers(client: tq.TransferQueueClient) -> None:
    client.put(rows(8, "x"), partition_id="p")
    with served() as page, page.stream() as events:
        before = view_when(events, state_is("live"))
        controller = server_process("controller")
        controller.suspend()
        stale = view_when(events, state_is("restarting"))
        assert stale["now"] <= stale["state"]["since"] + 0.01
        assert "restarted" in stale["state"]["words"]
        controller.kill()
        after = view_when(events, state_is("live"))
        assert after["now"] > before["now"]
        client.put(rows(8, "x"), partition_id="p")
        seen = view_when(events, lambda view: view["timeline"]["gaps"] and view["partitions"]["rows"] == 16)
        assert seen["partitions"]["list"][0]["rows"] == 16


def test_the_end_of_the_system_is_shown_and_a_successor_is_followed(client: tq.TransferQueueClient) -> None:
    client.put(rows(8, "x"), partition_id="p")
    with served() as page, page.stream() as events:
        first = view_when(events, state_is("live"))
        tq.close()
        ended = view_when(events, state_is("ended"))
        assert f"The system {NAME} has ended" in ended["state"]["words"]
        kind, later = next(events)
        assert kind == "delta"
        assert "tasks" not in later  # the last state stays
        tq.init({"system": {"name": NAME}})
        tq.get_client().put(rows(24, "y"), partition_id="q")
        second = view_when(events, lambda view: state_is("live")(view) and view["partitions"]["rows"] == 24)
        assert second["system"]["started"] > first["system"]["started"]
        assert [each["name"] for each in second["partitions"]["list"]] == ["q"]
        assert all(lane["task"] != "rollout" for lane in second["timeline"]["lanes"])


def test_the_command_serves_until_it_is_interrupted(client: tq.TransferQueueClient) -> None:
    client.put(rows(8, "x"), partition_id="p")
    command = [sys.executable, "-m", "transfer_queue.cli", "live", "--name", NAME, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert NAME in process.stdout.readline()
        page = Page(process.stdout.readline().strip(), lambda: None)
        assert page.view_when(state_is("live"))["partitions"]["rows"] == 8
        with page.browser() as browser, browser.stream("GET", "/api/live") as response:
            process.send_signal(signal.SIGINT)
            assert [kind for kind, _ in read_events(response)][-1] == "bye"
        out, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert "token" not in out


REFUSED = [
    (["--host", "0.0.0.0"], 1, "live.host is 0.0.0.0"),
    (["--name", "live-nobody"], 1, "no system is running"),
    (["--tokenizer", "nowhere", "--values"], 2, "the tokenizer 'nowhere' was not found"),
    (["--tokenizer", "nowhere"], 2, "--tokenizer is 'nowhere', but values are hidden: give --values as well"),
]


def test_the_command_refuses_what_it_cannot_serve(
    client: tq.TransferQueueClient, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, code, words in REFUSED:
        try:
            found = main(["live", "--name", NAME, *arguments])
        except SystemExit as ended:  # a usage error
            found = ended.code
        assert found == code
        assert words in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there_is_reported_at_the_start(nothing_runs: None) -> None:
    live = {"enabled": True, "values": True, "tokenizer": "/nowhere/tokenizer.json"}
    with pytest.raises(tq.StartError, match=r"live\.tokenizer: the tokenizer '/nowhere/tokenizer\.json' was not found"):
        tq.init({"system": {"name": NAME}, "live": live})
    with pytest.raises(tq.InvalidArgumentError, match=r"live\.tokenizer is .*null, unless live\.values is true"):
        tq.init({"system": {"name": NAME}, "live": {**live, "values": False}})


def test_a_system_with_the_setting_has_a_page_that_outlives_its_controller(nothing_runs: None) -> None:
    tq.init({"system": {"name": NAME}, "live": {"enabled": True}})
    try:
        system = CURRENT.system
        assert system is not None
        assert os.stat(system.folder / "live").st_mode & 0o777 == 0o600
        assert tq.get_live_address() == system.live_address
        page = Page(system.live_address, lambda: None)
        tq.get_client().put(rows(8, "x"), partition_id="p")
        page.view_when(lambda view: state_is("live")(view) and view["partitions"]["rows"] == 8)
        server = server_process("live")
        server_process("controller").kill()
        page.view_when(state_is("live"))
        assert server.is_running()
        server.kill()  # the supervisor starts it again, under the same address
        with httpx.Client(timeout=SECONDS, transport=httpx.HTTPTransport(verify=False, retries=5)) as stranger:
            while True:
                try:
                    assert stranger.get(page.address).status_code == 303
                    break
                except httpx.TransportError:
                    continue
        page.view_when(lambda view: state_is("live")(view) and view["partitions"]["rows"] == 8)
        with page.browser() as browser, browser.stream("GET", "/api/live") as response:
            events = read_events(response)
            assert next(events)[0] == "full"
            tq.close()
            assert [kind for kind, _ in events][-1] == "bye"
    finally:
        tq.close()


def test_a_port_that_is_in_use_is_reported_at_the_start(nothing_runs: None) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(tq.StartError, match=f"the page cannot be served on port {port}"):
            tq.init({"system": {"name": NAME}, "live": {"enabled": True, "port": port}})
