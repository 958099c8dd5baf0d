"""Reward functions: called by one contract, checked, and combined.

The contract is TRL's: a reward is called with keyword arguments ``prompts``, ``completions``, ``completion_ids``, every
further column of the dataset (one entry per completion), ``trainer_state``, ``log_extra`` and ``log_metric``, and
returns one number per completion, or None where it does not apply. None is never 0: a completion that no function could
score stays out of its group's statistics.

How each function is run is in its options: here, in worker processes, or in a sandbox; in one call or in several. The
numbers and their order are the same.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.rewards.contract import (
    RESERVED,
    RewardError,
    RewardFn,
    RewardInputs,
    RewardLog,
    check_rewards,
    reward_name,
)
from grpo_trainer.rewards.loop import LoopThread, run
from grpo_trainer.rewards.options import RewardOptions, check_requirements, options_of
from grpo_trainer.rewards.pool import Reply, Task, WorkerPool
from grpo_trainer.rewards.scoring import Pending, Reward, Rows, Scoring, plain_state
from grpo_trainer.rewards.workers import start_pools

__all__ = [
    "RESERVED",
    "RewardError",
    "RewardFn",
    "RewardInputs",
    "RewardLog",
    "RewardSet",
    "check_rewards",
    "reward_name",
]

Work = Callable[[], Coroutine[Any, Any, None]]
"""Makes a coroutine."""


class RewardSet:
    """Several reward functions with their names and weights.

    Args:
        functions: the functions, at least one.
        weights: one finite number per function; None weighs each with 1.
        names: one per function; None derives them. Names are made unique by a suffix, so no metric hides another.
        options: how each is run; None: as each declares. Workers are started at once, if one needs them.

    Raises:
        ValueError: if there is no function, one is not callable or cannot be carried to a worker, or the number of
            weights, names or options differs.
    """

    def __init__(
        self,
        functions: Sequence[RewardFn],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        options: Sequence[RewardOptions] | None = None,
    ) -> None:
        if not functions:
            raise ValueError("reward_funcs is empty: give at least one reward function")
        for f in functions:
            if not callable(f):
                raise ValueError(f"reward_funcs holds {f!r} ({type(f).__name__}), which is not callable")
            check_requirements(f)
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"reward_weights has {len(weights)} entries for {len(functions)} reward functions; give one each"
            )
        if weights is not None and not all(math.isfinite(w) for w in weights):
            raise ValueError(f"reward_weights must be finite numbers, got {list(weights)}")
        for what, given in (("names", names), ("options", options)):
            if given is not None and len(given) != len(functions):
                raise ValueError(f"{len(given)} {what} for {len(functions)} reward functions; give one each")
        self.functions = list(functions)
        self.names = unique_names(list(names) if names is not None else [reward_name(f) for f in functions])
        self.weights = torch.tensor([1.0] * len(functions) if weights is None else list(weights), dtype=torch.float64)
        self.options = [options_of(f) for f in functions] if options is None else list(options)
        self._rewards = [
            Reward(name=n, function=f, options=o)
            for n, f, o in zip(self.names, self.functions, self.options, strict=True)
        ]
        self._pools = start_pools(self._rewards)

    def score(self, inputs: RewardInputs) -> tuple[Tensor, RewardLog]:
        """Calls every function on the batch: those with workers there, meanwhile the others here.

        Args:
            inputs: N completions.

        Returns:
            (N, R) rewards in float64, NaN where a function does not apply, and what the functions logged.

        Raises:
            RewardError: if a function returns a wrong number of values, or a value that is not a finite number; if a
                call in a worker fails. Where the function's options say so, its reward is None or a number instead.
            Exception: whatever a function raises here, with a note that names the function.
        """
        return self.begin(inputs).finish()

    def begin(self, inputs: RewardInputs) -> Batch:
        """A batch whose completions may come one group after the other.

        Args:
            inputs: N completions, which need not be there yet: what the sequences hold when their group is started, and
                the others when the batch is finished, is what counts.

        Returns:
            The batch.
        """
        return Batch(self, [Scoring(reward, inputs) for reward in self._rewards], self._pools)

    @property
    def starts_early(self) -> bool:
        """Whether a group can be scored while others are still being drawn."""
        return any(reward.starts_early for reward in self._rewards)

    def close(self) -> None:
        """Ends the workers, if there are any. The next batch starts new ones."""
        for pool in self._pools.values():
            pool.close()

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


class Batch:
    """A batch that is being scored.

    Args:
        rewards: the functions.
        scorings: each function's part.
        pools: workers, by kind of isolation.
    """

    def __init__(self, rewards: RewardSet, scorings: Sequence[Scoring], pools: dict[str, WorkerPool]) -> None:
        self._rewards = rewards
        self._scorings = scorings
        self._inputs = scorings[0].inputs
        self._away = _Away(pools, self._inputs)
        sizes = [len(self._inputs.rows)] if self._inputs.group_sizes is None else self._inputs.group_sizes
        self._groups = [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
        self._early: set[int] = set()
        self._loop: LoopThread | None = None
        self._awaited: list[Future[None]] = []
        self._clock = _Clock()

    @property
    def hidden(self) -> float:
        """Seconds, before the batch was finished, in which at least one call was being made."""
        return self._clock.seconds

    def start(self, group: int) -> None:
        """Scores a group whose completions are there, with those functions that can do without the rest of the batch.

        Workers score it, and coroutine functions that are called here, in a thread beside the drawing. Other functions
        are not called beside it: what they use may be bound to the main thread, and they would hold up the drawing.

        Args:
            group: its place in the batch.
        """
        self._early.add(group)
        for scoring in self._scorings:
            if not scoring.reward.starts_early:
                continue
            calls = scoring.calls([self._groups[group]])
            if scoring.reward.isolated:
                self._clock.begin(self._away.start(scoring, calls))
            else:
                self._loop = self._loop or LoopThread()
                futures = [self._loop.submit(functools.partial(_call, scoring, rows)) for rows in calls]
                self._clock.begin(futures)
                self._awaited += futures

    def finish(self) -> tuple[Tensor, RewardLog]:
        """Scores what has not been started, and waits for all.

        Returns:
            As ``RewardSet.score``.

        Raises:
            Exception: as ``RewardSet.score``.
        """
        self._clock.stop()
        rest = [group for place, group in enumerate(self._groups) if place not in self._early]
        pending: list[tuple[Scoring, Pending]] = []
        try:
            for scoring in self._scorings:
                if scoring.reward.isolated:
                    self._away.start(scoring, scoring.calls(rest if scoring.reward.piecewise else self._groups))
            for scoring in self._scorings:
                if not scoring.reward.isolated:
                    # lists of its own: what a function does to them does not reach the next
                    calls = scoring.calls(rest if scoring.reward.starts_early else self._groups)
                    pending += [(scoring, each) for rows in calls for each in scoring.call(rows)]
            self._await([functools.partial(scoring.finish, each) for scoring, each in pending])
            self._away.wait()
        except BaseException:
            self.abandon()
            for _, each in pending:
                if inspect.iscoroutine(each.awaitable):
                    each.awaitable.close()
            raise
        log = RewardLog()
        columns = [scoring.report(log) for scoring in self._scorings]
        return torch.tensor(columns, dtype=torch.float64).reshape(len(columns), -1).T.contiguous(), log

    def abandon(self) -> None:
        """Ends what is being done for this batch, and the workers with it."""
        try:
            self._close_loop()
        finally:
            self._rewards.close()

    def _await(self, rest: list[Work]) -> None:
        """Waits for these coroutines and for those that were started early; the first that raises ends them all."""
        if self._loop is None:
            if rest:
                run(_gather([work() for work in rest]))
            return
        awaited = self._awaited + [self._loop.submit(work) for work in rest]
        for future in as_completed(awaited):
            future.result()
        self._close_loop()

    def _close_loop(self) -> None:
        if self._loop is not None:
            self._loop.close()


class _Clock:
    """Measures how long at least one of some calls is under way, until it is stopped."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._under_way = 0
        self._since: float | None = None
        self._stopped = False

    def begin(self, futures: Sequence[Future[Any]]) -> None:
        """Takes up calls that have begun."""
        with self._lock:
            if futures and self._since is None:
                self._since = time.perf_counter()
            self._under_way += len(futures)
        for future in futures:
            future.add_done_callback(self._end)

    def stop(self) -> None:
        """What is under way is no longer counted."""
        with self._lock:
            self._pause()
            self._stopped = True

    def _end(self, future: Future[Any]) -> None:
        with self._lock:
            self._under_way -= 1
            if not self._under_way and not self._stopped:
                self._pause()

    def _pause(self) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
        self._since = None


