"""TransferQueueRolloutWorker: what TRL's AsyncGRPOTrainer asks of a rollout worker, through the queue."""

from __future__ import annotations

import inspect
import json
import math
import queue
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.experimental.async_grpo import AsyncGRPOTrainer

from transfer_queue.attachment import current_client
from transfer_queue.client.checkpoint import checkpoint_folder
from transfer_queue.errors import InvalidArgumentError, WaitTimeoutError
from transfer_queue.integrations.trl.policy_weights import mark_stopped, partition_of, publish_weights
from transfer_queue.integrations.trl.prompt_feed import PromptFeed, Prompts
from transfer_queue.integrations.trl.rollout_buffer import RolloutBuffer
from transfer_queue.integrations.trl.rollout_partition import (
    GENERATE,
    LEASE,
    ROLLOUTS,
    SCORE,
    TRAIN,
    check_positive,
    is_worked_on,
    progress_of,
)
from transfer_queue.interface import load_checkpoint, save_checkpoint
from transfer_queue.messages.reports.progress import PartitionProgress

FOLDER = "transfer_queue"
"""The folder of the queue in a checkpoint of the trainer."""


class TransferQueueRolloutWorker(TrainerCallback):  # type: ignore[misc]  # transformers is not installed with mypy
    """Give the samples of a queue to TRL's `AsyncGRPOTrainer`, and its weights to the generators.

    Prompts, completions, rewards and advantages are fields of samples of one partition. Generators
    (`generate_rollouts`) and the reward stage (`score_rollouts`) are separate processes, on any machine. The worker
    puts the prompts, publishes the weights of each version, and takes whole groups of samples under leases, which it
    acknowledges when an optimizer step has used them. It is also the weight transfer and a callback of the trainer:
    `trainer_arguments` returns the arguments for the installed version of TRL (1.4 to 1.16).

    The partition admits prompts so that no sample is more than `args.max_staleness` versions old when it is trained on,
    if samples are trained on in the order of their prompts. Each checkpoint of the trainer contains the queue.

    Args:
        prompts: The dataset: rows with the column "prompt" and the columns that the reward functions need.
        args: The `AsyncGRPOConfig` of the trainer.
        epochs: How often the dataset is repeated; the partition is sealed afterwards. Default: without end.
        seed: The seed of the order of the prompts, which differs in each epoch. Default: the order of the dataset.
        checkpoint: The checkpoint of the trainer from which the training is resumed. Its queue is loaded. Default:
            none, and the partitions are cleared when the training begins.
        partition_id: The name of the partition. Default: "rollouts".
        samples_per_version: The number of samples that are trained on for each version of the weights. Default: the
            batch size of an optimizer step times `args.weight_sync_steps`. Required with `args.token_budget`.
        lease: Seconds after which the samples of a killed trainer are delivered again. Default: 30.
        producer_timeout: Seconds without a generator or without a reward stage after which the training fails.
            Default: 300, in which an engine such as vLLM has started.

    Raises:
        InvalidArgumentError: An argument is not valid, or the trainer and the producers would wait for each other.

    Example:
        ::

            tq.init()
            worker = TransferQueueRolloutWorker(dataset, args)
            trainer = AsyncGRPOTrainer(
                model="my-model", reward_funcs=reward, args=args, train_dataset=dataset, **worker.trainer_arguments()
            )
            trainer.train()
    """

    def __init__(
        self,
        prompts: Prompts,
        args: Any,
        *,
        epochs: int | None = None,
        seed: int | None = None,
        checkpoint: str | Path | None = None,
        partition_id: str = ROLLOUTS,
        samples_per_version: int | None = None,
        lease: float = LEASE,
        producer_timeout: float = 300.0,
    ) -> None:
        for name, value in (("lease", lease), ("producer_timeout", producer_timeout)):
            check_positive(name, value)
        if not len(prompts):
            raise InvalidArgumentError("prompts must have at least one row, got none")
        self._args = args
        self._partition = partition_id
        self._group_size = int(args.num_generations)
        self._rows_per_version = _rows_per_version(args, samples_per_version)
        _check_no_deadlock(args, self._rows_per_version)
        self._timeout = producer_timeout
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._loaded_step: int | None = None
        self._version = -1
        self._is_open = self._has_ended = False
        self._feed = PromptFeed(prompts, partition_id, self._group_size, epochs, seed)
        self._missing: dict[str, float] = {}
        self._batches: deque[list[int]] = deque()
        self._used: list[int] = []
        self.rollout_buffer = RolloutBuffer(partition_id, self._group_size, lease, self.check_health)
        """The buffer from which the trainer takes samples."""
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        """Metrics that TRL 1.16 logs: none. `TransferQueueCallback` logs those of the queue."""

    @property
    def version(self) -> int:
        """The version of the policy that was published last: 0 for the initial weights, -1 before them."""
        return self._version

    def trainer_arguments(self, callbacks: Iterable[Any] = ()) -> dict[str, Any]:
        """Return the arguments of `AsyncGRPOTrainer` with which it uses this worker.

        Args:
            callbacks: Other callbacks of the trainer. Default: none.

        Returns:
            `rollout_worker`, `callbacks`, and `weight_transfer` if the installed version of TRL has it.

        Example:
            ::

                trainer = AsyncGRPOTrainer(model="my-model", args=args, **worker.trainer_arguments())
        """
        known = inspect.signature(AsyncGRPOTrainer.__init__).parameters
        arguments: dict[str, Any] = {"rollout_worker": self, "callbacks": [*callbacks, self]}
        return arguments | ({"weight_transfer": self} if "weight_transfer" in known else {})

    # ------------------------------------------------------------ what TRL asks of a rollout worker

    def start(self) -> None:
        """Begin to put prompts. The trainer calls this after it has sent the first weights."""
        self._open()
        self._feed.start()

    def stop(self) -> None:
        """Stop the training: seal the partition, so that all producers end. Further calls do nothing."""
        if self._is_open:
            self._is_open, self._has_ended = False, True
            mark_stopped(self._partition)
            current_client().seal(self._partition)
            self._feed.stop()

    def update_model_version(self, model_version: int) -> None:
        """Report that the weights that were sent last are in force, so that more prompts are admitted.

        Args:
            model_version: The trainer's number of these weights, which it counts from the start of its process.
        """
        self.rollout_buffer.offset = model_version - self._version
        current_client().set_policy_version(self._partition, self._version)

    def check_health(self, stale_after_s: float = math.inf) -> None:
        """Raise an error if no more samples will come.

        Args:
            stale_after_s: Seconds without a producer after which it is gone, if this is shorter than
                `producer_timeout`.

        Raises:
            WaitTimeoutError: No generator or no reward stage has worked for this time. Or the partition is sealed, and
                the trainer has all of its samples.
        """
        if self._feed.failure is not None:
            raise self._feed.failure
        progress = progress_of(self._partition)
        if progress is not None and progress.sealed and progress.rows == _dealt(progress):
            raise WaitTimeoutError(
                f"partition {self._partition!r} is sealed, and the trainer has all of its samples, but its last step "
                f"is not reached: choose fewer steps (max_steps), or more epochs of the prompts"
            )
        limit = min(self._timeout, stale_after_s)
        for task, function in ((GENERATE, "generate_rollouts"), (SCORE, "score_rollouts")):
            now = time.monotonic()
            if is_worked_on(self._partition, task):
                self._missing.pop(task, None)
            elif now - self._missing.setdefault(task, now) >= limit:
                raise WaitTimeoutError(
                    f"no process has worked for task {task!r} of partition {self._partition!r} for {limit:g} s, so the "
                    f"trainer would wait forever: start a process that calls {function}({self._partition!r}), and "
                    f"look at the logs of those that have ended"
                )

    # ------------------------------------------------------------ what TRL asks of a weight transfer

    def init_weight_transfer(self) -> None:
        """Do nothing: generators fetch the weights by themselves."""

    def pause(self) -> None:
        """Do nothing: a generator loads new weights between two batches."""

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Do nothing: the published weights remain until the system ends."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish the weights of the next version for the generators.

        Args:
            iterator: Names and tensors.
        """
        self._open()
        publish_weights(iterator, self._partition, self._version + 1, self._group_size)
        self._version += 1

    # ------------------------------------------------------------ what the trainer reports to a callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that a resumed training has the queue of its checkpoint, and observe which samples a batch has."""
        if not state.is_world_process_zero:
            return
        self._open()  # TRL 1.4 has sent the first weights already, later versions send them now
        if state.global_step and not args.ignore_data_skip:
            raise InvalidArgumentError(
                "ignore_data_skip must be True in the arguments of a training that is resumed, got False: the trainer "
                "would skip samples that it has not trained on"
            )
        if state.global_step != (self._loaded_step or 0):
            raise InvalidArgumentError(
                f"the training begins at step {state.global_step}, but the queue is of step {self._loaded_step or 0}: "
                f"pass the same folder as TransferQueueRolloutWorker(checkpoint=...) and as "
                f"train(resume_from_checkpoint=...)"
            )
        loader = kwargs["train_dataloader"]
        loader = getattr(loader, "base_dataloader", loader)
        collate = loader.collate_fn

        def observed(examples: Any) -> Any:
            self._batches.append(self._positions_of(examples))
            return collate(examples)

        loader.collate_fn = observed

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that a micro-batch was used, whose gradients are accumulated."""
        if state.is_world_process_zero:
            self._used += self._batches.popleft()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Acknowledge the samples that this step has used, and drop those that the trainer has left out."""
        if state.is_world_process_zero:
            self._used += self._batches.popleft()
            self.rollout_buffer.release(1 + max(self._used), set(self._used))
            self._used.clear()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the queue into the checkpoint of the trainer."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / FOLDER
            save_checkpoint(folder, metadata={"step": state.global_step, "policy_version": self._version})

    # ------------------------------------------------------------ internal

    def _open(self) -> None:
        """Create the partitions of this training, or load them."""
        if self._is_open:
            return
        if self._has_ended:
            raise InvalidArgumentError("this TransferQueueRolloutWorker was stopped; make a new one for each training")
        client = current_client()
        if self._checkpoint is not None:
            folder = self._checkpoint / FOLDER
            load_checkpoint(folder)
            saved = json.loads((folder / checkpoint_folder.METADATA).read_text())["user_metadata"]
            # The first weights that the trainer sends are those of the checkpoint, and no new version.
            self._version, self._loaded_step = saved["policy_version"] - 1, saved["step"]
        else:
            for partition in (self._partition, partition_of(self._partition)):
                client.clear_partition(partition)
            client.create_partition(
                self._partition, self._group_size, max_staleness=self._args.max_staleness,
                rows_per_version=self._rows_per_version, trained_by=TRAIN,
            )  # fmt: skip
        self._is_open = True

    def _positions_of(self, examples: Any) -> list[int]:
        """Return the positions of the samples of a batch. TRL 1.4 collates samples, 1.16 rows of samples."""
        samples = examples if isinstance(examples[0], dict) else [s for row in examples[0] for s in row.samples]
        return [self.rollout_buffer.position_of(sample["input_ids"]) for sample in samples]


