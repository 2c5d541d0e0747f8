"""The directions of imports in src/transfer_queue, read from the source: nothing is imported to check it.

display, errors <- messages <- core, sampler, wire <- storage, journal, net <- system_folder <- node, client
<- interface, dataloader <- cli.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "transfer_queue"
ENVIRONMENT = SOURCE / "config" / "environment.py"

# A part of the package (a module or folder directly below it) -> the parts that it may import, annotations included.
LOWEST = {"errors", "messages", "display"}
SETTINGS = {"config", "names", "private_files", "utils"}
BYTES = LOWEST | {"wire"}
SERVERS = BYTES | SETTINGS | {"core", "sampler", "storage", "journal", "metrics", "net"}
CLIENT = BYTES | SETTINGS | {"metadata", "sampler", "storage", "core", "journal", "net", "system_folder", "timeline"}
GUESTS = CLIENT | {"client", "node"}
MAY_IMPORT = {
    "errors": set(),
    "display": set(),
    "messages": {"errors", "display"},
    "names": set(),
    "private_files": set(),
    "config": {"errors", "names"},
    "utils": {"config"},
    "sampler": {"errors", "config", "names", "utils"},
    "wire": LOWEST,
    "metadata": BYTES,
    "timeline": LOWEST,
    "core": LOWEST | {"metrics", "names", "sampler", "timeline"},
    "storage": BYTES | SETTINGS,
    "journal": BYTES | SETTINGS | {"core"},
    "net": BYTES | SETTINGS | {"metrics"},
    "metrics": LOWEST,
    "token_text": {"errors", "config"},
    "system_folder": LOWEST | SETTINGS | {"net"},
    "node": SERVERS | {"system_folder", "token_text"},
    "client": CLIENT,
    "controller": {"metadata"},
    "ray_runtime": GUESTS,
    "attachment": GUESTS | {"ray_runtime"},
    "_generated_kv": GUESTS | {"attachment"},
    "config_in_force": {"config", "display"},
    "interface": GUESTS | SERVERS | {"attachment", "_generated_kv", "config_in_force", "ray_runtime"},
    "summary_logger": GUESTS | {"attachment"},
    "queues": GUESTS | {"attachment", "interface"},
    "integrations": GUESTS | {"attachment", "interface", "summary_logger"},
    "dataloader": GUESTS | {"attachment", "interface"},
    "live": GUESTS | {"display", "metrics", "token_text"},
    "testing": SERVERS | GUESTS | {"attachment", "interface", "dataloader"},
    "cli": SERVERS | GUESTS | {"attachment", "interface", "dataloader", "live", "ray_runtime", "token_text"},
    "__init__": None,  # names everything, imports nothing: `test_package_imports_nothing`
}

# Modules that come before the rest of their folder, because other rooms use what they decide.
BEFORE_THEIR_FOLDER = {
    *("puts.apply", "claims.apply", "units.apply"),
    "state.restore",
    *("samplers.claim_samplers", "samplers.remote_calls"),
    *("claims.plan", "claims.final_rounds", "claims.row_leases"),
}
# The order inside `core`: a line may import the lines before it. Folders of one line do not import each other.
CORE_ORDER: list[set[str]] = [
    {"columns"},
    {"events"},
    {"tables"},
    {"earlier"},
    {"state"},
    {"puts.apply"},
    {"claims.apply", "units.apply"},
    {"state.restore"},
    {"appliers"},
    {"samplers"},
    {"configuration"},
    {"samplers.claim_samplers", "record_log"},
    {"context"},
    {"deadlines", "jobs", "activity"},
    {"samplers.remote_calls"},
    {"timeline"},
    {"queries"},
    {"locks"},
    {"claims.plan"},
    {"claims.final_rounds"},
    {"claims.row_leases"},
    {"absent_clients"},
    {"claims"},
    {"checkpoints"},
    {"units"},
    {"puts"},
    {"reports"},
    {"wakeups"},
    {"services"},
    {"controller"},
]

# Parts that are pure: they know neither torch nor a machine.
PURE = ("core", "metrics", "sampler", "timeline", "wire")
TENSORS = {"torch", "tensordict"}
MACHINE = {
    *("asyncio", "logging", "multiprocessing", "select", "selectors", "signal", "socket", "socketserver"),
    *("subprocess", "tempfile", "threading", "time", "datetime"),
}
# Exceptions: copies over several threads; the table of registered memory, which has a lock; the sampler that balances
# lengths decodes lengths that are arrays of one element.
EXCUSED = {
    ("wire/buffers/copies.py", "threading"),
    ("wire/blocks/device_memory.py", "threading"),
    ("sampler/seqlen_balanced_sampler.py", "transfer_queue.wire.objects.object_decoder"),
}
# The client's side of the wire, where tensors become bytes; `objects` only when it meets a tensor.
WITH_TENSORS = {
    *(f"wire/buffers/{name}.py" for name in ("jagged", "tensors")),
    *(f"wire/blocks/{name}.py" for name in ("column_sources", "device_memory", "encode", "gather", "gather_into")),
    "wire/objects/torch_objects.py",
}
TENSORS_INSIDE_FUNCTIONS = {"wire/objects/object_values.py"}
# What the processes of controller and units import: numpy and msgspec, nothing else from outside.
SERVER_PARTS = (
    "core",
    "timeline",
    "metrics",
    "sampler",
    "storage",
    "journal",
    "net",
    "messages",
    "errors",
    "config",
    "names",
    "utils",
)
SERVER_OUTSIDE = {"numpy", "msgspec"}


@dataclass(frozen=True)
class Import:
    """One import: where it stands, the module and the full name that it imports, whether it runs with the module."""

    file: str
    line: int
    module: str
    name: str
    at_import: bool
    for_types: bool

    @property
    def top(self) -> str:
        """The package that it names."""
        return self.module.partition(".")[0]

    @property
    def part(self) -> str:
        """The part of this package that it names, '' for the package itself."""
        return self.module.split(".")[1] if "." in self.module else ""

    @property
    def excused(self) -> bool:
        """Whether it is one of the exceptions."""
        return (self.file, self.module) in EXCUSED

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The syntax tree of a file, and all that it contains."""
    return list(ast.walk(ast.parse(path.read_text("utf-8"))))


