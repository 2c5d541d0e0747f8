"""Each panel shows what the data says, in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chromium import Page
from tests.live.browser import invented
from tests.live.browser.canned_server import CannedServer


def opened(page: Page, server: CannedServer) -> Page:
    """Return the page of a server, with its first data and its matrix."""
    page.open(server.url)
    page.wait_for("!!document.querySelector('main')")
    if server.full["state"]["state"] == "live":
        page.wait_for("!document.querySelector('#matrix').hidden")
    return page


def text_of(page: Page, selector: str) -> str:
    """Return the text of an element as a person reads it, on one line."""
    return " ".join(str(page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")).split())


def assert_clean(page: Page, server: CannedServer) -> None:
    """No script reported an error, nothing broke the content security policy, and no other host was asked."""
    assert page.errors == []
    assert [url for url in page.requests if not url.startswith((server.url, "about:"))] == []


def test_the_verdict_is_in_words_with_its_numbers(page: Page, server: CannedServer) -> None:
    opened(page, server)
    assert text_of(page, ".verdict h1") == "Flowing, slowly reward is the slowest stage"
    words = text_of(page, ".verdict")
    assert "train waits 63 % of the time for advantage, which reward puts; 1,048 samples queue before it" in words
    assert "2 of 4 reward workers are gone" in words
    assert "reward needs 4 ranks" in words
    assert "84 % of train_42 dealt; ends in 11 s" in words
    assert "5 of 5 servers reply; ✕ 2 ranks gone 0 values lost" in words
    assert page.evaluate("document.title").startswith("Flowing, slowly: reward is the slowest stage")
    assert_clean(page, server)


def test_the_flow_shows_tasks_fields_queues_and_the_slowest_stage(page: Page, server: CannedServer) -> None:
    opened(page, server)
    code = """[...document.querySelectorAll('.flow svg text')].map(each =>
        [...each.childNodes].filter(node => node.nodeType === 3).map(node => node.data).join('').trim())"""
    texts = page.evaluate(code)
    assert {"rollout", "reference", "reward", "train", "routed_experts", "advantage", "▼ slowest stage"} <= set(texts)
    assert {"1,048", "2 of 4", "15.6 samples/s", "waits 63 %", "weights, version 42, 31 s old"} <= set(texts)
    assert page.evaluate("document.querySelectorAll('.flow .rank.x').length") == 2  # crosses: gone
    assert page.evaluate("document.querySelectorAll('.flow .edge').length") == 5
    # a screen reader gets a table instead
    assert page.evaluate("document.querySelector('.flow svg').getAttribute('aria-hidden')") == "true"
    assert "reward 2 of 4 15.6 works 100 %" in text_of(page, ".flow table")
    assert "queues for reward 24 s" in text_of(page, ".life")


def test_who_waits_is_shown_with_a_link_to_the_sample(page: Page, server: CannedServer) -> None:
    opened(page, server)
    first = text_of(page, ".waits li")
    assert first.startswith("train 6 of 8 ranks wait now 63 % of the last 60 s")
    assert "Claims of 8 samples with 5 fields in partition train_42 wait for advantage, which reward puts." in first
    assert "Sample 107168 of partition 'train_42' misses the fields ['advantage']" in first
    gone = text_of(page, ".waits li:nth-child(2)")
    assert "✕ ranks 1 and 3 are gone 78 s" in gone
    assert "ended without a close: rank 1, pid 41212, node-04; rank 3, pid 41214, node-06." in gone
    page.evaluate("document.querySelector('.waits li:nth-child(3) details').open = true")
    assert "rank 0, pid 41209, node-01; rank 1, pid 41210, node-02." in text_of(page, ".waits li:nth-child(3)")


def test_a_rank_without_a_number_is_named_by_its_process(page: Page, server: CannedServer) -> None:
    own = {**server.full["timeline"]["lanes"][0], "rank": -1, "label": "pid 17, node-9"}
    server.full["timeline"].update(lanes=[own], order=[own["id"]])
    server.full["waits"][0].update(count=1, of=1, ranks=["pid 17, node-9"])
    opened(page, server)
    assert "pid 17, node-9 waits now" in text_of(page, ".waits li")
    page.type("t")
    press(page, "ArrowLeft")
    assert text_of(page, ".timeline [role=status]").startswith("rollout, pid 17, node-9, ")


def test_the_step_times_are_shown_in_numbers(page: Page, server: CannedServer) -> None:
    opened(page, server)
    words = text_of(page, ".steps")
    assert words.startswith("Step time from one policy version to the next")
    assert "Last 60 s, median 60 s, longest 88 s (v37). The current step has taken 31 s so far." in words
    assert page.evaluate("document.querySelectorAll('.steps li').length") == 13
    server.delta(1.0, steps={"by": "partition", "task": "train", "steps": [], "since": None})
    page.wait_for("document.querySelector('.steps').innerText.includes('No complete step')")
    assert "from the first claim of one partition by train to that of the next" in text_of(page, ".steps")
    assert_clean(page, server)


def test_a_partition_that_is_not_sealed_has_neither_a_share_nor_an_end(page: Page, server: CannedServer) -> None:
    server.full["step"].update(sealed=False, eta=None)
    opened(page, server)
    assert "856 dealt of 1,024 in train_42 so far; not sealed 5 of 5" in text_of(page, ".verdict")


def test_policy_versions_are_above_the_lanes_and_cover_none(page: Page, server: CannedServer) -> None:
    timeline = server.full["timeline"]
    first = {**timeline["lanes"][0], "spans": [[0.0, 300.0, 1, 0]]}
    timeline.update(lanes=[first], order=[first["id"]], versions=[{"t": timeline["origin"] + 150, "version": 7}])
    opened(page, server)
    width = page.evaluate("document.getElementById('timeline').clientWidth")
    middle = 108 + (width - 108) / 2
    column = [pixel(page, "timeline", middle + by, y) for by in (-1, 0, 1) for y in range(30, 35)]
    assert set(column) == {"#0072b2"}
    assert any(pixel(page, "timeline", middle + by, 18).startswith("#1") for by in (-1, 0, 1))  # the ink of a tick


def test_policy_memory_and_servers_show_their_numbers(page: Page, server: CannedServer) -> None:
    opened(page, server)
    policy = text_of(page, ".policy")
    assert "version 42, set 31 s ago; limit 2 behind" in policy
    ages = "Samples that train claimed at versions 35 to 42 were at most 2 and on average 0.9 versions behind."
    assert f"The newest policy version is 42. {ages}" in policy
    assert "train_42 107 of 128 complete" in text_of(page, ".policy")
    memory = text_of(page, ".memory")
    assert "unit 3 node-07 0.40 of 1 GiB" in memory
    assert "Delivered again: 16. Lost values: 0. Poison: 0." in memory
    rows = page.evaluate(
        "[...document.querySelectorAll('.servers tbody tr')].map(row => row.innerText.replace(/\\s+/g, ' '))"
    )
    assert rows[0].startswith("controller ✓ up 31 % 0.21 ms 1.8 ms 66, 4 ended")
    assert len(rows) == 5


def color_at(canvas: str, x: float, y: float) -> str:
    """Return an expression for the color of a point of a canvas, as #rrggbb."""
    return f"""(() => {{
        const canvas = document.getElementById({json.dumps(canvas)}), ratio = devicePixelRatio;
        const data = canvas.getContext('2d').getImageData(Math.round({x} * ratio), Math.round({y} * ratio), 1, 1).data;
        return '#' + [...data.slice(0, 3)].map(each => each.toString(16).padStart(2, '0')).join('');
    }})()"""


