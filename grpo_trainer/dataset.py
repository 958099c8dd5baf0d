"""The datasets that a trainer is given: checked row by row before anything is trained, and without what is filtered."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils.data import Subset

from grpo_trainer.data import OneFormat, PromptLimit, PromptRenderer
from grpo_trainer.rewards.base import RESERVED, RewardSet
from grpo_trainer.stream import check_stream, is_stream

logger = logging.getLogger(__name__)

ROWS_CHECKED = 2000
"""Rows whose prompt is rendered when a trainer is made, to find bad ones early; others are checked when met."""


def check_dataset(
    name: str, dataset: Any, renderer: PromptRenderer, limit: PromptLimit, warn: Callable[[str], Any] = logger.warning
) -> Any:
    """Renders prompts, so that bad rows are found before anything is trained, and leaves out what a policy filters.

    Of a dataset the first ``ROWS_CHECKED`` rows are looked at, or all if the policy decides about each; of a stream the
    first. Others are checked when met.

    Args:
        name: of the argument, for messages.
        dataset: rows, or None.
        renderer: row -> prompt.
        limit: how long a prompt may be.
        warn: is told, in a sentence, how many rows are left out or cut.

    Returns:
        The dataset itself, or what is left of it.

    Raises:
        ValueError: if the dataset has no rows, cannot be read as it needs to be, or has a row whose prompt is not legal
            or too long.
    """
    if dataset is None:
        return None
    _refuse_what_is_no_dataset(name, dataset)
    stream = is_stream(dataset)
    if stream:
        check_stream(name, dataset)
    first = first_row(dataset)
    if first is None:
        raise ValueError(f"{name} is empty")
    pictures = sorted({"image", "images"} & set(first)) if isinstance(first, Mapping) else []
    if pictures:
        raise ValueError(
            f"{name} has a column {pictures[0]!r}, but images are not supported yet and the model would not see them: "
            f"drop it with remove_columns({pictures[0]!r}), or rename it if only a reward function reads it"
        )
    count = 1 if stream else len(dataset) if limit.needs_every_prompt else min(len(dataset), ROWS_CHECKED)
    one_format, kept, cut = OneFormat(), [], 0
    for i in range(count):
        where = f"row {i} of {name}"
        prompt = renderer(dataset[i] if i else first, where)
        one_format.check(prompt, where)
        if limit.keeps(prompt):
            kept.append(i)
            cut += limit.fit(prompt, where) is not prompt
    if cut:
        warn(
            f"{name}: of {count} prompts looked at, {cut} have more than max_prompt_length={limit.max_prompt_length} "
            "tokens and keep their last ones (overlong_prompts='truncate_left')"
        )
    return dataset if stream or len(kept) == count else _only(kept, name, dataset, limit, warn)


def _only(kept: Sequence[int], name: str, dataset: Any, limit: PromptLimit, warn: Callable[[str], Any]) -> Any:
    """The rows that a filter keeps, said once."""
    room = f" or leave no room for max_completion_length={limit.max_completion_length} in the model's context"
    why = (
        f"have more than max_prompt_length={limit.max_prompt_length} tokens{room if limit.context else ''} "
        "(overlong_prompts='filter')"
    )
    if not kept:
        raise ValueError(
            f"{name}: all {len(dataset)} prompts {why}, so nothing is left. Raise max_prompt_length, or set "
            "overlong_prompts='truncate_left'"
        )
    warn(f"{name}: {len(dataset) - len(kept)} of {len(dataset)} rows are left out, whose prompts {why}")
    if hasattr(dataset, "select"):
        return dataset.select(kept)
    return [dataset[i] for i in kept] if isinstance(dataset, (list, tuple)) else Subset(dataset, kept)


def _refuse_what_is_no_dataset(name: str, dataset: Any) -> None:
    kind = f"{name} is a {type(dataset).__name__}, not a dataset of rows"
    if isinstance(dataset, str):
        raise ValueError(f"{kind}: load it first, e.g. datasets.load_dataset({dataset!r}, split='train')")
    if hasattr(dataset, "iloc"):
        raise ValueError(f"{kind}: give datasets.Dataset.from_pandas(frame)")
    if isinstance(dataset, Mapping) and "prompt" in dataset:
        raise ValueError(f"{kind}: give datasets.Dataset.from_dict(columns), or a list of rows")
    if isinstance(dataset, Mapping):
        splits = ", ".join(map(repr, dataset)) or "none"
        raise ValueError(f"{kind}: give one of its splits ({splits}), e.g. dataset[{next(iter(dataset), 'train')!r}]")


def check_eval_dataset(
    eval_dataset: Any, renderer: PromptRenderer, limit: PromptLimit, warn: Callable[[str], Any] = logger.warning
) -> Any:
    """As ``check_dataset``, for one evaluation set or several.

    Args:
        eval_dataset: a dataset, a mapping from name to dataset (a ``DatasetDict`` is one), or None.
        renderer: row -> prompt.
        limit: how long a prompt may be.
        warn: is told, in a sentence, how many rows are left out or cut.

    Returns:
        What is left of it; a mapping becomes a dict.

    Raises:
        ValueError: if a set is not legal, or the mapping is empty.
    """
    if not isinstance(eval_dataset, Mapping):
        return check_dataset("eval_dataset", eval_dataset, renderer, limit, warn)
    if not eval_dataset:
        raise ValueError(f"eval_dataset is an empty {type(eval_dataset).__name__}: give {{name: dataset}}, or None")
    return {
        name: check_dataset(f"eval_dataset[{name!r}]", dataset, renderer, limit, warn)
        for name, dataset in eval_dataset.items()
    }


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
