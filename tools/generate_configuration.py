"""Write src/transfer_queue/config.yaml and docs/reference/configuration.md from the declarations of the settings.

--check only compares the files with what would be written. The declarations are in `transfer_queue.config.settings`,
`transfer_queue.config.store_options` and `transfer_queue.config.environment`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from generated_files import ROOT, write_or_check

from transfer_queue.config.declaration import Setting
from transfer_queue.config.environment import VARIABLES
from transfer_queue.config.settings import SETTINGS
from transfer_queue.config.store_options import STORE_OPTIONS
from transfer_queue.config.validators import (
    FieldBackends,
    OrNull,
    Patterns,
    PlainMapping,
    TaskSamplers,
    TlsFiles,
)
from transfer_queue.sampler import BUILT_IN

YAML = ROOT / "src" / "transfer_queue" / "config.yaml"
PAGE = ROOT / "docs" / "reference" / "configuration.md"
WIDTH = 120
BY_KEY = {each.key: each for each in SETTINGS}
SECTIONS = {
    "ray": "Settings that apply under Ray.",
    "durability": (
        "Which failures the state and the values survive. The state is in a journal, with which a controller that was "
        "killed continues. docs/reliability.md says what each level costs."
    ),
    "backend.SimpleStorage": "The storage that is built in: shared memory of each node.",
    "backend.SimpleStorage.offload": (
        "A disk tier. If more than `high_watermark` of a unit's bytes are in use, the oldest blocks move to an SSD "
        "until `low_watermark` is reached. They are read from there as from memory."
    ),
    **{f"backend.{name}": options.__doc__ or "" for name, options in STORE_OPTIONS.items()},
}
"""What the settings of a section have in common."""


def tree_of_defaults(settings: list[Setting]) -> dict[str, Any]:
    """Return the defaults of settings as nested mappings."""
    tree: dict[str, Any] = {}
    for each in settings:
        section = tree
        for name in filter(None, each.section.split(".")):
            section = section.setdefault(name, {})
        section[each.name] = dict(each.default) if isinstance(each.default, Mapping) else each.default
    return tree


DEFAULTS = tree_of_defaults(list(SETTINGS))

YAML_INTRODUCTION = """\
The defaults of `transfer_queue.init(conf)`. `init` merges the caller's conf over them, key by key. `null` means what
the comment of its setting says. Durations are in seconds, sizes in bytes.

tools/generate_configuration.py has written this file. To change it, edit transfer_queue/config/settings.py.
"""

PAGE_INTRODUCTION = """\
# Configuration

<!-- tools/generate_configuration.py has written this page from src/transfer_queue/config. -->

`transfer_queue.init(conf)` takes a dict or an OmegaConf `DictConfig` and merges it over the defaults, which are in the
package's `config.yaml`. `tq start` takes a YAML file (`--conf FILE`) and single settings (`--set KEY=VALUE`).

- A process that attaches to a running system gets its configuration. A warning names the settings that differ.
- [Keys of the PyPI package TransferQueue](../migrate.md) that have other names here are accepted.
"""

THE_TEN = {
    "strict": "You want an error for a mistyped key, and not a warning.",
    "system.name": "Several trainings of one user run on a machine or in a Ray cluster.",
    "controller.sampler": "Samples must be dealt in groups, by length, by priority or equally to ranks "
    "([samplers](../guides/choosing-a-sampler.md)).",
    "backend.SimpleStorage.arena_bytes": "Other programs need the shared memory ([sizes](../guides/sizing-memory.md)).",
    "backend.SimpleStorage.offload.enabled": "The samples do not fit into memory; set `offload.path`, too.",
    "backend.SimpleStorage.replicas": "A lost node must not lose samples: 2.",
    "durability.values": "Samples must outlive the system; set `durability.folder`, too "
    "([reliability](../reliability.md)).",
    "ray.detached": "The system must outlive its driver.",
    "metrics.enabled": "Prometheus collects metrics ([metrics](../metrics.md)); set `metrics.port`, too.",
    "security.tls": "Samples cross a network that others can read ([TLS](../guides/tls.md)).",
}
"""The settings that most systems need first, and when."""

ENVIRONMENT_INTRODUCTION = """\
## Environment variables

A variable that is empty counts as unset.
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
        if setting.validator.type_name != "boolean":
            yield from comment(f"Allowed: {setting.validator.allowed}.", indent)
        yield f"{indent}{name}: {setting.default_yaml}"


def yaml_file() -> str:
    """Return the text of config.yaml."""
    return "\n".join([*comment(YAML_INTRODUCTION, ""), *yaml_lines(DEFAULTS)]) + "\n"


# ---------------------------------------------------------------- the page


EXPLAINED = (FieldBackends, Patterns, PlainMapping, TaskSamplers, TlsFiles)
"""Validators of which the meaning of a setting already says what is allowed."""
PLAIN = ("true or false", "a text", "a text that is not empty")
"""Phrases that say what every reader expects."""


def facts(setting: Setting) -> str:
    """Return the line below the name of a setting."""
    validator = setting.validator
    inner = validator.inner if isinstance(validator, OrNull) else validator
    allowed = "" if isinstance(inner, EXPLAINED) or inner.allowed in PLAIN else f" *Allowed:* {validator.allowed}."
    return f"*Default:* `{setting.default_yaml}`.{allowed}"


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
        yield f"### `{each.key}`"
        yield wrapped(facts(each))
        # "null: no limit." explains a value, which is set as code
        yield wrapped(re.sub(r'(?:^|(?<=\. ))([\w"]+): ', r"`\1`: ", each.meaning + notes(each)))
    for name, value in tree.items():
        if f"{above}{name}" not in BY_KEY:
            yield from page_sections(value, f"{above}{name}.")


def the_ten() -> str:
    """Return the table of the settings that most systems need first."""
    rows = [f"| [`{key}`](#{anchor(key)}) | {when} |" for key, when in THE_TEN.items()]
    return "\n".join(["## The ten you need", "", "| setting | set it if |", "|---|---|", *rows])


def anchor(key: str) -> str:
    """Return the anchor of the heading of a setting, as the site makes it."""
    return key.lower().replace(".", "")


def environment() -> Iterator[str]:
    """The variables."""
    yield ENVIRONMENT_INTRODUCTION.strip()
    for variable in VARIABLES:
        yield f"### `{variable.name}`"
        default = f" *Default:* `{variable.default}`." if variable.default else ""
        yield wrapped(variable.meaning + default)


def page() -> str:
    """Return the text of the page."""
    return "\n\n".join([PAGE_INTRODUCTION.strip(), the_ten(), *page_sections(DEFAULTS), *environment()]) + "\n"


if __name__ == "__main__":
    write_or_check({YAML: yaml_file(), PAGE: page()})
