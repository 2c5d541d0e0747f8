"""The configuration as a tree of keys: merges the caller's conf over the defaults, and finds unknown keys.

`config.settings` validates the values. This module can be imported without omegaconf and torch: the functions that need
omegaconf import it.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from transfer_queue.config.validators import not_allowed, unreadable_conf
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.names import nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

_SET_BY_INIT = ("system.folder",)  # `init` returns it in the configuration, which a caller may pass to `init` again

_NOT_COMPARED = ("strict", "system.", "runtime", "timeouts.start")

ALIASES = {
    "backend.SimpleStorage.ssd_offload.enabled": "backend.SimpleStorage.offload.enabled",
    "backend.SimpleStorage.ssd_offload.path": "backend.SimpleStorage.offload.path",
    "backend.SimpleStorage.required_node_resource": "ray.node_resource",
    "controller.journal.durability": "durability.mode",
    "controller.journal.folder": "durability.folder",
}
"""Keys of TransferQueue 0.1.11, and of earlier releases of this package, that have another name here."""

_RDMA = "backend.Yuanrong.enable_rdma"
_WORKER_ARGS = "backend.Yuanrong.worker_args"

WITHOUT_COUNTERPART = {
    "backend.SimpleStorage.ssd_offload.threshold_bytes": (
        "values move to the SSD when a share of a unit's bytes is in use: set "
        "backend.SimpleStorage.offload.high_watermark and backend.SimpleStorage.arena_bytes"
    ),
    "backend.MooncakeStore.offload": (
        "configure an SSD tier in Mooncake itself, with auto_init: false, or use SimpleStorage with "
        "backend.SimpleStorage.offload"
    ),
    "backend.MooncakeStore.gdr_staging_buffer_mb": (
        "values of a GPU are sent from a pool of registered memory that grows as needed; "
        "backend.MooncakeStore.local_buffer_size limits what is kept of the host's"
    ),
    "backend.Yuanrong.ucx_env_vars": (
        "set these variables in the environment of the program that starts the system; its servers inherit them"
    ),
    "backend.Yuanrong.ds_max_workers": "reads and writes of a batch are single calls of the library",
}
"""Keys of TransferQueue 0.1.11 that have no effect here, and what to do instead."""


def merge(conf: DictConfig | Mapping[str, Any] | None = None) -> DictConfig:
    """Return the caller's conf merged over the defaults, as a new DictConfig without struct or read-only flags.

    Unknown keys and objects are kept. The values of keys of the PyPI package `TransferQueue` are also set under the
    names of this package. Interpolations that point outside of `conf` are resolved. `conf` itself is not changed.

    Raises:
        InvalidArgumentError: conf is not a mapping.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    plain = {} if conf is None else _plain_conf(conf)
    try:
        merged = OmegaConf.merge(_default_conf(), OmegaConf.create(plain, flags={"allow_objects": True}))
    except (OmegaConfBaseException, TypeError) as error:  # OmegaConf raises a plain TypeError for some mistakes
        raise unreadable_conf(error) from error
    assert isinstance(merged, DictConfig)
    OmegaConf.set_readonly(merged, None)
    return merged


def unknown_keys(conf: DictConfig | Mapping[str, Any] | None, strict: bool | None = None) -> list[str]:
    """Return a sentence for each key of a conf that has no effect, with the nearest known name.

    Args:
        conf: What the caller gave.
        strict: Whether such a key is an error. Default: the value of `strict` in the conf.

    Raises:
        InvalidArgumentError: There are such keys, and they are errors.
    """
    if conf is None:
        return []
    plain = _plain_conf(conf)
    known = [*key_paths(_default_tree()), *_SET_BY_INIT]
    lines = [_describe_unknown(key, known) for key in _unknown_paths(plain, set(known), "")]
    if lines and (plain.get("strict") is True if strict is None else strict):
        raise InvalidArgumentError("\n  ".join(["the configuration has keys without an effect; correct them:", *lines]))
    return lines


