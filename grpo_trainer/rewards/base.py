"""Reward functions: called by one contract, checked, and combined.

The contract is TRL's: a reward is called with keyword arguments ``prompts``, ``completions``, ``completion_ids``, every
further column of the dataset (one entry per completion), ``trainer_state``, ``log_extra`` and ``log_metric``, and
returns one number per completion, or None where it does not apply. None is never 0: a completion that no function could
score stays out of its group's statistics.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import math
import numbers
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.types import Row

RewardFn = Callable[..., Any]
"""``f(prompts, completions, completion_ids, **columns) -> list[float | None]``, or a coroutine of one."""

RESERVED = frozenset(
    ("prompt", "completion", "completion_ids", "prompts", "completions", "trainer_state", "log_extra", "log_metric")
)
"""Columns that are not handed on, since the contract uses their names."""


class RewardError(ValueError):
    """A reward function returned something that is not a reward."""


@dataclass
class RewardLog:
    """What reward functions reported while they scored one batch.

    Attributes:
        extra: column -> one value per completion, for the completions table.
        metrics: name -> values, averaged when they are logged.
    """

    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardInputs:
    """One batch to score: N completions, each with the row that it answers.

    Attributes:
        rows: N dataset rows; the row of completion i, so a prompt's row stands once per completion.
        completions: N texts, or N message lists for conversational prompts.
        completion_ids: N lists of token ids.
        trainer_state: the trainer's state, for rewards that change over a run.
    """

    rows: Sequence[Row]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    trainer_state: Any = None

    def keyword_arguments(self, log: RewardLog) -> dict[str, Any]:
        """The arguments of the contract."""
        columns: dict[str, None] = {}
        for row in self.rows:
            columns.update(dict.fromkeys(row))
        extra = {c: [row.get(c) for row in self.rows] for c in columns if c not in RESERVED}
        return {
            **extra,
            "prompts": [_own(row["prompt"]) for row in self.rows],
            "completions": [_own(completion) for completion in self.completions],
            "completion_ids": [list(ids) for ids in self.completion_ids],
            "trainer_state": self.trainer_state,
            "log_extra": functools.partial(_log_extra, log, len(self.rows)),
            "log_metric": functools.partial(_log_metric, log),
        }


class RewardSet:
    """Several reward functions with their names and weights.

    Args:
        functions: the functions, at least one.
        weights: one finite number per function; None weighs each with 1.
        names: one per function; None derives them. Names are made unique by a suffix, so no metric hides another.

    Raises:
        ValueError: if there is no function, one is not callable, or the number of weights or names differs.
    """

    def __init__(
        self, functions: Sequence[RewardFn], weights: Sequence[float] | None = None, names: Sequence[str] | None = None
    ) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty: give at least one reward function")
        for f in functions:
            if not callable(f):
                raise ValueError(f"reward_funcs holds {f!r} ({type(f).__name__}), which is not callable")
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(functions)} reward functions; give one each"
            )
        if weights is not None and not all(math.isfinite(w) for w in weights):
            raise ValueError(f"reward_weights must be finite numbers, got {list(weights)}")
        if names is not None and len(names) != len(functions):
            raise ValueError(f"{len(names)} names for {len(functions)} reward functions; give one each")
        self.functions = list(functions)
        self.names = _unique(list(names) if names is not None else [reward_name(f) for f in functions])
        self.weights = torch.tensor([1.0] * len(functions) if weights is None else list(weights), dtype=torch.float64)

    def score(self, inputs: RewardInputs) -> tuple[Tensor, RewardLog]:
        """Calls every function on the batch.

        Args:
            inputs: N completions.

        Returns:
            (N, R) rewards in float64, NaN where a function does not apply, and what the functions logged.

        Raises:
            RewardError: if a function returns a wrong number of values, or a value that is not a finite number.
            Exception: whatever a function raises, with a note that names the function.
        """
        log = RewardLog()
        returned = []
        for name, function in zip(self.names, self.functions, strict=True):
            with _naming(name, len(inputs.rows)):
                # lists of its own: what a function does to them does not reach the next
                returned.append(function(**inputs.keyword_arguments(log)))
        pending = {
            i: _named(r, self.names[i], len(inputs.rows)) for i, r in enumerate(returned) if inspect.isawaitable(r)
        }
        if pending:
            for i, values in zip(pending, _run(_gather(list(pending.values()))), strict=True):
                returned[i] = values
        columns = [
            check_rewards(name, values, inputs.completions) for name, values in zip(self.names, returned, strict=True)
        ]
        return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), -1).T.contiguous(), log

    def combine(self, rewards: Tensor) -> Tensor:
        """The weighted sum over the functions that apply.

        Args:
            rewards: (N, R), NaN where a function does not apply.

        Returns:
            (N,) totals in float64; NaN where none applies. Weights are not renormalised where some do not apply.
        """
        total = torch.zeros_like(rewards[:, 0])
        for weight, column in zip(self.weights.tolist(), rewards.T, strict=True):
            # one function after the other, so that equal rewards have equal totals to the last bit in every row
            total = total + (weight * column).nan_to_num(nan=0.0)
        return total.masked_fill(rewards.isnan().all(dim=1), math.nan)


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


def check_rewards(name: str, values: Any, completions: Sequence[Any]) -> list[float]:
    """The values that a function returned, as floats, NaN for None.

    Args:
        name: the function's name.
        values: what it returned for ``completions``.
        completions: the N completions, to show the one in question.

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
            f"reward function {name!r} returned {_short(values)} ({type(values).__name__}) for {count} completions; "
            f"it must return a list of {count} numbers or None"
        )
    if len(values) != count:
        raise RewardError(
            f"reward function {name!r} returned {len(values)} values for {count} completions; "
            "it must return one per completion"
        )
    return [_check_value(name, row, value, completions[row]) for row, value in enumerate(values)]


