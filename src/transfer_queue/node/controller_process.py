"""The process of the controller: what it is built of."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy.ma  # noqa: F401  (np.unique imports it at its first call: 14 ms in which the loop would answer nobody)

from transfer_queue.config import Settings, sampler_from
from transfer_queue.core.controller import Controller
from transfer_queue.errors import SamplerError
from transfer_queue.messages import SystemStatus
from transfer_queue.net.server import Server
from transfer_queue.node.controller_service import ControllerService
from transfer_queue.node.paths import SystemFolder
from transfer_queue.node.samplers import PickledSampler, load

METRICS_SECONDS = 5.0  # for the loop to answer one reader of metrics


def build_controller(system: SystemFolder, config: str, key: bytes, sampler: PickledSampler | None) -> Server:
    """The controller's server, listening. config: JSON text with the "settings" of `config.Settings`.

    Raises whatever the user's sampler raises when it is made.
    """
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    made: Any
    if sampler is not None:
        made = sampler_from(load(sampler), settings.sampler_args)
    elif settings.sampler is not None:
        made = sampler_from(settings.sampler, settings.sampler_args)
    else:
        raise SamplerError("the settings name no sampler and none came with them; pass the object to the launcher")
    controller = Controller(made, config=config, capacity=settings.total_storage_size, timer=time.perf_counter)
    service = ControllerService(controller)
    server = Server(service, key, max_payload=0)  # requests to a controller carry none
    service.attach(server.call_soon)
    controller.of_connections = server.counters
    server.listen(str(system.controller))
    if settings.metrics_enabled:
        _serve_metrics(server, controller, settings.metrics_port)
    return server


def _serve_metrics(server: Server, controller: Controller, port: int) -> None:
    """Serves metrics, and tells attaching clients where. The status is taken in the controller's own loop."""
    from concurrent.futures import Future

    from transfer_queue.node.metrics_http import serve_metrics

    def snapshot() -> SystemStatus:
        future: Future[SystemStatus] = Future()

        def take() -> None:
            future.set_result(controller.status(time.monotonic()))

        server.call_soon(take)
        return future.result(METRICS_SECONDS)

    endpoint = serve_metrics(port, snapshot)
    config = {**msgspec.json.decode(controller.config), "metrics_endpoint": endpoint}
    controller.config = msgspec.json.encode(config).decode()
