"""ConfigInForce: the configuration of a running system, which `init` returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig

from transfer_queue.config.loading import as_json, differences
from transfer_queue.display import short_repr


class ConfigInForce(DictConfig):
    """The configuration of a running system, as `init` returns it.

    It equals a conf if every setting of that conf is in force, so `tq.init(conf) == conf` checks them. It prints as one
    line. `OmegaConf.to_yaml(config)` returns all settings as text, and `OmegaConf.to_container(config)` as a dict.

    Example:
        >>> config = tq.init()
        >>> config == {"controller": {"polling_mode": config.controller.polling_mode}}
        True
    """

    __hash__ = None  # as of every DictConfig

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConfigInForce) or not isinstance(other, (DictConfig, Mapping)):
            return bool(super().__eq__(other))
        return not differences(other, as_json(self))

    def __repr__(self) -> str:
        try:
            return _summary_line(self)
        except Exception:  # the user may have replaced any part of it
            return "ConfigInForce()"

    __str__ = __repr__


def _summary_line(config: DictConfig) -> str:
    """Return the most important settings as one line."""
    plain = as_json(config)
    folder, controller = Path(str(plain["system"]["folder"])), plain["controller"]
    entries = {
        "system": folder.name, "storage_backend": plain["backend"]["storage_backend"],
        "sampler": str(controller["sampler"]).rpartition(".")[2], "polling_mode": controller["polling_mode"],
        "metrics": plain["metrics"]["enabled"],
    }  # fmt: skip
    shown = ", ".join(f"{name}={short_repr(value)}" for name, value in entries.items())
    return f"ConfigInForce({shown}; OmegaConf.to_yaml(config) returns all settings)"
