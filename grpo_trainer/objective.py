"""The objective of a step: four independent choices, bound.

An advantage turns the rewards of a group into credit; a policy loss turns credit into a loss per token; a KL estimator
adds the price of leaving the reference; an aggregation turns losses per token into one number, ``sum(w * loss) / Z``.
Each is a pure function from ``functional/``, chosen by name.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_trainer.functional.advantages import ADVANTAGES
from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.functional.ratios import RATIOS, ratio_at
from grpo_trainer.functional.shapes import check_shapes
from grpo_trainer.registry import only_accepted, resolve, suggest
from grpo_trainer.types import AdvantageFn, AggregationFn, KLFn, PolicyLossFn, RolloutBatch


class Recipe(NamedTuple):
    """What one ``loss_type`` stands for: a policy loss and an aggregation, by name."""

    policy_loss: str
    aggregation: str


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
"""Every ``loss_type`` by name. A policy loss of one's own, ``pkg.mod:fn``, comes with ``token_mean``."""

SCALE_REWARDS = {
    "group": "group_zscore",
    "batch": "batch_zscore",
    "none": "group_center",
}
"""Every value of ``scale_rewards`` and the advantage it stands for."""


class ObjectiveOutput(NamedTuple):
    """What the objective says about one micro-batch.

    Attributes:
        loss: () the sum of ``w * loss`` over the micro-batch; divide by Z, the items of the whole optimizer step.
        stats: name -> (sum, count), two () tensors; their quotient, after both are added up, is a mean over tokens, or
            over completions where a completion has one figure.
    """

    loss: Tensor
    stats: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The four choices, bound.

    Attributes:
        advantage: rewards (P, G) -> advantages (P, G).
        policy_loss: log-probs and advantages -> loss per token.
        aggregation: mask (B, T) -> weights (B, T) and items ().
        kl: log-probs -> KL estimate per token.
        beta: weight of the KL term, in loss per nat; 0 leaves it out, and no reference is needed.
        kl_importance_weighted: multiply the KL estimate by the importance ratio, which makes its gradient that of the
            true KL (DeepSeek-V3.2, arXiv:2512.02556, equation 7).
        importance_sampling_level: which ratio that is, a key of ``RATIOS``; the policy loss has its own bound.
        keeps_silent_rows: whether rows without an advantage have to be computed all the same: a policy loss of someone
            else's making may do anything with them.
    """

    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    aggregation: AggregationFn
    kl: KLFn
    beta: float = 0.0
    kl_importance_weighted: bool = True
    importance_sampling_level: str = "token"
    keeps_silent_rows: bool = False

    def items(self, batch: RolloutBatch) -> Tensor:
        """What the batch adds to Z, the normaliser of the optimizer step: ()."""
        return self.aggregation(batch.mask)[1]

    def without_silent_rows(self, batch: RolloutBatch) -> RolloutBatch:
        """The rows that carry a gradient, with the weights that they have among all rows.

        A completion whose advantage is 0, and one without a token, adds exactly 0 to loss and gradient as long as
        there is no KL term. What it adds to Z has to be asked before: ``items`` is about all rows.

        Args:
            batch: B rows.

        Returns:
            Those rows; all if there is a KL term, or ``keeps_silent_rows``; one row if none carries a gradient, so that
            there is something to run a backward pass on.
        """
        live = self._live_rows(batch)
        if len(live) == len(batch):
            return batch
        return dataclasses.replace(batch, token_weights=self.aggregation(batch.mask)[0]).select(live)

    def silent_stats(self, batch: RolloutBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """The figures of the policy loss over the rows that ``without_silent_rows`` leaves out.

        They need no forward pass: on policy every ratio is 1.

        Args:
            batch: B rows, sampled by the current policy.

        Returns:
            name -> (sum, count), as in ``ObjectiveOutput``; empty if no row is left out.
        """
        live = set(self._live_rows(batch))
        silent = batch.select([i for i in range(len(batch)) if i not in live])
        if not len(silent):
            return {}
        logprobs = torch.zeros(silent.mask.shape, device=silent.mask.device)
        stats = self.policy_loss(logprobs, None, silent.advantages, silent.mask).stats
        return {name: masked_sum(value, silent.mask) for name, value in stats.items()}

    def _live_rows(self, batch: RolloutBatch) -> list[int]:
        """The rows that have to be computed; at least one, if there is one."""
        if self.beta or self.keeps_silent_rows:
            return list(range(len(batch)))
        advantages = batch.advantages.tolist()
        live = [i for i, length in enumerate(batch.lengths) if length and advantages[i]]
        return live or sorted(range(len(batch)), key=batch.lengths.__getitem__)[:1]

    def __call__(self, logprobs: Tensor, batch: RolloutBatch) -> ObjectiveOutput:
        """The loss of one micro-batch, as a sum yet to be divided by Z.

        Args:
            logprobs: (B, T) of the completion tokens under the current policy.
            batch: the constants.

        Returns:
            The weighted sum of the token losses and the figures to log.

        Raises:
            ValueError: if the shapes differ, or ``beta`` is not 0 and the batch has no reference log-probs.
        """
        check_shapes("B T", logprobs=logprobs, mask=batch.mask)
        mask = batch.mask

        def credited(values: Tensor | None) -> Tensor | None:
            """Nothing outside the mask reaches a sum or, through it, a gradient: not even a NaN."""
            return None if values is None else torch.where(mask, values, 0.0)

        logprobs, old = torch.where(mask, logprobs, 0.0), credited(batch.old_logprobs)
        token = self.policy_loss(logprobs, old, batch.advantages, mask)
        loss, stats = token.loss, dict(token.stats)
        if self.beta:
            reference = credited(batch.ref_logprobs)
            if reference is None:
                raise ValueError(f"beta={self.beta} needs reference log-probs, and the batch has none")
            kl = self.kl(logprobs, reference)
            if self.kl_importance_weighted:
                kl = kl * ratio_at(self.importance_sampling_level, logprobs, old, mask)
            loss = loss + self.beta * kl
            stats["kl"] = kl.detach()
        weights = self.aggregation(mask)[0] if batch.token_weights is None else batch.token_weights
        total = torch.where(mask, loss * weights, 0.0).sum()
        return ObjectiveOutput(total, {name: masked_sum(value, mask) for name, value in stats.items()})


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values under the mask and their number.

    Args:
        values: (B, T), or (B, 1): one per completion, counted where the completion has a credited token.
        mask: (B, T) bool.

    Returns:
        Two () float32 tensors.
    """
    if values.shape != mask.shape:
        mask = mask.any(dim=1, keepdim=True)
    return torch.where(mask, values, 0.0).sum().float(), mask.sum().float()


