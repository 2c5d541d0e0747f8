"""Published RL trainings, and the requests that they would make of a controller.

The rates of samples follow from published figures. Which requests a sample needs is an assumption, see `Style`.
"""

from __future__ import annotations

from dataclasses import dataclass

GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Training:
    """A published training.

    source: Where its figures are. samples: The answers of one step. tokens: The mean length of an answer, or the limit
    where no mean is published (`is_limit`).
    """

    name: str
    source: str
    gpus: int
    samples: int
    step_seconds: float
    tokens: int
    is_limit: bool = False

    @property
    def nodes(self) -> float:
        """Return the number of nodes of eight GPUs."""
        return self.gpus / GPUS_OF_A_NODE

    def samples_a_second(self, nodes: float | None = None) -> float:
        """Return the samples per second, on its own nodes or in proportion on another number of them."""
        return self.samples / self.step_seconds * (1 if nodes is None else nodes / self.nodes)


NEMO = "NeMo RL performance summary, v0.4, GRPO, 1-step off-policy"
AREAL = "AReaL v0.3 report; 512 prompts of 16 answers a step from arXiv:2505.24298"
TRAININGS = (
    Training(
        "DeepSeek-R1-Zero, 660B",
        "Nature 2025, supplement: 10,400 steps in 198 h",
        512,
        512,
        198 * 3600 / 10_400,
        32_768,
        True,
    ),
    Training("DeepSeek V3, 671B", NEMO, 512, 512, 77.9, 744),
    Training("Qwen3-235B", NEMO, 256, 512, 241.0, 5691),
    Training("Qwen3-32B", NEMO, 64, 2048, 215.0, 3207),
    Training("R1-Distill-Qwen-7B", AREAL, 192, 8192, 25.4 * 3.6, 27_648, True),
    Training("R1-Distill-Qwen-1.5B", AREAL, 128, 8192, 14.8 * 3.6, 27_648, True),
    Training("Llama-3.1-8B", NEMO, 16, 2048, 74.6, 1129),
)


@dataclass(frozen=True)
class Style:
    """The requests that one sample makes.

    single: Puts of one row.
    part: Tokens of an unfinished answer after which it is put, too; None for never.
    batch: Rows of each other request.
    stages: Tasks that fetch a sample in batches: a claim, a lookup and an acknowledgement each.
    batch_puts: Puts of a field in batches.
    tags: Updates of its tag.
    """

    name: str
    single: float
    batch: int
    stages: int
    batch_puts: int
    tags: float
    part: int | None = None

    def requests(self, tokens: int) -> dict[str, float]:
        """Return the number of requests of each kind for one sample whose answer has this number of tokens."""
        each = 1 / self.batch
        parts = 0 if self.part is None else tokens // self.part
        return {
            "put of a row": self.single + parts, "put of 64 rows": self.batch_puts * each, "claim": self.stages * each,
            "get of 64 rows": self.stages * each, "ack": self.stages * each, "tag update": self.tags,
        }  # fmt: skip


STYLES = (
    Style("in batches", 0, 64, 4, 4, 0),
    Style("answer by answer", 2, 64, 3, 2, 1),
    Style("every 1,024 tokens", 2, 64, 3, 2, 1, part=1024),
)
"""How producers put: all fields in batches; or each answer when it ends and its reward, with a status in its tag; or
also each part of an unfinished answer (partial rollouts that survive their process)."""
