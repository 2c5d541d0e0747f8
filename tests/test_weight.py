"""Ceilings of the package's weight. A change that makes it lighter lowers its ceilings here; none raises them."""

from __future__ import annotations

from pathlib import Path

import pytest

import code_weight
import warm

FUNCTIONS_AND_FILES = {
    "put": (118, 49),
    "get_meta": (105, 39),
    "get_data": (88, 28),
    "kv_batch_put": (125, 47),
    "kv_batch_get": (75, 25),
}
"""Operation -> the most functions and files of the package that it passes through, with 4 rows of 2 fields."""
CORE_LINES = 15_820
PACKAGE_LINES = 63_204
MODULES = 442
IMPORTS_OF_A_CORE_MODULE = 20
"""Other modules of the package that one module of the core imports. The list of services imports each feature."""

SRC = Path(__file__).parents[1] / "src"
PACKAGE = SRC / code_weight.PACKAGE
CORE = PACKAGE / "core"


@pytest.fixture(scope="module")
def functions() -> dict[str, tuple[int, int]]:
    process, results = warm.reporting(code_weight.report_functions)
    with results:
        found: dict[str, tuple[int, int]] = results.recv()
    process.join()
    return found


@pytest.mark.parametrize("operation", FUNCTIONS_AND_FILES)
def test_an_operation_passes_through_few_functions_and_files(
    operation: str, functions: dict[str, tuple[int, int]]
) -> None:
    most = FUNCTIONS_AND_FILES[operation]
    now = functions[operation]
    assert now[0] <= most[0], f"{operation} passes through {now[0]} functions, at most {most[0]} are allowed"
    assert now[1] <= most[1], f"{operation} passes through {now[1]} files, at most {most[1]} are allowed"


@pytest.mark.parametrize(("folder", "most"), [(CORE, CORE_LINES), (PACKAGE, PACKAGE_LINES)], ids=["core", "package"])
def test_lines_of_code(folder: Path, most: int) -> None:
    lines = code_weight.lines_in(folder)
    assert lines <= most, f"{folder.name} has {lines} lines of code, at most {most} are allowed"


def test_number_of_modules() -> None:
    modules = len(list(PACKAGE.rglob("*.py")))
    assert modules <= MODULES, f"the package has {modules} modules, at most {MODULES} are allowed"


def test_a_module_of_the_core_imports_few_others() -> None:
    counts = {
        path: len(code_weight.imported_modules(path, SRC)) for path in CORE.rglob("*.py") if path.name != "services.py"
    }
    most = max(counts, key=lambda path: counts[path])
    words = f"{most.relative_to(SRC)} imports {counts[most]} modules of the package"
    assert counts[most] <= IMPORTS_OF_A_CORE_MODULE, f"{words}, at most {IMPORTS_OF_A_CORE_MODULE} are allowed"


def test_what_is_not_code_does_not_count() -> None:
    text = '"""A module."""\n\n# a comment\nx = 1  # one\n\n\ndef f():\n    """Two\n    lines."""\n    x = """\n"""\n'
    assert code_weight.lines_of_code(text) == 4


def test_imports_are_counted_as_modules(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os\nfrom transfer_queue import errors\nfrom transfer_queue.errors import StartError, ProtocolError\n"
    )
    assert code_weight.imported_modules(path, SRC) == {"transfer_queue.errors"}
