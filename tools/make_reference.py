"""Write what the pages of the reference take from the code: the commands, the metrics and the errors.

    python tools/make_reference.py           writes them
    python tools/make_reference.py --check   exits with 1 if they are not what it would write

The commands come from the argument parser of `tq`, the metrics from `metrics/families.py`, and the errors from the
classes and docstrings of `errors.py`. The pages of commands and metrics are written by hand outside of their markers.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

from generated_files import ROOT, write_or_check

from transfer_queue import cli, errors
from transfer_queue.metrics.exposition import COMPATIBLE
from transfer_queue.metrics.families import ROWS
from transfer_queue.metrics.samples import Family

DOCS = ROOT / "docs"
CLI, METRICS = DOCS / "reference" / "cli.md", DOCS / "metrics.md"
HEAD = "<!-- Made by tools/make_reference.py. Change {source} instead, and run the tool again. -->"
END = "<!-- The end of what tools/make_reference.py made. -->"
EXPLAINED_ONCE = {"--json", "--name"}
"""Options of many commands, which the page of the commands explains at its beginning."""


def cli_section() -> str:
    """Return the part of the page of the commands that describes each of them."""
    parser = cli._parser()
    [commands] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    helps = {action.dest: action.help or "" for action in commands._choices_actions}
    parts = []
    for name, command in commands.choices.items():
        parts += [f"## tq {name}", _sentence(command.description or helps[name])]
        parts += _arguments_of(name, command)
    return "\n\n".join(parts)


def _arguments_of(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    actions = [action for action in command._actions if "--help" not in action.option_strings]
    words = [f"tq {name}", *(_usage(action) for action in actions)]
    yield "```text\n" + " ".join(words) + "\n```"
    rows = [
        f"| {_spelling(action)} | {_cell(_help(command, action))} |"
        for action in actions
        if action.help and not EXPLAINED_ONCE.intersection(action.option_strings)
    ]
    if rows:
        yield "\n".join(["| argument | |", "|---|---|", *rows])


def _usage(action: argparse.Action) -> str:
    word = _value(action)
    if action.option_strings:
        word = " ".join(filter(None, [action.option_strings[-1], word]))
    if action.nargs == "*":
        return f"[{word} ...]"
    return word if action.required else f"[{word}]"


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _spelling(action: argparse.Action) -> str:
    words = action.option_strings or [_value(action)]
    value = f" {_value(action)}" if action.option_strings and _value(action) else ""
    return ", ".join(f"`{word}{value}`" for word in words)


def _help(command: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": command.prog} if action.help else ""


def metrics_section() -> str:
    """Return the tables of the metrics."""
    parts = []
    for title, families in ROWS.items():
        parts.append(_metrics_table(title, families))
    parts += ["### Names of other dashboards", _metrics_table("", COMPATIBLE)]
    return "\n\n".join(parts)


def _metrics_table(title: str, families: dict[str, Family]) -> str:
    rows = [f"| {_metric(name, family)} | {_cell(family.help)} |" for name, family in families.items()]
    return "\n".join([f"| {title or 'metric'} | meaning |", "|---|---|", *rows])


def _metric(name: str, family: Family) -> str:
    """Return a metric with its labels, and with its kind if the name does not tell it."""
    labels = f"{{{','.join(family.labels)}}}" if family.labels else ""
    usual = "counter" if name.endswith("_total") else "gauge"
    return f"`{name}{labels}`" + (f" ({family.kind})" if family.kind != usual else "")


def errors_page() -> str:
    """Return the page of the errors."""
    parts = [
        HEAD.format(source="src/transfer_queue/errors.py"),
        "# Errors",
        "Every exception that this package raises deliberately is a `TransferQueueError`, and all can be imported from "
        "`transfer_queue`. Each is also a `RuntimeError`, unless its section names other standard exceptions, so that "
        "for example `except TimeoutError` catches it. The message says what was wrong, what was found and what to do. "
        "[Troubleshooting](../guides/troubleshooting.md) starts from symptoms.",
        "```text\n" + "\n".join(_tree(errors.TransferQueueError, "")) + "\n```",
    ]
    for error in _descendants(errors.TransferQueueError):
        meaning = inspect.cleandoc(error.__doc__ or "").partition("\n\nArgs:")[0]
        parts.append(f"## {error.__name__}")
        if (outside := _outside(error)) != ["RuntimeError"]:
            parts.append(f"*Also a* {', '.join(f'`{name}`' for name in outside)}.")
        parts.append(meaning)
    return "\n\n".join(parts) + "\n"


def _tree(error: type, indent: str) -> Iterator[str]:
    """Draw a class and those below it, each under the first parent that it has in this package."""
    yield f"{indent}{error.__name__}"
    for below in _below(error):
        yield from _tree(below, indent + "    ")


def _below(error: type) -> list[type]:
    return [cls for cls in _all_errors() if cls.__bases__[0] is error]


def _descendants(error: type) -> Iterator[type]:
    for below in _below(error):
        yield below
        yield from _descendants(below)


def _all_errors() -> list[type]:
    found = vars(errors).values()
    return [cls for cls in found if isinstance(cls, type) and issubclass(cls, errors.TransferQueueError)]


def _outside(error: type) -> list[str]:
    """Return the exceptions outside of this package that catch an error; the closest ones only."""
    own = errors.TransferQueueError
    outside = [cls for cls in error.__mro__ if not issubclass(cls, own) and not issubclass(Exception, cls)]
    closest = [cls for cls in outside if not any(cls in other.__mro__[1:] for other in outside)]
    # `_ShutDown` stands for `queue.ShutDown` in versions of Python that do not have it
    return [cls.__name__ if cls.__module__ == "builtins" else f"queue.{cls.__name__.lstrip('_')}" for cls in closest]


def _cell(text: str) -> str:
    return _sentence(" ".join(text.split())).replace("|", "\\|")


def _sentence(text: str) -> str:
    text = text.strip()
    return f"{text[0].upper()}{text[1:]}{'' if text.endswith(('.', ')')) else '.'}" if text else ""


def with_section(page: Path, source: str, section: str) -> str:
    """Return the text of a page with another section between its markers."""
    head = HEAD.format(source=source)
    before, _, rest = page.read_text("utf-8").partition(head)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{page} must have the two lines {head!r} and {END!r}, in this order; add them")
    return f"{before}{head}\n\n{section}\n\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the text of every page."""
    return {
        CLI: with_section(CLI, "the modules of transfer_queue.cli", cli_section()),
        METRICS: with_section(METRICS, "src/transfer_queue/metrics/families.py", metrics_section()),
        DOCS / "reference" / "errors.md": errors_page(),
    }


if __name__ == "__main__":
    write_or_check(pages())
