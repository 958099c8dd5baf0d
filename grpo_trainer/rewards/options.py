"""How a reward function is run: where, for how long, and what its trouble means."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from grpo_trainer.registry import suggest

Isolation = Literal["inline", "process", "sandbox"]
"""In the trainer's process; in a worker that can be killed; in a worker that sees neither files nor the network."""

OnTrouble = Literal["raise", "none"] | float
"""End the run; no reward for the completion (None); this reward for it."""

F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "__reward_options__"
_REQUIRES = "__reward_requires__"


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """How one reward function is run. The defaults are those of a user's plain function.

    Attributes:
        isolation: ``inline`` in the trainer's process, ``process`` in a worker process, ``sandbox`` in a worker that
            has no network, sees no files of the user's and runs as nobody.
        time_limit: seconds that a call may take in a worker; None for no limit.
        memory_limit: bytes of address space that a worker may use; None for no limit.
        rows_per_call: completions per call, which lets a batch be spread over workers, and a completion that hangs or
            crashes be told from those beside it; None gives the function the whole batch, as inline. Set it only if the
            reward of a completion depends on nothing beside it.
        on_error: what an exception, a crash or an illegal value means.
        on_timeout: what it means that the time limit ran out.
        group: the function is called once per group, with the completions of one prompt.
        cache: equal arguments are scored once (``trainer_state`` does not count, and ``log_metric`` is not called
            again). Set it only if the reward of a completion (with ``group``: of a group) depends on nothing else.
        imports: modules that a worker imports before it takes calls, so that this is not part of a call's time.

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
    imports: tuple[str, ...] = ()

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
        for name in ("group", "cache"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; use true or false")
        if isinstance(self.imports, str) or not all(isinstance(name, str) for name in self.imports):
            raise ValueError(f"imports is {self.imports!r}; use a list of names of modules")
        object.__setattr__(self, "imports", tuple(self.imports))
        if self.group and self.rows_per_call is not None:
            raise ValueError(
                f"group is true, so a call holds the completions of one prompt, and rows_per_call={self.rows_per_call} "
                "would cut it; leave one of them out"
            )
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


def with_options(function: F, **changes: Any) -> Callable[..., Any]:
    """A function that is run in another way than the one given, which stays as it is.

    Args:
        function: a reward function, or a partial of one.
        **changes: fields of `RewardOptions`.

    Returns:
        A partial of it; the function itself if nothing changes.

    Raises:
        ValueError: if a change is not legal.
    """
    if not changes:
        return function
    changed = functools.partial(function)
    setattr(changed, _ATTRIBUTE, options_of(function, **changes))
    return changed


def check_option_names(names: Iterable[str], where: str) -> None:
    """Checks that there are such options.

    Args:
        names: of options.
        where: they are set, for the message.

    Raises:
        ValueError: if one is unknown, with the nearest legal one.
    """
    legal = [f.name for f in dataclasses.fields(RewardOptions)]
    for name in names:
        if name not in legal:
            raise ValueError(f"{where} has no option {name!r}.{suggest(str(name), legal)} Legal: {', '.join(legal)}.")


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
    while isinstance(function, functools.partial) and not hasattr(function, _ATTRIBUTE):
        function = function.func
    return dataclasses.replace(getattr(function, _ATTRIBUTE, RewardOptions()), **changes)


def requires(check: Callable[..., None]) -> Callable[[F], F]:
    """Declares what a reward function needs, so that it is refused before a run starts rather than in its first step.

    Args:
        check: called with the keyword arguments that are bound to the function; it raises if something is missing.

    Returns:
        A decorator that returns the function itself.
    """

    def declare(function: F) -> F:
        setattr(function, _REQUIRES, check)
        return function

    return declare


def check_requirements(function: Callable[..., Any]) -> None:
    """Refuses a reward function that cannot work here.

    Args:
        function: a reward function, or a partial of one.

    Raises:
        Exception: what the function's own check raises.
    """
    bound: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        bound = {**function.keywords, **bound}
        function = function.func
    check = getattr(function, _REQUIRES, None)
    if check is not None:
        check(**bound)
