"""Every test is run by a stage of CI, or by a target that CONTRIBUTING.md describes; a stage that fails is reported."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

import transfer_queue

ROOT = Path(__file__).resolve().parent.parent
STAGE = re.compile(r'^stage "([^"]+)" (\d+) make ([\w-]+)', re.MULTILINE)
STAGES = STAGE.findall((ROOT / ".ci" / "run").read_text("utf-8"))
NOT_IN_CI = {
    "loggers": "tests/loggers",
    "trl": "tests/integrations/trl",
    "verl": "tests/integrations/verl",
}
"""Targets outside of CI with tests that run nowhere else, each with their folder or file. CONTRIBUTING.md says why."""
NOT_PYTEST = {"long", "fuzz", "simulation"}
"""Folders with programs, which other targets run."""


def commands(target: str) -> list[list[str]]:
    """Return the arguments of each call of pytest in a target of the Makefile."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line.partition(" -m pytest ")[2]) for line in lines if " -m pytest " in line]


def ignores(arguments: list[str]) -> list[str]:
    return [argument.partition("=")[2] for argument in arguments if argument.startswith("--ignore=")]


def paths(arguments: list[str]) -> list[str]:
    """Return the files and folders of tests/ that a call of pytest names. Without any it runs those of `testpaths`."""
    named = [argument for argument in arguments if not argument.startswith("-") and "/" in argument]
    return [name for name in named if name.startswith("tests/")] if named else ["tests"]


def run_by(arguments: list[str]) -> set[str]:
    """Return the test files that a call of pytest collects."""
    globs = [argument.partition("=")[2] for argument in arguments if argument.startswith("--ignore-glob=")]
    found: set[str] = set()
    for name in paths(arguments):
        for start in ROOT.glob(name):
            files = [start] if start.is_file() else start.rglob("test_*.py")
            found |= {file.relative_to(ROOT).as_posix() for file in files}
    return {
        file
        for file in found
        if not any(file == name or file.startswith(f"{name}/") for name in ignores(arguments))
        and not any(fnmatch(file, glob) for glob in globs)
    }


def test_every_test_file_is_run():
    targets = [target for _, _, target in STAGES] + ["types-tests", *NOT_IN_CI]
    everything = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    ran = {file for target in targets for arguments in commands(target) for file in run_by(arguments)}
    assert len(everything) > 200
    assert everything - ran == set()
    in_ci = {file for _, _, target in STAGES for arguments in commands(target) for file in run_by(arguments)}
    in_ci |= {file for arguments in commands("types-tests") for file in run_by(arguments)}
    left_out = [ROOT / name for name in NOT_IN_CI.values()]
    wrong = [file for file in everything - in_ci if not any((ROOT / file).is_relative_to(name) for name in left_out)]
    assert wrong == []


def test_what_make_names_exists():
    """A name that is spelled wrong, or that was renamed, leaves nothing out and runs nothing."""
    targets = [target for _, _, target in STAGES] + ["types-tests", "test-oldest", "fuzz", "quick", *NOT_IN_CI]
    for target in targets:
        for arguments in commands(target):
            missing = [name for name in [*paths(arguments), *ignores(arguments)] if not list(ROOT.glob(name))]
            assert missing == [], target


def test_no_stage_of_ci_leaves_tests_out_by_name():
    for _, _, target in STAGES:
        for arguments in commands(target):
            assert not {"-k", "-m", "--deselect", "--lf", "--ff", "--sw"} & set(arguments), target


def test_a_file_with_tests_is_called_like_one():
    """pytest collects test_*.py only."""
    wrong = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if not path.name.startswith("test_")
        and path.name != "conftest.py"
        and path.relative_to(ROOT / "tests").parts[0] not in NOT_PYTEST
        and re.search(r"^(async )?def test_", path.read_text("utf-8"), re.MULTILINE)
    ]
    assert wrong == []


