"""Rewards: the contract, and the functions that can be asked for by name. Nothing here knows of a trainer."""

from __future__ import annotations

from grpo_trainer.rewards.maths import last_integer

REWARDS = {
    "last_integer": last_integer,
}
"""Every reward by name. A new one is a function in a module of this folder and a line here."""
