"""The docstrings of the public surface have a fixed form: Google style, complete, with an example.

ruff checks the style of what is written (`D` in pyproject.toml); these tests check that nothing is left out. Examples
run in test_docstring_examples.py. Every docstring of the package, public or not, is parsed as the build of the site
parses it, where a warning is an error.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import griffe
import pytest

from public_objects import PublicObject, public_objects
from tools.site_docstrings import ExampleSections
from transfer_queue import errors

SECTIONS = ("Args", "Attributes", "Example", "Raises", "Returns", "Yields")
OBJECTS = public_objects()
FUNCTIONS = {name: each for name, each in OBJECTS.items() if each.kind == "function"}
CLASSES = {name: each for name, each in OBJECTS.items() if each.kind == "class"}
ERRORS = {name for name, value in vars(errors).items() if inspect.isclass(value)}

SHOWN_TOGETHER = {"Client", "ReadyIndexes", "Store", "StoreConformance", "Task"}
"""Classes whose own example shows their methods, most of which are written by others or need one another."""

# What API.md says that callers of these get, besides the errors that their bodies raise themselves.
RAISED = {
    "close": set(),
    "get_client": {"NotInitializedError"},
    "init": {"InvalidArgumentError", "StartError", "AttachError"},
    "kv_put": {"InvalidArgumentError", "FieldTypeError", "CapacityError", "UncarriableValueError"},
    "kv_batch_put": {"InvalidArgumentError", "FieldTypeError", "CapacityError", "UncarriableValueError"},
    "kv_batch_get": {"InvalidArgumentError"},
    "kv_batch_get_by_meta": {"InvalidArgumentError"},
    "kv_retrieve_keys": {"UnknownPartitionError"},
    "put": {"InvalidArgumentError", "FieldTypeError", "CapacityError", "UncarriableValueError", "SealedError"},
    "get_meta": {"WaitTimeoutError", "UnknownPartitionError", "BatchGoneError", "SamplerError"},
    "get_data": {"StorageKeyNotFoundError"},
    "save_checkpoint": {"NotInitializedError", "CheckpointError"},
    "load_checkpoint": {"NotInitializedError", "CheckpointNotFoundError", "CheckpointError"},
    "select_keys": {"UnknownKeyError"},
    "reorder": {"InvalidArgumentError", "DuplicateError", "OutOfRangeError"},
    "select_samples": {"OutOfRangeError"},
    "concat": {"InvalidArgumentError"},
    "union": {"InvalidArgumentError"},
    "get_seqlen_balanced_partitions": {"BalanceInputError"},
    "karmarkar_karp": {"BalanceInputError"},
}


def section(docstring: str, title: str) -> str:
    """Return the text of a section; "" if the docstring does not have it."""
    found = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)+)", docstring + "\n", flags=re.MULTILINE)
    return textwrap.dedent(found[1]) if found else ""


def entries(text: str) -> dict[str, str]:
    """Return the entries of a section by name."""
    parts = re.split(r"^(\*{0,2}\w+): ", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def overrides(each: PublicObject) -> bool:
    """Whether a method has the documentation of a base class of this package, which describes its arguments."""
    name = each.value.__name__
    bases = each.owner.__mro__[1:] if each.owner is not None else ()
    return any(name in vars(base) for base in bases if base.__module__.startswith("transfer_queue"))


def parameters(function: object) -> list[str]:
    """Return the names of the parameters, with their stars, without self and cls."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return [stars.get(p.kind, "") + p.name for p in found if p.name not in ("self", "cls")]


def check_parameters(each: PublicObject, names: list[str]) -> None:
    documented = entries(section(each.docstring, "Args"))
    assert list(documented) == names
    wrong = [name for name, text in documented.items() if not text.strip().endswith((".", ".)"))]
    assert wrong == [], "entries end with a period"


