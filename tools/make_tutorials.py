"""Write the pages of docs/tutorials from the scripts in examples/tutorials.

    python tools/make_tutorials.py           writes them
    python tools/make_tutorials.py --check   exits with 1 if they are not what it would write

A script is in percent format: `# %% [markdown]` begins a cell of prose (comments), `# %%` a cell of code. Its first
cell is a heading and one paragraph, which is also its line in the list of pages. tests/test_docs.py runs the scripts
and compares the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from generated_files import ROOT, write_or_check

SCRIPTS = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"

LIST_HEAD = """<!-- Made by tools/make_tutorials.py -->

# Tutorials

Each page is a script that runs in seconds without a GPU: `.venv/bin/python examples/tutorials/01_key_value.py`. The
code asserts what the page states.

"""


def cells_of(source: str, name: str) -> Iterator[tuple[bool, list[str]]]:
    """Yield (whether it is prose, its lines) of each cell, without blank lines around them.

    Raises:
        ValueError: There is something before the first cell, a line of prose is not a comment, or a line begins like a
            marker of a cell and is none.
    """
    prose, lines = None, list[str]()
    for number, line in enumerate([*source.splitlines(), "# %%"], 1):
        begin = re.fullmatch(r"# %%( \[markdown\])?", line)
        if begin is None:
            if re.match(r"\s*#+\s*%%", line):
                raise ValueError(
                    f"{name}:{number}: a line that begins a cell must be '# %%' or '# %% [markdown]', got: {line}"
                )
            if prose is None or (prose and line and not re.match(r"#( |$)", line)):
                raise ValueError(f"{name}:{number}: a line must be in a cell, and prose must be comments, got: {line}")
            lines.append(line[2:] if prose else line)
            continue
        text = "\n".join(lines).strip("\n")
        if text:
            yield bool(prose), text.split("\n")
        prose, lines = begin[1] is not None, []


def page_of(script: Path) -> str:
    """Return the page of a script."""
    parts = [f"<!-- Made by tools/make_tutorials.py from examples/tutorials/{script.name} -->"]
    for prose, lines in cells_of(script.read_text("utf-8"), script.name):
        parts.append("\n".join(lines if prose else ["```python", *lines, "```"]))
    return "\n\n".join(parts) + "\n"


def entry_of(script: Path) -> str:
    """Return the line of a script in the list of pages.

    Raises:
        ValueError: Its first cell is not a heading and a paragraph.
    """
    _, lines = next(cells_of(script.read_text("utf-8"), script.name))
    if len(lines) < 3 or not lines[0].startswith("# ") or lines[1]:
        raise ValueError(f"{script.name}: the first cell must be a heading, a blank line and a paragraph")
    paragraph = " ".join(lines[2:]).split("  ")[0]
    return f"1. [{lines[0][2:]}]({name_of(script)}): {paragraph}"


def name_of(script: Path) -> str:
    """Return the file name of a script's page."""
    return script.stem.replace("_", "-") + ".md"


def pages() -> dict[Path, str | None]:
    """Return the text of every file of docs/tutorials; None for a page whose script is gone."""
    scripts = sorted(SCRIPTS.glob("[0-9]*.py"))
    made = {PAGES / name_of(script): page_of(script) for script in scripts}
    contents = LIST_HEAD + "\n".join(map(entry_of, scripts)) + "\n"
    return {**dict.fromkeys(PAGES.glob("*")), PAGES / "README.md": contents, **made}


if __name__ == "__main__":
    write_or_check(pages())