def pixel(page: Page, canvas: str, x: float, y: float) -> str:
    """Return the color of a point of a canvas, as #rrggbb."""
    return str(page.evaluate(color_at(canvas, x, y)))


MISSING, PUT, CLAIMED, CONSUMED, LOST = "#e6eaef", "#86bfe2", "#e69f00", "#0b3f66", "#b93a06"


def simple_matrix(partition: str = "train_42") -> dict[str, Any]:
    """Return a matrix of four columns: missing, half, all, lost; ready, claimed, consumed, nothing."""
    return {
        "partition": partition, "epoch": "1", "rows": 40, "reserved": 0, "start": 0, "stop": 40, "columns": 4,
        "column_rows": 10, "group_size": 0, "index": [[0, 500, 10], [2, 900, 10]],
        "fields": [{"name": "tokens", "rows": 15, "share": invented.runs([0, 128, 255, 0]),
                    "lost": invented.runs([0, 0, 0, 255])}],
        "tasks": [{"name": "train", "ready": invented.runs([255, 0, 0, 0]), "claimed": invented.runs([0, 255, 0, 0]),
                   "consumed": invented.runs([0, 0, 255, 0]), "passed": ""}],
    }  # fmt: skip


@pytest.fixture
def simple(page: Page, server: CannedServer) -> Page:
    """A page with one partition of four columns."""
    for each in server.full["partitions"]["list"]:
        each["shown"] = each["name"] == "train_42"
    server.matrices = {"train_42": simple_matrix()}
    return opened(page, server)


