"""One reward function's part in scoring one batch: which calls it takes, and what becomes of their trouble."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import logging
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.rewards.carry import pack
from grpo_trainer.rewards.contract import RewardError, RewardInputs, RewardLog, check_rewards, short
from grpo_trainer.rewards.options import RewardOptions

logger = logging.getLogger(__name__)

Rows = list[int]
"""Places of completions in the batch: those of one call."""

TROUBLES = ("timeouts", "errors")

CACHE_SIZE = 100_000
"""Most scores that are remembered of one function; the oldest are forgotten."""


@dataclass(kw_only=True)
class Reward:
    """A reward function and how it is run.

    Attributes:
        name: under which its figures are logged.
        function: the function.
        options: how it is run.
        index: its place among the functions of its workers.
        cache: scores by arguments, of one completion or group each: values, and values by extra column.
        shown: kinds of trouble that were shown.
    """

    name: str
    function: Callable[..., Any]
    options: RewardOptions
    index: int = 0
    cache: OrderedDict[bytes, tuple[list[float], dict[str, list[Any]]]] = field(default_factory=OrderedDict)
    shown: set[str] = field(default_factory=set)

    @property
    def isolated(self) -> bool:
        """Whether it is called in a worker."""
        return self.options.isolation != "inline"

    @property
    def watched(self) -> bool:
        """Whether its trouble is counted even when there is none."""
        return self.isolated or self.options.on_error != "raise"

    @property
    def piecewise(self) -> bool:
        """Whether a part of a batch can be scored without the rest."""
        return self.options.group or self.options.cache or self.options.rows_per_call is not None

    @property
    def asynchronous(self) -> bool:
        """Whether calling it gives a coroutine."""
        function = inspect.unwrap(getattr(self.function, "func", self.function))
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def starts_early(self) -> bool:
        """Whether a group is scored while others are still being drawn."""
        return self.piecewise and (self.isolated or self.asynchronous)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A call whose coroutine has not been awaited yet.

    Attributes:
        rows: its completions.
        log: what it logs.
        awaitable: what the call gave.
    """

    rows: Rows
    log: RewardLog
    awaitable: Awaitable[Any]


