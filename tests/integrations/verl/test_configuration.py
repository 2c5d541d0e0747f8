"""verl makes the replay buffers by its configuration, with the settings that it gives its own ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from verl.trainer.ppo.v1 import get_trainer_cls

from transfer_queue.integrations.verl import EventDrivenReplayBuffer, EventDrivenReplayBufferAsync

pytestmark = pytest.mark.filterwarnings("ignore:.*load_extern_type.*deprecated:FutureWarning")  # verl's own call

CHOSEN = "trainer.v1.sampler.custom_sampler."
SETTINGS = [
    "trainer_mode", "max_off_policy_threshold", "max_off_policy_strategy", "filter_groups_metric", "train_batch_size",
    "gen_batch_size", "max_inflight_gen_batches", "sync_refill_failed_groups",
]  # fmt: skip


def replay_buffer(mode: str, *settings: str) -> Any:
    """Return the replay buffer that a trainer of verl makes."""
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        config = compose("ppo_trainer", [f"trainer.v1.trainer_mode={mode}", *settings])
    trainer = object.__new__(get_trainer_cls(mode))
    trainer.config, trainer.trainer_mode = config, mode
    return trainer._build_replay_buffer()


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["data.gen_batch_size=32"],
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_inflight_gen_batches=3"],
        ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc", "data.train_batch_size=12"],
        ["trainer.v1.sampler.sync_refill_failed_groups=True"],
        ["trainer.v1.sampler.max_off_policy_threshold=null", "trainer.v1.sampler.max_off_policy_strategy=wait"],
    ],
)
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("sync", EventDrivenReplayBuffer),
        ("colocate_async", EventDrivenReplayBufferAsync),
        ("separate_async", EventDrivenReplayBufferAsync),
    ],
)
def test_the_settings_are_those_of_the_replay_buffer_of_verl(mode: str, kind: type, settings: list[str]) -> None:
    chosen = [f"{CHOSEN}path=pkg://transfer_queue.integrations.verl", f"{CHOSEN}name={kind.__name__}"]
    ours, stock = replay_buffer(mode, *settings, *chosen), replay_buffer(mode, *settings)
    assert type(ours) is kind
    assert {name: getattr(ours, name) for name in SETTINGS} == {name: getattr(stock, name) for name in SETTINGS}


def test_sampler_kwargs_reach_it() -> None:
    chosen = [f"{CHOSEN}path=pkg://transfer_queue.integrations.verl", f"{CHOSEN}name=EventDrivenReplayBuffer"]
    assert replay_buffer("sync", *chosen)._report_after == 60.0
    assert replay_buffer("sync", *chosen, "+trainer.v1.sampler.sampler_kwargs.report_after=5")._report_after == 5.0
