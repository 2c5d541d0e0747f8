"""The features of the controller, one line for each.

A line names the module of a feature, whose handlers are registered when it is imported, and whose services run when
they are needed. Hooks are called in this order.
"""

from __future__ import annotations

from types import ModuleType

from transfer_queue.core import absent_clients, activity, checkpoints, jobs, locks, wakeups
from transfer_queue.core.claims import (
    claim_handler,
    consumption_handlers,
    deal_jobs,
    plan,
    row_leases,
)
from transfer_queue.core.context import CoreService
from transfer_queue.core.puts import decide, equal_values, partitions
from transfer_queue.core.queries import lookups, partition_view
from transfer_queue.core.reports import deadlock_detector, explain, sample_report, status, waits
from transfer_queue.core.timeline import abandoned_samples, recorder
from transfer_queue.core.units import migration_planner, mirror_writer, mover, store_servers, unit_handlers

FEATURES: tuple[ModuleType, ...] = (
    recorder,
    abandoned_samples,
    checkpoints,
    activity,
    row_leases,
    locks,
    absent_clients,
    partitions,
    wakeups,
    jobs,
    decide,
    equal_values,
    deal_jobs,
    claim_handler,
    consumption_handlers,
    plan,
    partition_view,
    lookups,
    mover,
    migration_planner,
    unit_handlers,
    waits,
    deadlock_detector,
    mirror_writer,
    store_servers,
    explain,
    sample_report,
    status,
)

SERVICES: tuple[type[CoreService], ...] = tuple(
    kind
    for module in FEATURES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, CoreService) and kind.__module__ == module.__name__
)
"""The services of the features."""
