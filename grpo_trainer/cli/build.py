"""From a recipe to the objects of a run: rewards, adapter, tokenizer, trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_trainer.cli.data import import_path
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import Recipe, RecipeArguments
from grpo_trainer.registry import resolve
from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.options import with_options
from grpo_trainer.trl_door import PEER_REWARDS, peer_reward


def build_trainer(
    recipe: Recipe, config: Any, train_dataset: Any, eval_dataset: Any = None, callbacks: Iterable[Any] = ()
) -> Any:
    """The trainer of a recipe, with our progress in place of transformers' own.

    Args:
        recipe: the recipe.
        config: its ``GRPOConfig``.
        train_dataset: rows to train on.
        eval_dataset: rows to evaluate on.
        callbacks: callbacks of the trainer.

    Returns:
        A ``GRPOTrainer``.

    Raises:
        RecipeError: if the trainer refuses something, with its message.
    """
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from grpo_trainer import GRPOTrainer

    arguments = recipe.arguments
    if not arguments.model_name_or_path:
        raise RecipeError(f"{recipe.path} names no model: set model_name_or_path")
    rewards = build_rewards(recipe)
    try:
        trainer = GRPOTrainer(
            model=arguments.model_name_or_path,
            reward_funcs=rewards,
            args=config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=build_tokenizer(arguments, config),
            callbacks=list(callbacks),
            quantization_config=build_quantization(arguments),
            peft_config=build_adapter(arguments),
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise RecipeError(f"{recipe.path}: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def build_rewards(recipe: Recipe) -> list[Callable[..., Any] | str]:
    """The reward functions of a recipe, their keyword arguments bound, after its reward model.

    Args:
        recipe: the recipe.

    Returns:
        At least one; a reward model by its name.

    Raises:
        RecipeError: if there is none, or one is unknown or does not take a keyword argument.
    """
    arguments = recipe.arguments
    model = [arguments.reward_model_name_or_path] if arguments.reward_model_name_or_path else []
    entries = arguments.rewards()
    if not entries and not model:
        raise RecipeError(f"{recipe.path} names no reward: set reward_funcs, e.g. to [{next(iter(REWARDS))}]")
    # trl's own are imported only if they are asked for
    known: dict[str, Callable[..., Any]] = {**dict.fromkeys(PEER_REWARDS, peer_reward), **REWARDS}
    try:
        functions = [
            with_options(
                peer_reward(entry.name, **entry.kwargs)
                if known.get(entry.name) is peer_reward
                else resolve(import_path(entry.name), known, "reward", **entry.kwargs),
                **entry.options(),
            )
            for entry in entries
        ]
    except (ValueError, ImportError) as error:
        raise RecipeError(f"{recipe.path}: reward_funcs: {error}") from error
    return [*model, *functions]


def build_tokenizer(arguments: RecipeArguments, config: Any) -> Any:
    """The tokenizer, if it is not simply the model's.

    Args:
        arguments: the recipe's.
        config: its ``GRPOConfig``.

    Returns:
        The tokenizer, or None if the recipe says nothing about it.

    Raises:
        ValueError: if there is none.
    """
    if arguments.tokenizer_name_or_path is None and arguments.chat_template is None:
        return None
    from grpo_trainer.loading import load_tokenizer

    own = arguments.tokenizer_name_or_path
    tokenizer = load_tokenizer(
        None,
        own or arguments.model_name_or_path or "",
        trust_remote_code=config.trust_remote_code,
        revision=None if own else arguments.model_revision,
    )
    template = arguments.chat_template
    if template is not None:
        is_file = "{" not in template and "\n" not in template and Path(template).is_file()
        tokenizer.chat_template = Path(template).read_text(encoding="utf-8") if is_file else template
    return tokenizer


def build_adapter(arguments: RecipeArguments) -> Any:
    """The adapter's configuration, or None.

    Args:
        arguments: the recipe's.

    Returns:
        A ``peft.LoraConfig`` if ``use_peft`` is set.
    """
    if not arguments.use_peft:
        return None
    from grpo_trainer.loading import lora_config

    targets = arguments.lora_target_modules
    if isinstance(targets, str) and targets.isidentifier():
        targets = [targets]  # peft takes a text for a pattern of the whole path, which a plain name never matches
    parameters = arguments.lora_target_parameters
    return lora_config(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets,
        target_parameters=[parameters] if isinstance(parameters, str) else parameters,
        modules_to_save=arguments.lora_modules_to_save,
        use_rslora=arguments.use_rslora,
        use_dora=arguments.use_dora,
    )


def build_quantization(arguments: RecipeArguments) -> Any:
    """How to load the model in 4 or 8 bits, or None.

    Args:
        arguments: the recipe's.

    Returns:
        A ``transformers.BitsAndBytesConfig``; 4-bit blocks are computed in ``dtype``.

    Raises:
        RecipeError: if both are asked for, or there is no adapter to train.
    """
    if not (arguments.load_in_4bit or arguments.load_in_8bit):
        return None
    if arguments.load_in_4bit and arguments.load_in_8bit:
        raise RecipeError("load_in_4bit and load_in_8bit exclude each other; set one of them to false")
    if not arguments.use_peft:
        bits = "load_in_4bit" if arguments.load_in_4bit else "load_in_8bit"
        raise RecipeError(f"{bits} needs an adapter to train on top: set use_peft to true")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=arguments.load_in_4bit,
        load_in_8bit=arguments.load_in_8bit,
        bnb_4bit_quant_type=arguments.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=arguments.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=None if arguments.dtype == "auto" else arguments.dtype,
        bnb_4bit_quant_storage=arguments.bnb_4bit_quant_storage,
    )


def quiet_libraries() -> None:
    """Switches off the bars that transformers and datasets draw while loading; the command line draws its own."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
