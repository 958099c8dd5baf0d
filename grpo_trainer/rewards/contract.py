"""What a reward function is called with, what it may log, and what it may return."""

from __future__ import annotations

import copy
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from grpo_trainer.types import Row

RewardFn = Callable[..., Any]
"""``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, or a coroutine of one."""

RESERVED = frozenset(
    ("prompt", "completion", "completion_ids", "prompts", "completions", "trainer_state", "log_extra", "log_metric")
)
"""Columns that are not handed on, since the contract uses their names."""


class RewardError(ValueError):
    """A reward function returned something that is not a reward, or came to grief in a worker."""


@dataclass
class RewardLog:
    """What reward functions reported while they scored one batch.

    Attributes:
        extra: column -> one value per completion, for the completions table.
        metrics: name -> values, averaged when they are logged.
        troubles: name of a metric -> completions of this batch that had such trouble.
    """

    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    troubles: dict[str, int] = field(default_factory=dict)

    def log_extra(self, count: int, column: str, values: Sequence[Any]) -> None:
        """Adds a column.

        Args:
            count: how many completions were scored.
            column: its name.
            values: one per completion.

        Raises:
            RewardError: if there are more or fewer.
        """
        if len(values) != count:
            raise RewardError(f"log_extra({column!r}, ...) got {len(values)} values for {count} completions")
        self.extra[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Adds to a metric.

        Args:
            name: of the metric.
            value: a finite number.

        Raises:
            RewardError: if it is not.
        """
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardError(f"log_metric({name!r}, ...) got {short(value)}, which is not a finite number")
        self.metrics.setdefault(name, []).append(float(value))


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """One batch to score: N completions, each with the row that it answers.

    Attributes:
        rows: N dataset rows; the row of completion i, so a prompt's row stands once per completion.
        completions: N texts, or N message lists for conversational prompts.
        completion_ids: N lists of token ids.
        trainer_state: the trainer's state, for rewards that change over a run.
        group_sizes: how many completions each prompt has here, one after the other; None: not known.
    """

    rows: Sequence[Row]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    trainer_state: Any = None
    group_sizes: Sequence[int] | None = None

    def columns(self) -> tuple[str, ...]:
        """The columns of the rows that are handed on."""
        return tuple(c for c in dict.fromkeys(c for row in self.rows for c in row) if c not in RESERVED)

    def data(self, columns: Sequence[str], rows: Sequence[int]) -> dict[str, list[Any]]:
        """The arguments of the contract that hold one entry per completion, for some completions.

        Args:
            columns: of the dataset.
            rows: places of n completions in the batch.

        Returns:
            Name -> n entries; the caller's own, but for the objects in the dataset's columns.
        """
        return {
            **{column: [self.rows[i].get(column) for i in rows] for column in columns},
            "prompts": [_own(self.rows[i]["prompt"]) for i in rows],
            "completions": [_own(self.completions[i]) for i in rows],
            "completion_ids": [list(self.completion_ids[i]) for i in rows],
        }

    def arguments(self, columns: Sequence[str], rows: Sequence[int], log: RewardLog) -> dict[str, Any]:
        """All arguments of the contract, for some completions.

        Args:
            columns: of the dataset.
            rows: places of n completions in the batch.
            log: where the function's log goes.

        Returns:
            Name -> argument.
        """
        return {
            **self.data(columns, rows),
            "trainer_state": self.trainer_state,
            "log_extra": functools.partial(log.log_extra, len(rows)),
            "log_metric": log.log_metric,
        }


def reward_name(function: RewardFn) -> str:
    """The name under which a function's figures are logged: its own, its wrapped function's, or its class's.

    Args:
        function: a function, a partial of one, or a callable object.

    Returns:
        The name.

    Example:
        >>> import functools
        >>> def correct(completions, scale): ...
        >>> reward_name(functools.partial(correct, scale=2))
        'correct'
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return "lambda" if name == "<lambda>" else name


def check_rewards(name: str, values: Any, completions: Sequence[Any], rows: Sequence[int] | None = None) -> list[float]:
    """The values that a function returned, as floats, NaN for None.

    Args:
        name: the function's name.
        values: what it returned for ``completions``.
        completions: the N completions, to show the one in question.
        rows: their places in the batch; None: 0 to N - 1.

    Returns:
        N floats.

    Raises:
        RewardError: if it is not a sequence of N values, or a value is neither a finite number nor None.
    """
    count = len(completions)
    if hasattr(values, "tolist"):
        values = values.tolist()  # a tensor, a numpy array and the like
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Sequence):
        raise RewardError(
            f"reward function {name!r} returned {short(values)} ({type(values).__name__}) for {count} completions; "
            f"it must return a list of {count} numbers or None"
        )
    if len(values) != count:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for {count} completions; "
            "it must return one per completion"
        )
    places = range(count) if rows is None else rows
    return [_check_value(name, *each) for each in zip(places, values, completions, strict=True)]


def _check_value(name: str, row: int, value: Any, completion: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    elif hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()  # a number of numpy's
    problem = f"{short(value)} ({type(value).__name__}), which is not a number"
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond 1e308
            number = math.inf
        if math.isfinite(number):
            return number
        problem = f"{number}, which is not finite"
    raise RewardError(
        f"reward function {name!r} returned {problem}, for row {row}: {short(completion)}. "
        "Return None where the reward does not apply"
    )


def _own(value: Any) -> Any:
    """A text, which cannot be changed, or a copy of messages, which could."""
    return value if isinstance(value, str) else copy.deepcopy(value)


def short(value: Any, limit: int = 120) -> str:
    """A value in a message, its end left out if it is long.

    Args:
        value: anything.
        limit: most characters.

    Returns:
        Its text.
    """
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
