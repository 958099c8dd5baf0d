"""From a recipe to the objects of a run: data, rewards, adapter, trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import Recipe, RecipeArguments
from grpo_trainer.registry import resolve
from grpo_trainer.rewards import REWARDS
from grpo_trainer.tasks import BUILTIN_TASKS, load_task

_FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


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
            callbacks=list(callbacks),
            quantization_config=build_quantization(arguments),
            peft_config=build_adapter(arguments),
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise RecipeError(f"{recipe.path}: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


def build_rewards(recipe: Recipe) -> list[Callable[..., Any]]:
    """The reward functions of a recipe, their keyword arguments bound.

    Args:
        recipe: the recipe.

    Returns:
        At least one function.

    Raises:
        RecipeError: if there is none, or one is unknown or does not take a keyword argument.
    """
    entries = recipe.arguments.rewards()
    if not entries:
        raise RecipeError(f"{recipe.path} names no reward: set reward_funcs, e.g. to [{next(iter(REWARDS))}]")
    try:
        return [resolve(e.name, REWARDS, "reward", **e.kwargs) for e in entries]
    except ValueError as error:
        raise RecipeError(f"{recipe.path}: reward_funcs: {error}") from error


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
    return lora_config(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets,
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
    )


def build_datasets(recipe: Recipe, config: Any) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on if the recipe evaluates.

    Args:
        recipe: the recipe.
        config: its ``GRPOConfig``.

    Returns:
        ``(train, evaluation or None)``, with the column ``prompt``.

    Raises:
        RecipeError: if the dataset, a split or the prompt column is not there.
    """
    from datasets.exceptions import DatasetsError

    arguments = recipe.arguments
    name = arguments.dataset_name
    if not name:
        raise RecipeError(f"{recipe.path} names no dataset: set dataset_name, e.g. to {next(iter(BUILTIN_TASKS))}")
    evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
    try:
        if name.startswith("builtin:"):
            train, heldout = load_task(name, config.seed)
        else:
            train = _load_split(name, arguments.dataset_config, arguments.dataset_train_split)
            if evaluates and _has_one_split(name):
                raise ValueError(
                    "it has one split only, so there is nothing to evaluate on but what is trained on; give a folder "
                    "with several splits, or set eval_strategy: no"
                )
            heldout = _load_split(name, arguments.dataset_config, arguments.dataset_test_split) if evaluates else None
    except (ValueError, OSError, DatasetsError) as error:
        raise RecipeError(f"{recipe.path}: dataset_name={name}: {error}") from error
    evaluation = as_prompts(heldout, arguments) if evaluates else None
    return as_prompts(train, arguments), evaluation


def as_prompts(dataset: Any, arguments: RecipeArguments) -> Any:
    """The dataset with its prompts in the column ``prompt``, the system prompt before them if there is one.

    Args:
        dataset: rows.
        arguments: ``dataset_prompt_column`` and ``system_prompt``.

    Returns:
        The dataset. With a system prompt, a text becomes a user message; messages keep a system message of their own.

    Raises:
        RecipeError: if the prompt column is not there.
    """
    column, system = arguments.dataset_prompt_column, arguments.system_prompt
    if column not in dataset.column_names:
        raise RecipeError(
            f"dataset_prompt_column={column!r} is no column of {arguments.dataset_name}; "
            f"its columns: {', '.join(dataset.column_names)}"
        )
    if column != "prompt":
        if "prompt" in dataset.column_names:
            dataset = dataset.remove_columns("prompt")
        dataset = dataset.rename_column(column, "prompt")
    if system is None:
        return dataset

    def with_system(row: dict[str, Any]) -> dict[str, Any]:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not messages or messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return {"prompt": messages}

    return dataset.map(with_system)


def _has_one_split(name: str) -> bool:
    path = Path(name)
    return path.suffix in _FILE_KINDS or (path / "state.json").is_file()


def _load_split(name: str, configuration: str | None, split: str) -> Any:
    from datasets import DatasetDict, load_dataset, load_from_disk

    path = Path(name)
    if path.suffix in _FILE_KINDS:
        if not path.is_file():
            raise ValueError("there is no such file")
        return load_dataset(_FILE_KINDS[path.suffix], data_files=str(path), split="train")
    saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
    if not saved:
        return load_dataset(name, configuration, split=split)
    dataset = load_from_disk(name)
    if not isinstance(dataset, DatasetDict):
        return dataset
    if split not in dataset:
        raise ValueError(f"there is no split {split!r}; its splits: {', '.join(dataset)}")
    return dataset[split]


def quiet_libraries() -> None:
    """Switches off the bars that transformers and datasets draw while loading; the command line draws its own."""
    import datasets
    from transformers.utils import logging

    datasets.disable_progress_bars()
    logging.disable_progress_bar()
