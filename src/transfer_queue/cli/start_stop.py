"""`tq start` and `tq stop`: start a system that outlives the command, and stop it."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transfer_queue.cli.durable import discard
from transfer_queue.cli.options import Commands, add_conf, find_system, finish, read_conf
from transfer_queue.cli.shell.terminal import print_json, system_as_json
from transfer_queue.display import size_text
from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.messages.system import Topology, TopologyReply

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from transfer_queue.node.system.launcher import RunningSystem

HELP_WIDTH = 100


def add(commands: Commands) -> None:
    """Add both commands to the parser of `tq`."""
    command = commands.add_parser(
        "start",
        help="start a system that outlives this command",
        add_help=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("-h", "--help", action=_HelpWithSettings, help="show this help message and all settings")
    add_conf(command, "a YAML file whose settings replace the defaults")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="one setting; replaces that of --conf",
    )
    finish(command, start)
    command = commands.add_parser(
        "stop", help="stop a system",
        description="Stops a system. What a durable system keeps (durability.values) remains for the next system with "
        "its folder, unless --discard is given.",
    )  # fmt: skip
    command.add_argument(
        "--discard",
        action="store_true",
        help="also remove what a durable system keeps, its journal and its values; it need not be running",
    )
    command.add_argument(
        "--folder", type=Path, help="with --discard: the durable folder of a system that is not running"
    )
    finish(command, stop)


class _HelpWithSettings(argparse.Action):
    """Print the help of the command and the settings, which are imported only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help and end the program."""
        parser.epilog = describe_settings()
        parser.print_help()
        parser.exit()


def describe_settings() -> str:
    """Return a text with each setting, its default, its summary and what is allowed."""
    from transfer_queue.config.settings import SETTINGS

    lines = ["settings and their defaults, as --set takes them (docs/reference/configuration.md has more):"]
    for each in SETTINGS:
        lines.append(f"  {each.key}={each.default_yaml}")
        text = f"{each.summary} Allowed: {each.validator.allowed}."
        lines += textwrap.wrap(text, HELP_WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def _setting(text: str) -> str:
    import yaml  # type: ignore[import-untyped,unused-ignore]
    from omegaconf import OmegaConf

    key, equals, value = text.partition("=")
    if not key.strip() or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}; for example controller.polling_mode=true")
    try:
        OmegaConf.from_dotlist([text])
    except (yaml.YAMLError, ValueError) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"the value {value!r} of {key} is not valid YAML: {reason}") from None
    return text


def start(options: argparse.Namespace) -> int:
    """Start a system, or report the one that is already running."""
    from transfer_queue.client.control_client import still_runs
    from transfer_queue.config.loading import as_json, merge, unknown_keys
    from transfer_queue.config.settings import Settings
    from transfer_queue.node.system.launcher import start_local
    from transfer_queue.sampler.factory import sampler_objects

    conf = read_conf(options.conf, options.set)
    unknown_keys(conf, strict=True)
    settings = Settings.from_config(conf)
    settings.check_runtime(under_ray=False)
    config = {"settings": settings.to_json(), "conf": as_json(merge(conf))}
    begin = partial(
        start_local, options.name or settings.name, config, sampler_objects(settings, conf), detached=True,
        timeout=settings.start_timeout,
    )  # fmt: skip
    system = begin()
    while not still_runs(system):
        system = begin()
    if not system.new:
        _refuse_other_settings(system, conf)
    if options.json:
        print_json({"new": system.new, **system_as_json(system)})
        return 0
    print(f"{'running' if system.new else 'already running'}: {system.describe()}")
    print(f"attach with  TQ_ADDRESS={system.folder}  or by its name; logs in {system.folder / 'logs'}")
    return 0


def stop(options: argparse.Namespace) -> int:
    """Stop a system, even if another process started it. With `--discard` also remove what it keeps."""
    if options.folder is not None and not options.discard:
        raise InvalidArgumentError("--folder is for --discard: a system that runs is stopped by its name (--name)")
    if options.discard and (options.folder is not None or _find_local(options.name) is None):
        return _discard(options)
    system = find_system(options.name)
    system.stop()
    removed = system.discard() if options.discard else None
    if options.json:
        print_json({"stopped": True, "discarded": removed, **system_as_json(system)})
        return 0
    print(f"stopped: {system.describe()}")
    if removed is not None:
        print(_discarded(system.description.durable, removed))
    return 0


def _find_local(name: str | None) -> RunningSystem | None:
    from transfer_queue.node.system.launcher import find

    return find(name)


def _discard(options: argparse.Namespace) -> int:
    """Remove what a system keeps that does not run."""
    folder, removed = discard(options.folder, options.name)
    if options.json:
        print_json({"stopped": False, "discarded": removed, "folder": folder})
        return 0
    print(_discarded(folder, removed))
    return 0


def _discarded(folder: str, nbytes: int) -> str:
    if not folder:
        return "nothing to discard: the system keeps no values (durability.values is none)"
    return f"discarded: {size_text(nbytes)} that {folder} kept"


def _refuse_other_settings(system: Any, conf: DictConfig) -> None:
    """Raise StartError if the running system has other settings than the conf."""
    import msgspec

    from transfer_queue.client.control_client import ControlClient
    from transfer_queue.config.loading import as_json, differences, merge

    with ControlClient(system) as onlooker:
        config = msgspec.json.decode(onlooker.request(Topology(), TopologyReply).config)
    differing = differences(conf, as_json(merge(config.get("conf"))))
    if differing:
        raise StartError(system.settings_warning(differing))
