"""Makes verl run on the CPU: a platform, its training engine, and a rollout backend named `transformers`.

verl imports this module in every process, because VERL_USE_EXTERNAL_MODULES names it. It uses only the registries that
verl has for other hardware and other inference engines.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry


class CpuModule(ModuleType):
    """Has the functions of `torch.cuda` that verl calls: those of `torch.cpu`, and the others without an effect."""

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        """Return the free and the total memory of the device, in bytes."""
        return 0, 0

    @staticmethod
    def get_device_name() -> str:
        """Return the name by which verl finds the operations a second of a device."""
        return "CPU"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *args, **kwargs: 0)


class PlatformCpu(PlatformBase):
    """A machine without accelerators. Ray gets a logical GPU for each worker, see `run.py`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuModule("cpu")

    def is_available(self) -> bool:
        """Return True."""
        return True

    def current_device(self) -> Any:
        """Return what verl passes to `Tensor.to`."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the CPU."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator of the CPU."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return that there is none."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable that Ray sets for a logical GPU."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing."""
        yield

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return the resource of which verl asks Ray for one per worker."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return none."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False."""
        return False

    def cudart(self) -> Any:
        """Return None."""
        return None


class CpuTrainingWorker(TrainingWorker):
    """A training worker whose process group is gloo alone; verl would name the backend of the CPU twice."""

    def __init__(self, config: Any) -> None:
        if not torch.distributed.is_initialized():
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        super().__init__(config)


def transformers_replica() -> type[RolloutReplica]:
    """Return the class of the rollout servers; imported only by the trainer."""
    from rollout_server import TransformersReplica

    return TransformersReplica


set_platform(PlatformCpu())
EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)
ActorRolloutRefWorker.actor_worker_cls = CpuTrainingWorker
ActorRolloutRefWorker.ref_worker_cls = CpuTrainingWorker
RolloutReplicaRegistry.register("transformers", transformers_replica)
_ROLLOUT_REGISTRY["transformers", "async"] = "rollout_server.TransformersRollout"
