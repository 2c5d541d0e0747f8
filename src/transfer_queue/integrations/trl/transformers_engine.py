"""An inference engine that generates with a model of transformers: for tests, examples and small models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from transfer_queue.errors import InvalidArgumentError
from transfer_queue.integrations.trl.producers import Completion
from transfer_queue.integrations.trl.rollout_partition import check_positive


class TransformersEngine:
    """Generate completions with `model.generate` of transformers.

    Args:
        model: A causal language model of transformers, on the device on which it should generate.
        tokenizer: Its tokenizer. Its padding side is set to "left".
        max_new_tokens: The maximum number of tokens of a completion.
        temperature: The temperature of sampling. It must be that of the trainer. Default: 1.0.

    Raises:
        InvalidArgumentError: An argument is not valid, or the tokenizer has no token to pad with.

    Example:
        A generator process::

            model = AutoModelForCausalLM.from_pretrained("my-model")
            tokenizer = AutoTokenizer.from_pretrained("my-model")
            generate_rollouts(TransformersEngine(model, tokenizer, max_new_tokens=256))
    """

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int, temperature: float = 1.0) -> None:
        check_positive("max_new_tokens", max_new_tokens)
        check_positive("temperature", temperature)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
            raise InvalidArgumentError(
                f"tokenizer must have a token that ends a text and one to pad with, got eos_token="
                f"{tokenizer.eos_token!r} and pad_token={tokenizer.pad_token!r}; set both"
            )
        tokenizer.padding_side = "left"
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._max_new_tokens = max_new_tokens
        self._temperature = temperature

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """See `Engine`. Raises InvalidArgumentError if the model has no such parameters."""
        result = self._model.load_state_dict(weights, strict=False)
        if result.unexpected_keys:
            raise InvalidArgumentError(
                f"the model of this generator must be that of the trainer, but it has no parameters "
                f"{result.unexpected_keys[:3]}; load the same checkpoint in both"
            )

    def generate(self, rows: Sequence[Mapping[str, Any]], count: int) -> list[list[Completion]]:
        """See `Engine`."""
        prompts = [self._prompt_ids(row["prompt"]) for row in rows]
        repeated = [ids for ids in prompts for _ in range(count)]
        sampled, logprobs = self._sample(repeated)
        answers = []
        for row, (ids, tokens, values) in enumerate(zip(repeated, sampled, logprobs)):
            text = self._tokenizer.decode(tokens, skip_special_tokens=True)
            messages = not isinstance(rows[row // count]["prompt"], str)
            content = [{"role": "assistant", "content": text}] if messages else text
            answers.append(Completion(ids, tokens, values, content))
        return [answers[first : first + count] for first in range(0, len(answers), count)]

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        text = self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def _sample(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens of a completion of each prompt, and their log-probabilities."""
        device = self._model.device
        padded = self._tokenizer.pad({"input_ids": list(prompts)}, return_tensors="pt").to(device)
        end = self._tokenizer.eos_token_id
        output = self._model.generate(
            input_ids=padded["input_ids"], attention_mask=padded["attention_mask"], do_sample=True,
            max_new_tokens=self._max_new_tokens, temperature=self._temperature, top_k=0, top_p=1.0, eos_token_id=end,
            pad_token_id=self._tokenizer.pad_token_id, return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        tokens = output.sequences[:, padded["input_ids"].shape[1] :]
        steps = zip(output.scores, tokens.unbind(1))
        chosen = torch.stack([s.float().log_softmax(-1).gather(-1, t[:, None])[:, 0] for s, t in steps], dim=1)
        ends = (tokens == end).int().cumsum(-1)
        lengths = ((ends - (tokens == end).int()) == 0).sum(-1).tolist()  # up to the first end, which is included
        cut = [row[:length] for row, length in zip(tokens.tolist(), lengths)]
        return cut, [row[:length] for row, length in zip(chosen.tolist(), lengths)]
