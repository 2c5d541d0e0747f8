"""The process of the controller: builds the controller, its journal, its service and its server.

A thread keeps the memory of its objects in huge pages, so that its forks are fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from transfer_queue.config.settings import SYSTEM, Settings
from transfer_queue.core.controller import Controller
from transfer_queue.core.samplers.calls import AnySampler, watched_tags
from transfer_queue.core.units.unit_handlers import lose_missing_mirrors, lose_units_of_nodes
from transfer_queue.errors import StartError
from transfer_queue.journal.journal import Journal, Recovered, recover
from transfer_queue.journal.segment import ClockIdentity
from transfer_queue.journal.state_file import LoadedStates
from transfer_queue.journal.terms import Term
from transfer_queue.net.server.server_loop import ServerLoop
from transfer_queue.net.tls_contexts import tls_context
from transfer_queue.node.controller.controller_service import ControllerService, core_config, core_sampler
from transfer_queue.node.controller.journal_service import Journaling, JournalSync
from transfer_queue.node.controller.metrics_collector import Collector
from transfer_queue.node.controller.sampler_loading import SamplerFiles, SamplerLoading
from transfer_queue.node.controller.state_files import StateFiles
from transfer_queue.node.hosting.service_base import ProcessMetrics, resident_bytes
from transfer_queue.node.system.sampler_transfer import PickledSampler
from transfer_queue.node.unit.mirror_folders import boot_ids
from transfer_queue.storage.arena.remote_access import MAX_WRITTEN
from transfer_queue.system_folder.liveness import DepartedClients, handed_over, is_client_alive
from transfer_queue.system_folder.paths import SystemFolder, is_network_storage

PART = 128
"""Replies of one event that are sent before the others are made."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sockets:
    """The sockets on which a controller listens. They outlive it."""

    controller: Sequence[socket.socket]
    metrics: socket.socket | None
    """None if metrics are off."""


def build_controller(
    system: SystemFolder,
    config: str,
    key: bytes,
    pickled: Mapping[str, PickledSampler],
    sockets: Sockets,
    journal: Path | None,
    term: Term | None = None,
) -> ServerLoop:
    """Return the controller's server, listening.

    Args:
        system: The folder for state files of clients that save and load, and for the liveness files of clients.
        config: JSON text with the "settings" of `config.settings.Settings`.
        key: The key of the system.
        pickled: The samplers that the settings do not name, by the keys of `Settings.samplers`.
        sockets: Where the server listens.
        journal: The folder of the journal, from which the state of the previous controller is recovered. None: there
            is no journal.
        term: The term in which the controller may use the journal. None: no other controller may take it over.

    Raises:
        StartError: If a later term has begun.
        JournalError: If the journal is damaged. Errors of the user's sampler are raised, too.
    """
    # np.unique imports it at its first call, which blocks the loop for 14 ms. Units do not need it.
    importlib.import_module("numpy.ma")
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    if term is not None and not term.is_current():
        raise StartError(f"a controller of a later term than {term.number} has taken over the journal in {journal}")
    loading = SamplerLoading.create(settings, system.log("sampler"))
    files = SamplerFiles(system.samplers, loading)
    hosts = {
        pattern: (files.current() if pattern == SYSTEM else None) or loading.from_settings(settings, pickled, pattern)
        for pattern in settings.samplers
    }
    made = {pattern: core_sampler(host, pattern) for pattern, host in hosts.items()}
    clock = ClockIdentity.now()
    recovered = None if journal is None else _recover(journal, clock, settings, made.values())
    core = core_config(
        settings, made.pop(SYSTEM), config, task_samplers=made, lease_key=key, part=PART, boot=uuid.uuid4().hex,
        timer=time.perf_counter, lives=partial(is_client_alive, system.clients),
        handed_over=partial(handed_over, system.clients),
    )  # fmt: skip
    controller = Controller(core, None if recovered is None else recovered.state, time.monotonic())
    _lose_former_units(controller, settings, sockets, term)
    journaling = loaded = None
    if journal is not None and recovered is not None:
        # other nodes see a commit on network storage only when the storage has it
        durable = settings.durability_mode == "sync" or (term is not None and is_network_storage(journal))
        late = settings.max_lag is not None and not durable
        loaded = LoadedStates(journal, durable or late)
        writer = Journal(journal, recovered, clock, durable or late, late)
        sync = JournalSync(writer) if late else None
        journaling = Journaling(controller, writer, clock, durable or late, sync, settings.call_timeout)
    states = StateFiles(system.states, loaded)
    service = ControllerService(controller, states, journaling, DepartedClients(system.clients), files, term)
    server = ServerLoop(
        service, key, max_payload=MAX_WRITTEN, served=service.serve_puts, commit=service.commit,
        longest=service.load.longest,
    )  # fmt: skip
    service.attach(server.call_soon)
    service.end, service.serves_one = server.stop, server.serves_one
    service.use_hosts(hosts, server)
    controller.context.measures.server_counters = server.counters
    secret = tls_context(settings.tls, server=True)
    for listener in sockets.controller:
        server.inherit(listener, secret)
    meter = ProcessMetrics(server, service.load)
    measures = (lambda: None) if journaling is None else journaling.measures
    collector = Collector(controller, server.call_soon, service.demand, meter, measures)
    service.on_measured, service.measure_servers = collector.units.take_answer, collector.measure_servers
    service.show_views = collector.show_views
    if sockets.metrics is not None:
        _serve_metrics(collector, controller, sockets.metrics, settings.metrics_compatible_names)
    collapse_regularly()
    return server