def cell(page: Page, column: int) -> float:
    """Return the x of the middle of a column of the simple matrix."""
    width = page.evaluate("document.getElementById('matrix').clientWidth")
    return float(108 + (column + 0.5) * (width - 108) / 4)


def test_the_matrix_shows_what_each_sample_has_and_how_far_it_is(simple: Page) -> None:
    field, task = 20 + 6, 20 + 15 + 20 + 6  # the middle of their rows
    assert [pixel(simple, "matrix", cell(simple, column), field) for column in (0, 2, 3)] == [MISSING, PUT, LOST]
    half = [pixel(simple, "matrix", cell(simple, 1), y) for y in (21, 31)]
    assert half == [MISSING, PUT]  # filled from below
    assert [pixel(simple, "matrix", cell(simple, at), task) for at in range(4)] == [PUT, CLAIMED, CONSUMED, MISSING]
    assert "lost" in text_of(simple, ".matrix .key")
    assert "168 samples of train_42 lack advantage, for which train waits." in text_of(simple, ".matrix")


def test_the_matrix_is_a_table_for_users_who_cannot_see_it(simple: Page) -> None:
    simple.evaluate("document.querySelector('.matrix details').open = true")
    simple.wait_for("!!document.querySelector('.matrix details table')")
    table = text_of(simple, ".matrix details table")
    assert "tokens 15 of 40 put" in table
    assert "25 % consumed, 25 % claimed, 25 % ready, 0 % skipped" in table


ANSWERS = "performance.getEntriesByType('resource').filter(each => each.name.includes('api/matrix'))"


def test_a_matrix_that_has_not_changed_is_not_sent_again(simple: Page, server: CannedServer) -> None:
    simple.wait_for(f"{ANSWERS}.length > 1")
    statuses = simple.evaluate(f"{ANSWERS}.map(each => each.responseStatus)")
    assert statuses[0] == 200
    assert set(statuses[1:]) == {304}
    changed = simple_matrix()
    changed.update(epoch="2")
    changed["fields"][0]["share"] = invented.runs([255, 255, 255, 255])
    server.matrices["train_42"] = changed
    simple.wait_for(f"{json.dumps(PUT)} === {color_at('matrix', cell(simple, 0), 26)}")
    assert simple.errors == []


def test_a_click_on_a_column_opens_its_first_sample(simple: Page, server: CannedServer) -> None:
    server.samples["900"] = {**server.samples["107168"], "index": 900}
    box = simple.evaluate(
        "(() => { const b = document.getElementById('matrix').getBoundingClientRect(); return [b.x, b.y] })()"
    )
    x, y = box[0] + cell(simple, 2), box[1] + 26
    for kind in ("mousePressed", "mouseReleased"):
        simple.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    simple.wait_for("!!document.querySelector('dialog .history')")
    assert text_of(simple, "dialog h2") == "Sample 900"


def press(page: Page, key: str, **more: Any) -> None:
    """Press a key that writes no character."""
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, **more)


def test_arrow_keys_move_in_the_matrix_and_enter_opens_the_sample(simple: Page, server: CannedServer) -> None:
    server.samples["510"] = {**server.samples["107168"], "index": 510}
    simple.type("m")
    assert simple.evaluate("document.activeElement.id") == "matrix"
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        press(simple, key)
    said = text_of(simple, ".matrix [role=status]")
    assert said == "train_42, 10 samples from 510 on, train: claimed"
    press(simple, "Enter")
    simple.wait_for("!!document.querySelector('dialog .history')")
    assert text_of(simple, "dialog h2") == "Sample 510"


