"""The page of a real system, from its controller to the pixels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import transfer_queue as tq
from chromium import Page
from tests.live.browser.invented import HOSTILE
from tests.live.browser.test_panels import text_of
from tests.live.live_system import Page as Served
from tests.live.live_system import rows, served
from tests.live.test_lifecycle import server_process


@pytest.fixture
def client() -> Iterator[tq.TransferQueueClient]:
    tq.init({"system": {"name": "live-browser"}}, task="rollout", rank=0)
    yield tq.get_client()
    tq.close()


@pytest.fixture
def address(client: tq.TransferQueueClient) -> Iterator[Served]:
    """The page of this system, with sample values."""
    with served(values=True) as found:
        yield found


def opened(page: Page, address: Served, panel: str) -> None:
    """Open the page as its reader does, with the token, and wait for a panel."""
    page.call("Page.navigate", url=address.address)
    page.wait_for(f"!!document.querySelector('{panel}')")


def assert_clean(page: Page, address: Served) -> None:
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((address.base, "about:"))] == []


def test_each_panel_shows_what_the_system_did(client: tq.TransferQueueClient, address: Served, page: Page) -> None:
    groups = [f"q{number // 8}" for number in range(32)]
    meta = client.put(
        rows(32, "tokens", "logprobs"), partition_id="train_0", group_ids=groups, tags=[{"worker": "w7"}] * 32
    )
    client.put(rows(16, "reward"), meta[:16])
    dealt = client.get_meta(["tokens", "reward"], 8, "train_0", task_name="train")
    opened(page, address, ".verdict")
    page.wait_for("[...document.querySelectorAll('.flow .task')].some(each => each.textContent.includes('train'))")
    assert page.evaluate("location.search") == ""  # the token is not kept
    assert {"tokens", "logprobs", "reward"} <= set(
        page.evaluate("[...document.querySelectorAll('.chip + text title')].map(each => each.textContent)")
    )
    page.evaluate("document.querySelector('.matrix details').open = true")
    page.wait_for("document.querySelector('.matrix details table')?.innerText.includes('reward')")
    table = text_of(page, ".matrix details table")
    assert "tokens 32 of 32 put" in table
    assert "reward 16 of 32 put" in table
    assert "25 % consumed" in table or "25 % claimed" in table
    assert "controller ✓ up" in text_of(page, ".servers")
    save = page.evaluate("document.querySelector('header a[download]').href")
    assert save == f"{address.base}/api/snapshot"
    assert page.evaluate(f"fetch('{save}').then((response) => response.status)") == 200
    assert "4 of 4" not in text_of(page, ".policy") or "complete" in text_of(page, ".policy")
    first = int(dealt.global_indexes[0])
    page.evaluate("document.querySelector('#find').focus()")
    page.type(str(first))
    page.evaluate("document.querySelector('.search').requestSubmit()")
    page.wait_for("!!document.querySelector('dialog .history')")
    words = text_of(page, "dialog")
    assert f"Sample {first:,}" in words
    assert "group q0" in words
    assert "tokens int64 [4]" in words
    assert "worker" in words
    assert "w7" in words
    assert_clean(page, address)


def test_a_killed_controller_is_shown_and_recovers(client: tq.TransferQueueClient, address: Served, page: Page) -> None:
    client.put(rows(8, "x"), partition_id="p")
    opened(page, address, ".verdict")
    controller = server_process("controller")
    controller.suspend()
    page.wait_for("document.querySelector('.banner')?.innerText.includes('The page shows the state of')")
    assert text_of(page, "#announcement") == "The controller does not reply."
    controller.kill()
    page.wait_for("!document.querySelector('.banner')")
    client.put(rows(8, "x"), partition_id="p")
    page.wait_for("document.querySelector('.memory h2').innerText.includes('16 samples')")
    page.wait_for("document.querySelector('.timeline .key').innerText.includes('not known')")


def test_hostile_names_of_a_real_system_are_text(client: tq.TransferQueueClient, address: Served, page: Page) -> None:
    partition, field, tag = HOSTILE[0], HOSTILE[4], HOSTILE[3]
    client.put(rows(8, field, "x"), partition_id=partition, tags=[{tag: HOSTILE[1]}] * 8, group_ids=[HOSTILE[2]] * 8)
    opened(page, address, ".matrix canvas")
    page.wait_for("!document.querySelector('#matrix').hidden")
    page.evaluate("document.querySelector('#find').focus()")
    page.type("0")
    page.evaluate("document.querySelector('.search').requestSubmit()")
    page.wait_for("!!document.querySelector('dialog .history')")
    shown = page.evaluate("document.body.innerText")
    assert partition in shown
    assert field in shown
    assert "\u202e" not in shown
    assert page.evaluate("document.querySelectorAll('img, b b, script:not([src])').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert_clean(page, address)
