"""Every code block of README.md and docs/ runs, in the order of its page, one process a page.

Pages of docs/tutorials are made of the scripts in examples/tutorials: these run as they are, the pages are compared.

Python blocks of a page share their names, as a reader would type them one after another. In a console block the
lines that start with `$ ` are commands, run by bash in the page's folder; the rest is what they print. A command
`$ make TARGET` is not run: that the target exists is enough (the tests would start themselves).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

import warm
from leftovers import files_in, wait_for_none
from tools.make_tutorials import cells_of

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = ROOT / "docs" / "tutorials"
SCRIPTS = sorted((ROOT / "examples" / "tutorials").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "console", "text", "yaml", "toml", "json", "mermaid", "diff"}
MAKE = "make "


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line (from 1), its lines without the fence's indent."""

    language: str
    line: int
    lines: list[str]


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page in order."""
    blocks: list[Block] = []
    inside: Block | None = None
    indent = 0
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        fence = re.match(r"( *)```(\w*)\s*$", line)
        is_other = re.match(r"\s*(```|~~~)", line) and not fence
        assert not is_other, (
            f"{page.name}:{number}: a block begins with three backticks and a language, else it never runs"
        )
        if fence and inside is None:
            indent, inside = len(fence[1]), Block(fence[2], number + 1, [])
        elif fence and inside is not None:
            blocks.append(inside)
            inside = None
        elif inside is not None:
            assert not line[:indent].strip(), f"{page.name}:{number}: less indented than its fence"
            inside.lines.append(line[indent:])
    assert inside is None, f"{page.name}: a block is not closed"
    return blocks


def commands_of(block: Block) -> list[tuple[int, str]]:
    """The commands of a console block, each with its line's number."""
    return [(block.line + i, line[2:]) for i, line in enumerate(block.lines) if line.startswith("$ ")]


def program_of(page: Path) -> str:
    """The page as one program: every line of code at the line's own number, so that tracebacks name the page."""
    lines = [""] * (len(page.read_text("utf-8").splitlines()) + 1)
    for block in blocks_of(page):
        if block.language == "python":
            lines[block.line - 1 : block.line - 1 + len(block.lines)] = block.lines
        elif block.language == "console":
            for number, command in commands_of(block):
                if not command.startswith(MAKE):
                    call = f"__import__('subprocess').run(['bash', '-eo', 'pipefail', '-c', {command!r}], check=True)"
                    lines[number - 1] = call
    return "\n".join(lines)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_languages(page):
    """Each block says its language: one that is run, or one that is only read."""
    wrong = [f"{name_of(page)}:{block.line}" for block in blocks_of(page) if block.language not in LANGUAGES]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets(page):
    """A target that a page tells its reader to make is in the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    lines = [line for block in blocks_of(page) if block.language == "console" for _, line in commands_of(block)]
    commands = [line.partition("#")[0] for line in lines]
    told = {word for command in commands if command.startswith(MAKE) for word in command.split()[1:] if "=" not in word}
    assert told <= targets


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page):
    """A link to a file of the repository leads to one."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")) + re.findall(
        r'src="([^"]+)"', page.read_text("utf-8")
    )
    of_the_repository = [link for link in links if not re.match(r"\w+://|\.\./\.\./actions/", link)]
    wrong = [link for link in of_the_repository if not (page.parent / link).exists()]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "howto"], ids=name_of)
def test_named_files(page):
    """A file of the repository that a page names exists. (Pages of docs/howto name files that a reader is to make.)"""
    names = re.findall(r"`((?:tests|tools|docs|examples|benchmarks|src)/[\w/.-]+)`", page.read_text("utf-8"))
    assert [name for name in names if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("pages", "most"),
    [
        (["README.md"], 1_000),
        (["CHANGELOG.md"], 1_500),
        (["docs/performance.md"], 1_600),
        (["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**/*.md"], 75_000),
    ],
)
def test_pages_have_a_budget_of_words(pages, most):
    """Words are removed before words are added: what is not read hides what is."""
    assert sum(len(page.read_text("utf-8").split()) for pattern in pages for page in ROOT.glob(pattern)) <= most