def _recover(folder: Path, clock: ClockIdentity, settings: Settings, samplers: Iterable[AnySampler]) -> Recovered:
    begun = time.perf_counter()
    recovered = recover(folder, clock, settings.total_storage_size, watched_tags(*samplers))
    if not recovered.fresh:
        logger.warning(
            "the controller resumes from the journal in %s: %d rows, %d records after the snapshot, %d bytes of an "
            "unfinished commit dropped; %.2f s",
            folder,
            recovered.state.row_count,
            recovered.records,
            recovered.torn,
            time.perf_counter() - begun,
        )
    return recovered


def _lose_former_units(controller: Controller, settings: Settings, sockets: Sockets, term: Term | None) -> None:
    """Note which units of systems before this one cannot come back."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    alone = all(listener.family == socket.AF_UNIX for listener in sockets.controller)
    if alone or term is not None:
        lose_units_of_nodes(controller.context, when, named=alone)
    if term is not None and settings.durability_values == "machine" and settings.durability_folder is not None:
        lose_missing_mirrors(controller.context, boot_ids(Path(settings.durability_folder)), when)


def _serve_metrics(
    collector: Collector, controller: Controller, listener: socket.socket, compatible_names: bool
) -> None:
    """Serve metrics, and write their endpoint into the configuration for attaching clients."""
    from transfer_queue.metrics.exposition import exposition
    from transfer_queue.node.controller.metrics_http import serve_metrics

    endpoint = serve_metrics(listener, lambda: exposition(collector.collect(), compatible_names))
    config = {**msgspec.json.decode(controller.context.client_config), "metrics_endpoint": endpoint}
    controller.context.client_config = msgspec.json.encode(config).decode()


# ---------------------------------------------------------------- huge pages
# A fork copies the page tables of the process, and the controller forks to write its state. In huge pages, the tables
# are a small fraction of their size. glibc requests huge pages for its own memory (`launcher._environment`), but not
# the allocator of Python's objects. After a fork, the kernel also divides each huge page to which the controller writes
# while the child exists. So a thread collapses the pages again and again (`MADV_COLLAPSE`, Linux 6.1). For memory that
# is in huge pages already, this costs microseconds.


HUGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with pages of 4 KiB, on ARM."""
SMALLEST = 64 << 20
"""Bytes of a process whose fork is fast enough without huge pages."""
PAUSE = 5.0
"""Seconds between two passes over the memory."""

_MADV_COLLAPSE = 25

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def collapse_regularly() -> None:
    """Begin to collapse the memory of this process, every PAUSE seconds, until the kernel collapses nothing."""
    threading.Thread(target=_repeat, args=(PAUSE,), name="huge pages", daemon=True).start()


def _repeat(pause: float) -> None:
    waiting = threading.Event()
    collapsed = 1
    while collapsed:
        waiting.wait(pause)
        if resident_bytes() >= SMALLEST:
            collapsed = collapse_memory()


def collapse_memory() -> int:
    """Collapse the anonymous memory of this process, page by page, so that faults of other threads do not wait long.

    Returns:
        The number of huge pages that the memory is in now. 0 if the kernel does not collapse memory.
    """
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        return sum(collapse(page, HUGE) for page in huge_pages_of(maps.read()))
    return 0


def huge_pages_of(maps: str) -> Iterator[int]:
    """Iterate over the addresses of the whole huge pages in private anonymous memory.

    Args:
        maps: The text of `/proc/self/maps`.
    """
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        addresses, permissions, inode, name = fields[0], fields[1], fields[4], "".join(fields[5:])
        if permissions != "rw-p" or inode != "0" or (name.startswith("[") and name != "[heap]"):
            continue
        first, end = (int(address, 16) for address in addresses.split("-"))
        yield from range(-(-first // HUGE) * HUGE, end - HUGE + 1, HUGE)


def collapse(address: int, nbytes: int) -> bool:
    """Collapse a range of memory. Returns whether it is in huge pages now."""
    return bool(_madvise(address, nbytes, _MADV_COLLAPSE) == 0)
