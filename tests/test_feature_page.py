"""The feature of docs/howto/add-a-feature.md is built by the page's blocks in a copy of the package, and works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from test_docs import ROOT, blocks_of

PAGE = ROOT / "docs" / "howto" / "add-a-feature.md"


def write_files(folder: Path) -> list[str]:
    """Write each Python block into the file that the page names in the line before it."""
    lines, names = PAGE.read_text("utf-8").splitlines(), []
    for block in blocks_of(PAGE):
        if block.language == "python":
            named = re.fullmatch(r"`([\w/]+\.py)`:", lines[block.line - 4])
            assert named, f"line {block.line}: a block of code stands after the name of its file"
            (folder / named[1]).write_text("\n".join(block.lines) + "\n", "utf-8")
            names.append(named[1])
    return names


def edit_files(folder: Path) -> list[str]:
    """Make the edits of the blocks that name files; those of a block without a name are only read."""
    names = []
    for block in blocks_of(PAGE):
        if block.language == "diff" and block.lines[0].startswith("--- "):
            for name, before, after in edits_of(block.lines):
                path = folder / name
                text = path.read_text("utf-8")
                assert text.count(before) == 1, f"{name} does not have these lines once:\n{before}"
                path.write_text(text.replace(before, after), "utf-8")
                names.append(name)
    return list(dict.fromkeys(names))


def edits_of(lines: list[str]) -> list[tuple[str, str, str]]:
    """Return (file, lines before, lines after) of each part of a diff that begins with @@."""
    edits: list[tuple[str, str, str]] = []
    name = ""
    for line in lines:
        if line.startswith("--- "):
            continue
        if line.startswith("+++ b/"):
            name = line.removeprefix("+++ b/")
        elif line == "@@":
            edits.append((name, "", ""))
        else:
            _, before, after = edits.pop()
            before += line[1:] + "\n" if line[0] != "+" else ""
            after += line[1:] + "\n" if line[0] != "-" else ""
            edits.append((name, before, after))
    return edits


def test_the_feature_of_the_page_works(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "core").mkdir(parents=True)
    for name in ("test_imports.py", "core/conftest.py", "core/harness.py", "core/sameness.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    written, edited = write_files(tmp_path), edit_files(tmp_path)
    assert [name for name in written if name.startswith("src/transfer_queue/core/")] == [
        "src/transfer_queue/core/notices.py"
    ]
    assert [name for name in edited if name.startswith("src/transfer_queue/core/")] == [
        "src/transfer_queue/core/state/state.py",
        "src/transfer_queue/core/services.py",
    ], "a feature is registered in one place, and its column in the state in another one"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{tmp_path / 'tests'}"}
    environment.pop("PYTEST_ADDOPTS", None)
    tests = ["tests/core/test_notices.py", "tests/test_imports.py::test_no_import_cycles"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