class Scoring:
    """One function's part in scoring one batch of N completions.

    Args:
        reward: the function.
        inputs: the batch.

    Raises:
        ValueError: if the function asks for whole groups and the batch does not say where they begin.
    """

    def __init__(self, reward: Reward, inputs: RewardInputs) -> None:
        self.reward = reward
        self.inputs = inputs
        self.values = [math.nan] * len(inputs.rows)
        self.troubles: list[str | None] = [None] * len(inputs.rows)
        self.extra: dict[str, list[Any]] = {}
        self.counts = dict.fromkeys(TROUBLES, 0)
        self._columns = inputs.columns()
        self._metrics: list[tuple[int, str, list[float]]] = []
        self._keys: dict[bytes, list[Rows]] = {}  # of what was not known: where it stands
        if reward.options.group and inputs.group_sizes is None:
            raise ValueError(f"reward function {reward.name!r} has group=True: give RewardInputs its group_sizes")

    # --- calls ----------------------------------------------------------------------------------------------------

    def calls(self, groups: Sequence[Rows]) -> list[Rows]:
        """The calls that are needed for some groups, in order; what is remembered is filled in.

        Args:
            groups: the completions of one prompt each; all of the batch if the function takes whole batches.

        Returns:
            The completions of each call.
        """
        options = self.reward.options
        rows = [row for group in groups for row in group]
        units = [list(group) for group in groups] if options.group else [[row] for row in rows]
        if options.cache:
            units = self._unknown(units)
        if options.group:
            return units
        if not self.reward.piecewise:
            return [rows]
        rows = [row for unit in units for row in unit]
        size = int(options.rows_per_call or max(len(rows), 1))
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def call(self, rows: Rows) -> list[Pending]:
        """Makes a call here.

        Args:
            rows: its completions.

        Returns:
            What has to be awaited yet.

        Raises:
            Exception: what the function raises, if that ends the run.
        """
        log = RewardLog()
        try:
            with naming(self.reward.name, len(rows)):
                returned = self.reward.function(**self.inputs.arguments(self._columns, rows, log))
            if inspect.isawaitable(returned):
                return [Pending(rows=rows, log=log, awaitable=returned)]
            self.take(rows, returned, log)
        except Exception as error:
            again = self.fail(rows, "errors", f"{type(error).__name__}: {error}", error)
            return [pending for each in again for pending in self.call(each)]
        return []

    async def finish(self, pending: Pending) -> None:
        """Awaits a call.

        Args:
            pending: the call.

        Raises:
            Exception: what the function raises, if that ends the run.
        """
        try:
            with naming(self.reward.name, len(pending.rows)):
                returned = await pending.awaitable
            self.take(pending.rows, returned, pending.log)
        except Exception as error:
            again = self.fail(pending.rows, "errors", f"{type(error).__name__}: {error}", error)
            await asyncio.gather(*(self.finish(more) for each in again for more in self.call(each)))

    def task(self, calls: Sequence[Rows], state: Any) -> bytes:
        """What a worker is told to do.

        Args:
            calls: one or more calls.
            state: the trainer's, see ``plain_state``.

        Returns:
            See ``worker.answer``.
        """
        data = [self.inputs.data(self._columns, rows) for rows in calls]
        return pack((self.reward.index, data, state, self.reward.options.time_limit or 0.0))

    def settle(self, rows: Rows, result: Any) -> list[Rows]:
        """Takes what a worker said of a call.

        Args:
            rows: its completions.
            result: from JSON.

        Returns:
            Calls to make in its place.

        Raises:
            RewardError: if its trouble ends the run.
        """
        name = self.reward.name
        if "unloaded" in result:
            raise RewardError(f"reward function {name!r} cannot be loaded in a worker: {result['unloaded']}")
        if result.get("printed") and self.reward.options.isolation == "process":
            print(result["printed"], end="")
        if result.get("timeout"):
            return self.fail(rows, "timeouts")
        if "error" in result:
            said, trace = str(result["error"]), str(result.get("trace", "")).rstrip()
            error = RewardError(f"reward function {name!r} raised {said}, {self._where(rows)}, in a worker:\n{trace}")
            return self.fail(rows, "errors", said, error)
        log = RewardLog()
        try:
            for column, values in result["extra"]:
                log.log_extra(len(rows), str(column), values)
            for metric, value in result["metrics"]:
                log.log_metric(str(metric), _revived(value))
            values = result["values"]
            self.take(rows, [_revived(v) for v in values] if isinstance(values, list) else _revived(values), log)
        except RewardError as error:
            return self.fail(rows, "errors", str(error), error)
        except (KeyError, TypeError, ValueError):  # a completion has written it
            return self.fail(rows, "errors", "its reply is none that a worker writes")
        return []

    # --- outcomes -------------------------------------------------------------------------------------------------

    def take(self, rows: Rows, returned: Any, log: RewardLog) -> None:
        """Takes what a call returned and logged.

        Args:
            rows: its completions.
            returned: one value per completion.
            log: what it logged.

        Raises:
            RewardError: if a value is not legal.
        """
        values = check_rewards(self.reward.name, returned, [self.inputs.completions[i] for i in rows], rows)
        for row, value in zip(rows, values, strict=True):
            self.values[row] = value
        self._fill(rows, log.extra)
        self._metrics += [(rows[0] if rows else 0, name, found) for name, found in log.metrics.items()]

    def fail(self, rows: Rows, kind: str, said: str | None = None, error: Exception | None = None) -> list[Rows]:
        """Does what the options say of a call that came to grief.

        Args:
            rows: its completions.
            kind: ``timeouts`` or ``errors``.
            said: what happened, in words.
            error: what was raised; None if the call was ended.

        Returns:
            Calls to make in its place: each completion alone, where that is allowed and may save some.

        Raises:
            Exception: ``error``, or a ``RewardError``, if the trouble ends the run.
        """
        options, name = self.reward.options, self.reward.name
        policy = options.on_timeout if kind == "timeouts" else options.on_error
        if options.rows_per_call is not None and len(rows) > 1 and (policy != "raise" or error is None):
            return [[row] for row in rows]
        said = said or f"no reward within time_limit={options.time_limit:g} s"
        if policy == "raise":
            raise error or RewardError(f"reward function {name!r}: {said}, {self._where(rows)}")
        for row in rows:
            self.values[row] = math.nan if policy == "none" else float(policy)
            self.troubles[row] = said
        self.counts[kind] += len(rows)
        if kind not in self.reward.shown:
            self.reward.shown.add(kind)
            rank = os.environ.get("RANK")
            logger.warning(
                "reward function %r%s: %s, %s. The reward is %s there, as on_%s says. This is said once; "
                "rewards/%s/%s counts them all",
                *(name, f" on process {rank}" if rank else "", said, self._where(rows)),
                *("None" if policy == "none" else policy, kind[:-1], name, kind),
            )
        return []

    def report(self, log: RewardLog) -> list[float]:
        """The values, when every call is settled.

        Args:
            log: where to what was logged goes.

        Returns:
            N values, NaN where there is none.
        """
        self._remember()
        log.extra.update(self.extra)
        for _, name, found in sorted(self._metrics, key=lambda each: each[0]):
            log.metrics.setdefault(name, []).extend(found)
        if self.reward.watched:
            log.extra[f"{self.reward.name}_trouble"] = self.troubles
            for kind, count in self.counts.items():
                log.troubles[f"rewards/{self.reward.name}/{kind}"] = count
        return self.values

    def _where(self, rows: Rows) -> str:
        first = short(self.inputs.completions[rows[0]], 500) if rows else "none"
        return f"while it scored {first}" if len(rows) == 1 else f"while it scored {len(rows)} completions from {first}"

    def _fill(self, rows: Rows, extra: Mapping[str, Sequence[Any]]) -> None:
        for column, values in extra.items():
            whole = self.extra.setdefault(column, [None] * len(self.values))
            for row, value in zip(rows, values, strict=True):
                whole[row] = value

    # --- what is remembered ---------------------------------------------------------------------------------------

    def _unknown(self, units: list[Rows]) -> list[Rows]:
        """Those completions or groups that have to be scored, each kind once; the others are filled in."""
        cache, new = self.reward.cache, []
        for unit in units:
            key = _key(self.inputs.data(self._columns, unit))
            if key in cache:
                cache.move_to_end(key)
                values, extra = cache[key]
                for row, value in zip(unit, values, strict=True):
                    self.values[row] = value
                self._fill(unit, extra)
                continue
            if key not in self._keys:
                new.append(unit)
            self._keys.setdefault(key, []).append(unit)
        return new

    def _remember(self) -> None:
        cache = self.reward.cache
        for key, (first, *others) in self._keys.items():
            values = [self.values[row] for row in first]
            troubles = [self.troubles[row] for row in first]
            extra = {column: [whole[row] for row in first] for column, whole in self.extra.items()}
            for unit in others:
                for row, value, trouble in zip(unit, values, troubles, strict=True):
                    self.values[row], self.troubles[row] = value, trouble
                self._fill(unit, extra)
            if not any(troubles):
                cache[key] = (values, extra)
        while len(cache) > CACHE_SIZE:
            cache.popitem(last=False)