def test_the_timeline_shows_work_thick_and_waiting_thin(page: Page, server: CannedServer) -> None:
    first = {**server.full["timeline"]["lanes"][0], "spans": [[0.0, 150.0, 1, 0], [150.0, 300.0, 3, 1]]}
    server.full["timeline"].update(lanes=[first], order=[first["id"]], versions=[])
    opened(page, server)
    width = page.evaluate("document.getElementById('timeline').clientWidth")
    early, late = (108 + part * (width - 108) for part in (0.4, 0.6))
    assert pixel(page, "timeline", early, 15) == "#0072b2"  # the whole height
    assert pixel(page, "timeline", late, 15) != "#e69f00"
    assert pixel(page, "timeline", late, 17) == "#e69f00"  # the middle
    page.type("t")
    press(page, "ArrowLeft")
    why = server.full["timeline"]["why"][1]
    assert text_of(page, ".timeline [role=status]").startswith(f"rollout rank 0, pid 41201, node-01, waits for {why}, ")
    page.evaluate("document.querySelector('.timeline details').open = true")
    page.wait_for("!!document.querySelector('.timeline details table')")
    assert "rollout rank 0, pid 41201, node-01 waits 50 % 50 % 0 %" in text_of(page, ".timeline details table tbody")


@pytest.fixture
def banded(page: Page, server: CannedServer) -> Page:
    """A page on which 100 ranks of rollout are joined to one line, below which rank 0 has a line of its own."""
    own = server.full["timeline"]["lanes"][0]
    band = {**own, "id": 900, "rank": -1, "ranks": 100, "label": "", "spans": []}
    band["band"] = [(float(second), 60, 30, 0, 10) for second in range(1, 301)]
    server.full["timeline"].update(lanes=[band, own], order=[900, own["id"]], versions=[])
    server.lanes["rollout"] = invented.joined("rollout", 100, first=1)
    return opened(page, server)


SINGLE = "document.querySelector('.joined p')?.innerText"


def height(page: Page) -> int:
    return int(page.evaluate("document.getElementById('timeline').clientHeight"))


def test_enter_on_a_line_of_many_ranks_shows_them_singly_and_joins_them_again(
    banded: Page, server: CannedServer
) -> None:
    before = height(banded)
    banded.type("t")
    press(banded, "ArrowUp")
    assert "60 % work, 30 % wait, 0 % are held back, 10 % are gone" in text_of(banded, ".timeline [role=status]")
    assert text_of(banded, ".timeline [role=status]").endswith("Enter shows 100 single ranks.")
    press(banded, "Enter")
    banded.wait_for(f"{SINGLE}?.includes('ranks 1 to 64, 1 to 64 of 100 joined ones')")
    assert text_of(banded, ".timeline [role=status]") == "rollout: ranks 1 to 64, 1 to 64 of 100 joined ones"
    assert height(banded) > 64 * 6 > before
    press(banded, "ArrowDown")
    assert text_of(banded, ".timeline [role=status]").startswith("rollout rank 1, pid 41201, node-01, ")
    press(banded, "ArrowUp")
    press(banded, "Enter")
    banded.wait_for("!document.querySelector('.joined p')")
    assert height(banded) == before
    assert text_of(banded, ".timeline [role=status]") == "The ranks are joined again."
    assert_clean(banded, server)


def test_a_click_on_a_line_of_many_ranks_shows_them_singly(banded: Page, server: CannedServer) -> None:
    box = banded.evaluate(
        "(() => { const b = document.getElementById('timeline').getBoundingClientRect(); return [b.x, b.y] })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        banded.call(
            "Input.dispatchMouseEvent", type=kind, x=box[0] + 200, y=box[1] + 20, button="left", clickCount=1
        )  # fmt: skip
    banded.wait_for(f"{SINGLE}?.includes('ranks 1 to 64')")
    assert any("api/lanes?task=rollout&from=0&count=64&after=" in path for path in server.requests)
    assert_clean(banded, server)


def test_buttons_turn_the_pages_of_single_ranks_and_the_table_names_them(banded: Page, server: CannedServer) -> None:
    def click(selector: str) -> None:
        banded.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    banded.evaluate("document.querySelector('.timeline details').open = true")
    click(".joined [aria-expanded]")
    banded.wait_for(f"{SINGLE}?.includes('ranks 1 to 64')")
    assert banded.evaluate("document.querySelector('.joined .link').getAttribute('aria-expanded')") == "true"
    assert banded.evaluate("document.querySelector('.joined [aria-label=\"Ranks before\"]').ariaDisabled") == "true"
    click('.joined [aria-label="Next ranks"]')
    banded.wait_for(f"{SINGLE}?.includes('ranks 65 to 100, 65 to 100 of 100 joined ones')")
    banded.wait_for("document.querySelector('.timeline details table').innerText.includes('rollout rank 65')")
    assert "rollout, 100 ranks together" in text_of(banded, ".timeline details table")
    click('.joined [aria-label="Ranks before"]')
    banded.wait_for(f"{SINGLE}?.includes('ranks 1 to 64')")
    timeline = server.full["timeline"]
    unchanged = [{**each, "spans": [], "band": []} for each in timeline["lanes"]]
    server.delta(1.0, timeline={**timeline, "since": 300.0, "lanes": unchanged})
    banded.wait_for("performance.getEntriesByType('resource').some(each => each.name.includes('after=0-1'))")
    assert "ranks 1 to 64" in text_of(banded, ".joined p")
    assert_clean(banded, server)


