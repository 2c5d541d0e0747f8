"""The screens of `tq top`: what they show of a picture, and what each key does."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from pipeline_scenarios import Expected, Scenario, grpo
from textual.widgets import Input
from top_pilot import FakeSource, TopPilot, empty_picture, on_screen, partition, picture_at, run_top, seen

from transfer_queue.cli.top.app import HelpScreen, OverviewScreen, TopApp
from transfer_queue.cli.top.detail_screens import PartitionScreen, SampleScreen, TaskScreen, WaitScreen
from transfer_queue.cli.top.follower import News
from transfer_queue.errors import ConnectionLostError

SLOW = picture_at(200.0)
MANY = picture_at(200.0, more=[partition(f"step_{number}", consumed=number % 10) for number in range(1000)])
HOSTILE = "[bold red]x[/] \x1b[2J\r\n[@click=app.leave]y[/]"


@on_screen(seen(SLOW))
async def test_the_first_line_is_the_verdict_in_words(top: TopPilot) -> None:
    assert top.lines()[0].startswith(" ▲ reward is the slowest stage: train waits")
    words = top.words()
    assert "1 of 4 reward workers is gone (rank 3, pid 10" in words
    assert "● live" in words


@on_screen(seen(SLOW))
async def test_a_terminal_of_80_columns_shows_stages_and_one_more_table(top: TopPilot) -> None:
    lines = top.lines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    (head,) = [line for line in lines if " stage " in line]
    for column in ("ranks", "waiting", "ready", "takes/s", "puts/s", "waits for ← from"):
        assert column in head
    reward = next(line for line in lines[3:] if line.startswith(" ▲ reward"))
    assert "3 ×1" in reward
    train = next(line for line in lines[3:] if " train " in line and "%" in line)
    assert "█" in train
    assert "reward ← reward" in train
    text = top.text()
    assert "2 Who waits for what" in text
    assert "3 Partitions" in text
    assert "4 Memory  5 Controller" in text


@pytest.mark.parametrize("size", [(120, 40), (200, 60)])
@on_screen(seen(SLOW))
async def test_a_large_terminal_shows_every_table(top: TopPilot, size: tuple[int, int]) -> None:
    text = top.text()
    for title in ("1 Stages", "2 Who waits for what", "3 Partitions", "4 Memory", "5 Controller"):
        assert title in text
    assert "reward needs" in text, "the advice of the verdict"
    assert ("last minute" in text) == (size[0] >= 200)


@pytest.mark.parametrize("size", [(20, 5), (1, 1)])
@on_screen(seen(SLOW))
async def test_a_tiny_terminal_is_not_an_error(top: TopPilot, size: tuple[int, int]) -> None:
    await top.press("3", "enter", "3", "enter", "question_mark")


@on_screen(seen(SLOW))
async def test_another_size_of_the_terminal_shows_other_tables(top: TopPilot) -> None:
    assert "5 Controller  " not in top.text()
    await top.pilot.resize_terminal(160, 50)
    await top.press()
    assert "loop busy" in top.text() or "longest event 35.9 ms (Publish)" in top.text()
    await top.pilot.resize_terminal(80, 24)
    await top.press()
    assert "longest event" not in top.text()


@on_screen(seen(SLOW))
async def test_a_number_or_tab_goes_to_a_table(top: TopPilot) -> None:
    found = []
    for key in ("1", "2", "3", "4", "5", "tab", "tab", "shift+tab"):
        await top.press(key)
        found.append(top.app.focused.id if top.app.focused is not None else "")
    assert found == ["stages", "waits", "partitions", "memory", "load", "stages", "waits", "stages"]


@on_screen(seen(SLOW))
async def test_memory_and_load_of_the_controller(top: TopPilot) -> None:
    await top.press("4")
    words = top.words()
    assert "in memory" in words
    assert "768.0 MiB 2.0 GiB 2 units" in words
    assert "being drained" in words
    await top.press("5")
    assert "longest event 35.9 ms (Publish)" in top.words()
    assert "Claim" in top.words()


@on_screen(seen(SLOW), size=(120, 30))
async def test_enter_opens_a_task_with_its_ranks_over_time_and_escape_goes_back(top: TopPilot) -> None:
    await top.press("1", "s", "end", "enter")
    assert isinstance(top.app.screen, TaskScreen)
    words = top.words()
    assert f"› task {top.app.screen.task_name}" in words
    assert re.search(r"the last [\d.]+ s: works █ held ▒ waits ░", words)
    assert "rank 0" in words
    await top.press("escape")
    assert isinstance(top.app.screen, OverviewScreen)


@on_screen(seen(SLOW), size=(120, 30))
async def test_the_screen_of_a_task_says_what_it_waits_for_and_who_is_gone(top: TopPilot) -> None:
    top.app.push_screen(TaskScreen(top.app.state, "reward"))
    await top.press()
    words = top.words()
    assert "3 connected × 1 gone since" in words
    assert "▲ the slowest stage" in words
    assert "takes response" in words
    assert "puts reward" in words
    assert "×" in top.text()
    await top.press("escape")
    top.app.push_screen(TaskScreen(top.app.state, "train"))
    await top.press()
    assert "reward put by reward" in top.words()


@on_screen(seen(SLOW))
async def test_enter_on_a_wait_explains_it(top: TopPilot) -> None:
    await top.press("2", "enter")
    assert isinstance(top.app.screen, WaitScreen)
    words = top.words()
    assert "3 available." in words
    assert "Ranks that wait" in words
    request = top.source.controller.requests[0]
    assert (request.partition, request.task) == (top.app.screen.row.partition, top.app.screen.row.task)
    top.source.controller.fails = ConnectionLostError("the controller is gone")
    await top.give(seen(SLOW))
    assert "the controller is gone" in top.words()


@on_screen(seen(SLOW))
async def test_enter_on_a_rank_that_waits_explains_its_wait(top: TopPilot) -> None:
    row = SLOW.waits[0]
    top.app.push_screen(TaskScreen(top.app.state, row.task))
    await top.press("slash", *row.members[0].lane.name.replace(" ", "_").split("_")[-1], "enter", "enter")
    assert isinstance(top.app.screen, WaitScreen)
    assert top.app.screen.row.task == row.task


@on_screen(seen(SLOW))
async def test_a_partition_a_sample_and_the_way_back(top: TopPilot) -> None:
    await top.press("3", "enter")
    assert isinstance(top.app.screen, PartitionScreen)
    words = top.words()
    for part in ("1 Fields", "2 Tasks", "3 Samples", "key-0", "complete", "samples that have it"):
        assert part in words
    await top.press("3", "down", "enter")
    assert isinstance(top.app.screen, SampleScreen)
    words = top.words()
    assert "› sample 1 of train_0" in words
    assert "int64[4]" in words
    assert "missing: reward" in words
    assert "rollout rank 3, pid 17" in words
    assert "history, the newest last" in words
    assert "Sample 1 is missing the field 'reward'; it is not consumed by task 'train'." in words
    await top.press("escape", "escape")
    assert isinstance(top.app.screen, OverviewScreen)
    await top.press("escape")
    assert isinstance(top.app.screen, OverviewScreen)


@on_screen(seen(SLOW))
async def test_tab_and_numbers_go_to_the_tables_of_a_partition(top: TopPilot) -> None:
    await top.press("3", "enter")
    found = []
    for key in ("tab", "tab", "tab", "shift+tab", "2"):
        await top.press(key)
        found.append(top.app.focused.id if top.app.focused is not None else "")
    assert found == ["tasks", "samples", "fields", "samples", "tasks"]


@on_screen(seen(SLOW))
async def test_g_goes_to_a_sample_by_key_or_index(top: TopPilot) -> None:
    await top.press("3", "enter", "g", *"key-2", "enter")
    assert isinstance(top.app.screen, SampleScreen)
    assert (top.app.screen.index, top.app.screen.key) == (None, "key-2")
    await top.press("escape", "g", *"4711", "enter")
    assert isinstance(top.app.screen, SampleScreen)
    assert (top.app.screen.index, top.app.screen.key) == (4711, None)
    await top.press("escape", "g", "escape")
    assert isinstance(top.app.screen, PartitionScreen)


@on_screen(seen(SLOW))
async def test_the_end_of_the_samples_reads_the_next_page(top: TopPilot) -> None:
    top.source.controller.samples = 5
    await top.press("3", "enter", "3", "end")
    assert isinstance(top.app.screen, PartitionScreen)
    assert [row.index for row in top.app.screen.samples.rows] == [*range(5), *range(100, 105)]
    await top.press("r")
    assert [row.index for row in top.app.screen.samples.rows] == [*range(5)]


@on_screen(seen(SLOW))
async def test_a_partition_that_is_gone_says_so(top: TopPilot) -> None:
    top.app.push_screen(PartitionScreen(top.app.state, "other"))
    await top.press()
    assert "The partition does not exist any more." in top.words()


@on_screen(seen(MANY), size=(120, 30))
async def test_a_filter_shows_only_what_contains_a_text(top: TopPilot) -> None:
    await top.press("3", "slash", *"step_99")
    assert "11 of 1,001 contain 'step_99'" in top.words()
    await top.press("enter")
    assert top.app.focused.id == "partitions"
    await top.give(seen(MANY))
    assert "11 of 1,001" in top.words(), "a refresh keeps the filter"
    await top.press("slash", *"x", "escape")
    assert "contain" not in top.words()
    await top.press("slash", *"nothing-like-it", "enter")
    assert "No row contains 'nothing-like-it'." in top.words()
    await top.press("escape")
    assert "contain" not in top.words()


@on_screen(seen(SLOW))
async def test_keys_in_the_filter_are_text(top: TopPilot) -> None:
    await top.press("3", "slash", "q", "p", "question_mark")
    assert top.app.screen.query_one("#input", Input).value == "qp?"


@on_screen(seen(SLOW))
async def test_s_sorts_by_one_column_after_the_other(top: TopPilot) -> None:
    await top.press("1")
    names = [[row.name for row in top.app.screen.query("#stages").first().shown]]  # type: ignore[attr-defined]
    table = top.app.screen.query_one("#stages")
    for key in ("s", "S"):
        await top.press(key)
        names.append([row.name for row in table.shown])  # type: ignore[attr-defined]
    assert "stage▼" in top.text()
    while table.sorted_by >= 0:  # type: ignore[attr-defined]
        await top.press("s")
    names.append([row.name for row in table.shown])  # type: ignore[attr-defined]
    assert names[0][0] == "rollout", "in the order of the pipeline"
    assert names[0][-1] == "train"
    assert names[1] == sorted(names[0])
    assert names[2] == sorted(names[0], reverse=True)
    assert names[-1] == names[0], "after the last column comes the order of the pipeline"


@on_screen(seen(MANY))
async def test_the_cursor_stays_on_its_row(top: TopPilot) -> None:
    await top.press("3", "end", "up")
    table = top.app.screen.query_one("#partitions")
    assert table.row.progress.name == "step_998"  # type: ignore[attr-defined]
    assert "step_998" in top.text()
    fewer = picture_at(200.0, more=[partition(f"step_{number}") for number in range(500, 1000)])
    await top.give(seen(fewer))
    assert table.row.progress.name == "step_998"  # type: ignore[attr-defined]
    assert "step_998" in top.text()
    await top.press("home", "pagedown", "k", "j")
    assert table.row.progress.name == fewer.partitions[table.cursor].progress.name  # type: ignore[attr-defined]


@on_screen(seen(SLOW))
async def test_p_keeps_what_is_shown(top: TopPilot) -> None:
    await top.press("p")
    await top.give(seen(empty_picture()))
    assert "‖ PAUSED" in top.text()
    assert "reward is the slowest stage" in top.words()
    await top.press("p")
    assert "PAUSED" not in top.text()
    assert "Idle: no claim is open" in top.words()


@on_screen(seen(SLOW), size=(100, 50))
async def test_help_names_keys_and_shapes(top: TopPilot) -> None:
    await top.press("question_mark")
    assert isinstance(top.app.screen, HelpScreen)
    words = top.words()
    assert "/ show only the rows that contain a text" in words
    assert "▲ the slowest stage" in words
    await top.press("question_mark")
    assert isinstance(top.app.screen, OverviewScreen)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
@on_screen(seen(SLOW))
async def test_q_quits(top: TopPilot, key: str) -> None:
    await top.press(key)
    assert top.app.return_value == 0


@on_screen(seen(SLOW))
async def test_t_changes_between_dark_and_light(top: TopPilot) -> None:
    dark = top.app.export_screenshot()
    await top.press("t")
    light = top.app.export_screenshot()
    assert "#10151a" in dark
    assert "#10151a" not in light
    await top.press("t")
    assert "#10151a" in top.app.export_screenshot()


def test_the_picture_of_the_guide_is_small_and_loads_nothing() -> None:
    picture = (Path(__file__).parents[3] / "docs" / "assets" / "tq-top.svg").read_text()
    assert len(picture.encode()) < 100 * 1024
    assert set(re.findall(r"https?://[^\s\"'<]+", picture)) == {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",
    }
    assert not re.search(r"url\((?!#)|<image|<script|href", picture)
    assert "tq\xa0top" in html.unescape(picture)


def test_before_the_first_reply_it_says_what_it_does() -> None:
    async def program(top: TopPilot) -> None:
        assert "Reading the timeline" in top.words()
        assert "The system has no partitions" not in top.words(), "nothing is known yet"
        await top.press("1", "enter", "3", "enter", "slash", "x", "enter", "p", "s", "5")
        await top.give(News(silence="The controller did not reply within 10 s."))
        assert "! The controller did not reply within 10 s." in top.words()

    run_top(program)


@on_screen(seen(empty_picture()), size=(120, 40))
async def test_an_empty_system_has_tables_that_say_so(top: TopPilot) -> None:
    words = top.words()
    assert "○ Idle: no claim is open, and nothing was recorded in the last" in words
    for sentence in (
        "No task has claimed",
        "Nothing waits",
        "The system has no partitions.",
        "The system has no storage units.",
    ):
        assert sentence in words


@on_screen(seen(SLOW, age=20.2), size=(120, 30))
async def test_old_data_is_marked_as_old(top: TopPilot) -> None:
    words = top.words()
    assert re.search(
        r"! The controller does not reply\. The newest data is \d+ s old\. Its log is in /logs/contr", words
    )
    assert re.search(r"! \d+ s old", words)
    assert "reward is the slowest stage" in words, "what was known stays"
    await top.give(seen(SLOW))
    assert "does not reply" not in top.words()


@on_screen(seen(SLOW), size=(120, 30))
async def test_the_end_of_a_system_and_a_new_one_of_its_name(top: TopPilot) -> None:
    await top.give(seen(SLOW, ended="The system test was stopped at 03:11:26 (it was started by pid 1)."))
    words = top.words()
    assert "! The system test was stopped at 03:11:26 (it was started by pid 1). Waiting for a new system" in words
    assert "× ended" in words
    await top.give(seen(empty_picture(), followed="The system test is a new one, started by pid 2."))
    assert "was stopped" not in top.words()
    assert "Idle" in top.words()


def test_an_error_of_the_reader_ends_the_command_with_a_traceback() -> None:
    async def program(top: TopPilot) -> None:
        await top.give(News(error=ZeroDivisionError("unexpected")))

    with pytest.raises(ZeroDivisionError, match="unexpected"):
        run_top(program, seen(SLOW))


def hostile_scenario() -> Scenario:
    """The same pipeline, whose tasks and fields have names that could be markup or move the cursor."""
    names = {name: f"{HOSTILE}{name}" for name in ("prompt", "response", "ref_log_prob", "reward")}
    stages = tuple(
        type(stage)(
            f"{HOSTILE}{stage.name}", stage.ranks, tuple(names[each] for each in stage.takes),
            tuple(names[each] for each in stage.puts), stage.batch,
            stage.seconds * (3 if stage.name == "reward" else 1),
        )
        for stage in grpo()
    )  # fmt: skip
    return Scenario("", stages, Expected("slow"))


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_hostile_names_are_shown_as_text(size: tuple[int, int]) -> None:
    picture = picture_at(200.0, hostile_scenario(), more=[partition(HOSTILE)])

    async def program(top: TopPilot) -> None:
        shown = [top.text()]
        for keys in (("1", "enter"), ("2", "enter"), ("3", "end", "enter"), ("3", "enter")):
            await top.press(*keys)
            shown.append(top.text())
            if keys[0] != "3":
                await top.press("escape")
        assert isinstance(top.app.screen, SampleScreen)
        everything = "\n".join(shown)
        assert "[bold red]x[/]" in everything
        assert "\x1b" not in everything
        assert "\r" not in everything

    run_top(program, seen(picture), size=size)


@on_screen(seen(SLOW))
async def test_a_picture_shows_states_by_shape_and_color(top: TopPilot, monkeypatch: pytest.MonkeyPatch) -> None:
    text = top.text()
    assert "▲ reward" in text
    assert "● rollout" in text


def test_no_color_removes_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = TopApp(FakeSource())
    assert app.no_color
    (found,) = app.get_line_filters()
    assert type(found).__name__ == "NoColor"


@on_screen(seen(SLOW, age=5.0))
async def test_the_age_of_the_data_is_shown_while_it_is_paused(top: TopPilot) -> None:
    await top.press("p")
    assert top.app.state.age == 5.0
    assert "‖ PAUSED, 5 s old" in top.text()