def plain_state(state: Any) -> Any:
    """The trainer's state for a worker: what of its attributes needs no library to be read.

    Args:
        state: an object with attributes, None, or a plain value.

    Returns:
        A pickle of name -> value; a plain value itself.
    """
    if _is_plain(state):
        return state
    return pickle.dumps({k: v for k, v in getattr(state, "__dict__", {}).items() if _is_plain(v)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(k) is str and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _key(arguments: Mapping[str, Any]) -> bytes:
    """A digest of arguments: equal if they are equal and plain."""
    text = repr(arguments) if _is_plain(dict(arguments)) else pickle.dumps(arguments)
    content = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(content, digest_size=16).digest()


def _revived(value: Any) -> Any:
    """A value of a worker's reply, with a stand-in for what JSON cannot hold, so that it is refused by its own name."""
    if not isinstance(value, dict):
        return value
    kind, text = value["illegal"]
    return type(str(kind), (), {"__repr__": lambda self: str(text)})()


@contextlib.contextmanager
def naming(name: str, count: int) -> Iterator[None]:
    """Adds to what is raised inside, which is the user's own error, whose function it was.

    Args:
        name: of the function.
        count: how many completions it scored.

    Yields:
        Nothing.
    """
    try:
        yield
    except Exception as error:
        note = f"raised by reward function {name!r}, while it scored {count} completions"
        error.__dict__.setdefault("__notes__", []).append(note)  # add_note, which Python 3.10 lacks
        raise
