"""The library as a run calls it: in workers, with the numbers of a direct call, and through hostile text."""

from __future__ import annotations

import math
import time

import pytest

pytest.importorskip("math_verify", reason="needs the extra `rewards`")

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.base import RewardInputs, RewardSet
from grpo_trainer.rewards.math_answer import math_answer
from grpo_trainer.rewards.options import options_of, with_options

TEXTS = [
    "<think>We add both numbers first, and then we look at it again.</think> <answer>7</answer>",
    '{"x": 7}',
    "<a>7</a>",
    "We add both numbers, which is quite easy to do. So the answer is \\boxed{7}.",
    "On additionne les deux nombres, et la réponse est donc \\boxed{8}.",
    "",
    "\x00\ud800\u202e 7",
    "word " * 3000,
]
ARGUMENTS = {
    "matches": {"pattern": "[78]"},
    "json_schema": {"schema": {"type": "object"}},
    "cosine_length": {"max_length": 100},
}
ISOLATED = [name for name in REWARDS if options_of(REWARDS[name]).isolation == "process"]


def inputs_of(texts, answers):
    return RewardInputs(
        rows=[{"prompt": "p", "answer": answer} for answer in answers],
        completions=texts,
        completion_ids=[list(range(len(text))) for text in texts],
        group_sizes=[len(texts)],
    )


@pytest.mark.parametrize("name", ISOLATED)
def test_a_worker_gives_the_numbers_of_a_direct_call(name):
    import functools

    function = functools.partial(REWARDS[name], **ARGUMENTS.get(name, {}))
    inputs = inputs_of(TEXTS, [7] * len(TEXTS))
    direct = function(**inputs.data(("answer",), range(len(TEXTS))))
    rewards = RewardSet([function])
    try:
        found, _ = rewards.score(inputs)
    finally:
        rewards.close()
    assert [None if math.isnan(v) else v for v in found[:, 0].tolist()] == direct
    assert len({v for v in direct if v is not None}) > 1  # it tells these texts apart


def test_mathematics_that_hangs_costs_its_own_completion_and_no_other():
    """A reference may be what no guard of ours turns down; then the worker's limit is what ends it."""
    limited = with_options(math_answer, time_limit=2.0)
    rewards = RewardSet([limited])
    start = time.monotonic()
    try:
        # the reference itself is a tower, so the answer may be one too, and sympy never ends
        found, log = rewards.score(
            inputs_of(["\\boxed{7}", "\\boxed{9^{9^{9^{9}}}+1}", "\\boxed{8}"], [7, "9^{9^{9^{9}}}", 7])
        )
    finally:
        rewards.close()
    values = found[:, 0].tolist()
    assert (values[0], values[2]) == (1.0, 0.0) and (math.isnan(values[1]) or values[1] == 0.0)
    assert time.monotonic() - start < 120
    assert sum(log.troubles.values()) == math.isnan(values[1])
