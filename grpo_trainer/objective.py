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
from grpo_trainer.functional.losses import POLICY_LOSSES, importance_ratio
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
}
"""Every ``loss_type`` by name."""

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
        stats: name -> (sum, count), two () tensors; their quotient, after both are added up, is a mean over tokens.
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
    """

    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    aggregation: AggregationFn
    kl: KLFn
    beta: float = 0.0
    kl_importance_weighted: bool = True

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
            Those rows; all if there is a KL term; one row if none carries a gradient, so that there is something to
            run a backward pass on.
        """
        advantages = batch.advantages.tolist()
        live = [i for i, length in enumerate(batch.lengths) if length and advantages[i]]
        if self.beta or len(live) == len(batch) or not len(batch):
            return batch
        weighted = dataclasses.replace(batch, token_weights=self.aggregation(batch.mask)[0])
        return weighted.select(live or [min(range(len(batch)), key=batch.lengths.__getitem__)])

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
                kl = kl * importance_ratio(logprobs, old)
            loss = loss + self.beta * kl
            stats["kl"] = kl.detach()
        weights = self.aggregation(mask)[0] if batch.token_weights is None else batch.token_weights
        total = torch.where(mask, loss * weights, 0.0).sum()
        return ObjectiveOutput(total, {name: masked_sum(value, mask) for name, value in stats.items()})


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values under the mask and their number.

    Args:
        values: (B, T).
        mask: (B, T) bool.

    Returns:
        Two () float32 tensors.
    """
    return torch.where(mask, values, 0.0).sum().float(), mask.sum().float()


def build_objective(
    *,
    loss_type: str,
    scale_rewards: str,
    max_completion_length: int,
    advantage_ddof: int = 1,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance_weighted: bool = True,
    **policy_loss_knobs: Any,
) -> Objective:
    """From names to functions.

    Args:
        loss_type: a key of ``LOSS_TYPES``.
        scale_rewards: a key of ``SCALE_REWARDS``.
        max_completion_length: the constant L of ``dr_grpo``, in tokens.
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
    recipe = _choose(loss_type, LOSS_TYPES, "loss_type")
    advantage = _choose(scale_rewards, SCALE_REWARDS, "scale_rewards")
    known = {name for loss in POLICY_LOSSES.values() for name in inspect.signature(loss).parameters}
    for name in policy_loss_knobs:
        if name not in known:
            raise ValueError(f"no policy loss takes {name!r}.{suggest(name, sorted(known))}")
    knobs = {name: value for name, value in policy_loss_knobs.items() if value is not None}

    def bound(name: str, table: Mapping[str, Callable], what: str, **available: Any) -> Callable:
        return resolve(name, table, what, **only_accepted(resolve(name, table, what), available))

    return Objective(
        advantage=bound(advantage, ADVANTAGES, "advantage", ddof=advantage_ddof),
        policy_loss=bound(recipe.policy_loss, POLICY_LOSSES, "policy loss", **knobs),
        aggregation=bound(recipe.aggregation, AGGREGATIONS, "aggregation", length=max_completion_length),
        kl=resolve(kl_estimator, KL_ESTIMATORS, "kl_estimator"),
        beta=beta,
        kl_importance_weighted=kl_importance_weighted,
    )


def _choose(name: str, table: dict, what: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}.{suggest(str(name), table)} Known: {', '.join(table)}.")
    return table[name]
