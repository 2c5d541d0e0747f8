"""The options that several commands have, and the search for the running system that `--name` selects."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transfer_queue.cli.shell.terminal import add_json
from transfer_queue.config import environment
from transfer_queue.config.validators import SystemName, validator_of
from transfer_queue.errors import AttachError, InvalidArgumentError
from transfer_queue.names import nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from transfer_queue.node.system.launcher import RunningSystem


Commands = Any  # argparse has no public name for what `add_subparsers` returns


def add_name(command: argparse.ArgumentParser) -> None:
    """Add the option `--name`, which selects the system."""
    command.add_argument("--name", type=_name, help="the system's name (TQ_SYSTEM, or your default one)")


def finish(
    command: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int], json: str = "print one JSON document"
) -> None:
    """Add the options with which commands about one system end, `--json` and `--name`, and what executes the command.

    Args:
        command: The parser of the command.
        run: Executes the command.
        json: The help of `--json`.
    """
    add_json(command, json)
    add_name(command)
    command.set_defaults(run=run)


def _name(text: str) -> str:
    try:
        return str(validator_of(SystemName).convert("the name of a system", text))
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def seconds_type(wanted: str, accepts: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the type of an option in seconds. It must be finite; `wanted` says in words what `accepts` accepts."""

    def convert(text: str) -> float:
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and accepts(seconds)):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return seconds

    return convert


def whole_number_type(wanted: str, least: int, most: int) -> Callable[[str], int]:
    """Return the type of an option that is a whole number within these limits, which `wanted` says in words."""

    def convert(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return int(text)

    return convert


def add_tokenizer(command: argparse.ArgumentParser, default: str) -> None:
    """Add the option `--tokenizer`, which decodes token ids."""
    command.add_argument(
        "--tokenizer", metavar="PATH_OR_NAME",
        help="also show token ids as text: the path of a tokenizer.json or of its folder, or the name of a model in "
        f"the cache of Hugging Face; nothing is downloaded; needs the extra [tokenizer] (default: {default})",
    )  # fmt: skip


def add_conf(command: argparse.ArgumentParser, purpose: str) -> None:
    """Add the option `--conf`, a file of settings."""
    command.add_argument("--conf", type=Path, metavar="FILE", help=purpose)


def read_conf(path: Path | None, assignments: Sequence[str] = ()) -> DictConfig:
    """Return the settings of the file, with the assignments merged over them.

    Raises:
        InvalidArgumentError: The file cannot be read, or the assignments cannot be merged into it.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    given: Any = OmegaConf.create({})
    if path is not None:
        try:
            given = OmegaConf.load(path)
        except OSError as error:
            raise InvalidArgumentError(
                f"--conf {path} cannot be read: {error.strerror or error}; give the path of a YAML file"
            ) from None
        except UnicodeDecodeError:
            raise InvalidArgumentError(f"--conf {path} is not a text file in UTF-8; give a YAML file") from None
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            reason = " ".join(str(error).split())
            raise InvalidArgumentError(f"--conf {path} is not valid YAML: {reason}; correct the file") from None
        if not isinstance(given, DictConfig):
            kind = "a list" if OmegaConf.is_list(given) else type(given).__name__
            raise InvalidArgumentError(f"--conf {path} must contain a mapping of settings, but contains {kind}")
    try:
        return cast(DictConfig, OmegaConf.merge(given, OmegaConf.from_dotlist(list(assignments))))
    except (OmegaConfBaseException, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgumentError(
            f"--set {' --set '.join(assignments)} cannot be merged with the other settings: {reason}"
        ) from None


# ---------------------------------------------------------------- the system that a command is about

ATTACH_SECONDS = 30.0  # for a system under Ray that is being started


def find_system(name: str | None) -> RunningSystem:
    """Return the running system of this name; with RAY_ADDRESS, that of the Ray cluster first.

    Raises:
        AttachError: No system is running under this name.
    """
    from transfer_queue.node.system.launcher import find
    from transfer_queue.ray_runtime import launcher as on_ray

    system = on_ray.find(name, on_ray.NAMESPACE, ATTACH_SECONDS) if on_ray.is_used("auto") else None
    system = system or find(name)
    if system is None:
        raise AttachError(f"{_not_running(name)}; start one with `tq start`, or name another one with `--name`")
    return system


def find_system_that_replies(name: str | None) -> RunningSystem:
    """Return the running system of this name, as `find_system`.

    Raises:
        AttachError: No system is running under this name, or only stopped processes of it are left.
    """
    system = find_system(name)
    if system.is_ending() and system.describe_stopped():
        raise AttachError(f"the system {system.name!r} cannot reply: {system.describe_stopped()}, and start it again")
    return system


def _not_running(name: str | None) -> str:
    """Return a phrase that names the system that was not found, and the systems that are running."""
    from transfer_queue.system_folder.paths import DEFAULT_NAME, SystemFolder, runtime_dir

    place = environment.address() if name is None else None
    wanted = name or environment.system_name() or DEFAULT_NAME
    looked = f"at TQ_ADDRESS={place}" if place is not None else f"under the name {wanted!r}"
    sought = SystemFolder(Path(place) if place is not None else runtime_dir() / wanted)
    folders = [SystemFolder(path) for path in runtime_dir().iterdir() if not path.name.startswith(".")]
    running = sorted(folder.name for folder in folders if folder.description.exists() and folder.name != sought.name)
    meant = nearest(wanted, running)
    hint = f"; running: {', '.join(map(repr, running))}" if running else ""
    if meant:
        hint = f" (did you mean {meant[0]!r}?)"
    return f"no system is running {looked}{sought.describe_crash()}{hint}"
