"""Declares a setting in one place: its key, its default, what is allowed, and what it means."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from transfer_queue.config.validators import Validator, validator_of

_METADATA = "setting"
_PLAIN_YAML = re.compile(
    r"(?!(?:null|true|false|yes|no|on|off)$)[A-Za-z][\w.:-]*|\d+\.\d+\.\d+\.\d+"
)  # no quotes needed


@dataclass(frozen=True)
class Setting:
    """A setting of the configuration. It is the source of `config.yaml`, `tq start --help` and a page."""

    key: str
    """The dotted path of the setting in the configuration."""
    default: object
    """The default, as written in a configuration."""
    validator: Validator[Any]
    """What is allowed, and how a value is converted."""
    meaning: str
    """What the setting does, in full sentences. The first one is the summary."""

    @property
    def summary(self) -> str:
        """The first sentence of the meaning."""
        return self.meaning.partition(". ")[0].rstrip(".") + "."

    @property
    def default_yaml(self) -> str:
        """The default as YAML."""
        if isinstance(self.default, str) and _PLAIN_YAML.fullmatch(self.default):
            return self.default
        return json.dumps(self.default)

    @property
    def section(self) -> str:
        """The path of the section that has the setting; "" for the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]


def setting(key: str, default: object, meaning: str) -> Any:
    """Declare a field of a dataclass as a setting. The annotation of the field says what is allowed (`validator_of`).

    Args:
        key: The dotted path of the setting in the configuration.
        default: The default, as written in a configuration.
        meaning: What the setting does, in full sentences. The first one is the summary.
    """
    return field(metadata={_METADATA: (key, default, meaning)})


@cache
def declared_settings(kind: type) -> dict[str, Setting]:
    """Return the settings of a dataclass by the names of its attributes, in the order of their declaration.

    An attribute that is a `Setting` itself is included, too. It is no field, so servers do not get it.
    """
    of_fields = {each.name: each.metadata[_METADATA] for each in fields(kind)}
    settings = {}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        if name in of_fields:
            key, default, meaning = of_fields[name]
            settings[name] = Setting(key, default, validator_of(annotation), meaning)
        elif isinstance(vars(kind).get(name), Setting):
            settings[name] = vars(kind)[name]
    return settings
