from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer as EventDrivenReplayBuffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync as EventDrivenReplayBufferAsync
