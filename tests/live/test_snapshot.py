"""A snapshot has what the page shows, needs no system, and is refused with a good message if it is damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
from tests.live.example_payload import example_matrix, example_sample, example_view
from tests.live.live_system import Page, served
from transfer_queue.cli import main
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.interface import CURRENT
from transfer_queue.live.answers import MatrixAnswer, SampleAnswer
from transfer_queue.live.snapshot import (
    FORMAT,
    LiveSnapshot,
    SnapshotAnswers,
    decode_snapshot,
    encode_snapshot,
    file_name,
    read_snapshot,
    take_snapshot,
)


def snapshot_of(matrices: list[MatrixAnswer], samples: list[SampleAnswer]) -> LiveSnapshot:
    return LiveSnapshot("", 0, saved=0.0, view=example_view(), matrices=matrices, samples=samples)


class NoAnswers(SnapshotAnswers):
    """Answers nothing."""

    def __init__(self) -> None:
        super().__init__(snapshot_of([], []))


@pytest.fixture
def document() -> dict[str, Any]:
    """A snapshot as JSON."""
    found: dict[str, Any] = json.loads(gzip.decompress(encode_snapshot(take_snapshot(example_view(), NoAnswers()))))
    return found


def packed(document: Any) -> bytes:
    return gzip.compress(json.dumps(document).encode())


def saved(page: Page) -> bytes:
    """Save a page that is open, as the button does."""
    with page.browser() as browser, browser.stream("GET", "/api/live") as stream:
        next(stream.iter_bytes())
        response = browser.get("/api/snapshot")
        assert response.status_code == 200
        assert response.headers["content-disposition"].startswith('attachment; filename="tq-live-live-test-')
        return response.content


def test_a_saved_page_is_shown_without_its_system(client: tq.TransferQueueClient, page: Page) -> None:
    live = page.view_when(lambda view: view["state"]["state"] == "live" and bool(view["tasks"]))
    snapshot = decode_snapshot(saved(page), "file")
    with served(snapshot=snapshot) as other, other.browser() as browser:
        view = other.view_when(lambda view: True)
        assert view["state"]["state"] == "snapshot"
        assert view["system"]["name"] == live["system"]["name"]
        assert [task["name"] for task in view["tasks"]] == [task["name"] for task in live["tasks"]]
        assert view["timeline"]["lanes"]
        matrix = browser.get("/api/matrix", params={"partition": "train_0"})
        assert {field["name"]: field["rows"] for field in matrix.json()["fields"]}["reward"] == 16
        missing = browser.get("/api/sample", params={"partition": "train_0", "index": 10**6})
        assert "this sample is not in the snapshot" in missing.json()["error"]
        cells = browser.get("/api/matrix", params={"partition": "x"})
        assert cells.json()["error"] == "the cells of partition 'x' are not in this snapshot"
        lanes = browser.get("/api/lanes", params={"task": "train"})
        assert "a snapshot does not have the single ranks" in lanes.json()["error"]


def test_a_snapshot_has_neither_values_nor_secrets(client: tq.TransferQueueClient) -> None:
    with served(values=True) as page:
        page.view_when(lambda view: view["state"]["state"] == "live")
        text = gzip.decompress(saved(page)).decode()
    system = CURRENT.system
    assert system is not None
    assert page.address.split("token=")[1] not in text
    assert system.key.hex() not in text
    assert "tag-value" not in text
    assert json.loads(text)["view"]["system"]["values"] is False


def test_stuck_samples_are_saved_without_their_values() -> None:
    snapshot = snapshot_of([example_matrix()], [example_sample()])
    found = decode_snapshot(encode_snapshot(take_snapshot(example_view(), SnapshotAnswers(snapshot))), "file")
    assert [(each.partition, each.index) for each in found.samples] == [("train_42", 107_168)]
    assert {field.note for field in found.samples[0].fields if field.present} == {"a snapshot has no values"}
    assert [each.partition for each in found.matrices] == ["train_42"]
    answers = SnapshotAnswers(found)
    assert answers.sample("train_42", None, "q15690/0") == answers.sample("train_42", 107_168, None)
    assert file_name(found).startswith("tq-live-grpo-moe-30b-")


def test_a_controller_that_does_not_reply_is_asked_once() -> None:
    class Silent(SnapshotAnswers):
        asked = 0

        def matrix(self, partition: str, first: int, last: int | None, columns: int) -> MatrixAnswer | None:
            self.asked += 1
            raise tq.WaitTimeoutError("no reply")

    silent = Silent(snapshot_of([], []))
    assert take_snapshot(example_view(), silent).matrices == []
    assert silent.asked == 1


def test_the_command_saves_a_snapshot(
    client: tq.TransferQueueClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "now.json.gz"
    assert main(["live", "--name", "live-test", "--save", str(path)]) == 0
    assert f"the system live-test is saved in {path}" in capsys.readouterr().out
    snapshot = read_snapshot(path)
    assert snapshot.saved > 0
    assert [each.partition for each in snapshot.matrices] == ["train_0"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--save", "x", "--port", "1"], "--port cannot be given with --save"),
        (["x", "--name", "y"], "--name cannot be given with the snapshot x"),
        (["x", "--save", "y"], "--save cannot be given with the snapshot x"),
    ],
)
def test_options_that_have_no_meaning_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["live", *arguments])
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(tmp_path / "no")]) == 1
    said = capsys.readouterr().err
    assert f"tq: {tmp_path / 'no'} cannot be read: No such file or directory; give a file that `tq live --save" in said
    with pytest.raises(InvalidArgumentError, match="cannot be read: Is a directory"):
        read_snapshot(tmp_path)


def test_a_file_of_another_kind_is_refused(document: dict[str, Any]) -> None:
    whole = packed(document)
    assert decode_snapshot(whole, "f").format == FORMAT
    for data, words in [
        (b"", "f is not a snapshot of the live page: it begins with b''"),
        (b"PK\x03\x04", r"it begins with b'PK\\x03\\x04', not as gzip"),
        (whole[:-20], "f is a damaged snapshot: the file ends too early, after "),
        (whole[:20] + b"x" * 20 + whole[40:], "f is a damaged snapshot: "),
        (packed({"a": 1}), "f is not a snapshot of the live page: Object missing required field `kind`"),
        (packed({**document, "kind": "x"}), "its kind is 'x'; give a file that"),
        (packed({**document, "format": 2, "version": "9.1"}), "a snapshot of format 2, written by transfer_queue 9.1"),
        (
            packed(
                {**document, "view": {**document["view"], "system": {**document["view"]["system"], "history": 1e9}}}
            ),
            "its timeline covers 1000000000.0 s",
        ),
        (packed({**document, "samples": 1}), "f is a damaged snapshot: Expected `array`, got `int`"),
        (packed({**document, "view": {"seq": 1, "now": 2.0}}), "f is a damaged snapshot: it lacks system, state"),
        (gzip.compress(b"[" * 100_000), "f is not a snapshot of the live page"),
    ]:
        with pytest.raises(InvalidArgumentError, match=words):
            decode_snapshot(data, "f")
