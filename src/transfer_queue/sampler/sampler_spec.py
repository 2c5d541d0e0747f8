"""The configuration of a built-in sampler as plain values, so that a request or a record can contain a sampler."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import BUILT_IN
from transfer_queue.sampler.base import GROUP_SIZE, BaseSampler
from transfer_queue.sampler.sampler_wrapper import built_in

SAMPLER, ARGUMENTS = "sampler", "sampler_args"
"""The keys of a sampler that is given as a mapping."""

MAX_DEPTH = 8  # samplers inside each other
MAX_KEPT = 64  # samplers; clients choose them


def spec_of(sampler: object) -> tuple[str, str] | None:
    """Return the name of a built-in sampler and its arguments as JSON; None if a user's sampler is involved.

    All arguments are there, also those that were left out, so that samplers of the same configuration have the same
    text.
    """
    arguments = _arguments_of(sampler)
    return None if arguments is None else (type(sampler).__name__, msgspec.json.encode(arguments).decode())


@lru_cache(maxsize=MAX_KEPT)
def sampler_of(name: str, arguments: str) -> BaseSampler:
    """Return the built-in sampler of a specification, the same one for the same specification.

    It imports and runs no code outside of this package.

    Raises:
        InvalidArgumentError: There is no such sampler, or it does not take these arguments.
    """
    return _made(name, _read(name, arguments), 0)


def describe_spec(name: str, arguments: str) -> str:
    """Return a built-in sampler as code that makes it, without the arguments that have their defaults."""
    return _described(name, _read(name, arguments))


def _read(name: str, arguments: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the arguments of {name} must be JSON, got {arguments[:80]!r}: {error}") from error
    if not isinstance(decoded, dict):
        raise InvalidArgumentError(f"the arguments of {name} must be a mapping, got {arguments[:80]!r}")
    return decoded


def _arguments_of(sampler: object) -> dict[str, Any] | None:
    """Return all arguments of a built-in sampler. An inner sampler is a mapping with its name and its arguments."""
    if not isinstance(sampler, BaseSampler):
        return None
    if type(sampler) is not BUILT_IN.get(type(sampler).__name__) or not built_in(sampler):
        return None
    arguments: dict[str, Any] = {}
    for name in _parameters(type(sampler)):
        value = getattr(sampler, name)
        if (name == GROUP_SIZE and not sampler.size_given) or (name == "dp_size" and not sampler.dp_size_given):  # type: ignore[attr-defined]
            value = None
        if isinstance(value, BaseSampler):
            inner = _arguments_of(value)
            if inner is None:
                return None
            value = {SAMPLER: type(value).__name__, ARGUMENTS: inner}
        arguments[name] = value
    return arguments


def _parameters(kind: type[BaseSampler]) -> dict[str, inspect.Parameter]:
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    return {each.name: each for each in parameters}


def _made(name: str, arguments: Mapping[str, Any], depth: int) -> BaseSampler:
    kind = BUILT_IN.get(name)
    if kind is None:
        raise InvalidArgumentError(f"sampler must be one of {', '.join(BUILT_IN)}, got {name!r}")
    given = dict(arguments)
    inner = given.get("inner")
    if inner is not None:
        is_spec = isinstance(inner, dict) and isinstance(inner.get(SAMPLER), str)
        if not is_spec or not isinstance(inner.get(ARGUMENTS), dict) or depth >= MAX_DEPTH:
            raise InvalidArgumentError(
                f"inner of {name} must be a mapping with the keys {SAMPLER} and {ARGUMENTS}, and at most {MAX_DEPTH} "
                f"samplers may be inside each other, got {inner!r}"
            )
        given["inner"] = _made(inner[SAMPLER], inner[ARGUMENTS], depth + 1)
    try:
        return kind(**given)
    except TypeError as error:
        raise InvalidArgumentError(f"{name} does not take these arguments: {error}") from error


def _described(name: str, arguments: Mapping[str, Any]) -> str:
    kind = BUILT_IN.get(name)
    defaults = {} if kind is None else _parameters(kind)
    shown = [
        f"{argument}={_described(value[SAMPLER], value[ARGUMENTS]) if isinstance(value, dict) else repr(value)}"
        for argument, value in arguments.items()
        if argument not in defaults or (value is not None and value != defaults[argument].default)
    ]
    return f"{name}({', '.join(shown)})"
