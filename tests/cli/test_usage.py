"""Typing errors in the arguments of `tq`: a message says what is wrong and suggests a name, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from transfer_queue.cli import main
from transfer_queue.config.settings import SETTINGS

NOBODY = "a-system-that-nobody-has-started"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Return the exit code of `tq` with these arguments, and its output on stderr."""
    try:
        code = main(words)
    except SystemExit as error:  # of argparse
        code = int(error.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"a: [1, 2", "is not valid YAML"),
        (b"\xff\xfe\x00\x88", "is not a text file in UTF-8"),
        (b"- 1\n- 2\n", "must contain a mapping of settings, but contains a list"),
        (b"controller: 3", "controller is 3; allowed: a mapping"),
        (b"controller: {polling_mode: perhaps}", "controller.polling_mode is 'perhaps'"),
        (b"controller: {samplr: x}", "controller.samplr: unknown; did you mean controller.sampler?"),
    ],
)
def test_a_file_of_settings_that_cannot_be_used_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "conf.yaml"
    if content is not None:
        path.write_bytes(content)
    code, said = told(capsys, "start", "--name", NOBODY, "--conf", str(path))
    assert code == 1
    assert said.startswith("tq: ")
    assert message in said


def test_a_folder_in_place_of_a_file_of_settings_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, said = told(capsys, "start", "--name", NOBODY, "--conf", str(tmp_path))
    assert (code, said) == (1, f"tq: --conf {tmp_path} cannot be read: Is a directory; give the path of a YAML file\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("trace", "trace.json", "--last", "0"), "must be a positive number of seconds, got '0'"),
        (("start", "--set", "foo"), "must be KEY=VALUE, got 'foo'"),
        (("start", "--set", "=3"), "must be KEY=VALUE, got '=3'"),
        (("start", "--set", "a.b=["), "the value '[' of a.b is not valid YAML"),
        (("start", "--name", "../x"), "the name of a system is '../x'"),
        (("status", "--jsn"), "unrecognized arguments: --jsn; did you mean '--json'?"),
        (("dashboard", "grafana"), "unrecognized arguments: grafana"),
        (("strat",), "unknown command 'strat'; did you mean 'start'? (the commands are: demo, start,"),
        (("show", "p"), "the following arguments are required: KEY|INDEX"),
        (("stuck", "--for", "-1"), "must be a number of seconds from 0 to 1e9, got '-1'"),
        (("stuck", "--limit", "0"), "must be a whole number from 1 to 10000, got '0'"),
        (("bench",), "unknown command 'bench': the package has no benchmarks; run `python -m benchmarks`"),
        (("bench", "kv", "--quick"), "run `python -m benchmarks` in a checkout of the repository"),
    ],
)
def test_arguments_that_a_command_does_not_take_are_usage_errors(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, said = told(capsys, *words)
    assert code == 2
    assert message in said


def test_an_unknown_key_that_is_set_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "start", "--name", NOBODY, "--set", "polling_mode=true")
    assert code == 1
    assert "polling_mode: unknown; did you mean controller.polling_mode?" in said


def test_a_command_names_the_system_that_it_does_not_find(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "status", "--name", NOBODY)
    assert code == 1
    assert f"no system is running under the name {NOBODY!r}" in said


def test_a_similar_name_is_suggested_but_not_the_one_that_was_not_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("TQ_ADDRESS", raising=False)
    tmp_path.chmod(0o700)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "system.json").touch()
    assert (
        "no system is running under the name 'trainr' (did you mean 'trainer'?); start one"
        in told(capsys, "status", "--name", "trainr")[1]
    )
    monkeypatch.setenv("TQ_ADDRESS", str(tmp_path / "trainer"))
    code, said = told(capsys, "status")
    assert (code, "did you mean" in said, "running:" in said) == (1, False, False)


def test_the_help_of_start_has_every_setting_with_its_default_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(("start", "--help"))
    lines = capsys.readouterr().out.splitlines()
    assert [each.key for each in SETTINGS if f"  {each.key}={each.default_yaml}" not in lines] == []
    at = lines.index("  backend.SimpleStorage.replicas=1")
    assert lines[at + 1].endswith("Allowed: a whole number from 1 to 2.")
