"""Rollout worker: claims prompts, generates eight answers to each, and puts each group when it is finished."""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

import task
from events import WAIT, work
from model import Transformer, load
from objective import jagged
from sampling import Answer, generate
from settings import ANSWERS, PROMPTS, WEIGHTS, Settings, train_partition

TOGETHER = 8
"""Most prompts that are answered in one batch."""


def rollout(settings: Settings, name: str) -> None:
    """Answer prompts until their partition is sealed and empty."""
    client = tq.get_client()
    model = Transformer(len(task.ALPHABET)).eval()
    version = -1
    while True:
        prompts, ended = claim_prompts(name)
        if ended:
            return
        if not len(prompts):
            continue
        with work("rollout", name) as event:
            version = refresh(model, version)
            texts = client.get_data(prompts)["prompt"].tolist()
            tags = prompts.custom_meta
            for position, answers in generate(model, texts, ANSWERS):
                put_group(tags[position], texts[position], answers, version)
                client.clear_samples(prompts[position])  # answered, so no worker must answer it again
            event |= {"step": tags[0]["step"], "samples": len(texts) * ANSWERS, "version": version}


def claim_prompts(name: str) -> tuple[tq.BatchMeta, bool]:
    """Wait for one prompt, and claim more if they are ready. Their tags get this worker's name, in case it dies."""
    client = tq.get_client()
    claimed: list[tq.BatchMeta] = []
    ended = False
    while len(claimed) < TOGETHER:
        meta, ended = client.await_batch(
            ["prompt"], 1, PROMPTS, "rollout", {"sampler": "SequentialSampler"}, timeout=0 if claimed else WAIT
        )
        if not len(meta):
            break
        claimed.append(meta)
    prompts = tq.BatchMeta.concat(claimed)
    if claimed:
        prompts.update_custom_meta([{"worker": name}] * len(prompts))
        client.set_custom_meta(prompts)
    return prompts, ended and not claimed


def refresh(model: Transformer, version: int) -> int:
    """Load the newest weights if the model has older ones; return their version."""
    newest = tq.kv_list(WEIGHTS)[WEIGHTS]["policy"]["version"]
    if newest == version:
        return version
    data = tq.kv_batch_get(["policy"], WEIGHTS)
    load(model, data["weights"][0])
    return int(data["version"][0])


def columns(prompt: str, answers: list[Answer]) -> dict[str, list[Any]]:
    """Return the fields of the answers to one prompt."""
    start = task.encode(prompt)
    return {
        "prompt": [prompt] * len(answers),
        "answer": [task.decode(answer.tokens) for answer in answers],
        "tokens": [torch.tensor(start + answer.tokens) for answer in answers],
        "logprobs": [torch.tensor(answer.logprobs) for answer in answers],
    }


def put_group(tag: dict[str, int | str], prompt: str, answers: list[Answer], version: int) -> None:
    """Put the answers to one prompt, as one group, into the partition of their step."""
    fields = columns(prompt, answers)
    group = f"{tag['step']}/{tag['number']}"
    tq.kv_batch_put(
        keys=[f"{group}/{n}" for n in range(len(answers))],
        partition_id=train_partition(int(tag["step"])),
        fields=TensorDict(
            {
                "prompt": NonTensorStack(*fields["prompt"]),
                "answer": NonTensorStack(*fields["answer"]),
                "tokens": jagged(fields["tokens"]),
                "logprobs": jagged(fields["logprobs"]),
            },
            batch_size=len(answers),
        ),
        tags=[{"total_lengths": len(row), "policy_version": version} for row in fields["tokens"]],
        group_ids=[group] * len(answers),
    )
