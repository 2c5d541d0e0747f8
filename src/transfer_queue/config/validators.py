"""How values of a conf are checked, one at a time: each function gives the value, or raises what to write instead."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from typing import Any

from transfer_queue.errors import InvalidArgumentError


def refuse(key: str, value: object, wanted: str) -> InvalidArgumentError:
    """The error of a value that is not allowed."""
    return InvalidArgumentError(f"{key} is {value!r}; allowed: {wanted}")


def validated_name(key: str, name: object) -> str:
    """The name of a system."""
    wanted = "a name of letters, digits, '-', '_' and '.', not starting with '.', at most 64 long"
    if not isinstance(name, str) or not 0 < len(name) <= 64 or name.startswith("."):
        raise refuse(key, name, wanted)
    if not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in name):
        raise refuse(key, name, wanted)
    return name


def validated_bool(key: str, value: object) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise refuse(key, value, "true or false")
    return value


def validated_int(key: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number from `least` to `most`."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML reads 1e6 as a float
    # bool is an int to Python, never to a reader of the conf
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise refuse(key, value, f"a whole number >= {least}" + ("" if most is None else f" and <= {most}"))
    return value


def validated_seconds(key: str, value: object) -> float:
    """Seconds, more than none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise refuse(key, value, "seconds > 0")
    return float(value)


def validated_choice(key: str, value: object, choices: tuple[str, ...]) -> str:
    """One of these."""
    if value not in choices:
        raise refuse(key, value, ", ".join(choices))
    return str(value)


def validated_folder(key: str, value: object) -> str:
    """An absolute path."""
    if not isinstance(value, (str, os.PathLike)) or not os.path.isabs(value):
        raise refuse(key, value, "an absolute path, or null")
    return os.fspath(value)


def validated_text(key: str, value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(key, value, "a text that is not empty")
    return value


def mapping(key: str, value: object) -> dict[str, Any]:
    """A mapping of plain values."""
    from omegaconf import DictConfig, OmegaConf

    plain: Any = OmegaConf.to_container(value, resolve=True) if isinstance(value, DictConfig) else value
    if not isinstance(plain, Mapping):
        raise refuse(key, plain, "a mapping of options")
    try:
        options: dict[str, Any] = json.loads(json.dumps(plain))
    except (TypeError, ValueError) as error:
        raise refuse(key, plain, f"a mapping of plain values ({error})") from None
    return options


def validated_options(key: str, value: object) -> dict[str, Any]:
    """Options of an actor, but for those that the conf has keys of its own for."""
    options = mapping(key, value)
    fixed = sorted({"name", "namespace", "lifetime", "get_if_exists"} & set(options))
    if fixed:
        raise refuse(
            key, options, f"options other than {', '.join(fixed)}: see system.name, ray.namespace, ray.detached"
        )
    return options


def validated_port(key: str, value: object) -> int:
    """A port."""
    return validated_int(key, value, 0, 65535)


def validated_any_text(key: str, value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise refuse(key, value, "a text")
    return value


def validated_log_level(key: str, value: str | int) -> int:
    """The number of a level of `logging`, which is given by its name, in any case, or its number."""
    text = str(value).strip().upper()
    number = int(text) if text.isdecimal() else logging.getLevelName(text)
    if not isinstance(number, int) or number <= logging.NOTSET:
        raise refuse(key, value, "DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number > 0")
    return number