@cache
def imports_of(path: Path) -> list[Import]:
    """Every import of a file, `from package import module` as package.module."""
    file = path.relative_to(SOURCE).as_posix()
    package = ["transfer_queue", *path.relative_to(SOURCE).parts[:-1]]
    found: list[Import] = []

    def walk(node: ast.AST, at_import: bool, for_types: bool) -> None:
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # Of the package itself, what is imported is a part of it.
            inside = [f"{module}.{alias.name}" for alias in node.names]
            names = [(name if module == "transfer_queue" else module, name) for name in inside]
        found.extend(Import(file, node.lineno, *each, at_import, for_types) for each in names)  # type: ignore[attr-defined]
        at_import = at_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for_types = for_types or for_type_checkers(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):  # an expression has no imports
                walk(child, at_import, for_types)

    walk(nodes_of(path)[0], True, False)
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@cache
def all_imports() -> list[Import]:
    """The imports of the whole package, which are read when a test asks: each process of a run collects this file."""
    return [found for path in FILES for found in imports_of(path)]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(path: Path, modules: Collection[str]) -> set[str]:
    """The modules of this package that a file imports anywhere, also inside functions and for type checkers."""
    found: set[str] = set()
    for each in imports_of(path):
        names = [name.removeprefix("transfer_queue.") for name in (each.name, each.module)]
        named = [name for name in names if name in modules]
        if each.top == "transfer_queue" and named:
            found.add(named[0])
    return found - {module_name(path)}


def groups_of_cycles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """The groups of modules of which each reaches each other one (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: set[tuple[str, ...]] = set()

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.add(tuple(sorted(group)))

    for module in graph:
        if module not in number:
            visit(module)
    return found


@cache
def import_graph() -> dict[str, set[str]]:
    """Each module of the package and the modules that it imports."""
    files = {module_name(path): path for path in FILES if path != SOURCE / "__init__.py"}
    return {name: modules_imported(path, files) for name, path in files.items()}


def part_of(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


def in_parts(found: Import, parts: tuple[str, ...]) -> bool:
    return part_of(found.file) in parts


def test_every_part_has_a_place():
    """A new module or folder must be put into the table, with what it may import."""
    assert {part_of(path.relative_to(SOURCE).as_posix()) for path in FILES} <= set(MAY_IMPORT)


def test_exceptions_are_needed():
    """An exception that nobody needs any more is taken off."""
    assert {(found.file, found.module) for found in all_imports()} >= EXCUSED


@pytest.mark.parametrize("part", [part for part, allowed in MAY_IMPORT.items() if allowed is not None])
def test_direction(part):
    """A part imports the parts below it, and itself."""
    allowed = (MAY_IMPORT[part] or set()) | {part}
    inside = [found for found in all_imports() if found.top == "transfer_queue" and part_of(found.file) == part]
    assert [str(found) for found in inside if found.part not in allowed and not found.excused] == []


def test_no_import_cycles():
    """No modules import each other, not even for annotations."""
    assert groups_of_cycles(import_graph()) == set()


def test_cycles_are_found():
    """Both cycles of a graph that has two."""
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"f"}, "f": {"e"}, "g": {"a"}}
    assert groups_of_cycles(graph) == {("a", "b", "c"), ("e", "f")}


def place_in_core(module: str) -> tuple[int, str]:
    """The line of a module in CORE_ORDER, and its folder."""
    line = {part: number for number, parts in enumerate(CORE_ORDER) for part in parts}
    folder = module.split(".")[1]
    return line[module.removeprefix("core.") if module.removeprefix("core.") in BEFORE_THEIR_FOLDER else folder], folder


def test_core_order():
    """The parts of the core import those before them."""
    wrong = [
        f"{module} imports {other}"
        for module, others in import_graph().items()
        for other in others
        if module.startswith("core.") and other.startswith("core.")
        for (line, folder), (before, other_folder) in [(place_in_core(module), place_in_core(other))]
        if before > line or (before == line and folder != other_folder)
    ]
    assert wrong == []


def test_every_module_that_comes_first_exists():
    """A module that was moved or renamed is taken off the list."""
    assert {f"core.{name}" for name in BEFORE_THEIR_FOLDER} <= import_graph().keys()


def test_package_imports_nothing():
    """Importing the package imports none of its modules."""
    here = [found for found in all_imports() if found.file == "__init__.py" and found.at_import and not found.for_types]
    assert [str(found) for found in here if found.top == "transfer_queue"] == []


def test_package_imports_nothing_that_is_only_in_a_checkout():
    """The wheel contains neither the tests nor the benchmarks."""
    assert [str(found) for found in all_imports() if found.top in {"tests", "benchmarks", "examples"}] == []


def test_pure_parts_import_no_tensors():
    """core, sampler and wire import no torch, but for the client's side of the wire."""
    wrong = [
        found
        for found in all_imports()
        if found.top in TENSORS
        and in_parts(found, PURE)
        and found.file not in WITH_TENSORS
        and not found.for_types
        and not (found.file in TENSORS_INSIDE_FUNCTIONS and not found.at_import)
    ]
    assert [str(found) for found in wrong] == []