def _check_value(name: str, row: int, value: Any, completion: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    elif hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()  # a number of numpy's
    problem = f"{_short(value)} ({type(value).__name__}), which is not a number"
    if isinstance(value, numbers.Real):
        try:
            number = float(value)
        except OverflowError:  # an integer beyond 1e308
            number = math.inf
        if math.isfinite(number):
            return number
        problem = f"{number}, which is not finite"
    raise RewardError(
        f"reward function {name!r} returned {problem}, for row {row}: {_short(completion)}. "
        "Return None where the reward does not apply"
    )


@contextlib.contextmanager
def _naming(name: str, count: int) -> Iterator[None]:
    """Adds to what is raised inside, which is the user's own error, whose function it was."""
    try:
        yield
    except Exception as error:
        note = f"raised by reward function {name!r}, while it scored {count} completions"
        error.__dict__.setdefault("__notes__", []).append(note)  # add_note, which Python 3.10 lacks
        raise


async def _named(awaitable: Awaitable[Any], name: str, count: int) -> Any:
    with _naming(name, count):
        return await awaitable


async def _gather(awaitables: list[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaitables))


def _run(coroutine: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Runs a coroutine to its end, also where an event loop is already running (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: dict[str, Any] = {}
    begun, done = threading.Event(), threading.Event()

    async def cancellable() -> list[Any]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        outcome["cancel"] = functools.partial(loop.call_soon_threadsafe, task.cancel)
        begun.set()
        return await coroutine

    def work() -> None:
        try:
            outcome["value"] = asyncio.run(cancellable())
        except BaseException as error:
            outcome["error"] = error
        finally:
            done.set()

    thread = threading.Thread(target=work, name="rewards")
    try:
        thread.start()
        done.wait()  # a join that an interrupt breaks off takes the thread for ended, before Python 3.13
    except BaseException:  # Ctrl-C: what went on behind the notebook's back would meet the next run
        if begun.wait(timeout=1):
            with contextlib.suppress(RuntimeError):  # it has just ended by itself
                outcome["cancel"]()
            thread.join()
        raise
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def _log_extra(log: RewardLog, count: int, column: str, values: Sequence[Any]) -> None:
    if len(values) != count:
        raise RewardError(f"log_extra({column!r}, ...) got {len(values)} values for {count} completions")
    log.extra[column] = list(values)


def _log_metric(log: RewardLog, name: str, value: float) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise RewardError(f"log_metric({name!r}, ...) got {_short(value)}, which is not a finite number")
    log.metrics.setdefault(name, []).append(float(value))


def _unique(names: list[str]) -> list[str]:
    """Names with ``_2``, ``_3``, … where one recurs.

    >>> _unique(["a", "b", "a"])
    ['a', 'b', 'a_2']
    """
    out: list[str] = []
    for name in names:
        candidate, k = name, 1
        while candidate in out:
            k += 1
            candidate = f"{name}_{k}"
        out.append(candidate)
    return out


def _own(value: Any) -> Any:
    """A text, which cannot be changed, or a copy of messages, which could."""
    return value if isinstance(value, str) else copy.deepcopy(value)


def _short(value: Any, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
