"""`tq show`, `tq stuck`, `tq list` and `tq completion`, against a real system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import transfer_queue as tq
from tests.tiny_tokenizer import write_tokenizer
from transfer_queue.cli import main
from transfer_queue.client import TransferQueueClient
from transfer_queue.node.system.launcher import RunningSystem, find

NAME = "samples"
HOSTILE = "x\x1b[2Jy"


def text(words: str) -> torch.Tensor:
    return torch.tensor(list(words.encode()), dtype=torch.uint8)


@pytest.fixture(scope="module")
def system() -> Iterator[RunningSystem]:
    """A system with samples that several clients have put and claimed."""
    before = os.environ.get("TQ_SYSTEM")
    os.environ["TQ_SYSTEM"] = NAME
    assert main(["start", "--set", "controller.polling_mode=true", "--set", "security.allow_pickle=false"]) == 0
    found = find(NAME)
    assert found is not None
    rollout = TransferQueueClient(found, task="rollout", rank=3)
    train = TransferQueueClient(found, task="train", rank=0)
    try:
        for number in range(3):
            fields = {"prompt": text("What is 2 + 2?"), "ids": torch.arange(number + 10) + 9000}
            rollout.kv_put(f"p1_{number}", "train_0", fields, tag={"length": number})
        rollout.kv_put("gone", "train_0", {"prompt": text("bye")})
        rollout.kv_clear(["gone"], "train_0")
        rollout.kv_put("p1_0", "train_0", {"reward": torch.tensor(0.5), "info": {"a": 1}})
        rollout.kv_put("7", "train_0", {"prompt": text("seven")})
        rollout.kv_put(HOSTILE, HOSTILE, {HOSTILE: torch.zeros(2)}, tag={HOSTILE: HOSTILE})
        rollout.kv_put("wide", "wide", {f"f{number}": torch.tensor(number) for number in range(100)})
        train.get_meta(["prompt"], 1, "train_0", task_name="train", lease=600)
        yield found
    finally:
        rollout.close()
        train.close()
        tq.close()
        main(["stop"])
        os.environ.pop("TQ_SYSTEM")
        if before is not None:
            os.environ["TQ_SYSTEM"] = before


def output_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code, out, _ = output_of(capsys, *words, "--json")
    return code, json.loads(out)


class TestShow:
    def test_a_sample(self, system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = output_of(capsys, "show", "train_0", "p1_0")
        assert code == 0
        assert out.startswith("sample 'p1_0' of partition train_0, index 0: live\n")
        for words in (
            "'What is 2 + 2?'",
            "9000, 9001",
            f"rollout rank 3, pid {os.getpid()}, ",
            "claimed  by rank 0, pid",
            "dict: {'a': 1}",
            "length 0",
        ):
            assert words in out

    def test_as_json(self, system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
        code, found = as_json(capsys, "show", "train_0", "p1_1")
        assert (code, found["state"], found["key"], found["tags"]) == (0, "live", "p1_1", {"length": 1})
        assert found["values"]["prompt"]["text"] == "What is 2 + 2?"
        assert [event["kind"] for event in found["history"]] == ["put"]
        assert found["missing"] == ["reward", "info"]

    def test_by_index_and_by_a_key_that_is_a_number(
        self, system: RunningSystem, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert as_json(capsys, "show", "train_0", "1", "--no-values")[1]["key"] == "p1_1"
        assert as_json(capsys, "show", "train_0", "7", "--no-values")[1]["key"] == "7"

    def test_a_cleared_sample(self, system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = output_of(capsys, "show", "train_0", "gone")
        assert code == 0
        assert "cleared at " in out.splitlines()[0]
        assert f"by rollout rank 3, pid {os.getpid()}, " in out.splitlines()[0]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (("train_0", "p1_9"), "Did you mean 'p1_2'?"),
            (("trian_0", "p1_0"), "Did you mean 'train_0'?"),
            (("train_0", "999"), "no sample has this index yet"),
        ],
    )
    def test_what_does_not_exist(
        self, system: RunningSystem, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
    ) -> None:
        code, out, errors = output_of(capsys, "show", *words)
        assert (code, out) == (1, "")
        assert said in errors

    def test_hostile_names(self, system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = output_of(capsys, "show", HOSTILE, HOSTILE)
        assert code == 0
        assert "\x1b" not in out
        assert "0, 0" in out

    def test_a_hundred_fields(self, system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
        code, found = as_json(capsys, "show", "wide", "wide", "--no-values")
        assert (code, len(found["fields"])) == (0, 100)


def test_stuck(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "stuck", "--for", "0", "--partition", "train_0", "--limit", "2")
    assert (code, found["total"], found["partitions"]) == (3, 4, {"train_0": 4})
    assert [(each["key"], each["prompt"], each["task"], each["rank"]) for each in found["samples"]] == [
        ("p1_1", "p1", "rollout", 3), ("p1_2", "p1", "rollout", 3),
    ]  # fmt: skip
    code, out, _ = output_of(capsys, "stuck", "--for", "0", "--partition", "train_0")
    assert code == 3
    assert "1-2" in out
    assert "task rollout puts reward, info" in out
    code, out, _ = output_of(capsys, "stuck", "--for", "1e8")
    assert (code, out) == (0, "no sample that is not finished has been unchanged for 1157 d 9 h or longer\n")
    code, _, errors = output_of(capsys, "stuck", "--partition", "train_9")
    assert (code, errors) == (1, "tq: partition 'train_9' does not exist; did you mean 'train_0'?\n")


def test_explain_as_json(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "explain", "train_0", "--key", "p1_1", "--task", "train", "--fields", "rewrad")
    assert (code, found["exists"]) == (0, True)
    assert "No sample has a field 'rewrad'" in found["notes"][0]


def test_a_trace_as_json(system: RunningSystem, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, found = as_json(capsys, "trace", str(tmp_path / "trace.json"))
    assert (code, found["gaps"]) == (0, 0)
    assert found["events"] > 8


def test_list(system: RunningSystem, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = as_json(capsys, "list")
    (mine,) = [each for each in found["systems"] if each["name"] == NAME]
    assert (code, mine["state"], mine["runtime"], mine["backend"], mine["units"]) == (
        0, "running", "local", "SimpleStorage", 1,
    )  # fmt: skip
    assert (mine["partitions"], mine["detached"]) == (3, True)
    assert mine["memory"] > 0
    assert f"{NAME}  running" in output_of(capsys, "list")[1]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    code, out, _ = output_of(capsys, "completion", shell)
    assert code == 0
    for word in ("show", "stuck", "_tq_systems", "no-values"):
        assert word in out


def test_bash_completes_commands_and_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "tq.bash"
    script.write_text(output_of(capsys, "completion", "bash")[1])
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    ask = (
        f"source {script}; COMP_WORDS=({{}}); COMP_CWORD={{}}; "
        'f=$(complete -p tq | sed "s/.*-F \\([^ ]*\\).*/\\1/"); $f; echo "${{COMPREPLY[@]}}"'
    )

    def completed(words: str) -> list[str]:
        command = ask.format(words, len(words.split()) - 1)
        environment = {**os.environ, "TQ_RUNTIME_DIR": str(tmp_path / "runs")}
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment).stdout.split()

    assert completed("tq stu") == ["stuck"]
    assert completed("tq show --name mi") == ["mine"]


def test_without_the_extra_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, errors = output_of(capsys, "completion", "bash")
    assert code == 1
    assert "pip install 'transfer_queue[completion]'" in errors


class TestTokenizer:
    def test_token_ids_are_shown_as_text(
        self, system: RunningSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tokenizer = str(write_tokenizer(tmp_path))
        client = TransferQueueClient(system)
        client.kv_put("t", "texts", {"tokens": torch.tensor([2, 3, 4]), "labels": torch.tensor([2, -100])})
        client.close()
        assert main(["show", "texts", "t", "--tokenizer", tokenizer]) == 0
        shown = capsys.readouterr().out
        assert "      2, 3, 4\n      text: 'what is two'\n" in shown
        assert shown.count("text: ") == 1
        assert main(["show", "texts", "t", "--tokenizer", str(tmp_path), "--json"]) == 0
        values = json.loads(capsys.readouterr().out)["values"]
        assert (values["tokens"]["decoded"], values["labels"]["decoded"]) == ("what is two", None)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--tokenizer", "nowhere"], "the tokenizer 'nowhere' was not found"),
            (["--tokenizer", "x", "--no-values"], "--tokenizer is 'x', but --no-values hides values"),
        ],
    )
    def test_one_that_cannot_be_used_is_a_usage_error(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["show", "texts", "t", *arguments])
        assert ended.value.code == 2
        assert words in capsys.readouterr().err