def test_a_decision_fits_a_page():
    words = {page.name: len(page.read_text("utf-8").split()) for page in (ROOT / "docs" / "decisions").glob("0*.md")}
    assert {name: count for name, count in words.items() if count > 400} == {}


def runs(page: Path) -> bool:
    """Whether a page has anything to run that is run by no script, and not by `test_feature_page`."""
    return bool(program_of(page).strip()) and page.parent != TUTORIALS and page.name != "add-a-feature.md"


def test_decisions_are_listed_in_their_order():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^\| \[(\d{4})\]\((\1-[a-z0-9-]+\.md)\)", (folder / "README.md").read_text(), re.MULTILINE)
    assert [name for _, name in listed] == sorted(path.name for path in folder.glob("0*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=name_of)
def test_blocks_run(page, tmp_path):
    """The page's blocks run in order, and leave no process and no file behind."""
    program = tmp_path / page.name
    program.write_text(program_of(page), "utf-8")
    run_alone(program, tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_tutorials_run(script, tmp_path):
    """A tutorial's script runs, and leaves no process and no file behind."""
    run_alone(script, tmp_path)


def test_tutorials_are_their_scripts():
    """Every page of docs/tutorials is what its script makes, and has no commands that nobody runs."""
    command = [sys.executable, str(ROOT / "tools" / "make_tutorials.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = [page for page in PAGES if page.parent == TUTORIALS]
    assert len(pages) == len(SCRIPTS) + 1
    assert {block.language for page in pages for block in blocks_of(page)} <= {"python", "text"}


def test_no_page_shows_the_marker_of_a_cell():
    """`# %% [markdown]` in a page is a marker that the tool did not take for one."""
    assert len(SCRIPTS) >= 7
    assert [name_of(page) for page in PAGES if re.search(r"^\s*#+\s*%%", page.read_text("utf-8"), re.MULTILINE)] == []


@pytest.mark.parametrize(
    "line", ["# %% [markdown] Text.", "# %%[markdown]", "#%%", "# %% Title", "    # %% [markdown]"]
)
@pytest.mark.parametrize("kind", ["", " [markdown]"])
def test_a_line_that_is_almost_a_marker_is_refused(line, kind):
    with pytest.raises(ValueError, match=r"page\.py:3: a line that begins a cell must be '# %%' or"):
        list(cells_of(f"# %%{kind}\n# text\n{line}\n# text\n", "page.py"))


@pytest.mark.parametrize("tool", ["make_reference.py", "make_diagrams.py", "make_figures.py"])
def test_generated_pages_are_up_to_date(tool):
    """The pages of commands, metrics and errors, the diagrams and the README's figures are what their tools make."""
    command = [sys.executable, str(ROOT / "tools" / tool), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def run_alone(program: Path, folder: Path) -> None:
    """Runs a program in a folder, with a runtime folder of its own that must be empty after."""
    with tempfile.TemporaryDirectory(prefix="tq-docs-") as runtime, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TQ_RUNTIME_DIR", runtime)
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        done = warm.run_program(run_script, str(program), str(folder))
        left = wait_for_none(Path(runtime), 10)
        assert done.returncode == 0, done.stdout + done.stderr
        assert left == []
        assert files_in(Path(runtime)) == []


def run_script() -> int:
    """Run the script of the first argument in the folder of the second, as `python SCRIPT` does. In its own process."""
    program, folder = sys.argv[1:]
    os.chdir(folder)
    sys.argv, sys.path[:0] = [program], [str(Path(program).parent)]
    multiprocessing.set_start_method(None, force=True)  # the usual one, not that of this process
    runpy.run_path(program, run_name="__main__")
    atexit._run_exitfuncs()  # a process of multiprocessing does not
    return 0