def for_each(objects: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Return a decorator: one test runs the check for all objects. Two thousand tests would take ten times as long."""

    def decorate(check: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            failed = {}
            for name in objects:
                try:
                    check(name)
                except AssertionError as error:
                    failed[name] = str(error)
            assert failed == {}

        test.__doc__ = check.__doc__
        return test

    return decorate


def test_the_surface_is_large():
    """The test of a surface that is not found would test nothing."""
    assert len(FUNCTIONS) > 200
    assert len(CLASSES) > 60


@for_each(OBJECTS)
def test_the_summary_is_a_sentence(name):
    summary, *rest = OBJECTS[name].docstring.splitlines()
    assert re.match(r"[A-Z0-9(\"`\[{*]", summary), summary
    assert summary.endswith((".", "...")), summary
    assert not rest or not rest[0]


@for_each(OBJECTS)
def test_sections_are_known_and_in_order(name):
    titles = re.findall(r"^([A-Z]\w+):$", OBJECTS[name].docstring, flags=re.MULTILINE)
    assert set(titles) <= set(SECTIONS)
    order = ["Args", "Attributes", "Returns", "Yields", "Raises", "Example"]
    assert titles == sorted(titles, key=order.index)


@for_each(FUNCTIONS)
def test_arguments_are_documented(name):
    each = FUNCTIONS[name]
    if overrides(each) and not section(each.docstring, "Args"):
        return  # the method that it overrides documents them
    check_parameters(each, parameters(each.value))


@for_each(FUNCTIONS)
def test_results_are_documented(name):
    each = FUNCTIONS[name]
    if overrides(each):
        return
    returned = each.value.__annotations__.get("return", "None")
    documented = bool(section(each.docstring, "Returns") or section(each.docstring, "Yields"))
    assert documented == (returned != "None")


def raised_by(function: object) -> set[str]:
    """Return the errors of this package that the function's own body raises by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} & ERRORS


@for_each(FUNCTIONS)
def test_errors_are_documented(name):
    each = FUNCTIONS[name]
    listed = entries(section(each.docstring, "Raises"))
    expected = raised_by(each.value)
    if (
        "sampler." not in each.module.replace("sampler.balance", "")
        and "testing" not in each.module
        and "queues" not in each.module
    ):
        expected |= RAISED.get(each.value.__name__.removeprefix("async_"), set())
    if overrides(each):
        expected = {error for error in expected if error not in each.docstring}
    assert expected - set(listed) == set()
    assert [error for error in listed if error not in ERRORS and not hasattr(builtins, error)] == []


@for_each(FUNCTIONS)
def test_a_function_has_an_example(name):
    each = FUNCTIONS[name]
    if overrides(each) or (each.owner is not None and each.owner.__name__ in SHOWN_TOGETHER):
        return
    assert ">>> " in section(each.docstring, "Example")


@for_each(CLASSES)
def test_a_class_documents_how_it_is_made(name):
    """A class has an entry for each argument, unless its fields are its arguments; and it has an example."""
    each = CLASSES[name]
    if issubclass(each.value, errors.TransferQueueError):
        return  # the tree of errors.py is their documentation; nobody else makes them
    assert ">>> " in section(each.docstring, "Example")
    is_protocol = getattr(each.value, "_is_protocol", False)
    if "__init__" in vars(each.value) and not is_protocol and not hasattr(each.value, "__dataclass_fields__"):
        check_parameters(each, parameters(each.value.__init__))


def attributes_without_text(owner: type) -> list[str]:
    """Return the public attributes that a class or its constructor defines without a string after a definition."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(node, ast.ClassDef)
    constructor = [each.body for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    found: dict[str, bool] = {}
    for body in (node.body, *constructor):
        for statement, following in zip(body, [*body[1:], None]):
            name = attribute_of(statement, in_class=body is node.body)
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            found[name] = found.get(name, False) or text
    return [
        name
        for name, documented in found.items()
        if name and not name.startswith("_") and not documented and not documented_elsewhere(owner, name)
    ]


def attribute_of(statement: ast.stmt, in_class: bool) -> str:
    """Return the attribute that a statement of a class or of its constructor defines; "" for none."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return ""
    if in_class:
        return target.id if isinstance(target, ast.Name) else ""
    of_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    return target.attr if of_self else ""


def documented_elsewhere(owner: type, name: str) -> bool:
    """Whether a property of this name, or a base class of this package, documents an attribute."""
    bases = [base for base in owner.__mro__[1:] if base.__module__.startswith("transfer_queue")]
    inherited = any(name in {*vars(base), *vars(base).get("__annotations__", ())} for base in bases)
    return inherited or isinstance(vars(owner).get(name), property)


@for_each(CLASSES)
def test_attributes_are_documented_where_they_are_defined(name):
    """Each public attribute has a string after its definition, which IDEs and pyright show."""
    assert attributes_without_text(CLASSES[name].value) == []


def docstrings_of(owner: griffe.Object) -> Iterator[griffe.Docstring]:
    """Yield the docstrings of a module or class and of everything that it defines."""
    if owner.docstring is not None:
        yield owner.docstring
    for member in owner.members.values():
        if isinstance(member, griffe.Object):  # not a name that is imported from elsewhere
            yield from docstrings_of(member)


def parse_all(package: str, folder: Path) -> int:
    """Parse all docstrings of a package as the build of the site does, and return how many there are.

    A word before the colon of an entry of `Raises:` must be a name: griffe takes any text as a type.
    """
    loaded = griffe.load(
        package, search_paths=[folder], docstring_parser="google", extensions=griffe.load_extensions(ExampleSections())
    )
    assert isinstance(loaded, griffe.Object)
    count = 0
    for count, docstring in enumerate(docstrings_of(loaded), 1):  # noqa: B007
        for part in docstring.parsed:
            if isinstance(part, griffe.DocstringSectionRaises):
                names = [str(entry.annotation) for entry in part.value]
                bad = [name for name in names if not re.fullmatch(r"(\w+\.)*[A-Z]\w*", name)]
                assert bad == [], docstring.parent
    return count


def test_the_site_can_parse_every_docstring(caplog):
    """A line that is wrapped badly ends an entry, and the build of the site fails."""
    with caplog.at_level(logging.WARNING, "griffe"):
        assert parse_all("transfer_queue", Path(errors.__file__).parent.parent) > 5000
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "Raises:\n        ValueError: The metadata has samples of\n        another\n            partition.",
            "'another'",
        ),
        ("Args:\n        size: The number of\n        rows.", "'rows.'"),
        ("Args:\n        sizes: The number of rows.", "'sizes'"),
    ],
)
def test_a_docstring_that_the_site_cannot_parse_is_found(tmp_path, caplog, section, message):
    """The test above could not fail if griffe reported nothing."""
    (tmp_path / "planted.py").write_text(f'def f(size: int) -> None:\n    """Do it.\n\n    {section}\n    """\n')
    parse_all("planted", tmp_path)
    assert message in caplog.text


def test_a_badly_wrapped_line_with_a_colon_is_found(tmp_path):
    section = "Raises:\n        ValueError: Two\n        are wrong: the metadata."
    (tmp_path / "planted.py").write_text(f'def f() -> None:\n    """Do it.\n\n    {section}\n    """\n')
    with pytest.raises(AssertionError, match="are wrong"):
        parse_all("planted", tmp_path)
