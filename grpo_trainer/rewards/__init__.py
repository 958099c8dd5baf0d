"""Rewards: the contract, and the functions that can be asked for by name. Nothing here knows of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_trainer.rewards.countdown import countdown
from grpo_trainer.rewards.gym import reasoning_gym
from grpo_trainer.rewards.judge import llm_judge
from grpo_trainer.rewards.math_answer import math_answer
from grpo_trainer.rewards.maths import last_integer

REWARDS: dict[str, Callable[..., Any]] = {
    "last_integer": last_integer,
    "llm_judge": llm_judge,
    "math_answer": math_answer,
    "countdown": countdown,
    "reasoning_gym": reasoning_gym,
}
"""Every reward by name. A new one is a function in a module of this folder and a line here."""
