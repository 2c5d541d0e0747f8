"""Makes samplers from what a configuration names: built-in names, import paths, classes, instances."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transfer_queue.config.loading import merge, select
from transfer_queue.config.settings import KEYS, Settings
from transfer_queue.config.validators import not_allowed
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.names import did_you_mean
from transfer_queue.sampler import BUILT_IN, SamplerWrapper

if TYPE_CHECKING:
    from omegaconf import DictConfig


def sampler_object(settings: Settings, conf: DictConfig | Mapping[str, Any] | None) -> object | None:
    """Return the sampler of a conf as an object or class, to be sent to the controller.

    Args:
        settings: The settings of this conf.
        conf: The conf that the caller passed.

    Returns:
        An instance or a class. None for the name of a built-in sampler, which every process finds by this name.

    Raises:
        InvalidArgumentError: The sampler is unknown, or a built-in sampler does not take these arguments.
    """
    if settings.sampler in BUILT_IN:
        sampler_from(settings.sampler, settings.sampler_args)
        return None
    value: object = select(merge(conf), KEYS["sampler"])
    return sampler_class(value) if isinstance(value, str) else value


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
        raise not_allowed(KEYS["sampler_args"], dict(args or {}), f"arguments of {value.__name__} ({error})") from error
    return made


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


def _inner_sampler(value: Any) -> object:
    if isinstance(value, Mapping):
        if "sampler" not in value or not set(value) <= {"sampler", "sampler_args"}:
            raise InvalidArgumentError(
                f"inner is {value!r}; allowed: a sampler, its name, or a mapping that has the keys sampler and "
                f"sampler_args"
            )
        return sampler_from(value["sampler"], value.get("sampler_args"))
    return sampler_from(value) if isinstance(value, str) else value