def test_single_ranks_are_joined_when_so_few_are_left_that_each_has_a_line(banded: Page, server: CannedServer) -> None:
    banded.evaluate("document.querySelector('.joined .link').click()")
    banded.wait_for(f"{SINGLE}?.includes('ranks 1 to 64')")
    timeline = server.full["timeline"]
    own = timeline["lanes"][1]
    server.send("full", {**server.full, "timeline": {**timeline, "lanes": [own], "order": [own["id"]]}})
    banded.wait_for("!document.querySelector('.joined')")
    server.send("full", {**server.full, "timeline": timeline})
    banded.wait_for("!!document.querySelector('.joined')")
    banded.wait_for("!document.querySelector('.joined p')")


def test_why_single_ranks_cannot_be_shown_is_said(banded: Page, server: CannedServer) -> None:
    server.lanes.clear()
    banded.evaluate("document.querySelector('.joined .link').click()")
    banded.wait_for(f"{SINGLE}?.includes('no ranks of this task are joined to a line')")


def test_spans_narrower_than_a_pixel_are_added_up(page: Page, server: CannedServer) -> None:
    """Half of each second is work, in 20 spans: every pixel gets half of the color, and none is left out."""
    spans = [[at / 20, at / 20 + 0.025, 1, 0] for at in range(6000)]
    first = {**server.full["timeline"]["lanes"][0], "spans": spans}
    server.full["timeline"].update(lanes=[first], order=[first["id"]], versions=[])
    opened(page, server)
    alphas = page.evaluate("""(() => {
        const canvas = document.getElementById('timeline'), ratio = devicePixelRatio;
        const wide = canvas.width - Math.round(120 * ratio);
        const { data } = canvas.getContext('2d').getImageData(Math.round(112 * ratio), Math.round(17 * ratio), wide, 1);
        return Array.from({ length: wide }, (_, at) => data[4 * at + 3]);
    })()""")
    assert min(alphas) > 0
    assert sum(alpha == 255 for alpha in alphas) <= 6  # the lines of the minutes
    page.evaluate("document.querySelector('.timeline details').open = true")
    page.wait_for("!!document.querySelector('.timeline details table')")
    assert "100 % 0 % 0 %" in text_of(page, ".timeline details table tbody")


def test_the_inspector_shows_fields_tags_and_history(page: Page, server: CannedServer) -> None:
    sample = server.samples["107168"]
    sample["tags"] = [{"name": "policy_version", "value": "41"}]
    sample["fields"][0].update(head="1, 2, 3, …", text="What is 2 + 2?", note="")
    opened(page, server)
    page.evaluate("document.querySelector('.waits [data-index]').click()")
    page.wait_for("!!document.querySelector('dialog .history')")
    words = text_of(page, "dialog")
    assert "Sample 107168 of partition 'train_42' misses the fields ['advantage']" in words
    assert "partition train_42 · key q15690/0 · group q15690, member 1 of 8 · 60 KiB · unit 1, memory" in words
    assert "prompt int64 [1,536] 1, 2, 3, … rollout rank 3" in words
    assert "advantage missing" in words
    assert "reward ○ ready, and not claimed yet train … lacks advantage" in words
    assert "Other samples of its group 107,169 107,170" in words
    assert "What is 2 + 2?" in words
    assert "policy_version: 41" in words
    assert "rollout rank 3: pid 41204, node-04; " not in words
    assert "rollout rank 3: pid 41204, node-04." in words
    assert "claimed by reference rank 0, pid 41209, node-01" in words
    assert "tq explain train_42 --index 107168 --task train" in words
    page.evaluate("document.querySelector('dialog select').value = 'reward'")
    page.evaluate("document.querySelector('dialog select').dispatchEvent(new Event('change', {bubbles: true}))")
    page.wait_for("document.querySelector('dialog .why').innerText.includes(\"consumed by task 'reward'\")")
    assert any("api/explain?partition=train_42&index=107168&task=reward" in path for path in server.requests)
    press(page, "Escape", windowsVirtualKeyCode=27)
    page.wait_for("!document.querySelector('dialog')")
    assert page.evaluate("document.activeElement.matches('.waits [data-index]')") in (True, False)
    assert_clean(page, server)


