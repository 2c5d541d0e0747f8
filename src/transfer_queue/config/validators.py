"""Validators: what is allowed for one value of a configuration, in words, and how the value is converted.

Each error names the key, what was found and what is allowed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeAlias, TypeVar, Union

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
    said = (getattr(error, "msg", None) or str(error) or type(error).__name__).splitlines()[0]
    return InvalidArgumentError(f"conf cannot be read at {where}: {said}")


class NotAllowedError(Exception):
    """A value is not what a validator allows. `Validator.convert` makes it an error with the key."""


class Validator(ABC, Generic[V]):
    """Says what is allowed for a value, and converts an allowed value to its type in `Settings`.

    Example:
        >>> from transfer_queue.config.validators import WholeNumber
        >>> WholeNumber(1).convert("replicas", 2)
        2
        >>> WholeNumber(1).convert("replicas", 0)
        Traceback (most recent call last):
        transfer_queue.errors.InvalidArgumentError: replicas is 0; allowed: a whole number >= 1
    """

    type_name: str
    """The type of the value, as a user of YAML names it."""
    allowed: str
    """What is allowed, as a phrase."""
    unit: str
    """The unit of the value, such as "bytes"; "" if it has none."""

    def __init__(self, type_name: str, allowed: str, unit: str = "") -> None:
        self.type_name = type_name
        self.allowed = allowed
        self.unit = unit

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


class Boolean(Validator[bool]):
    """true or false."""

    def __init__(self) -> None:
        super().__init__("boolean", "true or false")

    def _accept(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise NotAllowedError
        return value


class WholeNumber(Validator[int]):
    """An integer in a range. A float without a fraction is converted, because YAML reads 1e6 as a float.

    Args:
        least: The smallest allowed value.
        most: The largest allowed value. Default: there is no limit.
        unit: What is counted, such as "bytes". Default: no unit.
    """

    def __init__(self, least: int, most: int | None = None, unit: str = "") -> None:
        number = f"a whole number of {unit}" if unit else "a whole number"
        super().__init__(
            "integer", f"{number} >= {least}" if most is None else f"{number} from {least} to {most}", unit
        )
        self._least = least
        self._most = most

    def _accept(self, key: str, value: object) -> int:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        # True and False are ints in Python, but no reader of a configuration means a number by them.
        if not isinstance(whole, int) or isinstance(whole, bool):
            raise NotAllowedError
        if whole < self._least or (self._most is not None and whole > self._most):
            raise NotAllowedError
        return whole


class Seconds(Validator[float]):
    """A finite number of seconds greater than 0."""

    def __init__(self) -> None:
        super().__init__("number", "seconds > 0", "seconds")

    def _accept(self, key: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise NotAllowedError
        return float(value)


class Fraction(Validator[float]):
    """A number greater than 0 and not greater than 1."""

    def __init__(self) -> None:
        super().__init__("number", "a fraction > 0 and <= 1")

    def _accept(self, key: str, value: object) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise NotAllowedError
        return float(value)


class Choice(Validator[str]):
    """One of several names.

    Args:
        *names: The allowed names.
        or_import_path: Whether an import path "package.module:Class" is allowed, too.
    """

    def __init__(self, *names: str, or_import_path: bool = False) -> None:
        path = ('an import path "package.module:Class"',) if or_import_path else ()
        super().__init__("text", ", ".join((*names, *path)))
        self._names = names
        self._or_import_path = or_import_path

    def _accept(self, key: str, value: object) -> str:
        if not isinstance(value, str) or (value not in self._names and not (self._or_import_path and ":" in value)):
            raise NotAllowedError
        return value


class AbsolutePath(Validator[str]):
    """An absolute path, as text or as a path object, which is converted to text."""

    def __init__(self) -> None:
        super().__init__("path", "an absolute path")

    def _accept(self, key: str, value: object) -> str:
        if not isinstance(value, (str, os.PathLike)) or not os.path.isabs(value):
            raise NotAllowedError
        return os.fspath(value)


class Text(Validator[str]):
    """A text.

    Args:
        may_be_empty: Whether "" is allowed.
    """

    def __init__(self, may_be_empty: bool = False) -> None:
        super().__init__("text", "a text" if may_be_empty else "a text that is not empty")
        self._may_be_empty = may_be_empty

    def _accept(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not (value or self._may_be_empty):
            raise NotAllowedError
        return value


class Patterns(Validator[list[str]]):
    """A list of patterns, as `fnmatch` has them: "*" for any characters, "?" for one."""

    def __init__(self) -> None:
        super().__init__("list", "a list of names, which may have * and ?")

    def _accept(self, key: str, value: object) -> list[str]:
        plain = _resolved(value)
        if not isinstance(plain, (list, tuple)) or not all(isinstance(each, str) and each for each in plain):
            raise NotAllowedError
        return list(plain)


class SystemName(Validator[str]):
    """The name of a system, which is also the name of its folder."""

    def __init__(self) -> None:
        super().__init__(
            "text",
            f"a name of letters, digits, '-', '_' and '.', not starting with '.', at most {LONGEST_NAME} long",
        )

    def _accept(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME or value.startswith("."):
            raise NotAllowedError
        if not all(letter.isascii() and (letter.isalnum() or letter in "-_.") for letter in value):
            raise NotAllowedError
        return value


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
        found = _resolved(value)
        if not isinstance(found, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in found):
            raise NotAllowedError
        return {pattern: self._backend.convert(f"{key}.{pattern}", name) for pattern, name in found.items()}


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
        found = _resolved(value)
        if not isinstance(found, Mapping) or not all(isinstance(pattern, str) and pattern for pattern in found):
            raise NotAllowedError
        return {pattern: self._task_sampler(f"{key}.{pattern}", sampler) for pattern, sampler in found.items()}

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
        super().__init__(f"{inner.type_name} or null", f"null, or {inner.allowed}", inner.unit)
        self.inner = inner

    def _accept(self, key: str, value: object) -> V | None:
        return None if value is None else self.inner._accept(key, value)


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
