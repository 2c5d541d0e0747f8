"""The page is readable by everyone: widths, themes, screen readers, and names that try to break it."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from chromium import PHONE, Page
from tests.live.browser import invented
from tests.live.browser.canned_server import CannedServer
from tests.live.browser.test_panels import assert_clean, opened, text_of

AXE = gzip.decompress((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode()
WIDE = (1280, 1000)
STATES = ("slow", "stopped", "flowing", "idle", "empty", "restarting", "ended", "snapshot", "ranks")


def in_state(server: CannedServer, state: str) -> None:
    """Let the server show a state of a system."""
    if state in ("restarting", "ended", "snapshot"):
        server.full.update(getattr(invented, state)(server.full))
    else:
        server.full = getattr(invented, state)()


def violations(page: Page) -> list[str]:
    """Return what axe-core finds: the rule, and the elements."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found: list[dict[str, Any]] = page.evaluate(
        "axe.run(document, {resultTypes: ['violations']}).then(each => each.violations)"
    )
    return [f"{each['id']}: {[node['html'][:120] for node in each['nodes']][:3]}" for each in found]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_any_state(page: Page, server: CannedServer, dark: bool) -> None:
    page.show_as(WIDE, dark)
    for state in STATES:
        in_state(server, state)
        opened(page, server)
        assert (state, violations(page)) == (state, [])
        server.full = invented.slow()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_in_the_inspector_the_tables_and_the_help(
    page: Page, server: CannedServer, dark: bool
) -> None:
    page.show_as(WIDE, dark)
    opened(page, server)
    page.evaluate("document.querySelectorAll('details').forEach(each => (each.open = true))")
    page.wait_for("document.querySelectorAll('.matrix details table, .timeline details table').length === 3")
    assert violations(page) == []
    page.evaluate("document.querySelector('.waits [data-index]').click()")
    page.wait_for("!!document.querySelector('dialog .history')")
    assert violations(page) == []
    page.evaluate("document.querySelector('dialog').close()")
    page.wait_for("!document.querySelector('dialog')")
    page.type("?")
    page.wait_for("!!document.querySelector('dialog.help')")
    assert violations(page) == []


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["1280", "390"])
def test_nothing_is_wider_than_the_window_in_any_state(page: Page, server: CannedServer, size: tuple[int, int]) -> None:
    page.show_as(size)
    too_wide = []
    for state in STATES:
        in_state(server, state)
        opened(page, server)
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            too_wide.append(state)
        server.full = invented.slow()
    assert too_wide == []
    page.evaluate("document.querySelector('.waits [data-index]')?.click()")


def test_the_colors_follow_the_system_and_the_button(page: Page, server: CannedServer) -> None:
    theme = "document.documentElement.dataset.theme"
    for dark in (True, False):
        page.show_as(WIDE, dark)
        opened(page, server)
        assert page.evaluate(theme) == ("dark" if dark else "light")
    page.evaluate("[...document.querySelectorAll('header button')].find(each => each.innerText === 'Dark').click()")
    page.wait_for(f"{theme} === 'dark'")
    opened(page, server)
    assert page.evaluate(theme) == "dark"  # the choice is kept
    page.evaluate("localStorage.clear()")


@pytest.mark.parametrize("name", invented.HOSTILE)
def test_hostile_names_of_joined_ranks_are_text(page: Page, server: CannedServer, name: str) -> None:
    own = server.full["timeline"]["lanes"][0]
    band = {
        **own,
        "id": 900,
        "task": name,
        "rank": -1,
        "ranks": 70,
        "label": "",
        "spans": [],
        "band": [(300.0, 60, 30, 0, 10)],
    }
    server.full["timeline"].update(lanes=[band], order=[900])
    server.lanes[name] = invented.joined(name, 70)
    page.show_as(PHONE)
    opened(page, server)
    page.evaluate("document.querySelector('.joined .link').click()")
    page.wait_for("document.querySelector('.joined p')?.innerText.includes('ranks 3 to 66')")
    assert (name or "no task").partition("\n")[0][:10].replace("\u202e", "\\u202e") in text_of(
        page, ".joined p"
    ).replace("␊", "\n")
    assert "\u202e" not in page.evaluate("document.body.innerText")
    assert page.evaluate("document.querySelectorAll('img, b b, script:not([src])').length") == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert_clean(page, server)


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["1280", "390"])
def test_hostile_names_are_text_and_break_no_layout(page: Page, server: CannedServer, size: tuple[int, int]) -> None:
    server.full, server.matrices = invented.hostile()
    sample = {
        **server.samples["107168"],
        "key": invented.HOSTILE[0],
        "words": invented.HOSTILE[2],
        "command": invented.HOSTILE[2],
    }
    sample["fields"] = [
        {**field, "name": name, "put_by": name} for field, name in zip(sample["fields"], invented.HOSTILE)
    ]
    sample["tags"] = [{"name": name, "value": name} for name in invented.HOSTILE]
    sample["group"] = {"id": invented.HOSTILE[1], "size": 8, "member": 0}
    server.samples = {"107168": sample}
    page.show_as(size)
    opened(page, server)
    assert page.evaluate("document.querySelectorAll('img, b b, script:not([src])').length") == 0
    assert "broken" not in page.evaluate("document.title").split("·")[0]
    assert invented.HOSTILE[0] in page.evaluate("document.querySelector('.waits .who').textContent")
    shown = page.evaluate("document.body.innerText")
    assert "\u202e" not in shown
    assert "\\u202e" in shown  # its code is shown instead
    assert "\x1b" not in shown
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.evaluate("document.querySelector('.waits [data-index]').click()")
    page.wait_for("!!document.querySelector('dialog .history')")
    assert page.evaluate("document.querySelectorAll('img, dialog script').length") == 0
    inside = "document.querySelector('dialog .inside')"
    assert page.evaluate(f"{inside}.scrollWidth <= {inside}.clientWidth")
    assert_clean(page, server)


def test_a_system_as_large_as_the_limits_is_shown(page: Page, server: CannedServer) -> None:
    server.full, server.matrices = invented.large()
    page.show_as(WIDE)
    opened(page, server)
    assert "1,024 ranks · 1,000 partitions" in text_of(page, "header")
    assert page.evaluate("document.querySelectorAll('.flow svg .box').length") == 16
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    timeline = {**server.full["timeline"], "since": 300.0, "until": 301.0}
    timeline["lanes"] = [{**lane, "spans": [[300.0, 301.0, 1, 0]], "band": []} for lane in timeline["lanes"]]
    server.delta(1.0, timeline=timeline, tasks=[{**task, "rate": 901.0} for task in server.full["tasks"]])
    page.wait_for("document.querySelector('.flow').textContent.includes('901')")
    server.lanes["task_5"] = invented.joined("task_5", 61)
    page.evaluate(
        "[...document.querySelectorAll('.joined .link')].find(each => each.innerText.startsWith('task_5')).click()"
    )
    page.wait_for("document.querySelector('.joined p')?.innerText.includes('ranks 3 to 63')")
    page.evaluate("performance.clearMeasures()")
    timeline.update(since=301.0, until=302.0)
    server.delta(2.0, timeline=timeline, tasks=[{**task, "rate": 902.0} for task in server.full["tasks"]])
    page.wait_for("document.querySelector('.flow').textContent.includes('902')")
    assert violations(page) == []
    print(
        {
            each: page.evaluate(f"performance.getEntriesByName('{each}')[0]?.duration")
            for each in ("event", "page", "timeline", "matrix")
        }
    )
    assert_clean(page, server)
