"""The environment variables of the package, and the cores. No other module reads a variable of the environment.

A variable is read when it is called, not when this module is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Callable, MutableMapping
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

from transfer_queue.config.validators import LogLevel, SystemName, not_allowed, validator_of

T = TypeVar("T", covariant=True)

_getenv = ctypes.PyDLL(None).getenv
"""The function of C, which every change of `os.environ` reaches. Each put reads a variable that is usually not set, and
`os.environ.get` raises and catches two exceptions for it, which takes 2 % of the time of a small put."""
_getenv.argtypes = [ctypes.c_char_p]
_getenv.restype = ctypes.c_char_p

VARIABLES: list[EnvironmentVariable[object]] = []
"""All variables, in the order of the reference page."""


class EnvironmentVariable(Generic[T]):
    """An environment variable; calling it returns its value, or its default if it is unset or empty.

    Example:
        >>> from transfer_queue.config import environment
        >>> environment.get_metadata_timeout()
        60.0
    """

    name: str
    """The name of the variable."""
    default: T
    """The value if the variable is unset or empty."""
    meaning: str
    """What the variable does, in full sentences."""

    def __init__(self, name: str, default: T, parse: Callable[[str, str], T], meaning: str) -> None:
        self.name = name
        self.default = default
        self.meaning = meaning
        self._parse = parse
        self._key = os.fsencode(name)
        VARIABLES.append(self)

    @property
    def summary(self) -> str:
        """The first sentence of `meaning`, for use in brackets."""
        sentence = self.meaning.partition(". ")[0].rstrip(".")
        return sentence[0].lower() + sentence[1:]

    def __call__(self) -> T:
        """Return the value.

        Raises:
            InvalidArgumentError: The text is not allowed; the message names the variable.
        """
        value = _getenv(self._key)
        text = "" if value is None else os.fsdecode(value).strip()
        return self._parse(self.name, text) if text else self.default


def text_variable(name: str, meaning: str) -> EnvironmentVariable[str | None]:
    """Return a variable that is any text, and None if it is unset or empty."""
    return EnvironmentVariable(name, None, _text, meaning)


def process_environment() -> MutableMapping[str, str]:
    """Return this process's environment, to pass it to child processes or to set TQ_ADDRESS for them."""
    return os.environ