def test_the_table_of_stages_is_that_of_ci():
    table = re.findall(
        r"^\| ([\w ]+) \| `make ([\w-]+)[^`]*` \| \d+ s \| (\d+) s \|$",
        (ROOT / "CONTRIBUTING.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert [(name, limit, target) for name, target, limit in table] == STAGES


def test_the_workflow_runs_all_stages_that_the_repository_has():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    (named,) = re.findall(r"bash \.ci/run\n *(.*)\n", workflow)
    assert shlex.split(named) == [name for name, *_ in STAGES if not name.startswith("contract")]


def test_a_release_compares_its_tag_with_the_version():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    (command,) = re.findall(r"version=\$\((.*)\)", workflow)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == transfer_queue.__version__


# ------------------------------------------------------------ the script itself


@pytest.fixture
def ci(tmp_path: Path):
    """ci(stages, *names): the exit code and the output of the script with these lines as its stages."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "tools").mkdir()
    bootstrap = tmp_path / "tools" / "bootstrap"
    bootstrap.write_text("#!/bin/sh\n")
    bootstrap.chmod(0o700)
    text = (ROOT / ".ci" / "run").read_text("utf-8")
    head, tail = text[: text.index("\nstage ")], text[text.rindex("\nstage ") :].partition("\n\n")[2]
    head = re.sub(r"^system_packages$", "", head, flags=re.MULTILINE)

    def run(stages: str, *names: str, **environment: str) -> tuple[int, str]:
        (tmp_path / ".ci" / "run").write_text(f"{head}\n{stages}\n\n{tail}", "utf-8")
        done = subprocess.run(
            [shutil.which("bash") or "bash", ".ci/run", *names],
            cwd=tmp_path, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


def test_stages_that_pass_are_green(ci):
    code, output = ci("stage 'a' 20 true\nstage 'b' 20 echo '==== 3 passed, 1 skipped in 0.10s ===='")
    assert code == 0, output
    assert "4 passed, 0 failed" in output


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        ("20 false", "FAILED: planted (exit 1)"),
        ("20 bash -c 'echo 2 failed, 3 passed in 0.10s; exit 1'", "FAILED: planted (exit 1)"),
        ("20 bash -c 'echo 1 error in 0.10s; exit 2'", "FAILED: planted (exit 2)"),
        ("20 bash -c 'echo no tests ran in 0.10s; exit 5'", "FAILED: planted (exit 5)"),
        ("20 echo 5 skipped in 0.10s", "FAILED: planted (ran nothing)"),
        ("20 echo 5 deselected in 0.10s", "FAILED: planted (ran nothing)"),
        ("1 sleep 60", "FAILED: planted (exit 124)"),
        ("20 bash -c 'kill -SEGV $$'", "FAILED: planted (exit 139)"),
        ("20 there-is-no-such-program", "FAILED: planted (exit 127)"),
        ("20 bash -c 'setsid sleep 60 >/dev/null 2>&1 &'", "FAILED: planted (left processes)"),
    ],
)
def test_a_stage_that_fails_is_red_and_the_others_run(ci, command, reported):
    code, output = ci(f"stage 'planted' {command}\nstage 'other' 20 echo here I am")
    assert code != 0, output
    assert reported in output
    assert "here I am" in output
    assert "other (" not in output


def test_only_named_stages_run_and_unknown_names_are_red(ci):
    stages = "stage 'a b' 20 echo from a\nstage 'c' 20 echo from c"
    code, output = ci(stages, "a b")
    assert code == 0, output
    assert "\nfrom a\n" in output
    assert "\nfrom c\n" not in output
    code, output = ci(stages, "c", "d")
    assert code != 0
    assert "there is no stage 'd'; the stages are: 'a b' 'c'" in output


def test_what_the_caller_exports_leaves_no_test_out(ci):
    code, output = ci(
        "stage 'a' 20 bash -c 'echo got:$ARGS$PYTEST_ADDOPTS$MAKEFLAGS:'",
        ARGS="-k none",
        PYTEST_ADDOPTS="-x",
        MAKEFLAGS="i",
    )
    assert code == 0, output
    assert "\ngot::\n" in output