def build_objective(
    *,
    loss_type: str,
    scale_rewards: str,
    max_completion_length: int,
    loss_aggregation: str | None = None,
    importance_sampling_level: str = "token",
    advantage_ddof: int = 1,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = True,
    **policy_loss_knobs: Any,
) -> Objective:
    """From names to functions.

    Args:
        loss_type: a key of ``LOSS_TYPES``, or a policy loss as ``pkg.mod:fn``.
        scale_rewards: a key of ``SCALE_REWARDS``.
        max_completion_length: the constant L of ``dr_grpo``, in tokens.
        loss_aggregation: a key of ``AGGREGATIONS``, or ``pkg.mod:fn``; None takes that of ``loss_type``.
        importance_sampling_level: a key of ``RATIOS``.
        advantage_ddof: 1 for the sample standard deviation, 0 for the population's.
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
    advantage = _choose(scale_rewards, SCALE_REWARDS, "scale_rewards")
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
        advantage=bound(advantage, ADVANTAGES, "advantage", ddof=advantage_ddof),
        policy_loss=bound(recipe.policy_loss, POLICY_LOSSES, "policy loss", **knobs),
        aggregation=bound(
            loss_aggregation or recipe.aggregation, AGGREGATIONS, "loss_aggregation", length=max_completion_length
        ),
        kl=resolve(kl_estimator, KL_ESTIMATORS, "kl_estimator"),
        beta=beta,
        kl_importance_weighted=kl_importance_weighted,
        importance_sampling_level=importance_sampling_level,
        keeps_silent_rows=recipe.policy_loss not in POLICY_LOSSES,
    )


def recipe_of(loss_type: str) -> Recipe:
    """What a ``loss_type`` stands for.

    Args:
        loss_type: a key of ``LOSS_TYPES``, or a policy loss as ``pkg.mod:fn``.

    Returns:
        The names.

    Raises:
        ValueError: if it is neither.

    Example:
        >>> recipe_of("luspo"), recipe_of("my_package.losses:squared").aggregation
        (Recipe(policy_loss='clipped', aggregation='sequence_sum'), 'token_mean')
    """
    if ":" in loss_type and loss_type not in LOSS_TYPES:
        return Recipe(loss_type, "token_mean")
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"unknown loss_type {loss_type!r}.{suggest(loss_type, LOSS_TYPES)} Known: {', '.join(LOSS_TYPES)}; or give "
            "a policy loss of your own as 'pkg.mod:fn'."
        )
    return LOSS_TYPES[loss_type]


def knobs_of(loss_type: str) -> frozenset[str]:
    """The names of the keyword arguments that the policy loss of a ``loss_type`` takes.

    Args:
        loss_type: a key of ``LOSS_TYPES``, or a policy loss as ``pkg.mod:fn``.

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