def test_pure_parts_know_no_machine():
    """core, sampler and wire import neither sockets, clocks, threads, processes nor logging."""
    wrong = [found for found in all_imports() if found.top in MACHINE and in_parts(found, PURE) and not found.excused]
    assert [str(found) for found in wrong] == []


def test_core_knows_no_operating_system():
    """Not even os: what the core does follows from its events alone."""
    assert [
        str(found) for found in all_imports() if found.top in {"os", "random", "secrets"} and in_parts(found, ("core",))
    ] == []


def test_core_knows_no_settings():
    """Not through other parts either: a sampler of a record is made without the settings of a user."""
    graph = import_graph()
    reached = {module for module in graph if module.startswith("core.")}
    new = reached
    while new:
        new = set().union(*(graph[module] for module in new)) - reached
        reached |= new
    assert "config.settings" not in reached


def test_samplers_import_the_logger_only_when_they_log():
    parts = {"config", "names", "utils"}
    assert [
        str(found)
        for found in all_imports()
        if found.part in parts and found.at_import and found.file.startswith("sampler/") and "factory" not in found.file
    ] == []


def test_servers_import_numpy_and_msgspec_only():
    """What controller and units import when they start is the standard library, numpy and msgspec."""
    wrong = [
        found
        for found in all_imports()
        if in_parts(found, SERVER_PARTS)
        and found.at_import
        and not found.for_types
        and found.top not in SERVER_OUTSIDE | {"transfer_queue"} | standard_library()
    ]
    assert [str(found) for found in wrong] == []


def reads_environment(node: ast.AST) -> bool:
    """Whether it looks a variable up; to pass the environment on, or to set a variable, is another thing."""

    def is_environment(value: ast.AST) -> bool:
        return ast.unparse(value) in {"os.environ", "environ", "os.environb"}

    if isinstance(node, ast.Call):
        called = node.func
        looked_up = isinstance(called, ast.Attribute) and called.attr in {"get", "pop", "items", "setdefault"}
        return ast.unparse(called).endswith("getenv") or (looked_up and is_environment(called.value))
    if isinstance(node, ast.Subscript):
        return isinstance(node.ctx, ast.Load) and is_environment(node.value)
    return isinstance(node, ast.Compare) and any(is_environment(value) for value in node.comparators)


def test_only_one_module_reads_the_environment():
    """Environment variables are read in config/environment.py and nowhere else."""
    wrong = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in FILES
        if path != ENVIRONMENT
        for node in nodes_of(path)
        if reads_environment(node)
    ]
    assert wrong == []


def test_reads_of_the_environment_are_found():
    """Each way to look a variable up is one, in config/environment.py and here."""
    reads = ["os.environ['A']", "os.environ.get('A')", "os.getenv('A')", "'A' in os.environ"]
    others = ["os.environ['A'] = 'b'", "dict(os.environ)", "{**os.environ}", "os.environ.copy()", "run(env=os.environ)"]
    found = [text for text in reads + others if any(map(reads_environment, ast.walk(ast.parse(text))))]
    assert found == reads
    assert any(map(reads_environment, nodes_of(ENVIRONMENT)))


def standard_library() -> frozenset[str]:
    return sys.stdlib_module_names | {"__future__"}


def test_test_files_have_names_of_their_own():
    """Pytest imports them by their file names, because their folders are not packages."""
    files = [path for path in Path(__file__).parent.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in files if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_class_name_exists_once():
    """A reader who meets the name of a class in a message or a page finds one class of that name."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
