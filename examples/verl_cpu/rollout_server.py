"""Stands in for vLLM or SGLang: a server that makes tokens with `transformers`; the trainer sends it the weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import ray
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

SERVER = "transformers_server_{}"


class TransformersServer:
    """A Ray actor that answers requests for tokens. Requests that arrive together are one batch.

    Args:
        model_path: The folder of the model. Its configuration is read; the weights come from the trainer.
        response_length: The number of tokens of a response.
    """

    def __init__(self, model_path: str, response_length: int) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path)).eval()
        self._length = response_length
        self._version: int | None = None
        self._waiting: list[tuple[list[int], dict[str, Any], asyncio.Future[TokenOutput]]] = []

    async def set_weights(self, weights: dict[str, torch.Tensor], version: int | None) -> None:
        """Replace the weights; responses name this version."""
        self._model.load_state_dict(weights, strict=False)
        self._version = version

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **others: Any
    ) -> TokenOutput:
        """Return a response to a prompt, with the log-probability of each token."""
        answer: asyncio.Future[TokenOutput] = asyncio.get_running_loop().create_future()
        self._waiting.append((list(prompt_ids), sampling_params, answer))
        if len(self._waiting) == 1:
            await asyncio.sleep(0.01)  # lets the other requests of the batch arrive
            self._answer(*zip(*self._take()))
        return await answer

    def _take(self) -> list[tuple[list[int], dict[str, Any], asyncio.Future[TokenOutput]]]:
        taken, self._waiting = self._waiting, []
        return taken

    def _answer(
        self,
        prompts: tuple[list[int], ...],
        params: tuple[dict[str, Any], ...],
        answers: tuple[asyncio.Future[TokenOutput], ...],
    ) -> None:
        temperature = torch.tensor([[each.get("temperature", 1.0)] for each in params])
        tokens, log_probs = self._sample(prompts, temperature)
        for answer, ids, probs in zip(answers, tokens.tolist(), log_probs.tolist()):
            answer.set_result(
                TokenOutput(
                    token_ids=ids,
                    log_probs=probs,
                    stop_reason="completed",
                    extra_fields={"global_steps": self._version},
                )
            )

    @torch.no_grad()
    def _sample(self, prompts: tuple[list[int], ...], temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        chosen, log_probs = [], []
        for _ in range(self._length):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            logits = self._model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            scaled = torch.log_softmax(logits / temperature.clamp(min=1e-6), -1)
            sampled = torch.multinomial(scaled.exp(), 1)
            token = torch.where(temperature > 0, sampled, logits.argmax(-1, keepdim=True))
            chosen.append(token)
            log_probs.append(scaled.gather(1, token))
            ids, mask = torch.cat([ids, token], 1), torch.cat([mask, torch.ones_like(token)], 1)
        return torch.cat(chosen, 1), torch.cat(log_probs, 1)

    async def nothing(self, **others: Any) -> None:
        """Do nothing: there is no memory of a device to free."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class TransformersReplica(RolloutReplica):
    """Starts the server of a replica."""

    async def launch_servers(self) -> None:
        """Start the server and remember its handle."""
        name = SERVER.format(self.replica_rank)
        server = ray.remote(TransformersServer).options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
        self._server_handle = server.remote(self.model_config.path, self.config.response_length)
        self._server_address = name
        self.servers = [self._server_handle]


class TransformersRollout(BaseRollout):
    """In a worker of the trainer: sends the weights to the server of its replica."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None, **others: Any
    ) -> None:
        """Send the weights, which arrive one by one, in one message. All workers of a replica take part."""
        complete = {name: tensor.detach().cpu().float() for name, tensor in weights}
        if torch.distributed.get_rank() == 0:
            await ray.get_actor(SERVER.format(0)).set_weights.remote(complete, global_steps)
