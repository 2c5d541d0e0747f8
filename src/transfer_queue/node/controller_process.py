"""The process of the controller: what it is built of."""

from __future__ import annotations

from typing import Any

import msgspec

from transfer_queue.config import Settings, sampler_from
from transfer_queue.core.controller import Controller
from transfer_queue.errors import SamplerError
from transfer_queue.net.server import Server
from transfer_queue.node.controller_service import ControllerService
from transfer_queue.node.paths import SystemFolder
from transfer_queue.node.samplers import PickledSampler, load


def build_controller(system: SystemFolder, config: str, key: bytes, sampler: PickledSampler | None) -> Server:
    """The controller's server, listening. config: JSON text with the "settings" of `config.Settings`.

    Raises whatever the user's sampler raises when it is made.
    """
    settings = Settings.from_json(msgspec.json.decode(config)["settings"])
    made: Any
    if sampler is not None:
        made = sampler_from(load(sampler))
    elif settings.sampler is not None:
        made = sampler_from(settings.sampler)
    else:
        raise SamplerError("the settings name no sampler and none came with them; pass the object to the launcher")
    controller = Controller(made, config=config, capacity=settings.total_storage_size)
    server = Server(ControllerService(controller), key)
    server.listen(str(system.controller))
    return server
