"""How a reward function is run: where, for how long, and what its trouble means."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Isolation = Literal["inline", "process", "sandbox"]
"""In the trainer's process; in a worker that can be killed; in a worker that sees neither files nor the network."""

OnTrouble = Literal["raise", "none"] | float
"""End the run; no reward for the completion (None); this reward for it."""

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__reward_options__"


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """How one reward function is run. The defaults are those of a user's plain function.

    Attributes:
        isolation: ``inline`` in the trainer's process, ``process`` in a worker process, ``sandbox`` in a worker that
            has no network, sees no files of the user's and runs as nobody.
        time_limit: seconds that a call may take in a worker; None for no limit.
        memory_limit: bytes of address space that a worker may use; None for no limit.
        rows_per_call: completions per call, which lets a batch be spread over workers; None gives the function the
            whole batch (or group), as inline. Set it only if the reward of a completion depends on nothing beside it.
        on_error: what an exception, a crash or an illegal value means.
        on_timeout: what it means that the time limit ran out.
        group: the function is called once per group, with the completions of one prompt.
        cache: equal arguments are scored once. Set it only if the reward depends on nothing but its arguments.

    Raises:
        ValueError: at construction, naming the field, its value and what is legal.
    """

    isolation: Isolation = "inline"
    time_limit: float | None = None
    memory_limit: int | None = None
    rows_per_call: int | None = None
    on_error: OnTrouble = "raise"
    on_timeout: OnTrouble = "none"
    group: bool = False
    cache: bool = False

    def __post_init__(self) -> None:
        if self.isolation not in get_args(Isolation):
            raise ValueError(f"isolation is {self.isolation!r}; use one of {', '.join(get_args(Isolation))}")
        for name in ("time_limit", "memory_limit", "rows_per_call"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
                raise ValueError(f"{name} is {value!r}; use a number above 0, or None for no limit")
        for name in ("on_error", "on_timeout"):
            value = getattr(self, name)
            if value not in ("raise", "none") and (
                isinstance(value, (bool, str)) or not isinstance(value, (int, float))
            ):
                raise ValueError(f"{name} is {value!r}; use raise, none or a number, the reward to give instead")
        if self.isolation == "inline" and (self.time_limit is not None or self.memory_limit is not None):
            raise ValueError(
                "time_limit and memory_limit hold in a worker only, as a call in the trainer's process cannot be "
                "stopped; set isolation to process or sandbox"
            )


def reward(**options: Any) -> Callable[[F], F]:
    """Declares how a reward function is run, unless the configuration says otherwise.

    Args:
        **options: fields of `RewardOptions`.

    Returns:
        A decorator that returns the function itself, which can still be called directly.

    Raises:
        ValueError: if an option is not legal.
        TypeError: if there is no such option.

    Example:
        >>> @reward(isolation="process", time_limit=5.0, rows_per_call=16)
        ... def short(completions, **kwargs):
        ...     return [-float(len(c)) for c in completions]
        >>> options_of(short).time_limit
        5.0
    """
    declared = RewardOptions(**options)

    def declare(function: F) -> F:
        setattr(function, _ATTRIBUTE, declared)
        return function

    return declare


def options_of(function: Callable[..., Any], **changes: Any) -> RewardOptions:
    """How a function is run: what it declares, changed where the configuration says otherwise.

    Args:
        function: a reward function, or a partial of one.
        **changes: fields of `RewardOptions`.

    Returns:
        The options.

    Raises:
        ValueError: if a change is not legal.
        TypeError: if there is no such option.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return dataclasses.replace(getattr(function, _ATTRIBUTE, RewardOptions()), **changes)
