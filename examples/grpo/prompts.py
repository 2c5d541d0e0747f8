"""Puts the prompts of each step as the policy advances, and puts them again if their worker has died."""

from __future__ import annotations

import random

import transfer_queue as tq

import task
from settings import PROMPTS, Settings, train_partition


def prompts_of(settings: Settings, step: int) -> list[str]:
    """Return the prompts of a step, which are the same in every run with this seed."""
    rng = random.Random(f"{settings.seed} {step}")
    return [task.draw(rng).prompt for _ in range(settings.prompts)]


class PromptSource:
    """The prompts of a run. A prompt stays in its partition until its answers are put."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._released = 0
        self._suspects: set[str] = set()
        self.again = 0
        """Prompts that were put a second time."""

    def release(self, version: int) -> None:
        """Put the prompts of all steps that may be answered with this version of the policy.

        Step s is trained on from version s on, so its samples are at most `settings.staleness` versions behind.
        """
        ahead = min(self._settings.steps, version + 1 + self._settings.staleness)
        for step in range(self._released, ahead):
            prompts = prompts_of(self._settings, step)
            tq.kv_batch_put(
                keys=[f"{step}/{number}" for number in range(len(prompts))],
                partition_id=PROMPTS,
                fields={"prompt": prompts},
                tags=[{"step": step, "number": number} for number in range(len(prompts))],
            )
        self._released = max(self._released, ahead)

    def redo(self, alive: set[str], version: int) -> None:
        """Put prompts again that were claimed, are not answered, and belong to no living worker.

        A living worker writes its name into the tags of its prompts just after it has claimed them, so a prompt is put
        again only if two calls have found it in this state.
        """
        client = tq.get_client()
        indexes, consumed = client.get_consumption_status("rollout", PROMPTS)
        if indexes is None or consumed is None:
            return
        tags = tq.kv_list(PROMPTS)[PROMPTS]
        claimed = client.kv_retrieve_keys(indexes[consumed == 1].tolist(), PROMPTS)
        lost = {key for key in claimed if key in tags and tags[key].get("worker") not in alive}
        sure, self._suspects = lost & self._suspects, lost - self._suspects
        for key in sorted(sure):
            prompt = tq.kv_batch_get([key], PROMPTS)["prompt"].tolist()
            tag = {name: tags[key][name] for name in ("step", "number")}
            tq.kv_clear([key], PROMPTS)
            if not answered(key, tag["step"], version):
                tq.kv_batch_put([key], PROMPTS, {"prompt": prompt}, tags=[tag])
                self.again += 1


def answered(key: str, step: int, version: int) -> bool:
    """Return whether the worker died after it had put the answers and before it cleared the prompt."""
    return step < version or len(tq.get_client().kv_retrieve_meta([f"{key}/0"], train_partition(step))) > 0