def differences(conf: DictConfig | Mapping[str, Any] | None, in_force: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each setting of a conf that has another value in a running system.

    Defaults and unknown keys are not compared, nor are settings that only name the system or say how to start it.

    Args:
        conf: The caller's conf.
        in_force: The merged conf of the system, as JSON values.
    """
    if conf is None:
        return []
    named, known = settings_by_path(_plain_conf(conf), _default_tree()), _default_tree()
    wanted, current = settings_by_path(as_json(merge(conf)), known), settings_by_path(in_force, known)
    return [
        f"{path}: requested {json.dumps(wanted[path])}, in force {json.dumps(current.get(path))}"
        for path in named
        if path in wanted
        and not path.startswith(_NOT_COMPARED)
        and not _same_value(path, wanted[path], current.get(path))
    ]


def _same_value(path: str, wanted: Any, current: Any) -> bool:
    if path == "controller.task_samplers" and isinstance(wanted, Mapping) and isinstance(current, Mapping):
        return list(map(_sampler_name, wanted.items())) == list(map(_sampler_name, current.items()))
    return bool(_sampler_name(wanted) == _sampler_name(current) if path == "controller.sampler" else wanted == current)


def _sampler_name(value: Any) -> Any:
    """Return a sampler without its module: a class, its instance and its import path are the same sampler."""
    if isinstance(value, tuple):
        return value[0], _sampler_name(value[1])
    if isinstance(value, Mapping):
        return {**value, "sampler": _sampler_name(value.get("sampler"))}
    return re.split("[.:]", value)[-1] if isinstance(value, str) else value


@lru_cache(maxsize=1)
def _default_conf() -> DictConfig:
    """Return the defaults of `config.yaml`, read-only."""
    import importlib.resources

    from omegaconf import DictConfig, OmegaConf

    defaults = OmegaConf.create((importlib.resources.files("transfer_queue") / "config.yaml").read_text("utf-8"))
    assert isinstance(defaults, DictConfig)
    OmegaConf.set_readonly(defaults, True)
    return defaults


@lru_cache(maxsize=1)
def _default_tree() -> Mapping[str, Any]:
    """Return the defaults as plain containers. Their keys are all known keys."""
    return _plain_conf(_default_conf())


def _plain_conf(conf: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return the conf as plain containers, in which keys of other versions also have their names here."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

    if not isinstance(conf, (DictConfig, Mapping)):
        raise not_allowed("conf", conf, "a DictConfig, a dict or None")
    flags = {"allow_objects": True}
    try:
        given = conf if isinstance(conf, DictConfig) else OmegaConf.create(dict(conf), flags=flags)
        try:
            plain: Any = OmegaConf.to_container(given, resolve=True)
        except InterpolationResolutionError:
            # An interpolation that refers to a default is resolved in the merged conf.
            plain = OmegaConf.to_container(given, resolve=False)
    except (OmegaConfBaseException, TypeError) as error:
        raise unreadable_conf(error) from error
    made: dict[str, Any] = with_translated_keys(plain)
    return made


def as_json(merged: DictConfig) -> Any:
    """Return the conf as JSON values. A class, or an object such as a sampler, becomes the name of the class."""
    import msgspec
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise unreadable_conf(error) from error
    return msgspec.json.decode(msgspec.json.encode(plain, enc_hook=_json_name))


def _json_name(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def select(conf: Any, key: str) -> Any:
    """Return the value at a dotted key of a merged conf.

    Raises:
        InvalidArgumentError: A section on the way is not a mapping, or an interpolation cannot be resolved.
    """
    from omegaconf.errors import OmegaConfBaseException

    section = conf
    path, _, leaf = key.rpartition(".")
    try:
        for part in path.split(".") if path else []:
            section = section[part]
            if not isinstance(section, Mapping):
                raise not_allowed(path, section, "a mapping")
        return section[leaf]
    except OmegaConfBaseException as error:
        raise unreadable_conf(error) from error


# ---------------------------------------------------------------- keys


def with_translated_keys(given: Any) -> Any:
    """Return a copy of a conf in which the values of keys with other names are also set under their names here.

    The old keys are kept. If the conf has a setting under both names, the value under the name here stays.
    """
    if not isinstance(given, Mapping):
        return given
    made = _copy_of(given)
    for old, new in ALIASES.items():
        value = _value_at(made, old)
        if value is not _MISSING and _value_at(made, new) is _MISSING:
            _set_value(made, new, value)
    if _value_at(made, _RDMA) not in (_MISSING, None, False):
        arguments = _value_at(made, _WORKER_ARGS)
        arguments = "" if arguments is _MISSING or arguments is None else arguments
        if isinstance(arguments, str) and "--enable_rdma" not in arguments:
            _set_value(made, _WORKER_ARGS, f"{arguments} --enable_rdma true".strip())
    return made


def key_paths(section: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the dotted path of every key, including sections. Users choose the keys in a section that is empty here."""
    for name, value in section.items():
        path = f"{above}{name}"
        yield path
        if isinstance(value, Mapping):
            yield from key_paths(value, f"{path}.")


def settings_by_path(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a conf by dotted path: the known keys that are not sections, without unknown keys."""
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name not in defaults:
            continue
        default = defaults[name]
        if isinstance(default, Mapping) and default and isinstance(value, Mapping):
            settings.update({f"{name}.{below}": each for below, each in settings_by_path(value, default).items()})
        else:
            settings[str(name)] = value
    return settings


def _unknown_paths(section: Mapping[str, Any], known: set[str], above: str) -> Iterator[str]:
    for name, value in section.items():
        path = f"{above}{name}"
        if path in WITHOUT_COUNTERPART:
            if _has_effect(value):
                yield path
        elif isinstance(value, Mapping) and _is_section(path, known):
            yield from _unknown_paths(value, known, f"{path}.")
        elif path not in known and path not in ALIASES and path != _RDMA:
            yield path


def _is_section(path: str, known: set[str]) -> bool:
    inside = f"{path}."
    return any(key.startswith(inside) for group in (known, ALIASES, WITHOUT_COUNTERPART) for key in group)


def _has_effect(value: Any) -> bool:
    """Whether this value switches something on in the PyPI package. Its files contain all keys, most of them off."""
    if isinstance(value, Mapping):
        return bool(value.get("enabled", any(map(_has_effect, value.values()))))
    return bool(value)


def _describe_unknown(key: str, known: list[str]) -> str:
    if key in WITHOUT_COUNTERPART:
        return f"{key}: a key of TransferQueue 0.1.11 that has no effect here; {WITHOUT_COUNTERPART[key]}"
    similar = _nearest_key(key, known)
    return f"{key}: unknown" + (f"; did you mean {similar}?" if similar else "")


def _nearest_key(key: str, known: list[str]) -> str | None:
    """Return the key that the caller most likely meant: from the same section, then of any path or name."""
    above, _, name = key.rpartition(".")
    anywhere = {path.rpartition(".")[2]: path for path in reversed(known)}
    beside = {path.rpartition(".")[2]: path for path in known if path.rpartition(".")[0] == above}
    whole = {path: path for path in known} if not above else {}
    for candidates, least in ((beside, 0.75), (whole, 0.6), (anywhere, 0.6)):
        similar = nearest(name, candidates, least=least)
        if similar:
            return candidates[similar[0]]
    return None


_MISSING = object()


def _copy_of(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a copy of nested mappings and lists. The values in them are not copied."""
    return {
        name: _copy_of(value) if isinstance(value, Mapping) else copy.copy(value) if isinstance(value, list) else value
        for name, value in section.items()
    }


def _value_at(section: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(section, Mapping) or name not in section:
            return _MISSING
        section = section[name]
    return section


def _set_value(section: dict[Any, Any], path: str, value: Any) -> None:
    *above, name = path.split(".")
    for each in above:
        if section.get(each) is None:
            section[each] = {}
        if not isinstance(section[each], dict):
            return  # `Settings` refuses this value when it reads it
        section = section[each]
    section[name] = value
