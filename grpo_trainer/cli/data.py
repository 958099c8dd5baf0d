"""The data of a recipe: loaded, mixed, renamed, split, and with the prompt where the trainer looks for it.

::

    load -> map_fn -> column_mapping -> columns -> weight      for each dataset
      fraction -> one after the other                          if there are several
        dataset_map_fn -> dataset_column_mapping               for all rows
          test_split_size -> prompt column -> system prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainer.cli.arguments import DatasetEntry, RecipeArguments
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import Recipe
from grpo_trainer.cli.source import files_of, load_rows
from grpo_trainer.registry import resolve, suggest
from grpo_trainer.tasks import BUILTIN_TASKS


def build_datasets(recipe: Recipe, config: Any, say: Callable[[str], None] = lambda line: None) -> tuple[Any, Any]:
    """The rows to train on, and those to evaluate on if the recipe evaluates.

    Args:
        recipe: the recipe.
        config: its ``GRPOConfig``.
        say: prints a line.

    Returns:
        ``(train, evaluation or None)``, with the column ``prompt``; streams if the recipe streams.

    Raises:
        RecipeError: if a dataset, a split or a column is not there.
    """
    from datasets.exceptions import DatasetsError

    arguments = recipe.arguments
    _check_names(recipe)
    evaluates = str(getattr(config.eval_strategy, "value", config.eval_strategy)) != "no"
    where = f"{recipe.path}: dataset_name={arguments.dataset_name}" if not arguments.datasets else f"{recipe.path}"
    try:
        if arguments.dataset_config and arguments.dataset_name and files_of(arguments.dataset_name) is not None:
            say(f"dataset_config={arguments.dataset_config} is left out: files have no configurations")
        train, heldout = _train_and_heldout(arguments, config, evaluates)
        return as_prompts(train, arguments), as_prompts(heldout, arguments) if evaluates else None
    except RecipeError as error:
        raise RecipeError(f"{recipe.path}: {error}") from error
    except (ValueError, TypeError, OSError, DatasetsError) as error:
        raise RecipeError(f"{where}: {error}") from error


def _check_names(recipe: Recipe) -> None:
    arguments = recipe.arguments
    if arguments.datasets and arguments.dataset_name:
        raise RecipeError(
            f"{recipe.path}: dataset_name={arguments.dataset_name} and datasets are both set; give one of them, the "
            "other as null"
        )
    if not arguments.datasets and not arguments.dataset_name:
        raise RecipeError(f"{recipe.path} names no dataset: set dataset_name, e.g. to {next(iter(BUILTIN_TASKS))}")


def _train_and_heldout(arguments: RecipeArguments, config: Any, evaluates: bool) -> tuple[Any, Any]:
    seed = config.seed if config.data_seed is None else config.data_seed
    streaming = arguments.dataset_streaming

    def load(split: str, evaluates: bool) -> Any:
        entry = DatasetEntry(path=arguments.dataset_name or "", name=arguments.dataset_config, split=split)
        return _prepared(load_rows(entry, seed=config.seed, streaming=streaming, evaluates=evaluates), arguments)

    if arguments.datasets:
        train = _prepared(mixture(arguments.datasets, seed=seed, streaming=streaming), arguments)
    else:
        train = load(arguments.dataset_train_split, False)
    if arguments.test_split_size is not None:
        if streaming:
            raise ValueError(
                f"test_split_size={arguments.test_split_size} needs the number of rows, which a stream does not tell: "
                "name another split as dataset_test_split, or set dataset_streaming: false"
            )
        parts = train.train_test_split(test_size=arguments.test_split_size, seed=seed)
        return parts["train"], parts["test"]
    if not evaluates:
        return train, None
    if arguments.datasets:
        raise RecipeError("datasets have no split to evaluate on: set test_split_size, or eval_strategy: no")
    return train, load(arguments.dataset_test_split, True)


def _prepared(dataset: Any, arguments: RecipeArguments) -> Any:
    if arguments.dataset_map_fn:
        dataset = mapped(dataset, arguments.dataset_map_fn, "dataset_map_fn")
    return renamed(dataset, arguments.dataset_column_mapping or {}, "dataset_column_mapping")


def mixture(entries: Sequence[DatasetEntry], *, seed: int, streaming: bool) -> Any:
    """Several datasets, one after the other.

    Args:
        entries: the datasets, with the share that each has.
        seed: draws the rows of those that have a ``weight``.
        streaming: read rows as they are needed.

    Returns:
        One dataset, or one stream.

    Raises:
        ValueError: if a share is out of range, or some have a fraction and others not, or their columns do not fit.
    """
    from datasets import concatenate_datasets
    from datasets.exceptions import DatasetsError

    fractions = [entry.fraction for entry in entries]
    if any(f is not None for f in fractions) and not all(f is not None and f > 0 for f in fractions):
        raise ValueError(f"datasets: fraction is {fractions}; give it for all of them, above 0, or for none")
    if streaming and any(entry.fraction or entry.weight for entry in entries):
        raise ValueError(
            "datasets: fraction and weight need the number of rows, which a stream does not tell; leave them out or "
            "set dataset_streaming: false"
        )
    loaded = []
    for i, entry in enumerate(entries):
        try:
            loaded.append(_one_of_mixture(entry, seed, streaming))
        except (ValueError, TypeError, OSError, DatasetsError) as error:
            raise ValueError(f"datasets[{i}] ({entry.path}): {error}") from error
    if all(f is not None for f in fractions):
        shares = [float(f) / sum(fractions) for f in fractions]  # type: ignore[arg-type]
        total = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True))
        loaded = [rows.select(range(round(share * total))) for rows, share in zip(loaded, shares, strict=True)]
    try:
        return concatenate_datasets(loaded)
    except (ValueError, TypeError) as error:
        raise ValueError(f"datasets: their columns do not fit each other; keep some with columns: {error}") from error


def _one_of_mixture(entry: DatasetEntry, seed: int, streaming: bool) -> Any:
    rows = load_rows(entry, seed=seed, streaming=streaming)
    if entry.map_fn:
        rows = mapped(rows, entry.map_fn, "map_fn")
    rows = renamed(rows, entry.column_mapping or {}, "column_mapping")
    if entry.columns is not None:
        _check_columns(rows, entry.columns, "columns")
        rows = rows.select_columns(entry.columns)
    if entry.weight is None:
        return rows
    if not 0 < entry.weight <= 1:
        raise ValueError(f"weight={entry.weight} must be in (0, 1], a share of its rows")
    return rows.shuffle(seed=seed).select(range(round(entry.weight * len(rows))))


def mapped(dataset: Any, name: str, key: str) -> Any:
    """The dataset with what a function adds to each row.

    Args:
        dataset: rows.
        name: of the function, ``pkg.mod:fn``; it is called with a row and returns the columns that it adds or changes.
        key: the setting that names it, for messages.

    Returns:
        The dataset; of a stream the rows are mapped as they are read.

    Raises:
        ValueError: if there is no such function, or it fails or returns no mapping, with the row.
    """
    function = resolve(import_path(name), {}, key)

    def call(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            out = function(row)
        except Exception as error:
            raise ValueError(f"{key}={name} failed on row {index}: {type(error).__name__}: {error}") from error
        if not isinstance(out, Mapping):
            raise ValueError(f"{key}={name} returned a {type(out).__name__} for row {index}; return a dict of columns")
        return dict(out)

    if not hasattr(dataset, "__len__"):
        return dataset.map(call, with_indices=True)
    # cached results are told apart by the function's name, not by what it does by now
    return dataset.map(call, with_indices=True, load_from_cache_file=False)


def import_path(name: str) -> str:
    """``pkg.mod:fn``, also where it is written ``pkg.mod.fn``, as TRL writes it."""
    return name if ":" in name or "." not in name else ":".join(name.rsplit(".", 1))


def renamed(dataset: Any, mapping: Mapping[str, str], key: str) -> Any:
    """The dataset with other names for some columns.

    Args:
        dataset: rows.
        mapping: column -> its new name.
        key: the setting, for messages.

    Returns:
        The dataset.

    Raises:
        ValueError: if a column is not there, or a new name is that of another column.
    """
    mapping = {old: new for old, new in mapping.items() if old != new}
    if not mapping:
        return dataset
    columns = _check_columns(dataset, list(mapping), key)
    taken = [c for c in columns if c not in mapping]
    for old, new in mapping.items():
        if new in taken:
            raise ValueError(
                f"{key}: {old!r} cannot be called {new!r}, since there is a column of that name; give that one another "
                f"name too, e.g. {{{old}: {new}, {new}: old_{new}}}"
            )
        taken.append(new)
    return dataset.rename_columns(mapping)


def as_prompts(dataset: Any, arguments: RecipeArguments) -> Any:
    """The dataset with its prompts in the column ``prompt``, the system prompt before them if there is one.

    Args:
        dataset: rows.
        arguments: ``dataset_prompt_column`` and ``system_prompt``.

    Returns:
        The dataset. With a system prompt, a text becomes a user message; messages keep a system message of their own.

    Raises:
        RecipeError: if the prompt column is not there.
        ValueError: if there is a system prompt, and a prompt is empty or neither a text nor messages.
    """
    column, system = arguments.dataset_prompt_column, arguments.system_prompt
    columns = columns_of(dataset)
    if column not in columns:
        raise RecipeError(
            f"dataset_prompt_column={column!r} is no column of {arguments.data_name}.{suggest(column, columns)} "
            f"Its columns: {', '.join(columns)}"
        )
    if column != "prompt":
        if "prompt" in columns:
            dataset = dataset.remove_columns("prompt")
        dataset = dataset.rename_column(column, "prompt")
    if system is None:
        return dataset

    def with_system(row: dict[str, Any], index: int) -> dict[str, Any]:
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not prompt or not isinstance(messages, list) or not isinstance(messages[0], Mapping):
            raise ValueError(
                f"row {index} has the prompt {prompt!r}; it must be a text or messages to follow system_prompt"
            )
        if messages[0].get("role") != "system":
            messages = [{"role": "system", "content": system}, *messages]
        return {"prompt": messages}

    return dataset.map(with_system, with_indices=True)


def columns_of(dataset: Any) -> list[str]:
    """The columns of a dataset; those of its first row if it is a stream that does not tell."""
    names = dataset.column_names
    return list(names if names is not None else next(iter(dataset), {}))


def _check_columns(dataset: Any, wanted: Sequence[str], key: str) -> list[str]:
    columns = columns_of(dataset)
    for name in wanted:
        if name not in columns:
            raise ValueError(
                f"{key}: there is no column {name!r}.{suggest(name, columns)} Its columns: {', '.join(columns)}"
            )
    return columns
