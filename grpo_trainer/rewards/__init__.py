"""Rewards: the contract, and the functions that can be asked for by name. Nothing here knows of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_trainer.rewards.code import code_compiles, code_tests
from grpo_trainer.rewards.countdown import countdown
from grpo_trainer.rewards.format import json_schema, matches, tag_counts, think_answer_format, xml
from grpo_trainer.rewards.gym import reasoning_gym
from grpo_trainer.rewards.judge import llm_judge
from grpo_trainer.rewards.language import language_consistency, readability
from grpo_trainer.rewards.length import cosine_length, relative_length, soft_overlong
from grpo_trainer.rewards.math_answer import math_answer
from grpo_trainer.rewards.maths import last_integer
from grpo_trainer.rewards.repetition import repetition

REWARDS: dict[str, Callable[..., Any]] = {
    "last_integer": last_integer,
    "code_compiles": code_compiles,
    "code_tests": code_tests,
    "llm_judge": llm_judge,
    "math_answer": math_answer,
    "countdown": countdown,
    "reasoning_gym": reasoning_gym,
    "think_answer_format": think_answer_format,
    "tag_counts": tag_counts,
    "matches": matches,
    "json_schema": json_schema,
    "xml": xml,
    "language_consistency": language_consistency,
    "readability": readability,
    "soft_overlong": soft_overlong,
    "cosine_length": cosine_length,
    "relative_length": relative_length,
    "repetition": repetition,
}
"""Every reward by name. A new one is a function in a module of this folder and a line here."""
