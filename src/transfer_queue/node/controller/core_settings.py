"""The configuration of the core that follows from the settings of a system."""

from __future__ import annotations

from functools import partial
from typing import Any

from transfer_queue.config.settings import Settings
from transfer_queue.core.configuration import CoreConfig, MaxLag, Watermarks
from transfer_queue.core.samplers.calls import AnySampler
from transfer_queue.wire.objects.object_values import decode_tag_value_copied


def core_config(settings: Settings, sampler: AnySampler, client_config: str, **environment: Any) -> CoreConfig:
    """Return the configuration of a controller.

    Args:
        settings: The settings of the system.
        sampler: The sampler of the system.
        client_config: JSON text that clients get when they attach.
        environment: Other fields of `CoreConfig`, which the process of the controller knows.
    """
    return CoreConfig(
        sampler,
        client_config=client_config,
        capacity=settings.total_storage_size,
        max_deliveries=settings.max_deliveries,
        replicas=settings.replicas,
        marks=Watermarks(settings.offload_high, settings.offload_low),
        max_lag=None if settings.max_lag is None else MaxLag(*settings.max_lag),
        strict=settings.strict,
        timeline_events=settings.timeline_events,
        values=partial(decode_tag_value_copied, allow_pickle=settings.allow_pickle),
        **environment,
    )
