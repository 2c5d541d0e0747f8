"""Makes samplers from what a configuration names: built-in names, import paths, classes, instances."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transfer_queue.config.loading import merge, select
from transfer_queue.config.settings import KEYS, SYSTEM, Settings
from transfer_queue.config.validators import not_allowed
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.names import did_you_mean
from transfer_queue.sampler import BUILT_IN, SamplerWrapper
from transfer_queue.sampler.sampler_spec import ARGUMENTS, SAMPLER, spec_of

if TYPE_CHECKING:
    from omegaconf import DictConfig


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
    samplers: dict[str, object] = {}
    for pattern, (name, args) in settings.samplers.items():
        value = given[pattern]
        try:
            if name in BUILT_IN:
                sampler_from(name, args)
                continue
            value = value[SAMPLER] if isinstance(value, Mapping) else value
            samplers[pattern] = sampler_class(value) if isinstance(value, str) else value
        except InvalidArgumentError as error:
            if pattern == SYSTEM:
                raise
            raise InvalidArgumentError(f"{KEYS['task_samplers']}.{pattern}: {error}") from error
    return samplers


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
    """Return the specification of a built-in sampler that a client gives to a task (`sampler.sampler_spec`).

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
    cls = BUILT_IN[name] if name in BUILT_IN else _imported(name)
    if not isinstance(cls, type):
        raise not_allowed(KEYS["sampler"], name, "the import path of a class")
    _check_sampler(cls)
    return cls


def _imported(name: str) -> Any:
    allowed = f"{', '.join(BUILT_IN)}, or 'package.module:Class' of a class that can be imported"
    module, colon, attribute = name.partition(":")
    if not colon:
        module, _, attribute = name.rpartition(".")
    if not module or not attribute:
        raise InvalidArgumentError(f"{not_allowed(KEYS['sampler'], name, allowed)}{did_you_mean(name, BUILT_IN)}")
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise InvalidArgumentError(f"{not_allowed(KEYS['sampler'], name, allowed)}; {error}") from error
    return value


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