class _Away:
    """The calls of one batch that are made in workers."""

    def __init__(self, pools: dict[str, WorkerPool], inputs: RewardInputs) -> None:
        self._pools = pools
        self._state = plain_state(inputs.trainer_state) if pools else None
        self._tasks: dict[Future[Reply], tuple[Scoring, list[Rows]]] = {}

    def start(self, scoring: Scoring, calls: list[Rows]) -> list[Future[Reply]]:
        """Hands out calls: one at a time, or those of a coroutine function together, as they can wait together."""
        pool = self._pools[scoring.reward.options.isolation]
        share = -(-len(calls) // pool.size) if scoring.reward.asynchronous else 1
        firsts = range(0, len(calls), max(share, 1))
        return [self._submit(pool, scoring, calls[first : first + share]) for first in firsts]

    def _submit(self, pool: WorkerPool, scoring: Scoring, calls: list[Rows]) -> Future[Reply]:
        options = scoring.reward.options
        # what awaits in vain is ended call by call, in the worker; this is for what never comes back from the function
        more = 1.0 if scoring.reward.asynchronous else 0.0
        task = Task(
            body=scoring.task(calls, self._state),
            calls=len(calls),
            time_limit=None if options.time_limit is None else options.time_limit + more,
            memory_limit=options.memory_limit,
        )
        future = pool.submit(task)
        self._tasks[future] = (scoring, calls)
        return future

    def wait(self) -> None:
        """Takes replies until every call is settled."""
        while self._tasks:
            done, _ = wait(self._tasks, return_when=FIRST_COMPLETED)
            for future in done:
                scoring, calls = self._tasks.pop(future)
                for rows in self._settle(scoring, calls, future.result()):
                    self._submit(self._pools[scoring.reward.options.isolation], scoring, [rows])

    @staticmethod
    def _settle(scoring: Scoring, calls: list[Rows], reply: Reply) -> list[Rows]:
        """Calls to make again."""
        if reply.results is not None:
            return [more for rows, one in zip(calls, reply.results, strict=True) for more in scoring.settle(rows, one)]
        if len(calls) > 1:
            return calls  # one of them has taken the others with it
        return scoring.fail(calls[0], "timeouts") if reply.timeout else scoring.fail(calls[0], "errors", reply.crash)


async def _call(scoring: Scoring, rows: Rows) -> None:
    """Makes a call of a coroutine function, and awaits it."""
    for pending in scoring.call(rows):
        await scoring.finish(pending)


async def _gather(awaitables: list[Any]) -> None:
    await asyncio.gather(*awaitables)


def unique_names(names: list[str]) -> list[str]:
    """Names with ``_2``, ``_3``, … where one recurs.

    Args:
        names: any.

    Returns:
        As many, none twice.

    Example:
        >>> unique_names(["a", "b", "a"])
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
