"""A pytest plugin that leaves out the contract tests listed in .ci/contract-later.txt.

A line names a file (`test_checkpoint.py`), a test (`test_dataset.py::TestLoader::test_one_worker`) or a class;
`#` starts a comment. A line that matches no test is an error, so that the list can only shrink.
"""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parent.parent / ".ci" / "contract-later.txt"


def listed() -> list[str]:
    """The names on the list."""
    lines = (line.partition("#")[0].strip() for line in LIST.read_text("utf-8").splitlines())
    return [line for line in lines if line]


def name_of(item: pytest.Item) -> str:
    """The test as the list names it: its file without folders, class and function, without parameters."""
    file, _, inside = item.nodeid.partition("::")
    return f"{Path(file).name}::{inside.partition('[')[0]}"


def covers(entry: str, name: str) -> bool:
    """Whether the entry of the list names this test, its class or its file."""
    return name == entry or name.startswith(entry + "::")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes the listed tests out of a run; refuses a list with a name that matches none."""
    entries = listed()
    # Only of a whole run can it be said that a name matches nothing.
    whole = not config.getoption("keyword") and all(Path(argument).is_dir() for argument in config.args)
    for entry in entries if whole else []:
        if not any(covers(entry, name_of(item)) for item in items):
            raise pytest.UsageError(f"{LIST.name} lists {entry}, which matches no test: take it off the list")
    later = [item for item in items if any(covers(entry, name_of(item)) for entry in entries)]
    if later:
        config.hook.pytest_deselected(items=later)
        items[:] = [item for item in items if item not in later]