def _number(name: str, text: str, allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise not_allowed(name, text, allowed) from None
    if not math.isfinite(number) or number < 0:
        raise not_allowed(name, text, allowed)
    return number


def _count(name: str, text: str) -> int:
    allowed = "a whole number >= 0"
    number = _number(name, text, allowed)
    if number != int(number):
        raise not_allowed(name, text, allowed)
    return int(number)


def _seconds(name: str, text: str) -> float:
    return _number(name, text, "seconds >= 0")


def _absolute_path(name: str, text: str) -> str:
    # Processes of one system must find the same folder, wherever each of them was started.
    if not os.path.isabs(text):
        raise not_allowed(name, text, "an absolute path")
    return text


def _text(name: str, text: str) -> str:
    return text


def _ranks(name: str, text: str) -> int:
    return int(text) if text.isdecimal() else 1  # it belongs to another program, which may write something else


def _is_true(name: str, text: str) -> bool:
    return text.lower() == "true"  # OpenTelemetry says that any other text means false


ATTACH_MODES = ("auto", "require", "never")


def _attach_mode(name: str, text: str) -> str:
    if text not in ATTACH_MODES:
        raise not_allowed(name, text, "auto, require or never")
    return text


address = EnvironmentVariable[str | None](
    "TQ_ADDRESS",
    None,
    _absolute_path,
    "The folder of a running system, to which `init` and `tq` attach. A process that starts a system sets it for its "
    "child processes.",
)

system_name = EnvironmentVariable[str | None](
    "TQ_SYSTEM",
    None,
    validator_of(SystemName).convert,
    "The name of the system to start or attach to. It applies if `system.name` is not set.",
)

attach_mode = EnvironmentVariable[str](
    "TQ_ATTACH",
    "auto",
    _attach_mode,
    "What `init` does if its call has no `attach`: auto, require (never start a system) or never (only start). Set it "
    "to require for workers, so that they do not start a system of their own if the trainer has crashed.",
)

runtime_dir = EnvironmentVariable[str | None](
    "TQ_RUNTIME_DIR",
    None,
    _absolute_path,
    "The folder in which systems keep their sockets, keys and logs. Default: a folder of the user in the runtime "
    "folder of the machine.",
)

logging_level = EnvironmentVariable[int | None](
    "TQ_LOGGING_LEVEL",
    None,
    LogLevel().convert,
    "The level of the logs of this package: DEBUG, INFO, WARNING, ERROR, CRITICAL, or a number. Default: WARNING in "
    "processes of users, INFO in servers.",
)

pre_alloc_sample_num = EnvironmentVariable[int](
    "TQ_PRE_ALLOC_SAMPLE_NUM",
    1,
    _count,
    "The number of indexes that a new partition reserves for its first samples, read by the client that creates it.",
)

get_metadata_timeout = EnvironmentVariable[float](
    "TQ_CONTROLLER_GET_METADATA_TIMEOUT",
    60.0,
    _seconds,
    "The seconds that a fetch without `timeout` waits for samples, if `controller.polling_mode` is false.",
)

empty_batch_sleep_interval = EnvironmentVariable[float](
    "TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL",
    1.0,
    _seconds,
    "The most seconds that a loader waits before it asks again for a batch. It asks earlier if samples become ready.",
)

RANKS_OF_NODE = [
    EnvironmentVariable[int](
        name,
        1,
        _ranks,
        f"The number of ranks on this node, which share its cores. {launcher} sets it.",
    )
    for name, launcher in (
        ("LOCAL_WORLD_SIZE", "Torchrun or Ray Train"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI"),
        ("MPI_LOCALNRANKS", "MPICH or Intel MPI"),
        ("SLURM_NTASKS_PER_NODE", "Slurm"),
    )
]
"""The variables with which launchers tell a process how many ranks its node has."""

ray_address = text_variable(
    "RAY_ADDRESS",
    "The cluster of Ray that this process belongs to. If it is set, `runtime: auto` means `ray`.",
)

no_color = text_variable(
    "NO_COLOR",
    "If it is set, commands print no colors.",
)

terminal = EnvironmentVariable[str](
    "TERM",
    "",
    _text,
    "The type of the terminal. On `dumb`, commands print no colors.",
)

hf_hub_cache = text_variable(
    "HF_HUB_CACHE",
    "Hugging Face's folder of models, in which `--tokenizer` looks for a name. Default: `hub` in HF_HOME.",
)

hf_home = text_variable(
    "HF_HOME",
    "Hugging Face's folder. Default: ~/.cache/huggingface.",
)

otel_sdk_disabled = EnvironmentVariable[bool](
    "OTEL_SDK_DISABLED",
    False,
    _is_true,
    "If it is true, operations have no spans of OpenTelemetry.",
)

otel_traces_exporter = text_variable(
    "OTEL_TRACES_EXPORTER",
    "OpenTelemetry's exporters of spans, separated by commas: otlp, console, none or others. Default: otlp if there "
    "is an endpoint, otherwise none.",
)

otel_endpoint = text_variable(
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "The URL of OpenTelemetry's collector.",
)

otel_traces_endpoint = text_variable(
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "The URL of OpenTelemetry's collector for spans, if it differs from that of other signals.",
)

otel_protocol = text_variable(
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "The protocol of OpenTelemetry's collector: http/protobuf, or grpc, which needs the package "
    "opentelemetry-exporter-otlp-proto-grpc. Default: http/protobuf.",
)

otel_traces_protocol = text_variable(
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "The protocol of OpenTelemetry's collector for spans, if it differs from that of other signals.",
)

# ---------------------------------------------------------------- cores
# Determines how many cores a process may use for its copies: by its affinity, its cgroups and the ranks beside it.

MOST = 16
"""The largest number of threads of a copy: more do not copy faster than the memory of a node allows."""
MAX_STREAMS = 8
CORES_PER_STREAM = 4
"""The cores of a process for each stream between nodes: both ends of a stream need a core, and others share them."""


def usable_cores() -> int:
    """Return the number of cores that this process may use, at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cgroup_quota())))


def copy_threads() -> int:
    """Return how many threads a copy of this process may use.

    The ranks of a training on this node share the cores. Each has two threads, if there are two cores.
    """
    cores = usable_cores()
    return min(MOST, max(min(2, cores), cores // _rank_count()))


def max_streams() -> int:
    """Return how many streams at once may carry the bytes between this process and another node: 1 below 8 cores."""
    return max(1, min(MAX_STREAMS, usable_cores() // _rank_count() // CORES_PER_STREAM))


def _rank_count() -> int:
    """Return the number of ranks that share the cores of this node."""
    return max([1, *(variable() for variable in RANKS_OF_NODE)])


@lru_cache
def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> float:
    """Return the cores that the cgroups of this process allow it to use on average; infinity without a limit."""
    limits = cgroup_values("cpu.max", root=root, of_process=of_process)
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    limits += map(" ".join, zip(*(cgroup_values("", "cpu", each, root=root, of_process=of_process) for each in files)))
    pairs = filter(None, (re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", text) for text in limits))  # "max" and -1 are no limit
    return min((int(each[1]) / int(each[2]) for each in pairs), default=math.inf)


def cgroup_values(
    name: str,
    controller: str = "",
    name_1: str = "",
    root: Path = Path("/sys/fs/cgroup"),
    of_process: Path = Path("/proc/self/cgroup"),
) -> list[str]:
    """Return the contents of a file of this process's cgroup and of those above it, innermost first.

    Files that cannot be read are left out.

    Args:
        name: The file in version 2 of cgroups.
        controller: The controller in version 1.
        name_1: The file in version 1.
        root: The folder of all cgroups.
        of_process: The file that names the cgroups of this process.
    """
    values = []
    with contextlib.suppress(OSError):  # not Linux
        for line in of_process.read_text("utf-8", "replace").splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and not (controller and controller in controllers.split(",")):
                continue
            top, file = (root, name) if number == "0" else (root / controller, name_1)
            inside = Path(path.lstrip("/"))
            # in a container, the path may be that of the host, and the container's own cgroup is the root
            for folder in (inside, *inside.parents):
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    values.append((top / folder / file).read_text("ascii").strip())
    return values
