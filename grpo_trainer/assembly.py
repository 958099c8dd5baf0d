"""From configuration fields and constructor arguments to the objects that a trainer is made of, checked."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.accumulation import Arrangement
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import PromptRenderer
from grpo_trainer.dynamic import DynamicSampling
from grpo_trainer.generation.hf import check_extra
from grpo_trainer.loading import base_model, end_of_sequence_ids, load_reward_model
from grpo_trainer.loss import Objective
from grpo_trainer.objective import build_objective
from grpo_trainer.policy.entropy_bonus import EntropyBonus
from grpo_trainer.policy.kl_coefficient import KLCoefficient
from grpo_trainer.policy.support import needs_last_token, why_padded
from grpo_trainer.registry import suggest
from grpo_trainer.reports.completions import FOLDER, CompletionsWriter
from grpo_trainer.reports.printer import CompletionsPrinter
from grpo_trainer.reports.tracker import CompletionsTracker
from grpo_trainer.reports.uploader import CompletionsUploader
from grpo_trainer.rewards.base import RewardSet, reward_name, unique_names
from grpo_trainer.rewards.model import RewardModel
from grpo_trainer.rewards.options import RewardOptions, options_of
from grpo_trainer.sampler import BatchPlan
from grpo_trainer.stream import is_stream
from grpo_trainer.types import SamplingParams
from grpo_trainer.variants import POLICY_LOSS_FIELDS


def check_args(args: GRPOConfig | None, model: Any) -> GRPOConfig:
    """The configuration, made from the model's name if there is none.

    Args:
        args: what the user gave.
        model: a name or a module.

    Returns:
        The configuration.

    Raises:
        ValueError: if it is another library's.
    """
    if args is None:
        name = model if isinstance(model, str) else _name_of(model, "model")
        return GRPOConfig(f"{name.rstrip('/').split('/')[-1].replace(':', '-')}-GRPO")
    if not isinstance(args, GRPOConfig):
        raise ValueError(
            f"args must be a grpo_trainer.GRPOConfig, got {type(args).__module__}.{type(args).__name__}; "
            "import GRPOConfig from grpo_trainer too"
        )
    return args


def reward_set(reward_funcs: Any, tokenizers: Any, args: GRPOConfig, renderer: PromptRenderer) -> RewardSet:
    """The reward functions, reward models loaded. The lists given are not changed.

    Args:
        reward_funcs: one or several of: a callable, a sequence classifier, or the name of one.
        tokenizers: of the reward models; one, or one per function.
        args: the configuration.
        renderer: knows how a prompt and its completion read as one text.

    Returns:
        The functions with their names and weights.

    Raises:
        ValueError: if there is none, the numbers of functions, tokenizers and weights differ, or ``reward_options`` are
            not legal.
    """
    if reward_funcs is None:
        raise ValueError("reward_funcs is missing: give a function, a reward model, or a list of them")
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    given = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(functions)
    if len(given) != len(functions):
        raise ValueError(
            f"reward_processing_classes has {len(given)} entries for {len(functions)} reward functions; give one each"
        )
    rewards = [_reward(f, t, args, renderer) for f, t in zip(functions, given, strict=True)]
    return RewardSet(rewards, args.reward_weights, options=_reward_options(rewards, args))


def _reward_options(rewards: list[Any], args: GRPOConfig) -> list[RewardOptions]:
    """How each is run: as it declares, changed by ``reward_options``."""
    names = unique_names([reward_name(f) for f in rewards])
    changes: dict[str, dict[str, Any]] = args.reward_options or {}  # type: ignore[assignment]
    for name in changes:
        if name not in names:
            raise ValueError(
                f"reward_options names {name!r}, but the reward functions are {', '.join(names)}.{suggest(name, names)}"
            )
    found = []
    for name, function in zip(names, rewards, strict=True):
        try:
            options = options_of(function, **changes.get(name, {}))
        except ValueError as error:
            raise ValueError(f"reward_options[{name!r}]: {error}") from error
        if options.isolation != "inline" and isinstance(function, RewardModel):
            raise ValueError(
                f"reward_options[{name!r}] has isolation={options.isolation!r}, but a reward model is run on the "
                "trainer's own device; leave it out"
            )
        if options.group:
            _check_whole_groups(name, args.batch_plan())
        found.append(options)
    return found


def _check_whole_groups(name: str, plan: BatchPlan) -> None:
    for rank in range(plan.world_size):
        if any(n != plan.num_generations for _, n in plan.local_groups(rank)):
            raise ValueError(
                f"reward function {name!r} asks for whole groups (group=True), but process {rank} of {plan.world_size} "
                f"holds a part of one. Make per_device_train_batch_size={plan.per_device_train_batch_size} a multiple "
                f"of num_generations={plan.num_generations}"
            )


def _reward(function: Any, tokenizer: Any, args: GRPOConfig, renderer: PromptRenderer) -> Any:
    if not isinstance(function, (str, nn.Module)):
        return function
    model, tokenizer = load_reward_model(function, tokenizer, trust_remote_code=args.trust_remote_code)
    name = _name_of(model, type(model).__name__).rstrip("/").split("/")[-1]
    if tokenizer.chat_template is not None:  # messages read as the reward model was taught to read them
        renderer = PromptRenderer(tokenizer, args.chat_template_kwargs)  # type: ignore[arg-type]
    return RewardModel(model.to(args.device), tokenizer, renderer.reward_text, name=name)


def _name_of(model: Any, otherwise: str) -> str:
    return getattr(getattr(model, "config", None), "_name_or_path", "") or otherwise


def sampling_params(args: GRPOConfig, model: nn.Module, tokenizer: Any) -> SamplingParams:
    """How completions are drawn in training.

    Args:
        args: the configuration.
        model: names end-of-sequence ids.
        tokenizer: names another, and the padding id.

    Returns:
        The parameters.

    Raises:
        ValueError: if ``generation_kwargs`` holds what transformers does not know.
    """
    check_extra(args.generation_kwargs or {})  # type: ignore[arg-type]
    return SamplingParams(
        max_new_tokens=args.max_completion_length,  # type: ignore[arg-type]
        eos_token_ids=end_of_sequence_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        extra={"cache_implementation": args.cache_implementation, **(args.generation_kwargs or {})},  # type: ignore[dict-item]
        tokenizer=tokenizer,
    )


def objective_of(args: GRPOConfig, *, balances: bool = False) -> Objective:
    """The objective that the configuration names.

    Args:
        args: the configuration.
        balances: whether there is a load-balancing loss, which every row has a part in.

    Returns:
        The objective.
    """
    return build_objective(
        loss_type=args.loss_type,
        scale_rewards=args.scale_rewards,
        max_completion_length=args.max_completion_length,  # type: ignore[arg-type]
        loss_aggregation=args.loss_aggregation,
        importance_sampling_level=args.importance_sampling_level,
        advantage_estimator=args.advantage_estimator,
        multi_objective_aggregation=args.multi_objective_aggregation,
        advantage_ddof=args.advantage_ddof,
        correction=args.vllm_importance_sampling_mode if args.sampler_correction else None,
        correction_clip_max=args.vllm_importance_sampling_clip_max,
        correction_clip_min=args.vllm_importance_sampling_clip_min,
        beta=args.beta if args.kl_placement == "loss" else 0.0,
        top_entropy=args.top_entropy_quantile,
        off_policy_threshold=args.off_policy_mask_threshold,
        keeps_silent_rows=balances or entropy_bonus_of(args).enabled,
        kl_estimator=args.kl_estimator_used,
        kl_importance_weighted=args.use_bias_correction_kl,
        **{name: getattr(args, name) for name in POLICY_LOSS_FIELDS},
    )


def kl_coefficient_of(args: GRPOConfig) -> KLCoefficient:
    """The price of the KL that the configuration asks for, in the loss or in the reward.

    Args:
        args: the configuration.

    Returns:
        The coefficient.
    """
    return KLCoefficient(beta=args.beta, target=args.kl_target, gain=args.kl_gain)


def entropy_bonus_of(args: GRPOConfig) -> EntropyBonus:
    """The entropy bonus that the configuration asks for.

    Args:
        args: the configuration.

    Returns:
        The bonus; not ``enabled`` if there is none.
    """
    return EntropyBonus(
        coefficient=args.entropy_coef,
        adaptive=args.use_adaptive_entropy,
        target=args.entropy_target,
        delta=args.entropy_coef_delta,
        minimum=args.entropy_coef_min,
        maximum=args.entropy_coef_max,
    )


def report_callbacks(args: GRPOConfig) -> list[TrainerCallback]:
    """The callbacks that ``log_completions`` stands for.

    Args:
        args: the configuration.

    Returns:
        Callbacks, possibly none, in the order in which they are to be called.
    """
    if not args.log_completions:
        return []
    folder = Path(args.output_dir) / FOLDER
    writer = CompletionsWriter(folder)
    unique = args.log_unique_prompts
    printer = CompletionsPrinter(writer, args.num_completions_to_print, unique=unique)
    callbacks: list[TrainerCallback] = [writer, printer, CompletionsTracker(writer, unique=unique)]
    if args.log_completions_hub_repo is not None:
        callbacks.append(CompletionsUploader(folder, args.log_completions_hub_repo))
    return callbacks


def prefer_own_progress(trainer: Any) -> None:
    """Takes transformers' bars and printed dicts away from a trainer that has a callback in their place.

    Args:
        trainer: with all its callbacks.
    """
    callbacks = trainer.callback_handler.callbacks
    own = [callback for callback in callbacks if getattr(callback, "replaces_progress", False)]
    if own:
        if hasattr(own[0], "rollout") and trainer.args.process_index == 0:
            trainer.collector.progress = own[0].rollout
        for callback in list(callbacks):
            if type(callback).__name__ in ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback"):
                trainer.remove_callback(callback)


def refuse_not_yet(**arguments: Any) -> None:
    """Refuses constructor arguments of TRL that nothing here honours yet.

    Args:
        **arguments: name -> what was given.

    Raises:
        ValueError: if one is not None.
    """
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name} is not supported yet; leave it out. docs/migrating.md lists what is.")


def balance_coefficient(args: GRPOConfig, model: nn.Module) -> float:
    """The weight of the load-balancing loss of a mixture of experts.

    Args:
        args: the configuration.
        model: the policy.

    Returns:
        The weight; 0 leaves the loss out, as for models without experts.

    Raises:
        ValueError: if one is asked for and the model has no such loss, or it is negative.
    """
    given, config = args.router_aux_loss_coef, base_model(model).config.get_text_config()
    has_experts = hasattr(config, "output_router_logits")
    if given and not has_experts:
        raise ValueError(
            f"router_aux_loss_coef={given} weights the load-balancing loss of a mixture of experts, and "
            f"{type(base_model(model)).__name__} computes none. Leave it out"
        )
    if given is not None and not 0 <= given < math.inf:
        raise ValueError(f"router_aux_loss_coef={given} must be a number, 0 or more")
    return (getattr(config, "router_aux_loss_coef", 0.0) if given is None else given) if has_experts else 0.0


def arrangement_of(args: GRPOConfig, plan: BatchPlan, model: Callable[[], Any]) -> Arrangement:
    """How rows are shared out over forward passes.

    Args:
        args: the configuration.
        plan: the arithmetic of the run.
        model: returns the policy.

    Returns:
        It. Micro-batches stay as they are configured where a row has to do with those beside it: with a share of
        tokens by entropy, and in models whose positions depend on the longest row of a pass.

    Raises:
        ValueError: if they have to, and the configuration sets a number of tokens.
    """
    why = None
    if balance_coefficient(args, model()):
        why = "the load-balancing loss of its experts is that of a whole micro-batch"
    elif args.top_entropy_quantile < 1:
        why = f"top_entropy_quantile={args.top_entropy_quantile} compares the tokens of a whole micro-batch"
    elif why_padded(model()) is None and needs_last_token(model()):
        why = "the positions of this model depend on the longest row of a forward pass"
    limit = args.max_tokens_per_microbatch
    if why and isinstance(limit, int):
        raise ValueError(
            f"max_tokens_per_microbatch={limit} would cut micro-batches, but {why}. Leave it out, and set "
            "per_device_train_batch_size"
        )
    together = math.gcd(plan.steps_per_generation, plan.gradient_accumulation_steps)
    return Arrangement(
        max_tokens=None if why else limit,
        micro_batch=plan.per_device_train_batch_size,
        block=plan.per_device_train_batch_size * (1 if why else together),
        packed=lambda: why_padded(model()) is None,
        whole=why,
    )


def dynamic_sampling_of(args: GRPOConfig, plan: BatchPlan, gather_object: Any) -> DynamicSampling | None:
    """What replaces groups without a signal.

    Args:
        args: the configuration.
        plan: the arithmetic of the run.
        gather_object: collects one object per process; None for a single process.

    Returns:
        It, or None where it is off.

    Raises:
        ValueError: if a group would be spread over processes.
    """
    if not args.dynamic_sampling:
        return None
    for rank in range(plan.world_size):
        if any(n != plan.num_generations for _, n in plan.local_groups(rank)):
            together = math.gcd(plan.steps_per_generation, plan.gradient_accumulation_steps)
            share = together * plan.per_device_train_batch_size
            raise ValueError(
                f"dynamic_sampling=True trades whole groups between processes, but process {rank} of {plan.world_size} "
                f"holds {share} completions at a time, no multiple of num_generations={plan.num_generations}. Make "
                "per_device_train_batch_size a multiple of num_generations"
            )
    return DynamicSampling(
        max_rounds=args.dynamic_sampling_max_rounds,
        at_cap=args.dynamic_sampling_at_cap,
        max_age=args.dynamic_sampling_max_age,
        gather_object=gather_object,
    )


def course_settings(args: GRPOConfig, train_dataset: Any, rewards: RewardSet) -> dict[str, Any]:
    """The settings that the course of a run depends on, to tell whether a resumed run is the same run.

    Args:
        args: the configuration.
        train_dataset: rows.
        rewards: the reward functions.

    Returns:
        Name -> value; without where things are written, what is logged, and how it is evaluated.
    """
    settings = {k: v for k, v in args.to_dict().items() if not k.startswith(_IMMATERIAL)}
    if args.lr_scheduler_type == "constant":  # the length of the run changes nothing but its end
        settings = {k: v for k, v in settings.items() if k not in ("max_steps", "num_train_epochs")}
    if is_stream(train_dataset):  # how many processes read it decides in which order its shards come
        settings["dataloader_num_workers"] = args.dataloader_num_workers
    rows = len(train_dataset) if hasattr(train_dataset, "__len__") else "a stream"
    return {**settings, "world_size": args.world_size, "rows": rows, "reward_funcs": list(rewards.names)}


_IMMATERIAL = (
    *("output_dir", "run_name", "project", "trackio", "log", "report_to", "num_completions_to_print", "disable_tqdm"),
    *("save_", "push_to_hub", "hub_", "do_", "eval_", "per_device_eval", "num_generations_eval", "batch_eval"),
    *("load_best", "metric_for_best", "greater_is_better", "prediction_", "include_", "label", "skip_memory", "debug"),
    *("resume_from", "ignore_data_skip", "restore_callback", "dataloader_", "local_rank", "ddp_", "cpu_threads"),
)
"""Beginnings of the names of settings that change nothing about the course of a run."""