def test_the_inspector_asks_what_holds_of_the_task(page: Page, server: CannedServer) -> None:
    """A sample that the task has is not asked why it is not there; "is not consumed by task" is no consumption."""
    states = {"train": "consumed", "reward": "claimed", "reference": "waiting"}
    sample = server.samples["107168"]
    sample["words"] = "Sample 107168 was consumed by task 'train'."
    sample["tasks"] = [
        {"task": task, "state": state, "lacks": [], "who": "", "reason": ""} for task, state in states.items()
    ]
    opened(page, server)
    page.evaluate("document.querySelector('.waits [data-index]').click()")
    page.wait_for("!!document.querySelector('dialog .history')")

    def chosen(task: str) -> tuple[str, bool]:
        select = "document.querySelector('dialog select')"
        page.evaluate(f"{select}.value = '{task}', {select}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        page.wait_for("document.querySelector('dialog .why').innerText === " + json.dumps(server.words))
        question = page.evaluate("document.querySelector('dialog h3 label').firstChild.data")
        return question.strip(), page.evaluate("document.querySelector('dialog .why').matches('.done')")

    server.words = "Sample 107168 was consumed by task 'train'."
    assert chosen("train") == ("Has it been at", True)
    server.words = "Sample 107168 is claimed by task 'reward'."
    assert chosen("reward") == ("Is it at", False)
    server.words = "Sample 107168 is not consumed by task 'reference'."
    assert chosen("reference") == ("Why is it not at", False)
    assert_clean(page, server)


def test_decoded_token_ids_stand_beside_them_as_text(page: Page, server: CannedServer) -> None:
    text = f"{invented.HOSTILE[0]} {invented.HOSTILE[1]}\n{'word ' * 400}"[:2000]
    server.samples["107168"]["fields"][1].update(head="123550, 124163, ...", decoded=text, note="")
    opened(page, server)
    page.evaluate("document.querySelector('.waits [data-index]').click()")
    page.wait_for("!!document.querySelector('dialog .history')")
    assert text_of(page, "dialog td .decoded").startswith("<img src=x onerror=")
    assert "123550, 124163, ..." in text_of(page, "dialog")
    whole = page.evaluate("document.querySelector('dialog pre').innerText")
    assert whole.startswith("tokens decoded from its token ids\n<img src=x onerror=")
    assert whole.endswith("word wo")  # all of it, while its line in the table is cut
    assert "\u202e" not in page.evaluate("document.body.innerText")
    assert page.evaluate("document.querySelectorAll('dialog img').length") == 0
    inside = "document.querySelector('dialog .inside')"
    assert page.evaluate(f"{inside}.scrollWidth <= {inside}.clientWidth")
    assert_clean(page, server)


def test_the_search_opens_a_sample_by_key_or_says_that_it_does_not_exist(page: Page, server: CannedServer) -> None:
    opened(page, server)
    page.type("/")
    page.type("q15690/0")
    page.evaluate("document.querySelector('.search').requestSubmit()")
    page.wait_for("!!document.querySelector('dialog .history')")
    assert text_of(page, "dialog h2") == "Sample 107,168"
    assert any("api/sample?partition=train_42&key=q15690%2F0" in path for path in server.requests)
    page.evaluate("document.querySelector('dialog').close()")
    page.wait_for("!document.querySelector('dialog')")
    page.evaluate(
        "(() => { document.querySelector('#find').value = '12'; document.querySelector('.search').requestSubmit() })()"
    )
    page.wait_for("!!document.querySelector('dialog [role=alert]')")
    assert text_of(page, "dialog [role=alert]") == "the sample does not exist"


def test_other_partitions_are_listed_filtered_and_shown_on_request(page: Page, server: CannedServer) -> None:
    server.matrices["train_41"] = {**simple_matrix(), "partition": "train_41"}
    opened(page, server)
    page.evaluate("[...document.querySelectorAll('.matrix details')].at(-1).open = true")
    assert "57 other partitions of 60" in text_of(page, ".matrix details:last-of-type summary")
    page.evaluate("[...document.querySelectorAll('.matrix .rows button')].at(0).click()")
    page.wait_for("document.getElementById('matrix').getAttribute('aria-label').includes('train_41')")
    assert server.requests[-1].startswith("/api/matrix?partition=train_41")
