"""Makes samplers from what a configuration or a record names: built-in names, import paths, classes, plain values."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from transfer_queue.config.loading import merge, select
from transfer_queue.config.settings import KEYS, SYSTEM, Settings
from transfer_queue.config.validators import not_allowed
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.names import did_you_mean
from transfer_queue.sampler import BUILT_IN, SamplerWrapper
from transfer_queue.sampler.base import GROUP_SIZE, BaseSampler
from transfer_queue.sampler.sampler_wrapper import built_in

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
        found = msgspec.json.decode(arguments)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the arguments of {name} must be JSON, got {arguments[:80]!r}: {error}") from error
    if not isinstance(found, dict):
        raise InvalidArgumentError(f"the arguments of {name} must be a mapping, got {arguments[:80]!r}")
    return found


def _arguments_of(sampler: object) -> dict[str, Any] | None:
    """Return all arguments of a built-in sampler. An inner sampler is a mapping with its name and its arguments."""
    if not isinstance(sampler, BaseSampler):
        return None
    if type(sampler) is not BUILT_IN.get(type(sampler).__name__) or not built_in(sampler):
        return None
    found: dict[str, Any] = {}
    for name in _parameters(type(sampler)):
        value = getattr(sampler, name)
        if (name == GROUP_SIZE and not sampler.size_given) or (name == "dp_size" and not sampler.dp_size_given):  # type: ignore[attr-defined]
            value = None
        if isinstance(value, BaseSampler):
            inner = _arguments_of(value)
            if inner is None:
                return None
            value = {SAMPLER: type(value).__name__, ARGUMENTS: inner}
        found[name] = value
    return found


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


def sampler_objects(settings: Settings, conf: DictConfig | Mapping[str, Any] | None) -> dict[str, object]:
    """Return the samplers of a conf that are to be sent to the controller as objects or classes.

    Args:
        settings: The settings of this conf.
        conf: The conf that the caller passed.

    Returns:
        The pattern of `controller.task_samplers`, or `SYSTEM` for `controller.sampler` -> an instance or a class.
        Samplers with the name of a built-in one are left out, because every process finds them by their names.

    Raises:
        InvalidArgumentError: A sampler is unknown, or a built-in sampler does not take these arguments.
    """
    merged = merge(conf)
    given = {SYSTEM: select(merged, KEYS["sampler"]), **select(merged, KEYS["task_samplers"])}
    found: dict[str, object] = {}
    for pattern, (name, args) in settings.samplers.items():
        value = given[pattern]
        try:
            if name in BUILT_IN:
                sampler_from(name, args)
                continue
            value = value[SAMPLER] if isinstance(value, Mapping) else value
            found[pattern] = sampler_class(value) if isinstance(value, str) else value
        except InvalidArgumentError as error:
            if pattern == SYSTEM:
                raise
            raise InvalidArgumentError(f"{KEYS['task_samplers']}.{pattern}: {error}") from error
    return found


def sampler_from(value: object, args: Mapping[str, Any] | None = None) -> object:
    """Return a sampler.

    Args:
        value: The name of a built-in sampler, an import path, a class, or an instance, which is returned itself.
        args: The arguments of the class, by name. The `inner` of a sampler around another one may be a name or path,
            or a mapping with the keys `sampler` and `sampler_args`.

    Raises:
        InvalidArgumentError: The sampler is unknown, or its class does not take these arguments (a ValueError).
    """
    if isinstance(value, str):
        value = sampler_class(value)
    _check_sampler(value)
    if not isinstance(value, type):
        return value
    given = dict(args or {})
    try:
        if "inner" in given and issubclass(value, SamplerWrapper):
            given["inner"] = _inner_sampler(given["inner"])
        made: object = value(**given)
    except (TypeError, InvalidArgumentError) as error:
        if not given:
            allowed = (
                f"a class that can be called without arguments or with those of {KEYS['sampler_args']}, or an "
                f"instance ({error})"
            )
            raise not_allowed(KEYS["sampler"], value, allowed) from error
        parameters = ", ".join(inspect.signature(value).parameters)
        allowed = f"arguments of {value.__name__}: {parameters} ({error})"
        raise not_allowed(KEYS["sampler_args"], dict(args or {}), allowed) from error
    return made


def built_in_spec(value: object, task: str) -> tuple[str, str]:
    """Return the specification of a built-in sampler that a client gives to a task (`sampler.factory`).

    Args:
        value: See `sampler_from`, or a mapping with the keys `sampler` and `sampler_args`.
        task: The task.

    Raises:
        InvalidArgumentError: It is not a sampler, or a user's sampler, whose code a client cannot send.
    """
    try:
        sampler = sampler_from(_inner_sampler(value, "sampler"))
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"sampler of task {task!r}: {error}") from error
    spec = spec_of(sampler)
    if spec is None:
        raise InvalidArgumentError(
            f"sampler is {type(sampler).__name__}, which is not built in, or has a sampler inside that is not; the "
            f"controller accepts no code from a dataset. Name it where the system is started, and leave it out here: "
            f"tq.init({{'controller': {{'task_samplers': {{{task!r}: {type(sampler).__name__}}}}}}})"
        )
    return spec


def sampler_class(name: str) -> type:
    """Return the class of a built-in name, or of an import path "package.module:Class" or "package.module.Class".

    Raises:
        InvalidArgumentError: There is no such sampler; the message has the name (a ValueError).
    """
    found = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    if not isinstance(found, type):
        raise not_allowed(KEYS["sampler"], name, "the import path of a class")
    _check_sampler(found)
    return found


def _imported(name: str) -> Any:
    allowed = f"{', '.join(BUILT_IN)}, or 'package.module:Class' of a class that can be imported"
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not module or not attribute:
        raise InvalidArgumentError(f"{not_allowed(KEYS['sampler'], name, allowed)}{did_you_mean(name, BUILT_IN)}")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{not_allowed(KEYS['sampler'], name, allowed)}; {error}") from error
    return found


def _check_sampler(value: object) -> None:
    if not callable(getattr(value, "sample", None)):
        allowed = f"{', '.join(BUILT_IN)}, 'package.module:Class', a sampler or its class"
        raise not_allowed(KEYS["sampler"], value, allowed)


def _inner_sampler(value: Any, what: str = "inner") -> object:
    if isinstance(value, Mapping):
        if SAMPLER not in value or not set(value) <= {SAMPLER, ARGUMENTS}:
            raise InvalidArgumentError(
                f"{what} is {value!r}; allowed: a sampler, its name, or a mapping that has the keys sampler and "
                f"sampler_args"
            )
        return sampler_from(value[SAMPLER], value.get(ARGUMENTS))
    return sampler_from(value) if isinstance(value, str) else value
