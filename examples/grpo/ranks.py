"""The collective operations of the data-parallel trainer ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from settings import TRAINER_RANKS, Settings


def join(settings: Settings, rank: int) -> None:
    """Join the process group of the ranks."""
    dist.init_process_group("gloo", init_method=settings.rendezvous.as_uri(), rank=rank, world_size=TRAINER_RANKS)


def leave() -> None:
    """Leave the process group."""
    dist.destroy_process_group()


def meet() -> None:
    """Wait until all ranks have reached this point, so that the wait is not measured as work."""
    dist.barrier()


def all_reduce_gradients(model: nn.Module, sums: Tensor) -> None:
    """Sum gradients and `sums` over the ranks in place, then divide the gradients by sums[0], the tokens."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients] + [sums])
    dist.all_reduce(flat)
    sums.copy_(flat[-len(sums) :])
    flat /= sums[0]
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each of these values over the ranks."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / TRAINER_RANKS).tolist()


def update(model: nn.Module, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Make one step of the optimizer with clipped gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
