"""Replay buffers for verl's V1 trainers. verl loads them by `trainer.v1.sampler.custom_sampler`."""

from __future__ import annotations

from transfer_queue.integrations.verl.replay_buffer import EventDrivenReplayBuffer, EventDrivenReplayBufferAsync

__all__ = ["EventDrivenReplayBuffer", "EventDrivenReplayBufferAsync"]