def _dealt(progress: PartitionProgress) -> int:
    """Return how many live samples the trainer has, or has trained on."""
    return sum(task.claimed + task.consumed for task in progress.tasks if task.name == TRAIN)


def _rows_per_version(args: Any, samples_per_version: int | None) -> int:
    if samples_per_version is None:
        if getattr(args, "token_budget", 0) != 0 and hasattr(args, "token_budget"):
            raise InvalidArgumentError(
                f"samples_per_version is required if token_budget is not 0, got token_budget={args.token_budget}: the "
                f"number of samples of a step is not known; pass its mean, or token_budget=0"
            )
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return int(batch * args.weight_sync_steps)
    check_positive("samples_per_version", samples_per_version)
    return samples_per_version


def _check_no_deadlock(args: Any, rows_per_version: int) -> None:
    """Raise InvalidArgumentError if the trainer would wait for samples that are admitted only after its next step.

    The trainer takes one micro-batch ahead. The partition admits whole groups.
    """
    ahead = args.per_device_train_batch_size * args.world_size
    cut = args.num_generations - math.gcd(args.num_generations, rows_per_version)
    if args.max_staleness * rows_per_version < ahead + cut:
        raise InvalidArgumentError(
            f"max_staleness must be at least {math.ceil((ahead + cut) / rows_per_version)} with {rows_per_version} "
            f"samples per version and groups of {args.num_generations}, got {args.max_staleness}: the trainer takes a "
            f"batch ahead, which would be admitted only after it was trained on"
        )
