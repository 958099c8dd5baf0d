"""``GRPOTrainer``: the step, driven by ``transformers.Trainer``.

The seam is two methods. The Trainer asks for the micro-batches of one optimizer step (``get_batch_samples``): that is
where rollouts are collected, cut, and counted. Then it asks for the loss of each (``compute_loss``): that is where the
objective is evaluated. Configuration fields become objects in ``__init__``; nothing below this file sees them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from grpo_trainer.accumulation import Accumulation, spread
from grpo_trainer.assembly import (
    arrangement_of,
    balance_coefficient,
    check_args,
    course_settings,
    dynamic_sampling_of,
    entropy_bonus_of,
    kl_coefficient_of,
    objective_of,
    prefer_own_progress,
    refuse_not_yet,
    report_callbacks,
    reward_set,
    sampling_params,
)
from grpo_trainer.checkpoint import RunState
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import PromptLimit, PromptRenderer
from grpo_trainer.dataset import check_dataset, check_eval_dataset, check_reward_columns
from grpo_trainer.difficulty import PromptMemory
from grpo_trainer.dynamic import Source
from grpo_trainer.evaluation import SampleResult, combine_seed, sample
from grpo_trainer.generation.continuous import ContinuousGenerator
from grpo_trainer.generation.engines import make_generator
from grpo_trainer.loading import base_model, disable_dropout, is_peft, load_policy, load_tokenizer, max_context
from grpo_trainer.loss import masked_sum
from grpo_trainer.metrics import MetricStore
from grpo_trainer.policy.reference import make_reference
from grpo_trainer.policy.scoring import check_packing, completion_logprobs
from grpo_trainer.reports.first_prompt import FirstPrompt
from grpo_trainer.reports.prompts import PromptTable
from grpo_trainer.reports.rollout_progress import rollout_progress
from grpo_trainer.resumable import ResumableTrainer
from grpo_trainer.rewards.base import RewardSet
from grpo_trainer.rollout import RolloutCollector
from grpo_trainer.runtime import HeapWatch, prepare_cpu
from grpo_trainer.sampler import PromptOrder, RolloutLoader, RolloutSampler, Ticket
from grpo_trainer.stream import EmptyTickets, StreamLoader, StreamOrder, TicketStream, is_stream
from grpo_trainer.types import RolloutBatch, Row

logger = logging.get_logger(__name__)


class GRPOTrainer(ResumableTrainer):
    """Trains a causal language model with Group Relative Policy Optimization.

    Takes the place of TRL's trainer of the same name: the same arguments with the same meaning.

    Args:
        model: a name (hub, folder, or ``builtin:…``), a ``PreTrainedModel`` or a ``PeftModel``.
        reward_funcs: one or several of: a callable by TRL's contract, a coroutine function, a sequence classifier
            (one label) as a module or by name.
        args: the configuration; None makes one from the model's name.
        train_dataset: rows with a column ``prompt``, a string or a list of messages; other columns go to the rewards.
            A stream (``IterableDataset``) is read again from its start when it ends, until ``max_steps``.
        eval_dataset: the same, or a mapping from name to dataset.
        processing_class: the tokenizer; None loads the model's. It is copied, never changed.
        reward_processing_classes: the tokenizers of reward models, one per reward function; None loads them.
        callbacks: further callbacks of the Trainer. One that has a method ``on_rollout(args, state, control, table)``
            is called with each rollout's completions, as columns.
        optimizers: an optimizer and a scheduler, as for the Trainer.
        quantization_config: loads a model given by name in 4 or 8 bits.
        peft_config: wraps the model in an adapter.
        tools: not supported yet.
        rollout_func: not supported yet.
        environment_factory: not supported yet.

    Raises:
        ValueError: if an argument is illegal; the message names it and what would be legal.

    Example:
        >>> from grpo_trainer import GRPOConfig, GRPOTrainer  # doctest: +SKIP
        >>> trainer = GRPOTrainer(
        ...     model="builtin:smollm2-135m-instruct",
        ...     reward_funcs=lambda completions, **kwargs: [-abs(20 - len(c)) for c in completions],
        ...     args=GRPOConfig("out"),
        ...     train_dataset=dataset,
        ... )  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP
    """

    loss_is_scaled_for_ga = True  # compute_loss divides by the items of the whole optimizer step

    def __init__(
        self,
        model: str | nn.Module,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Any = None,
        rollout_func: Any = None,
        environment_factory: Any = None,
    ) -> None:
        refuse_not_yet(tools=tools, rollout_func=rollout_func, environment_factory=environment_factory)
        args = check_args(args, model)
        if args.device.type == "cpu":
            for note in prepare_cpu(args.cpu_threads):
                logger.info(note)
        set_seed(args.seed)  # before loading: an adapter's first weights are random
        tokenizer = load_tokenizer(
            processing_class,
            model,
            trust_remote_code=args.trust_remote_code,
            revision=(args.model_init_kwargs or {}).get("revision"),  # type: ignore[union-attr]
        )
        renderer = PromptRenderer(tokenizer, args.chat_template_kwargs)  # type: ignore[arg-type]
        handed_in_as_peft = is_peft(model)
        policy = load_policy(
            model,
            model_init_kwargs=args.model_init_kwargs,  # type: ignore[arg-type]
            trust_remote_code=args.trust_remote_code,
            quantization_config=quantization_config,
            peft_config=peft_config,
            gradient_checkpointing=bool(args.gradient_checkpointing),
            cast_lm_head_to_fp32=args.cast_lm_head_to_fp32,
        )
        if args.disable_dropout:
            disable_dropout(policy)
        limit = PromptLimit(
            context=max_context(policy),
            max_completion_length=args.max_completion_length or 1,
            max_prompt_length=args.max_prompt_length,
            overlong=args.overlong_prompts,
            tokenizer=tokenizer,
        )
        warn = logger.warning if args.process_index == 0 else logger.debug
        for note in args.notes_on_variant():
            warn(f"{note}.")
        train_dataset = check_dataset("train_dataset", train_dataset, renderer, limit, warn)
        eval_dataset = check_eval_dataset(eval_dataset, renderer, limit, warn)
        if is_stream(train_dataset) and args.max_steps <= 0:
            raise ValueError(
                f"train_dataset is a stream without a length, so the number of optimizer steps cannot be told from "
                f"num_train_epochs={args.num_train_epochs}: set max_steps"
            )
        if is_stream(train_dataset) and args.prompt_sampling is not None:
            raise ValueError(
                f"prompt_sampling={args.prompt_sampling!r} draws prompts by what is remembered of each, and "
                "train_dataset is a stream, whose rows cannot be drawn again. Give a dataset with a length, or leave "
                "prompt_sampling out"
            )
        rewards = reward_set(reward_funcs, reward_processing_classes, args, renderer)
        check_reward_columns(rewards, train_dataset)
        super().__init__(
            model=policy,
            args=args,
            data_collator=_as_is,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            callbacks=[FirstPrompt(), *(callbacks or []), *report_callbacks(args)],
            optimizers=optimizers,
        )
        if self.is_fsdp_enabled or self._zero_stage() == 3 or self.get_tp_size() > 1:
            raise ValueError(
                "a model whose weights are spread over processes (FSDP, DeepSpeed ZeRO-3, tensor parallel) is not "
                "supported yet: completions are drawn by the whole model on every process. Use data parallel or ZeRO-2"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process, which would split groups over replicas. Start one "
                "process per GPU with `accelerate launch`, or show it one GPU with CUDA_VISIBLE_DEVICES=0."
            )
        self.plan = args.batch_plan()
        self._balance = balance_coefficient(args, policy)
        self.objective = objective_of(args, balances=self._balance != 0)
        self.entropy_bonus = entropy_bonus_of(args)
        self.kl_coefficient = kl_coefficient_of(args)
        self.metrics = MetricStore()
        self.arrangement = arrangement_of(args, self.plan, lambda: self.model)
        self._notes: list[Callable[[], None]] = []
        self._accumulation = Accumulation(
            book=self._book,
            take_back=self._take_back,
            arrangement=self.arrangement,
            say=lambda message: self._warn_once("memory", message),
        )
        self.collector = self._build_collector(renderer, limit, rewards, handed_in_as_peft)
        self.dynamic_sampling = dynamic_sampling_of(args, self.plan, gather_object if args.world_size > 1 else None)
        self.prompt_memory: PromptMemory | None = None
        self._prompts: PromptOrder | StreamOrder | PromptMemory | None = None  # asked by what does not go by tickets
        self._prompts_drawn: list[int] = []  # prompts of the rollout that is being drawn
        self._pending: deque[RolloutBatch] = deque()
        self._step_started: float | None = None
        self._verify_packing: str = args.verify_packing
        self._bonus_items = self._tokens = torch.ones(())
        self._heap = HeapWatch()
        self._size = sum(p.numel() for p in base_model(policy).parameters())
        self.add_callback(_StepClock(self._end_step))
        if args.prompt_sampling is not None:
            self.add_callback(PromptTable(lambda: None if self.prompt_memory is None else self.prompt_memory.table()))
        prefer_own_progress(self)

    def _zero_stage(self) -> int:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        return plugin.zero_stage if plugin is not None else 0

    def _build_collector(
        self, renderer: PromptRenderer, limit: PromptLimit, rewards: RewardSet, handed_in_as_peft: bool
    ) -> RolloutCollector:
        args: GRPOConfig = self.args
        reference = (
            make_reference(self.model, handed_in_as_peft=handed_in_as_peft, moves=args.sync_ref_model)
            if args.beta
            else None
        )
        sampling = sampling_params(args, self.model, renderer.tokenizer)
        generator = make_generator(
            args.generation_engine,
            lambda: self.model,
            self.accelerator.autocast,
            max_cache_tokens=args.max_cache_tokens,
            continuous_batching=args.transformers_continuous_batching_config,  # type: ignore[arg-type]
        )
        if isinstance(generator, ContinuousGenerator):
            generator.check(sampling)
        return RolloutCollector(
            renderer=renderer,
            generator=generator,
            sampling=sampling,
            rewards=rewards,
            advantage=self.objective.advantage,
            joint_advantage=self.objective.joint_advantage,
            num_generations=self.plan.num_generations,
            policy=lambda: self.model,
            limit=limit,
            reference=reference,
            keep_old_logprobs=self.plan.rollout_outlives_step,
            keep_sampling_logprobs=args.sampler_correction,
            kl_in_reward=self.objective.kl if args.beta and args.kl_placement == "reward" else None,
            kl_coefficient=self.kl_coefficient,
            mask_truncated=args.mask_truncated_completions,
            # the rows of one old or reference pass are those of one training pass, arranged alike: on one
            # machine the log-probs of equal weights are then equal to the last bit, in any precision
            parts=lambda batch, rows: self.arrangement(batch, rows),
            live=lambda batch: self.objective.live_rows(batch),
            metrics=self.metrics,
            gather=self._gather,
            rank=args.process_index,
            layout=[self.plan.rows(rank) for rank in range(args.world_size)],
            autocast=self.accelerator.autocast,
            trainer_state=lambda: self.state,
            observe=self._remember,
            **({} if args.disable_tqdm or args.process_index else {"progress": rollout_progress}),
        )

    # --- data -----------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        """One ticket per micro-step; rows are read when their rollout is collected.

        Returns:
            The loader.

        Raises:
            ValueError: if there is no training set, or it is smaller than one rollout.
        """
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset, and none was given")
        self._pending.clear()  # of an earlier call of train(), like the figures
        self.metrics.clear()
        self._notes.clear()
        self._step_started = None
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        shuffle = bool(self.args.shuffle_dataset)
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.load_state_dict({})
        if is_stream(self.train_dataset):
            tickets = TicketStream(
                self.train_dataset,
                self.plan,
                shuffle=shuffle,
                seed=seed,
                num_workers=self.args.dataloader_num_workers,
                keeps=self._keeps,
            )
            self._prompts = StreamOrder(tickets)
            return StreamLoader(tickets if self.dynamic_sampling is None else EmptyTickets(self.plan))
        sampler = RolloutSampler(len(self.train_dataset), self.plan, shuffle=shuffle, seed=seed)
        self._prompts = PromptOrder(sampler)
        if self.args.prompt_sampling is not None:
            self._prompts = self.prompt_memory = PromptMemory(
                sampler,
                self.args.prompt_sampling,
                pass_reward=self.args.prompt_pass_reward,
                skip_epochs=self.args.prompt_skip_epochs,
            )
        return RolloutLoader(sampler)

    def _keeps(self, row: Row, position: int) -> bool:
        """Whether a row of a stream is used: a policy may leave out prompts that are too long."""
        return self.collector.keeps(row, f"row {position} of train_dataset")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The rows of an evaluation set, unsharded and in order: ``evaluation_loop`` shares them out.

        Args:
            eval_dataset: a dataset, the name of one of several, or None for the trainer's own.

        Returns:
            The loader.

        Raises:
            ValueError: if there is none.
        """
        own = eval_dataset is None or isinstance(eval_dataset, str) or eval_dataset is self.eval_dataset
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("evaluate() needs an eval_dataset, and none was given")
        if self.collector.limit.filters and (is_stream(dataset) or not own):  # the others were filtered at the start
            dataset = [row for i, row in enumerate(dataset) if self.collector.keeps(row, f"row {i} of eval_dataset")]
        return DataLoader(dataset, batch_size=self.args.eval_batch_size, collate_fn=_as_is)

    # --- the step -------------------------------------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Ticket], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, list[RolloutBatch]]], Tensor]:
        """The micro-batches of one optimizer step, collected if there are none left, and the step's normaliser.

        Args:
            epoch_iterator: tickets, one per micro-step.
            num_batches: how many micro-batches the step has; fewer come at the end of an epoch.
            device: where the normaliser is to be.

        Returns:
            For each micro-batch of this process the parts that it is computed in, and Z, (): the items of the step over
            all micro-batches and processes.
        """
        if self.control.should_training_stop:  # a finished run that was asked to go on: nothing is drawn
            return [], torch.zeros((), device=device)
        self._step_started = time.perf_counter()
        tickets = list(itertools.islice(epoch_iterator, num_batches))
        self._load_rng_state(self._checkpoint)  # after what is skipped, before the first rollout
        window = []
        for place, ticket in enumerate(tickets):
            if ticket.micro_step == 0 or not self._pending:
                self._collect(ticket, place)
            window.append(self._pending.popleft())
        self.metrics.add("tokens_per_second", sum(batch.num_tokens for batch in window), 0.0)
        tokens = float(sum(batch.num_tokens for batch in window))
        items = torch.tensor([0.0, 0.0, tokens], device=device)
        for batch in window:
            items[:2] += torch.stack([self.objective.items(batch), self.objective.bonus_items(batch).float()])
        items, self._bonus_items, self._tokens = _divisor(self.accelerator.reduce(items, reduction="sum"))
        self._accumulation.begin()
        return [{"parts": parts} for parts in self._arranged(window)], items

    def _arranged(self, window: list[RolloutBatch]) -> list[list[RolloutBatch]]:
        """What has to be computed of some micro-batches, exactly: the rows that carry a gradient, part by part.

        The rows are shared out as they were for old and reference log-probs, so that equal weights give equal
        log-probs to the last bit, and the ratio is 1.
        """
        size = self.arrangement.block // self.plan.per_device_train_batch_size
        arranged = []
        for first in range(0, len(window), size):
            micro_batches = window[first : first + size]
            block = RolloutBatch.join([self.objective.weighted(batch) for batch in micro_batches])
            live = self.objective.live_rows(block)
            self._count(self.objective.silent_stats(block, live))  # what has no advantage is never clipped, and counts
            parts = [block.select(rows) for rows in self.arrangement(block, live)]
            arranged += spread(parts, len(micro_batches))
        return arranged

    def _collect(self, ticket: Ticket, place: int) -> None:
        """Fills the queue with what is left of the ticket's rollout: all of it, unless a run is resumed inside one."""
        groups = self.plan.local_groups(self.args.process_index)
        nth = place // self.plan.micro_steps_per_rollout  # rollout that begins in this optimizer step
        key = (self.args.seed, self.state.global_step, nth)
        if self.dynamic_sampling is None:
            rows, names = self._rows(ticket if self.prompt_memory is None else self.prompt_memory.rollout(0))
            rollout = self.collector.collect(rows, [n for _, n in groups], seed=combine_seed(*key), names=names)
        else:
            assert self._prompts is not None
            prompts = self._prompts
            source = Source(
                rows=lambda number: self._rows(prompts.rollout(number)),
                seed=lambda number: combine_seed(*key, *([number] if number else [])),
            )
            rollout = self.dynamic_sampling.collect(self.collector, groups, source, step=self.state.global_step)
        one_pass = [rollout.batch.select(part) for part in self.plan.micro_batches()]
        self._pending.clear()
        self._pending.extend((one_pass * self.plan.num_iterations)[ticket.micro_step :])
        self.state.num_input_tokens_seen += rollout.num_tokens
        self.metrics.latest("num_tokens", self.state.num_input_tokens_seen)
        self._show(rollout.table)

    def _rows(self, ticket: Ticket) -> tuple[Iterator[Row], list[str]]:
        """The rows of this process's prompts of a rollout, read as they are asked for, and their names."""
        self._prompts_drawn = ticket.prompts
        mine = [p for p, _ in self.plan.local_groups(self.args.process_index)]
        where = [ticket.prompts[p] for p in mine]
        rows = (self.train_dataset[i] for i in where) if ticket.rows is None else (ticket.rows[p] for p in mine)
        return rows, [f"row {i} of train_dataset" for i in where]

    def _remember(self, totals: Tensor) -> None:
        """Tells the memory of prompts what a rollout earned, (P, G)."""
        if self.prompt_memory is not None:
            self.prompt_memory.count(self._prompts_drawn, totals, self.state.global_step)
            for name, value in self.prompt_memory.figures().items():
                self.metrics.latest(name, value)

    def _prepare_inputs(self, inputs: dict[str, RolloutBatch]) -> dict[str, RolloutBatch]:
        """Micro-batches are on the device already."""
        return inputs

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Adds the gradients of one micro-step's parts.

        Args:
            model: the policy, as wrapped for training.
            inputs: holds the ``parts``.
            num_items_in_batch: Z, (), over all micro-batches and processes.

        Returns:
            The loss of the parts, (), without gradient.

        Raises:
            MemoryError: if memory runs out over a single completion.
            RuntimeError: if it runs out in a backward pass in which processes exchange gradients.
        """
        inner = super().training_step

        def step(part: RolloutBatch, last: bool) -> Tensor:
            # gradients are exchanged once an optimizer step, in the last backward pass
            with contextlib.nullcontext() if last else self.accelerator.no_sync(model):
                return inner(model, {"batch": part}, num_items_in_batch)

        self._accumulation.step = step
        return self._accumulation.add(inputs["parts"], self.args.device)

    def _take_back(self) -> None:
        """Clears the gradients of an optimizer step that is to begin again."""
        exchanges = self.args.world_size > 1 and self.accelerator.sync_gradients
        if exchanges or self.is_deepspeed_enabled:
            raise RuntimeError(
                "memory ran out while processes exchange gradients, which cannot be begun again. Set "
                f"max_tokens_per_microbatch={self.arrangement.fits} or less"
            )
        self.model.zero_grad()

    def _book(self, counts: bool) -> None:
        """Writes down the figures of the passes since the last call, or forgets them."""
        notes, self._notes = self._notes, []
        for note in notes if counts else []:
            note()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, RolloutBatch],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """The loss of one micro-batch, divided by the items of the whole optimizer step.

        Args:
            model: the policy, as wrapped for training.
            inputs: holds the ``batch``.
            return_outputs: also return the scores.
            num_items_in_batch: Z, (), over all micro-batches and processes; None takes this micro-batch's own.

        Returns:
            The loss, (): its sum over micro-batches, averaged over processes, is the objective of the step.
        """
        batch = inputs["batch"]
        if self._verify_packing != "never":
            check_packing(model, batch, temperature=self.args.temperature)
            self._verify_packing = "always" if self._verify_packing == "always" else "never"
        applied = self.entropy_bonus.applied
        scores = completion_logprobs(
            model,
            batch,
            temperature=self.args.temperature,
            with_entropy=True,
            entropy_gradient=applied != 0,
            with_balance=self._balance != 0,
        )
        total, stats, extremes, bonus = self.objective(scores.logprobs, batch, entropy=scores.entropy, pool=self._pool)
        bonus_items, tokens = self._bonus_items, self._tokens
        if num_items_in_batch is None:
            num_items_in_batch, bonus_items = (
                _divisor(n) for n in (self.objective.items(batch), self.objective.bonus_items(batch))
            )
            tokens = torch.tensor(float(batch.num_tokens))
        assert scores.entropy is not None and bonus is not None
        loss = total / num_items_in_batch
        stats = {**stats, "entropy": masked_sum(scores.entropy.detach(), batch.mask)}
        if scores.balance is not None:
            count = torch.tensor(float(batch.num_tokens))
            stats["aux_loss"] = (scores.balance.detach() * count.to(scores.balance.device), count)
        policy_loss = loss.detach()
        entropy = tuple(part.detach() for part in bonus)

        def note() -> None:
            self._count(stats)
            for name, value in extremes.items():
                self.metrics.extreme(name, value, name[-3:])
            if "kl" in stats:
                self.kl_coefficient.count(*stats["kl"])
            if self.entropy_bonus.enabled:
                self.entropy_bonus.count(*entropy)
                self.metrics.add("policy_loss", policy_loss, 0.0)

        self._notes.append(note)  # counted once the backward pass is through as well
        if self.entropy_bonus.enabled:
            loss = loss - applied * bonus[0] / bonus_items
        if scores.balance is not None:  # a mean over tokens, so over the step too
            loss = loss + self._balance * scores.balance * (batch.num_tokens / tokens.to(loss.device))
        # data-parallel wrappers average gradients over processes; the objective is a sum over them
        loss = loss * self.accelerator.num_processes
        return (loss, scores) if return_outputs else loss

    def _pool(self, values: Tensor) -> Tensor:
        """(n,) values of this process -> (m,) of all; every process calls it once per micro-batch."""
        if self.args.world_size == 1:
            return values
        padded = self.accelerator.pad_across_processes(values, dim=0, pad_index=-1)
        gathered = self.accelerator.gather(padded)
        return gathered[gathered >= 0]  # an entropy is never negative

    def _count(self, stats: dict[str, tuple[Tensor, Tensor]]) -> None:
        for name, (total, count) in stats.items():
            if not name.startswith("clip_ratio/"):
                self.metrics.add(name, total, count)
                continue
            self.metrics.add(f"{name}_mean", total, count)
            for side, how in (("low", "min"), ("high", "max")):
                if name.endswith(side):
                    none = -torch.inf if how == "max" else torch.inf
                    self.metrics.extreme(f"{name}_{how}", torch.where(count > 0, total / count, none), how)

    def _end_step(self) -> None:
        """Closes the books of one optimizer step: every time is per step, and what is not named is the update."""
        self._book(True)
        self._sync_reference()
        if self.entropy_bonus.enabled:
            self.entropy_bonus.end_step(lambda sums: self.accelerator.reduce(sums, reduction="sum"))
            self.metrics.add("entropy_coef", self.entropy_bonus.coefficient)
            self.metrics.add("policy_loss", 0.0, 1.0 / self.args.world_size)
        if self.kl_coefficient.adaptive:
            self.kl_coefficient.end_step(lambda sums: self.accelerator.reduce(sums, reduction="sum"))
            self.metrics.add("kl_coef", self.kl_coefficient.beta)
            self._set_beta()
        if self._step_started is None:
            return
        seconds = time.perf_counter() - self._step_started
        self._step_started = None
        self._heap.step()
        for name in ("time/generation", "time/rewards", "time/logprobs"):
            self.metrics.add(name, 0.0, 1.0)
        if self.collector.rewards.starts_early:
            self.metrics.add("time/rewards_hidden", 0.0, 1.0)
        self.metrics.add("step_time", seconds)
        self.metrics.add("tokens_per_second", 0.0, seconds / self.args.world_size)

    def _set_beta(self) -> None:
        """Puts a coefficient that has moved into the loss, if the KL stands there."""
        if self.objective.beta:
            self.objective = dataclasses.replace(self.objective, beta=self.kl_coefficient.beta)

    def _sync_reference(self) -> None:
        """Moves the reference towards the policy every so many optimizer steps; before a checkpoint, which holds it."""
        due = self.args.sync_ref_model and self.state.global_step % self.args.ref_model_sync_steps == 0
        if due and self.collector.reference is not None:
            self.collector.reference.sync(self.model, self.args.ref_model_mixup_alpha)

    # --- a run in parts -------------------------------------------------------------------------------------------

    def _course(self) -> dict[str, Any]:
        """The settings that the course of the run depends on."""
        return course_settings(self.args, self.train_dataset, self.collector.rewards)

    def _run_state(self) -> RunState:
        """What the rest of the run depends on and the Trainer does not save."""
        reference = self.collector.reference
        return RunState(
            pending=list(self._pending),
            metrics=self.metrics.state_dict(),
            reference=reference.state_dict() if reference is not None else {},
            entropy_bonus=self.entropy_bonus.state_dict(),
            kl_coefficient=self.kl_coefficient.state_dict(),
            prompt_memory=self.prompt_memory.state_dict() if self.prompt_memory is not None else {},
            dynamic_sampling=self.dynamic_sampling.state_dict() if self.dynamic_sampling is not None else {},
            fits=self.arrangement.fits,
        )

    def _take_run_state(self, state: RunState, *, same_layout: bool) -> None:
        """Takes it up again; with another layout, micro-batches that wait cannot be used."""
        if same_layout:
            self._pending = deque(state.pending)
        self.arrangement.fits = state.fits
        self.metrics.load_state_dict(state.metrics)
        self.entropy_bonus.load_state_dict(state.entropy_bonus)
        self.kl_coefficient.load_state_dict(state.kl_coefficient)
        if self.prompt_memory is not None:
            self.prompt_memory.load_state_dict(state.prompt_memory)
        if self.dynamic_sampling is not None:
            self.dynamic_sampling.load_state_dict(state.dynamic_sampling)
        self._set_beta()
        if state.reference and self.collector.reference is not None:
            self.collector.reference.load_state_dict(state.reference)

    def _end_run(self) -> None:
        """Ends the workers of reward functions; an evaluation after the run starts new ones."""
        self.collector.rewards.close()

    # --- evaluation -----------------------------------------------------------------------------------------------

    def sample(
        self, dataset: Any, num_generations: int, *, temperature: float | None = None, seed: int = 0
    ) -> SampleResult:
        """Completions of a dataset by the current policy, and their rewards. Leaves the training run as it was.

        Args:
            dataset: P rows with a column ``prompt``; a stream is read to its end.
            num_generations: G, completions of each row.
            temperature: of the sampling; None takes the configuration's.
            seed: equal seeds give equal completions of equal weights.

        Returns:
            The completions and rewards, the same on every process.

        Raises:
            ValueError: if the dataset is empty, or a prompt or a reward is not legal.
        """
        rows = list(dataset) if is_stream(dataset) else [dataset[i] for i in range(len(dataset))]
        if not rows:
            raise ValueError("the dataset is empty, so there is nothing to complete")
        share = self.plan.per_device_train_batch_size * self.plan.steps_per_generation
        return sample(
            self.collector,
            rows,
            num_generations,
            rows_at_once=max(1, max(self.args.per_device_eval_batch_size, share) // num_generations),
            temperature=temperature,
            seed=seed,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            gather_object=gather_object if self.args.world_size > 1 else None,
        )

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Draws ``num_generations_eval`` completions per row, with the same random numbers each time, and scores them.

        Args:
            dataloader: its dataset holds the rows.
            description: not used.
            prediction_loss_only: not used; there is no loss.
            ignore_keys: not used.
            metric_key_prefix: put before the name of every figure.

        Returns:
            The figures.
        """
        group = self.args.num_generations_eval or self.plan.num_generations
        result = self.sample(dataloader.dataset, group, seed=self.args.seed)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in result.figures.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(result.rows))

    # --- reports --------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures since the last log, over all processes, and hands everything to the callbacks.

        Args:
            logs: what the Trainer has to say; extended in place.
            start_time: of the training run.
        """
        if "loss" in logs or "train_runtime" in logs:  # of training; an evaluation has figures of its own
            figures = self.metrics.reduce(gather_object if self.args.world_size > 1 else None)
            if "step_time" in figures:
                parts = sum(figures.get(f"time/{part}", 0.0) for part in ("generation", "rewards", "logprobs"))
                figures["time/update"] = max(figures["step_time"] - parts, 0.0)
            self._warn_early(figures)
            logs.update(figures)
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Six per parameter and token, the usual estimate for a forward and a backward pass.

        Args:
            inputs: holds the ``parts``.

        Returns:
            The number of operations.
        """
        return 6 * self._size * sum(batch.num_tokens for batch in inputs["parts"])

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Tokens are counted where they are drawn."""

    def _show(self, table: dict[str, list[Any]]) -> None:
        """Hands the rollout's completions, of all processes, to the callbacks that want them."""
        listeners = [c.on_rollout for c in self.callback_handler.callbacks if hasattr(c, "on_rollout")]
        if not listeners:
            return
        tables = gather_object([table]) if self.args.world_size > 1 else [table]
        columns = dict.fromkeys(c for t in tables for c in t)
        sizes = [len(t["prompt"]) for t in tables]
        merged = {c: [v for t, n in zip(tables, sizes, strict=True) for v in t.get(c, [None] * n)] for c in columns}
        merged = {"step": [self.state.global_step + 1] * sum(sizes), **merged}
        for listener in listeners:
            listener(self.args, self.state, self.control, table=merged)

    def _warn_early(self, figures: dict[str, float]) -> None:
        """Says once, in words, what the first figures of a run should make a user look at."""
        if figures.get("completions/clipped_ratio", 0.0) > 0.9:
            self._warn_once(
                "truncated",
                f"{figures['completions/clipped_ratio']:.0%} of the completions were cut at max_completion_length="
                f"{self.args.max_completion_length}: raise it, or the policy never sees the end of what it says.",
            )
        if figures.get("frac_reward_zero_std") == 1.0 and "reward" in figures:
            self._warn_once(
                "silent",
                "every group's rewards were equal, so there was nothing to learn from: the reward may never be met or "
                "always be met. Try other prompts, a larger num_generations, or a reward with more steps.",
            )
        if "completions/mean_length" in figures and "reward" not in figures:
            self._warn_once("unscored", "no reward function applied to any completion (all returned None).")

    def _gather(self, tensor: Tensor) -> Tensor:
        if self.args.world_size == 1:
            return tensor
        return self.accelerator.gather(tensor.to(self.args.device)).cpu()


class _StepClock(TrainerCallback):
    """Tells the trainer that an optimizer step is over, before it is logged."""

    def __init__(self, end_step: Callable[[], None]) -> None:
        self._end_step = end_step

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Closes the step."""
        self._end_step()


def _divisor(items: Tensor) -> Tensor:
    """Z, or 1 where nothing was counted: the sum that it divides is then 0."""
    return torch.where(items == 0, 1.0, items)


def _as_is(batch: Sequence[Any]) -> Sequence[Any]:
    return batch
