"""What the page shows when the system is empty, stopped, restarting or ended, and when its server is gone."""

from __future__ import annotations

from chromium import Page
from tests.live.browser import invented
from tests.live.browser.canned_server import CannedServer
from tests.live.browser.test_panels import assert_clean, opened, press, text_of


def test_an_empty_system_says_who_waits_and_how_to_put_samples(page: Page, server: CannedServer) -> None:
    server.full = invented.empty()
    opened(page, server)
    words = text_of(page, "main")
    assert words.startswith("Nothing has been put yet The system grpo-moe-30b has been up since")
    assert "all 5 servers reply, and 3 clients are connected." in words
    assert "train ranks 0 to 7 wait for partition train_0 for 31 s, which does not exist yet." in words
    assert 'client.put(rows, partition_id="train_0")' in words
    assert "tq doctor, and TQ_SYSTEM in its environment." in words
    server.send("full", invented.slow())
    page.wait_for("!!document.querySelector('.verdict')")
    assert_clean(page, server)


def test_a_page_whose_server_has_not_reached_the_system_says_so_until_it_has(page: Page, server: CannedServer) -> None:
    full = server.full
    words = "The page has not reached the system yet."
    state = {"state": "restarting", "since": full["now"], "words": words, "every": 1.0}
    server.full = {"seq": 1, "now": full["now"], "state": state}
    page.open(server.url)
    page.wait_for(f"document.querySelector('.loading').innerText === '{words}'")
    server.delta(1.0, state={**state, "words": "The controller does not reply."})
    page.wait_for("document.querySelector('.loading').innerText === 'The controller does not reply.'")
    server.send("full", full)
    page.wait_for("!!document.querySelector('.verdict')")
    assert_clean(page, server)


def test_a_stopped_system_says_for_how_long_and_why(page: Page, server: CannedServer) -> None:
    server.full = invented.stopped()
    opened(page, server)
    words = text_of(page, ".verdict")
    assert words.startswith("Not flowing All reward workers are gone since 03:11:26 train waits")
    assert "Gone: rank 0, pid 41211, node-03; rank 1, pid 41212, node-04; " in words
    assert words.count("workers are gone") == 1
    assert "8 samples of partition 'train_42' may be lost to task 'reward'" in words
    assert "84 % of train_42 dealt 5 of 5 servers reply" in text_of(page, ".verdict")
    assert "8 of 8 ranks are held back now 2 min 50 s" in text_of(page, ".waits li:nth-child(3)")


def test_a_system_that_starts_says_what_was_seen_so_far(page: Page, server: CannedServer) -> None:
    server.full = invented.flowing()
    seen = "so far train waits 88 % of the time for `advantage`, which reward puts."
    server.full["verdict"].update(state="starting", headline="Starting", detail=seen, text=f"Starting: {seen}")
    opened(page, server)
    assert text_of(page, ".verdict").startswith("Starting So far train waits 88 % of the time for advantage")
    assert_clean(page, server)


def test_an_idle_system_without_policy_groups_and_leases_says_so(page: Page, server: CannedServer) -> None:
    server.full = invented.idle()
    opened(page, server)
    assert text_of(page, ".verdict h1") == "Idle No claim is open"
    assert "No partition has a policy version" in text_of(page, ".policy")
    assert "No sample has a group." in text_of(page, ".policy")
    assert "No lease is in force." in text_of(page, ".memory")
    assert "No task waits." in text_of(page, ".waits")
    assert_clean(page, server)


def test_a_system_that_flows_has_no_hot_stage(page: Page, server: CannedServer) -> None:
    server.full = invented.flowing()
    opened(page, server)
    assert text_of(page, ".verdict h1") == "Flowing train takes 30.9 samples each second"
    assert page.evaluate("document.querySelectorAll('.flow .hot, .waits .hot').length") == 0


def test_a_restart_greys_the_panels_until_the_controller_is_back(page: Page, server: CannedServer) -> None:
    opened(page, server)
    full = server.full
    server.delta(0.0, **invented.restarting(full))
    page.wait_for("!!document.querySelector('.banner')")
    banner = text_of(page, ".banner")
    words = "The controller does not reply: it is being restarted, or is overloaded. The page shows the state of"
    assert banner.startswith(words)
    assert page.evaluate("getComputedStyle(document.querySelector('.verdict')).filter") == "grayscale(1)"
    assert text_of(page, "#announcement") == "The controller does not reply."
    gap = {"start": full["now"] - 20, "end": full["now"] - 10}
    timeline = {**full["timeline"], "since": 300.0, "until": 301.0, "gaps": [gap]}
    timeline["lanes"] = [{**lane, "spans": []} for lane in timeline["lanes"]]
    server.delta(4.0, state={**full["state"], "state": "live"}, timeline=timeline)
    page.wait_for("!document.querySelector('.banner')")
    assert page.evaluate("getComputedStyle(document.querySelector('.verdict')).filter") == "none"
    assert "not known" in text_of(page, ".timeline .key")
    assert_clean(page, server)


def test_an_ended_system_keeps_its_last_state_on_the_page(page: Page, server: CannedServer) -> None:
    opened(page, server)
    server.delta(0.0, **invented.ended(server.full))
    page.wait_for("!!document.querySelector('.banner')")
    words = "The system grpo-moe-30b has ended: its starter, process 40112 (python train.py), has ended."
    assert text_of(page, ".banner").startswith("Ended at ")
    assert words in text_of(page, ".banner")
    assert "reward is the slowest stage" in text_of(page, ".verdict")
    server.send("full", invented.flowing())  # a system took its place
    page.wait_for("!document.querySelector('.banner')")
    assert "Flowing" in text_of(page, ".verdict h1")


