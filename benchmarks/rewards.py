"""Seconds that rewards take, by kind: ``make bench-rewards``.

Each row is a batch of completions that are all different, scored twice; the first round warms up and the second is
printed; words pick rows, as in ``benchmarks/rewards.py mathematics``. A row is a function that returns what to score,
and its line in ``ROWS``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

Batch = tuple[Callable[..., list[float | None]], dict[str, Any]]


def code_asserts(salt: int) -> Batch:
    """64 functions with two asserts each; a process for the program and one for its tests."""
    from grpo_trainer.rewards.code import code_tests

    texts = [f"def add(a, b):\n    # {salt} {i}\n    return a + b\n" for i in range(64)]
    return code_tests, {"completions": texts, "tests": ["assert add(1, 2) == 3\nassert add(0, 0) == 0"] * 64}


def code_pairs(salt: int) -> Batch:
    """64 programs with one pair of input and output each."""
    from grpo_trainer.rewards.code import code_tests

    texts = [f"print(sum(map(int, input().split())))  # {salt} {i}" for i in range(64)]
    return code_tests, {"completions": texts, "tests": [[{"input": "20 22", "output": "42"}]] * 64}


def code_compiling(salt: int) -> Batch:
    """64 compilations."""
    from grpo_trainer.rewards.code import code_compiles

    return code_compiles, {"completions": [f"x = {salt} + {i}" for i in range(64)]}


def maths(salt: int) -> Batch:
    """512 final answers of 64 questions, in numbers, fractions, roots, sets and intervals; in workers, as in a run."""
    from grpo_trainer.rewards.math_answer import math_answer

    golds = [
        text.format(salt + k) for k in range(16) for text in ("{}", "\\frac{{{}}}{{77}}", "2\\sqrt{{{}}}+1", "[0, {})")
    ]
    texts = [f"We try it in {i} ways.\nThe answer is \\boxed{{{golds[i // 8]}}}." for i in range(512)]
    return _in_workers(math_answer, "answer"), {"completions": texts, "answer": [golds[i // 8] for i in range(512)]}


_SETS: dict[Any, Any] = {}


def _in_workers(function: Callable[..., Any], column: str) -> Callable[..., list[float | None]]:
    """The function as a run calls it; its workers stay for the second round."""
    from grpo_trainer.rewards.base import RewardInputs, RewardSet

    rewards = _SETS.setdefault(function, RewardSet([function]))

    def scored(**arguments: Any) -> list[float | None]:
        rows = [{"prompt": "", column: value} for value in arguments[column]]
        texts = arguments["completions"]
        inputs = RewardInputs(rows=rows, completions=texts, completion_ids=[[0]] * len(texts))
        return rewards.score(inputs)[0][:, 0].tolist()

    return scored


ROWS: dict[str, tuple[Callable[[int], Batch], float | None]] = {
    "64 functions with asserts, sandboxed": (code_asserts, 6.0),
    "64 programs with input and output, sandboxed": (code_pairs, 6.0),
    "64 programs compiled, sandboxed": (code_compiling, None),
    "512 verdicts of mathematics": (maths, 2.0),
}
"""What is scored -> the batch, of a number that makes it different from an earlier one; and the seconds it may take."""


def main() -> None:
    """Prints one line per row."""
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    wanted = sys.argv[1:]
    for name, (make, bar) in ROWS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        seconds = 0.0
        for salt in range(2):
            function, arguments = make(salt)
            start = time.perf_counter()
            rewards = function(**arguments)
            seconds = time.perf_counter() - start
            assert set(rewards) == {1.0}, rewards
        print(f"{name:<50} {seconds:6.2f} s" + (f"  (at most {bar:g})" if bar else ""), flush=True)
    for rewards in _SETS.values():
        rewards.close()


if __name__ == "__main__":
    main()
