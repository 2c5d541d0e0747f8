"""Write src/transfer_queue/config.yaml and docs/reference/configuration.md from the declarations of the settings.

--check only compares the files with what would be written. The declarations are in `transfer_queue.config.settings`,
`transfer_queue.config.store_options` and `transfer_queue.config.environment`.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transfer_queue.config.declaration import Setting, tree_of_defaults
from transfer_queue.config.environment import VARIABLES
from transfer_queue.config.settings import SECTIONS, SETTINGS
from transfer_queue.config.validators import Boolean
from transfer_queue.sampler import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
YAML = ROOT / "src" / "transfer_queue" / "config.yaml"
PAGE = ROOT / "docs" / "reference" / "configuration.md"
WIDTH = 120
BY_KEY = {each.key: each for each in SETTINGS}
DEFAULTS = tree_of_defaults(list(SETTINGS))

YAML_INTRODUCTION = """\
The defaults of `transfer_queue.init(conf)`. `init` merges the caller's conf over them, key by key. `null` means what
the comment of its setting says. Durations are in seconds, sizes in bytes.

tools/generate_configuration.py has written this file. To change it, edit transfer_queue/config/settings.py.
"""

PAGE_INTRODUCTION = """\
# Configuration

<!-- tools/generate_configuration.py has written this page from src/transfer_queue/config. -->

`transfer_queue.init(conf)` takes a dict or an OmegaConf `DictConfig` and merges it over the defaults below, key by key.
`tq start` takes settings from a YAML file (`--conf FILE`) and from its arguments (`--set KEY=VALUE`). The file
`transfer_queue/config.yaml` of the package has all defaults. Interpolations of OmegaConf (`${...}`) are resolved.

- A value that is not allowed raises `InvalidArgumentError`, which names the key, the value and what is allowed.
- An unknown key is kept, and a warning names it and the nearest known key. With `strict: true` it is an error.
- A process that attaches to a running system gets the configuration of that system. A warning names each setting that
  the process asked for and that has another value in the system.
- [Keys of the PyPI package TransferQueue](../migrate.md) that have other names here are accepted.
"""

ENVIRONMENT_INTRODUCTION = """\
## Environment variables

Each variable is read when its value is needed. A variable that is empty counts as unset.
"""


def notes(setting: Setting) -> str:
    """Return what other parts of the package add to the meaning of a setting."""
    return f" The built-in samplers are {', '.join(BUILT_IN)}." if setting.key == "controller.sampler" else ""


# ---------------------------------------------------------------- config.yaml


def comment(text: str, indent: str) -> Iterator[str]:
    """Yield a text as comment lines."""
    for paragraph in text.strip().split("\n\n"):
        start = f"{indent}# "
        yield from textwrap.wrap(
            paragraph, WIDTH, initial_indent=start, subsequent_indent=start, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip


def yaml_lines(tree: Mapping[str, Any], above: str = "", indent: str = "") -> Iterator[str]:
    """Yield the lines of a section, each setting below its comment."""
    for name, value in tree.items():
        key = f"{above}{name}"
        if not indent or (isinstance(value, dict) and value and len(indent) == 2 and above == "backend."):
            yield ""
        setting = BY_KEY.get(key)
        if setting is None:
            yield from comment(SECTIONS[key], indent) if SECTIONS.get(key) else ()
            yield f"{indent}{name}:"
            yield from yaml_lines(value, f"{key}.", f"{indent}  ")
            continue
        yield from comment(f"{setting.meaning}{notes(setting)}", indent)
        if not isinstance(setting.validator, Boolean):
            yield from comment(f"Allowed: {setting.validator.allowed}.", indent)
        yield f"{indent}{name}: {setting.default_yaml}"


def yaml_file() -> str:
    """Return the text of config.yaml."""
    return "\n".join([*comment(YAML_INTRODUCTION, ""), *yaml_lines(DEFAULTS)]) + "\n"


# ---------------------------------------------------------------- the page


def facts(type_name: str, default: str, unit: str, allowed: str) -> str:
    """Return the line below the name of a setting."""
    of_unit = f" ({unit})" if unit else ""
    return f"*Type:* {type_name}{of_unit}. *Default:* `{default}`. *Allowed:* {allowed}."


def wrapped(text: str) -> str:
    """Return a paragraph of the page."""
    return "\n".join(textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))


def page_sections(tree: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the headings and settings of a section, then those of its subsections."""
    leaves = [BY_KEY[f"{above}{name}"] for name in tree if f"{above}{name}" in BY_KEY]
    if leaves:
        path = above.rstrip(".")
        yield f"## `{path}`" if path else "## Top level"
        if SECTIONS.get(path):
            yield wrapped(SECTIONS[path])
    for each in leaves:
        checked = each.validator
        yield f"### `{each.key}`"
        yield wrapped(facts(checked.type_name, each.default_yaml, checked.unit, checked.allowed))
        # "null: no limit." explains a value, which is set as code
        yield wrapped(re.sub(r'(?:^|(?<=\. ))([\w"]+): ', r"`\1`: ", each.meaning + notes(each)))
    for name, value in tree.items():
        if f"{above}{name}" not in BY_KEY:
            yield from page_sections(value, f"{above}{name}.")


def environment() -> Iterator[str]:
    """The variables."""
    yield ENVIRONMENT_INTRODUCTION.strip()
    for variable in VARIABLES:
        yield f"### `{variable.name}`"
        default = "unset" if variable.default is None else f"`{variable.default}`"
        yield wrapped(f"*Default:* {default}.")
        yield wrapped(variable.meaning)


def page() -> str:
    """Return the text of the page."""
    return "\n\n".join([PAGE_INTRODUCTION.strip(), *page_sections(DEFAULTS), *environment()]) + "\n"


def main() -> int:
    """Write the files, or compare them. Return 1 if a file differs with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the files, and write nothing")
    check = parser.parse_args().check
    differing = []
    for path, text in ((YAML, yaml_file()), (PAGE, page())):
        if path.exists() and path.read_text("utf-8") == text:
            continue
        differing.append(str(path.relative_to(ROOT)))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    if differing and check:
        print(f"{', '.join(differing)}: not up to date; run python tools/generate_configuration.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