def test_a_snapshot_says_that_it_is_one_and_keeps_its_colors(page: Page, server: CannedServer) -> None:
    server.full.update(invented.snapshot(server.full))
    opened(page, server)
    assert text_of(page, ".banner").startswith("Snapshot of the system grpo-moe-30b, saved on ")
    assert "snapshot of " in text_of(page, "header")
    assert page.evaluate("[...document.querySelectorAll('header .button')].map(each => each.innerText)") == [
        "Dark",
        "?",
    ]
    assert page.evaluate("getComputedStyle(document.querySelector('.verdict')).filter") == "none"
    assert page.evaluate("document.title").startswith("Snapshot")
    assert_clean(page, server)


def test_a_lost_server_is_reported_and_asked_again_until_it_is_back(page: Page, server: CannedServer) -> None:
    opened(page, server)
    server.stop_streams()
    page.wait_for("document.querySelector('.banner')?.innerText.startsWith('The server of this page does not reply.')")
    assert "reward is the slowest stage" in text_of(page, ".verdict")
    page.wait_for(
        "document.querySelector('.banner').innerText.startsWith('The server of this page refuses: too many pages.')"
    )
    server.full = invented.flowing()
    server.is_up = True
    page.wait_for(
        "!document.querySelector('.banner') && document.querySelector('.verdict h1').innerText.includes('takes')"
    )
    page.errors.clear()  # refused requests are errors for the browser's console


def test_a_hidden_tab_closes_its_stream_and_opens_it_again(page: Page, server: CannedServer) -> None:
    opened(page, server)
    hide = """Object.defineProperty(document, 'hidden', {value: %s, configurable: true});
        document.dispatchEvent(new Event('visibilitychange'))"""
    count = server.requests.count("/api/live")
    page.evaluate(hide % "true")
    server.delta(5.0, verdict=invented.flowing()["verdict"])
    page.evaluate("new Promise(resolve => setTimeout(resolve, 0))")
    assert "slowest" in text_of(page, ".verdict h1")
    page.evaluate(hide % "false")
    page.wait_for("document.querySelector('.verdict h1').innerText.includes('takes')")
    assert server.requests.count("/api/live") == count + 1


def test_deltas_update_only_what_has_changed(page: Page, server: CannedServer) -> None:
    opened(page, server)
    page.evaluate("""(() => {
        window.said = 0;
        const watched = {childList: true, characterData: true, subtree: true};
        new MutationObserver(() => said++).observe(document.getElementById('announcement'), watched);
    })()""")
    for number in range(3):
        verdict = {**server.full["verdict"], "queue_rows": 2000 + number}
        queues = [{**queue, "rows": 2000 + number} for queue in server.full["queues"]]
        server.delta(1.0, verdict=verdict, queues=queues)
        page.wait_for(f"document.querySelectorAll('.verdict .number')[1].innerText === '2,00{number}'")
    assert page.evaluate("window.said") == 0
    server.delta(1.0, verdict=invented.flowing()["verdict"])
    page.wait_for("document.getElementById('announcement').textContent === 'Flowing.'")
    assert page.evaluate("window.said") == 1


def test_pause_keeps_what_is_shown(page: Page, server: CannedServer) -> None:
    opened(page, server)
    page.type(" ")
    page.wait_for("document.querySelector('.age').innerText.includes('paused')")
    server.delta(1.0, verdict=invented.flowing()["verdict"])
    page.evaluate("new Promise(resolve => setTimeout(resolve, 100))")  # the event is there, and must not be shown
    assert "slowest" in text_of(page, ".verdict h1")
    page.type(" ")
    page.wait_for("document.querySelector('.verdict h1').innerText.includes('takes')")


def test_help_lists_the_keys_and_escape_closes_it(page: Page, server: CannedServer) -> None:
    opened(page, server)
    page.type("?")
    page.wait_for("!!document.querySelector('dialog.help')")
    assert "search a sample by index or key" in text_of(page, "dialog.help")
    press(page, "Escape", windowsVirtualKeyCode=27)
    page.wait_for("!document.querySelector('dialog')")


def test_the_timeline_and_the_rates_are_continued_as_the_payload_says(page: Page, server: CannedServer) -> None:
    opened(page, server)
    code = """import('/static/store.js').then(({ continueSpans, continueRates, continueTimeline }) => [
        continueSpans([[0, 5, 1, 0], [5, 9, 3, 1]], [[8, 12, 3, 1], [12, 13, 1, 0]], 8),
        continueSpans([[0, 5, 1, 0]], [], 3),
        continueRates([{t: 2}, {t: 4}, {t: 6}], [{t: 6, rows: 1}, {t: 8}], 5),
        continueTimeline(
            {lanes: [
                {id: 1, spans: [[0, 2, 1, 0], [2, 9, 1, 0]], band: []},
                {id: 2, spans: [], band: [[1, 9, 0, 0, 0], [9, 8, 0, 0, 0]]},
                {id: 3, spans: [], band: []},
            ]},
            {since: 9.5, until: 12, order: [2, 1], lanes: [
                {id: 2, spans: [], band: [[10, 7, 0, 0, 0]]}, {id: 1, spans: [[9.5, 10, 4, 0]], band: []},
            ]}, 8).lanes,
    ])"""  # fmt: skip
    spans, cut, rates, lanes = page.evaluate(code)
    assert spans == [[0, 5, 1, 0], [5, 12, 3, 1], [12, 13, 1, 0]]
    assert cut == [[0, 3, 1, 0]]
    assert [point["t"] for point in rates] == [4, 6, 8]
    assert [lane["id"] for lane in lanes] == [2, 1]
    assert lanes[0]["band"] == [[9, 8, 0, 0, 0], [10, 7, 0, 0, 0]]
    assert lanes[1]["spans"] == [[2, 9, 1, 0], [9.5, 10, 4, 0]]
