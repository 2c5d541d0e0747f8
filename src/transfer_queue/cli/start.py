"""`tq start`: a system that outlives the command."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, cast

from transfer_queue.cli.common import Commands, add_name


def add(commands: Commands) -> None:
    """Its words."""
    command = commands.add_parser("start", help="start a system that outlives this command")
    command.add_argument("--conf", type=Path, help="a YAML file to lay over the defaults")
    command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one value of the conf")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Starts it, or says whose runs already."""
    from omegaconf import DictConfig, OmegaConf

    from transfer_queue.config import Settings, as_json, merge, sampler_object
    from transfer_queue.node.launcher import start_local

    given: Any = OmegaConf.load(options.conf) if options.conf else {}
    conf = cast(DictConfig, OmegaConf.merge(given, OmegaConf.from_dotlist(options.set)))
    settings = Settings.from_config(conf)
    settings.check_runtime(under_ray=False)
    system = start_local(
        options.name or settings.name,
        {"settings": settings.to_json(), "conf": as_json(merge(conf))},
        sampler_object(conf),
        detached=True,
        timeout=settings.start_timeout,
    )
    new = system.description.starter_pid == os.getpid()
    print(f"{'running' if new else 'runs already'}: {system.describe()}")
    print(f"attach with  TQ_ADDRESS={system.folder}  or by its name; logs in {system.folder / 'logs'}")
    return 0
