"""The one door to trl: what it does well outside the objective.

Imported lazily, since trl brings much with it.
"""

from __future__ import annotations

from typing import Any

from grpo_trainer.registry import resolve


def is_conversational(prompt: Any) -> bool:
    """Whether a prompt is a list of messages (``role`` and ``content``), as trl tells it."""
    from trl.data_utils import is_conversational as peer

    return bool(peer({"prompt": prompt}))


PEER_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
"""Rewards that a recipe of trl asks for by name."""


def peer_reward(name: str, **kwargs: Any) -> Any:
    """A reward of trl's, as its own command line makes it.

    Args:
        name: one of ``PEER_REWARDS``.
        **kwargs: bound to it; for ``get_soft_overlong_punishment``, which makes a function, handed to that.

    Returns:
        The function.

    Raises:
        ValueError: if it does not take one of the arguments.
    """
    import trl.rewards

    if name != "get_soft_overlong_punishment":
        return resolve(getattr(trl.rewards, name), {}, f"reward {name!r}", **kwargs)
    limits = {"max_completion_len": 1280, "soft_punish_cache": 256}
    if not set(kwargs) <= set(limits):
        raise ValueError(f"reward {name!r} takes {' and '.join(limits)}, not {', '.join(set(kwargs) - set(limits))}")
    return trl.rewards.get_soft_overlong_punishment(**{**limits, **kwargs})
