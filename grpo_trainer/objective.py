"""The objective of a step: four independent choices, by name. What they come to is in ``loss.py``.

An advantage turns the rewards of a group into credit; a policy loss turns credit into a loss per token; a KL estimator
adds the price of leaving the reference; an aggregation turns losses per token into one number, ``sum(w * loss) / Z``.
Each is a pure function from ``functional/``, chosen by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from grpo_trainer.functional.advantages import ADVANTAGES, MULTI_REWARD_ADVANTAGES
from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.loss import Objective
from grpo_trainer.registry import only_accepted, resolve, suggest


class Recipe(NamedTuple):
    """What one ``loss_type`` stands for: a policy loss and an aggregation, by name."""

    policy_loss: str
    aggregation: str


COMPARES_WITH_SAMPLER = frozenset(["vespo"])
"""Policy losses whose old policy is the one that sampled, by its own log-probs: they need no correction beside."""

LOSS_TYPES = {
    "grpo": Recipe("clipped", "sequence_mean"),
    "dapo": Recipe("clipped", "token_mean"),
    "bnpo": Recipe("clipped", "micro_batch_token_mean"),
    "dr_grpo": Recipe("clipped", "fixed_length"),
    "cispo": Recipe("cispo", "token_mean"),
    "sapo": Recipe("sapo", "sequence_mean"),
    "luspo": Recipe("clipped", "sequence_sum"),
    "vespo": Recipe("vespo", "token_mean"),
    "gmpo": Recipe("gmpo", "sequence_mean"),
    "reinforce": Recipe("reinforce", "sequence_sum"),
}
"""Every ``loss_type`` that stands for a pair. Any other policy loss, by its name in ``POLICY_LOSSES`` or one's own as
``pkg.mod:fn``, is a ``loss_type`` too, and comes with ``token_mean``."""

LOSS_TYPE_NAMES = (*LOSS_TYPES, *(name for name in POLICY_LOSSES if name not in LOSS_TYPES))
"""Every name of a ``loss_type``."""

LEVEL_OF_PAPER = {"luspo": "sequence"}
"""``loss_type`` -> the ``importance_sampling_level`` that its paper has, where that is not the default."""

SCALE_REWARDS = {
    "group": "group_zscore",
    "batch": "batch_zscore",
    "none": "group_center",
}
"""Every value of ``scale_rewards`` and the advantage it stands for."""

MULTI_OBJECTIVE_AGGREGATIONS = ("sum_then_normalize", *MULTI_REWARD_ADVANTAGES)
"""Every value of ``multi_objective_aggregation``; after the first, the advantage of several rewards that it is."""


def build_objective(
    *,
    loss_type: str,
    scale_rewards: str,
    max_completion_length: int,
    loss_aggregation: str | None = None,
    importance_sampling_level: str = "token",
    advantage_estimator: str | None = None,
    multi_objective_aggregation: str = "sum_then_normalize",
    advantage_ddof: int = 1,
    correction: str | None = None,
    correction_clip_max: float | None = 3.0,
    correction_clip_min: float | None = None,
    top_entropy: float = 1.0,
    off_policy_threshold: float | None = None,
    keeps_silent_rows: bool = False,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = True,
    **policy_loss_knobs: Any,
) -> Objective:
    """From names to functions.

    Args:
        loss_type: a key of ``LOSS_TYPES`` or ``POLICY_LOSSES``, or a policy loss as ``pkg.mod:fn``.
        scale_rewards: a key of ``SCALE_REWARDS``.
        max_completion_length: the constant L of ``dr_grpo``, in tokens.
        loss_aggregation: a key of ``AGGREGATIONS``, or ``pkg.mod:fn``; None takes that of ``loss_type``.
        importance_sampling_level: a key of ``RATIOS``.
        advantage_estimator: a key of ``ADVANTAGES``, or ``pkg.mod:fn``; None takes that of ``scale_rewards``.
        multi_objective_aggregation: one of ``MULTI_OBJECTIVE_AGGREGATIONS``.
        advantage_ddof: 1 for the sample standard deviation, 0 for the population's.
        correction: a key of ``CORRECTIONS``, or ``pkg.mod:fn``; None corrects nothing.
        correction_clip_max: greatest weight of a correction.
        correction_clip_min: least weight of a correction.
        top_entropy: see ``Objective``.
        off_policy_threshold: see ``Objective``.
        keeps_silent_rows: see ``Objective``; always so for a policy loss of one's own.
        beta: weight of the KL term.
        kl_estimator: a key of ``KL_ESTIMATORS``, or ``pkg.mod:fn``.
        kl_importance_weighted: see ``Objective``.
        **policy_loss_knobs: keyword arguments for the policy loss, which takes those that it has; None leaves its
            default.

    Returns:
        The objective.

    Raises:
        ValueError: if a name is unknown, or no policy loss has such a knob.
    """
    recipe = recipe_of(loss_type)
    advantage = advantage_estimator or _choose(scale_rewards, SCALE_REWARDS, "scale_rewards")
    joint = _choose(
        multi_objective_aggregation, {n: n for n in MULTI_OBJECTIVE_AGGREGATIONS}, "multi_objective_aggregation"
    )
    _choose(importance_sampling_level, RATIOS, "importance_sampling_level")
    known = {name for loss in POLICY_LOSSES.values() for name in inspect.signature(loss).parameters}
    for name in policy_loss_knobs:
        if name not in known:
            raise ValueError(f"no policy loss takes {name!r}.{suggest(name, sorted(known))}")
    knobs = {name: value for name, value in policy_loss_knobs.items() if value is not None}
    knobs["importance_sampling_level"] = importance_sampling_level

    def bound(name: str, table: Mapping[str, Callable], what: str, **available: Any) -> Callable:
        return resolve(name, table, what, **only_accepted(resolve(name, table, what), available))

    return Objective(
        advantage=bound(advantage, ADVANTAGES, "advantage_estimator", ddof=advantage_ddof),
        joint_advantage=(
            bound(joint, MULTI_REWARD_ADVANTAGES, "multi_objective_aggregation", ddof=advantage_ddof)
            if joint in MULTI_REWARD_ADVANTAGES
            else None
        ),
        policy_loss=bound(recipe.policy_loss, POLICY_LOSSES, "policy loss", **knobs),
        aggregation=bound(
            loss_aggregation or recipe.aggregation, AGGREGATIONS, "loss_aggregation", length=max_completion_length
        ),
        kl=resolve(kl_estimator, KL_ESTIMATORS, "kl_estimator"),
        beta=beta,
        kl_importance_weighted=kl_importance_weighted,
        importance_sampling_level=importance_sampling_level,
        correction=bound(
            correction, CORRECTIONS, "correction", clip_max=correction_clip_max, clip_min=correction_clip_min
        )
        if correction
        else None,
        compares_with_sampler=recipe.policy_loss in COMPARES_WITH_SAMPLER,
        top_entropy=top_entropy,
        off_policy_threshold=off_policy_threshold,
        keeps_silent_rows=keeps_silent_rows or recipe.policy_loss not in POLICY_LOSSES,
    )


def recipe_of(loss_type: str) -> Recipe:
    """What a ``loss_type`` stands for.

    Args:
        loss_type: a key of ``LOSS_TYPES`` or ``POLICY_LOSSES``, or a policy loss as ``pkg.mod:fn``.

    Returns:
        The names.

    Raises:
        ValueError: if it is neither.

    Example:
        >>> recipe_of("luspo"), recipe_of("my_package.losses:squared").aggregation
        (Recipe(policy_loss='clipped', aggregation='sequence_sum'), 'token_mean')
    """
    if loss_type in LOSS_TYPES:
        return LOSS_TYPES[loss_type]
    if loss_type in POLICY_LOSSES or ":" in loss_type:
        return Recipe(loss_type, "token_mean")
    known = list(dict.fromkeys([*LOSS_TYPES, *POLICY_LOSSES]))  # as they are now: either may have grown
    raise ValueError(
        f"unknown loss_type {loss_type!r}.{suggest(loss_type, known)} Known: {', '.join(known)}; or give a policy loss "
        "of your own as 'pkg.mod:fn'."
    )


def knobs_of(loss_type: str) -> frozenset[str]:
    """The names of the keyword arguments that the policy loss of a ``loss_type`` takes.

    Args:
        loss_type: a key of ``LOSS_TYPES`` or ``POLICY_LOSSES``, or a policy loss as ``pkg.mod:fn``.

    Returns:
        The names; those of all policy losses for a function that takes any.

    Raises:
        ValueError: if it is neither, or the function cannot be imported.

    Example:
        >>> sorted(knobs_of("cispo"))
        ['epsilon_high', 'importance_sampling_level']
    """
    loss = resolve(recipe_of(loss_type).policy_loss, POLICY_LOSSES, "loss_type")
    every = {name: None for known in POLICY_LOSSES.values() for name in known.__kwdefaults__ or {}}
    return frozenset(only_accepted(loss, every))


def _choose(name: str, table: Mapping[str, Any], what: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}.{suggest(str(name), table)} Known: {', '.join(table)}.")
    return table[name]
