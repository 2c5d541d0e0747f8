"""Validators: what is allowed for one value of a configuration, in words, and how the value is converted.

Each error names the key, what was found and what is allowed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec

from transfer_queue.errors import InvalidArgumentError

V = TypeVar("V", covariant=True)
LONGEST_NAME = 64
TLS_FILES = ("certificate", "private_key", "authority")


def not_allowed(key: str, value: object, allowed: str) -> InvalidArgumentError:
    """Return the error for a value that is not allowed."""
    return InvalidArgumentError(f"{key} is {value!r}; allowed: {allowed}")


def unreadable_conf(error: Exception) -> InvalidArgumentError:
    """Return an error of this package for one of OmegaConf."""
    where = getattr(error, "full_key", None) or "its top level"
    reason = (getattr(error, "msg", None) or str(error) or type(error).__name__).splitlines()[0]
    return InvalidArgumentError(f"conf cannot be read at {where}: {reason}")


class NotAllowedError(Exception):
    """A value is not what a validator allows. `Validator.convert` makes it an error with the key."""


class Validator(ABC, Generic[V]):
    """Says what is allowed for a value, and converts an allowed value to its type in `Settings`.

    Example:
        >>> from transfer_queue.config.validators import Port, validator_of
        >>> validator_of(Port).convert("metrics.port", 9090)
        9090
        >>> validator_of(Port).convert("metrics.port", -1)
        Traceback (most recent call last):
        transfer_queue.errors.InvalidArgumentError: metrics.port is -1; allowed: a whole number from 0 to 65535
    """

    type_name: str
    """The type of the value, as a user of YAML names it."""
    allowed: str
    """What is allowed, as a phrase."""

    def __init__(self, type_name: str, allowed: str) -> None:
        self.type_name = type_name
        self.allowed = allowed

    def convert(self, key: str, value: object) -> V:
        """Return the value, converted.

        Args:
            key: The name of the setting, argument or variable, for the error.
            value: What the user gave.

        Raises:
            InvalidArgumentError: The value is not allowed.
        """
        try:
            return self._accept(key, value)
        except NotAllowedError:
            raise not_allowed(key, value, self.allowed) from None

    @abstractmethod
    def _accept(self, key: str, value: object) -> V:
        """Return the value, converted. Raise NotAllowedError if it is not allowed, or an error with more details."""


class TypeValidator(Validator[Any]):
    """What a type allows, with the limits of its `msgspec.Meta`. Instances of subclasses become those of the type.

    A float without a fraction is an int where one is wanted, because YAML reads 1e6 as a float.

    Args:
        accepted: The type, as `msgspec.convert` takes it.
        type_name: See `Validator`.
        allowed: See `Validator`.
    """

    def __init__(self, accepted: Any, type_name: str, allowed: str) -> None:
        super().__init__(type_name, allowed)
        self._accepted = accepted

    def _accept(self, key: str, value: object) -> Any:
        plain = value
        if isinstance(value, float):
            plain = int(value) if self.type_name == "integer" and value.is_integer() else float(value)
        elif isinstance(value, (int, str)) and not isinstance(value, bool):
            plain = int(value) if isinstance(value, int) else str.__str__(value)
        try:
            return msgspec.convert(plain, self._accepted)
        except msgspec.ValidationError:
            raise NotAllowedError from None


def validator_of(annotation: Any) -> Validator[Any]:
    """Return the validator that the annotation of a setting describes.

    Args:
        annotation: bool, int, float, str or a Literal, with a `msgspec.Meta` for its limits: its `description` is what
            is allowed if the limits do not say it, its `extra` may name the "unit". `X | None` also allows null. For
            all else, an `Annotated` type that names a `Validator`.
    """
    if type(None) in get_args(annotation):
        (inner,) = (each for each in get_args(annotation) if each is not type(None))
        return OrNull(validator_of(inner))
    kind, *more = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    if more and isinstance(more[0], Validator):
        return more[0]
    limits = more[0] if more else msgspec.Meta()
    if get_origin(kind) is Literal:
        return TypeValidator(annotation, "text", ", ".join(get_args(kind)))
    if kind is bool:
        return TypeValidator(annotation, "boolean", "true or false")
    if kind is int:
        number = " of ".join(filter(None, ["a whole number", (limits.extra or {}).get("unit")]))
        span = f">= {limits.ge}" if limits.le is None else f"from {limits.ge} to {limits.le}"
        return TypeValidator(annotation, "integer", f"{number} {span}")
    text = "a text that is not empty" if limits.min_length else "a text"
    return TypeValidator(annotation, "number" if kind is float else "text", limits.description or text)


Seconds: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max, description="seconds > 0")]
"""A finite number of seconds."""
Fraction: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1, description="a fraction > 0 and <= 1")]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
NonEmptyText: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
SystemName: TypeAlias = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"\A(?!\.)[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}\Z",
        description=f"a name of letters, digits, '-', '_' and '.', not starting with '.', at most {LONGEST_NAME} long",
    ),
]
"""The name of a system, which is also the name of its folder."""


class AbsolutePath(Validator[str]):
    """An absolute path, as text or as a path object, which is converted to text."""

    def __init__(self) -> None:
        super().__init__("path", "an absolute path")

    def _accept(self, key: str, value: object) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.path.isabs(value):
            raise NotAllowedError
        return os.fspath(value)


class Patterns(Validator[list[str]]):
    """A list of patterns, as `fnmatch` has them: "*" for any characters, "?" for one."""

    def __init__(self) -> None:
        super().__init__("list", "a list of names, which may have * and ?")

    def _accept(self, key: str, value: object) -> list[str]:
        plain = _resolved(value)
        if not isinstance(plain, (list, tuple)) or not all(isinstance(each, str) and each for each in plain):
            raise NotAllowedError
        return list(plain)


class LogLevel(Validator[int]):
    """A level of `logging`, given by its name in any case or by its number. It is converted to the number."""

    def __init__(self) -> None:
        super().__init__("text or integer", "DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number > 0")

    def _accept(self, key: str, value: object) -> int:
        text = str(value).strip().upper()
        number = int(text) if text.isdecimal() else logging.getLevelName(text)
        if not isinstance(number, int) or number <= logging.NOTSET:
            raise NotAllowedError
        return number


class PlainMapping(Validator[dict[str, Any]]):
    """A mapping of values that JSON has, because it is sent to servers. Interpolations of OmegaConf are resolved.

    Args:
        content: What the mapping contains, for errors.
        reserved: Names that are not allowed in it.
        instead: What to do instead of using a reserved name or a value that JSON does not have.
        null_is_empty: Whether null is allowed, too. It is converted to {}.
    """

    def __init__(
        self, content: str = "options", reserved: tuple[str, ...] = (), instead: str = "", null_is_empty: bool = False
    ) -> None:
        without = f" without {', '.join(reserved)}" if reserved else ""
        or_null = ("mapping or null", "null, or ") if null_is_empty else ("mapping", "")
        super().__init__(or_null[0], f"{or_null[1]}a mapping of {content}{without}")
        self._reserved = reserved
        self._null_is_empty = null_is_empty
        self._instead = instead

    def _accept(self, key: str, value: object) -> dict[str, Any]:
        plain = {} if value is None and self._null_is_empty else _resolved(value)
        if not isinstance(plain, Mapping):
            raise NotAllowedError
        try:
            options: dict[str, Any] = json.loads(json.dumps(dict(plain)))
        except (TypeError, ValueError) as error:
            instead = f", or {self._instead}" if self._instead else ""
            raise not_allowed(key, plain, f"plain values{instead} ({error})") from None
        if set(self._reserved) & set(options):
            raise not_allowed(key, options, f"{self.allowed}; {self._instead}")
        return options


class FieldBackends(Validator[dict[str, str]]):
    """A mapping from patterns of field names to backends, in the order of the caller.

    Args:
        backend: The validator of a backend.
    """

    def __init__(self, backend: Validator[str]) -> None:
        super().__init__("mapping", f"a mapping from patterns of field names to {backend.allowed}")
        self._backend = backend

    def _accept(self, key: str, value: object) -> dict[str, str]:
        patterns = _by_pattern(value)
        return {pattern: self._backend.convert(f"{key}.{pattern}", name) for pattern, name in patterns.items()}


def is_loopback(host: str) -> bool:
    """Return whether only processes of this machine can reach an address."""
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


class TlsFiles(Validator[dict[str, str]]):
    """The absolute paths of the PEM files of TLS, by name."""

    def __init__(self) -> None:
        super().__init__("mapping", f"a mapping with the keys {', '.join(TLS_FILES)}")

    def _accept(self, key: str, value: object) -> dict[str, str]:
        files = _resolved(value)
        if not isinstance(files, Mapping) or set(files) != set(TLS_FILES):
            raise NotAllowedError
        for name, path in files.items():
            if not isinstance(path, str) or not os.path.isabs(path):
                raise not_allowed(f"{key}.{name}", path, "the absolute path of a PEM file")
        return dict(files)


class SamplerReference(Validator[str | None]):
    """A sampler: a name, an import path, a class or an instance.

    It is converted to a name or import path, and to None if other processes cannot import it. Whether there is such a
    sampler is checked by `transfer_queue.sampler.factory`.
    """

    def __init__(self) -> None:
        super().__init__(
            "text, class or object",
            "the name of a built-in sampler, an import path 'package.module:Class', a sampler or its class",
        )

    def _accept(self, key: str, value: object) -> str | None:
        if isinstance(value, str) and value:
            return value
        if not callable(getattr(value, "sample", None)):
            raise NotAllowedError
        if not isinstance(value, type) or value.__module__ == "__main__" or "<" in value.__qualname__:
            return None
        return f"{value.__module__}:{value.__qualname__}"


TaskSampler: TypeAlias = tuple[Union[str, None], dict[str, Any]]
"""The name or import path of a sampler, None if other processes cannot import it; and the arguments of its class."""


class TaskSamplers(Validator[dict[str, TaskSampler]]):
    """A mapping from tasks, or patterns of tasks, to samplers, in the order of the caller."""

    def __init__(self) -> None:
        self._sampler = SamplerReference()
        self._arguments = PlainMapping(
            content="the arguments of the sampler", instead="pass an instance", null_is_empty=True
        )
        super().__init__("mapping", f"a mapping from the name or a pattern of tasks to {self._sampler.allowed}")

    def _accept(self, key: str, value: object) -> dict[str, TaskSampler]:
        patterns = _by_pattern(value)
        return {pattern: self._task_sampler(f"{key}.{pattern}", sampler) for pattern, sampler in patterns.items()}

    def _task_sampler(self, key: str, value: object) -> TaskSampler:
        if not isinstance(value, Mapping):
            return self._sampler.convert(key, value), {}
        if "sampler" not in value or not set(value) <= {"sampler", "sampler_args"}:
            raise not_allowed(key, value, "a sampler, or a mapping with the keys sampler and sampler_args")
        arguments = self._arguments.convert(f"{key}.sampler_args", value.get("sampler_args"))
        if arguments and not isinstance(value["sampler"], (str, type)):
            raise not_allowed(f"{key}.sampler_args", arguments, "nothing if the sampler is an instance")
        return self._sampler.convert(f"{key}.sampler", value["sampler"]), arguments


class OrNull(Validator[V | None]):
    """null, which is converted to None, or what another validator allows.

    Args:
        inner: The validator of all other values.
    """

    def __init__(self, inner: Validator[V]) -> None:
        super().__init__(f"{inner.type_name} or null", f"null, or {inner.allowed}")
        self.inner = inner

    def _accept(self, key: str, value: object) -> V | None:
        return None if value is None else self.inner._accept(key, value)


def _by_pattern(value: object) -> Mapping[str, Any]:
    """Return a mapping from patterns. Raise NotAllowedError if it is not one."""
    resolved = _resolved(value)
    if not isinstance(resolved, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in resolved):
        raise NotAllowedError
    return resolved


def _resolved(value: object) -> object:
    """Return a container of OmegaConf as plain containers, with its interpolations resolved; other values as is."""
    if value is None or isinstance(value, (dict, str, bool, int, float)):
        return value
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(value, resolve=True) if isinstance(value, (DictConfig, ListConfig)) else value
    except OmegaConfBaseException as error:
        raise unreadable_conf(error) from error
