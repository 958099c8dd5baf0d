"""From configuration fields and constructor arguments to the objects that a trainer is made of, checked."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import ContextLimit, PromptRenderer
from grpo_trainer.generation.hf import check_extra
from grpo_trainer.loading import end_of_sequence_ids, load_reward_model
from grpo_trainer.objective import Objective, build_objective
from grpo_trainer.reports.completions import CompletionsWriter
from grpo_trainer.reports.printer import CompletionsPrinter
from grpo_trainer.rewards.base import RESERVED, RewardSet
from grpo_trainer.rewards.model import RewardModel
from grpo_trainer.stream import check_stream, is_stream
from grpo_trainer.types import SamplingParams

ROWS_CHECKED = 2000
"""Rows whose prompt is rendered when a trainer is made, to find bad ones early; others are checked when met."""


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


def check_dataset(name: str, dataset: Any, renderer: PromptRenderer, limit: ContextLimit) -> None:
    """Renders the first ``ROWS_CHECKED`` prompts, and checks that each leaves room for a completion.

    Args:
        name: of the argument, for messages.
        dataset: rows, or None.
        renderer: row -> prompt.
        limit: what the model has room for.

    Raises:
        ValueError: if the dataset has no rows, cannot be read as it needs to be, or has a row whose prompt is not legal
            or too long.
    """
    if dataset is None:
        return
    if isinstance(dataset, (Mapping, str)) or hasattr(dataset, "iloc"):
        remedy = {
            "str": "load it first",
            "DataFrame": "give datasets.Dataset.from_pandas(frame)",
        }.get(type(dataset).__name__, "give one of its splits, e.g. dataset['train']")
        raise ValueError(f"{name} is a {type(dataset).__name__}, not a dataset of rows: {remedy}")
    if is_stream(dataset):
        check_stream(name, dataset)
        first = first_row(dataset)
        if first is None:
            raise ValueError(f"{name} is empty")
        limit.check(renderer(first, f"row 0 of {name}"), f"row 0 of {name}")  # the others are checked when met
        return
    if len(dataset) == 0:
        raise ValueError(f"{name} is empty")
    kinds: dict[bool, int] = {}
    for i in range(min(len(dataset), ROWS_CHECKED)):
        where = f"row {i} of {name}"
        prompt = renderer(dataset[i], where)
        limit.check(prompt, where)
        kinds.setdefault(prompt.conversational, i)
    if len(kinds) > 1:
        raise ValueError(
            f"{name} mixes prompts that are strings (row {kinds[False]}) and lists of messages (row {kinds[True]}), so "
            "a reward function would be given both kinds of completions; bring all into one form"
        )


def first_row(dataset: Any) -> Any:
    """The first row of a dataset or a stream, None if there is none."""
    return next(iter(dataset), None) if is_stream(dataset) else dataset[0] if len(dataset) else None


def check_reward_columns(rewards: RewardSet, dataset: Any) -> None:
    """Checks that each reward function can be called with the columns that there are.

    Args:
        rewards: the functions.
        dataset: rows, or None.

    Raises:
        ValueError: if a function asks for a column that is not there, or does not take one that is.
    """
    if dataset is None:
        return
    columns = set(first_row(dataset) or ()) - RESERVED
    given = dict.fromkeys([*columns, "prompts", "completions", "completion_ids", "trainer_state"])
    given |= dict.fromkeys(["log_extra", "log_metric"])
    for name, function in zip(rewards.names, rewards.functions, strict=True):
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C, say
            continue
        try:
            signature.bind(**given)
        except TypeError as error:
            raise ValueError(
                f"reward function {name!r} cannot be called: {error}. It is called with prompts, completions, "
                f"completion_ids, trainer_state, log_extra, log_metric and the dataset's columns "
                f"({', '.join(sorted(columns)) or 'none besides prompt'}); add **kwargs for those it does not need"
            ) from error


def named_datasets(eval_dataset: Any) -> dict[str, Any]:
    """The evaluation sets by the names that messages should use.

    Args:
        eval_dataset: one dataset, a mapping from name to dataset, or None.

    Returns:
        Name -> dataset.
    """
    if isinstance(eval_dataset, Mapping):
        return {f"eval_dataset[{name!r}]": dataset for name, dataset in eval_dataset.items()}
    return {"eval_dataset": eval_dataset}


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
        ValueError: if there is none, or the numbers of functions, tokenizers and weights differ.
    """
    if reward_funcs is None:
        raise ValueError("reward_funcs is missing: give a function, a reward model, or a list of them")
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    given = list(tokenizers) if isinstance(tokenizers, (list, tuple)) else [tokenizers] * len(functions)
    if len(given) != len(functions):
        raise ValueError(
            f"reward_processing_classes has {len(given)} entries for {len(functions)} reward functions; give one each"
        )
    return RewardSet(
        [_reward(f, t, args, renderer) for f, t in zip(functions, given, strict=True)], args.reward_weights
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
    )


def objective_of(args: GRPOConfig) -> Objective:
    """The objective that the configuration names.

    Args:
        args: the configuration.

    Returns:
        The objective.
    """
    return build_objective(
        loss_type=args.loss_type,
        scale_rewards=args.scale_rewards,
        max_completion_length=args.max_completion_length,  # type: ignore[arg-type]
        advantage_ddof=args.advantage_ddof,
        beta=args.beta,
        kl_importance_weighted=args.use_bias_correction_kl,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
    )


def report_callbacks(args: GRPOConfig) -> list[TrainerCallback]:
    """The callbacks that ``log_completions`` stands for.

    Args:
        args: the configuration.

    Returns:
        Callbacks, possibly none.
    """
    if not args.log_completions:
        return []
    return [CompletionsWriter(Path(args.output_dir) / "completions"), CompletionsPrinter(args.num_completions_to_print)]


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
    rows = len(train_dataset) if hasattr(train_dataset, "__len__") else "a stream"
    return {**settings, "world_size": args.world_size, "rows": rows, "reward_funcs": list(rewards.names)}


_IMMATERIAL = (
    *("output_dir", "run_name", "project", "trackio", "log", "report_to", "num_completions_to_print", "disable_tqdm"),
    *("save_", "push_to_hub", "hub_", "do_", "eval_", "per_device_eval", "num_generations_eval", "batch_eval"),
    *("load_best", "metric_for_best", "greater_is_better", "prediction_", "include_", "label", "skip_memory", "debug"),
    *("resume_from", "ignore_data_skip", "restore_callback", "dataloader_", "local_rank", "ddp_", "cpu_threads"),
)
"""Beginnings of the names of settings that change nothing about the course of a run."""
