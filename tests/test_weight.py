"""Ceilings of the package's weight. A change that makes it lighter lowers its ceilings here.

Only a change that adds an ability raises one, by the lines that this ability needs, which its commit names.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import code_weight
import warm

FUNCTIONS_AND_FILES = {
    "put": (114, 47),
    "get_meta": (103, 38),
    "get_data": (86, 28),
    "kv_batch_put": (122, 45),
    "kv_batch_get": (74, 25),
}
"""Operation -> the most functions and files of the package that it passes through, with 4 rows of 2 fields."""
CORE_LINES = 15_745
PACKAGE_LINES = 63_155
MODULES = 441
IMPORTS_OF_A_CORE_MODULE = 20
"""Other modules of the package that one module of the core imports. The list of services imports each feature."""
PRIVATE_ATTRIBUTES = 166
"""Private attributes and functions of the package that tests use."""

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src"
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


def test_tests_use_few_private_attributes() -> None:
    names = code_weight.private_names(PACKAGE)
    uses = {path: code_weight.private_uses(path, names) for path in TESTS.rglob("*.py")}
    most = sorted(uses, key=lambda path: -uses[path])[:5]
    listed = ", ".join(f"{path.relative_to(TESTS)} ({uses[path]})" for path in most)
    assert sum(uses.values()) <= PRIVATE_ATTRIBUTES, (
        f"tests use private attributes of the package {sum(uses.values())} times, at most {PRIVATE_ATTRIBUTES} are "
        f"allowed. Test what users and other modules see instead: results, errors, the status, counters, requests, "
        f"files. Most are in {listed}"
    )


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("from transfer_queue.errors import _ShutDown", 1),
        ("made._thread\nmade.inner()._thread = None", 2),
        ("self._thread\ncls._thread\nsuper()._thread\nos._exit(1)\nthread", 0),
    ],
)
def test_private_uses(tmp_path: Path, text: str, uses: int) -> None:
    path = tmp_path / "module.py"
    path.write_text(text)
    assert code_weight.private_uses(path, {"_thread"}) == uses


def test_private_names_are_those_that_are_defined(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        "_LIMIT = 3\nclass _Own:\n    def _repr_html_(self): ...\n    def _run(self):\n"
        "        self._done, self.__x = os._exit, tuple._replace\n"
    )
    assert code_weight.private_names(tmp_path) == {"_LIMIT", "_Own", "_run", "_done"}


def test_what_is_not_code_does_not_count() -> None:
    text = '"""A module."""\n\n# a comment\nx = 1  # one\n\n\ndef f():\n    """Two\n    lines."""\n    x = """\n"""\n'
    assert code_weight.lines_of_code(text) == 4


def test_imports_are_counted_as_modules(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import os\nfrom transfer_queue import errors\nfrom transfer_queue.errors import StartError, ProtocolError\n"
    )
    assert code_weight.imported_modules(path, SRC) == {"transfer_queue.errors"}
