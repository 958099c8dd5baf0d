"""The fields of the configuration that choose a published variant of the objective, and what may not be combined."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch

from grpo_trainer.divergence import Divergence
from grpo_trainer.functional.advantages import ADVANTAGES
from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.losses import POLICY_LOSSES
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.objective import (
    LEVEL_OF_PAPER,
    LOSS_TYPE_NAMES,
    MULTI_OBJECTIVE_AGGREGATIONS,
    SCALE_REWARDS,
    knobs_of,
    recipe_of,
)
from grpo_trainer.registry import only_accepted
from grpo_trainer.sampler import BatchPlan

POLICY_LOSS_FIELDS = (
    *("epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "gmpo_epsilon", "gmpo_epsilon_high"),
)
"""Fields that are handed to the policy loss as they are, if it takes them."""

_ADAPTIVE_FIELDS = ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")


@dataclass
class Variants(Divergence):
    """The fields, those of TRL with TRL's defaults, then those of our own."""

    epsilon: float = field(default=0.2, metadata={"help": "Lower clip distance of the ratio."})
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper clip distance; None takes epsilon. For cispo the greatest ratio itself; None takes 5."
        },
    )
    delta: float | None = field(
        default=None, metadata={"help": "Upper bound of the unclipped ratio, above 1 + epsilon_high."}
    )
    loss_type: str = field(
        default="dapo",
        metadata={"help": f"One of {', '.join(LOSS_TYPE_NAMES)}; or a policy loss of your own as pkg.mod:fn."},
    )
    scale_rewards: str = field(
        default="group",
        metadata={"help": "Divide centred rewards by the deviation of the group, of the batch, or by none."},
    )
    importance_sampling_level: str = field(
        default="token",
        metadata={
            "help": "Ratio of each token, or of the whole completion, normalised by its length (GSPO): one of "
            f"{', '.join(RATIOS)}."
        },
    )
    sapo_temperature_neg: float = field(
        default=1.05, metadata={"help": "Sharpness of sapo's gate where the advantage is 0 or below; above 0."}
    )
    sapo_temperature_pos: float = field(
        default=1.0, metadata={"help": "Sharpness of sapo's gate where the advantage is above 0; above 0."}
    )
    vespo_k_pos: float = field(default=2.0, metadata={"help": "k of vespo's kernel where the advantage is 0 or above."})
    vespo_lambda_pos: float = field(
        default=3.0, metadata={"help": "lambda of vespo's kernel where the advantage is 0 or above; above 0."}
    )
    vespo_k_neg: float = field(default=3.0, metadata={"help": "k of vespo's kernel where the advantage is below 0."})
    vespo_lambda_neg: float = field(
        default=2.0, metadata={"help": "lambda of vespo's kernel where the advantage is below 0; above 0."}
    )

    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "Add the weighted rewards up and normalise the sum, or normalise each within its group first "
            "(GDPO, normalize_then_sum)."
        },
    )

    off_policy_mask_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Drop completions with a negative advantage whose tokens have become less likely by more than so "
            "many nats on average since they were sampled (DeepSeek-V3.2); None drops none."
        },
    )
    top_entropy_quantile: float = field(
        default=1.0, metadata={"help": "Share of the tokens, those of the highest entropy, that is trained on."}
    )
    entropy_coef: float = field(
        default=0.0,
        metadata={"help": "Weight of the entropy bonus, in loss per nat; with use_adaptive_entropy the first."},
    )
    use_adaptive_entropy: bool = field(
        default=False,
        metadata={
            "help": "Raise the weight by entropy_coef_delta at each optimizer step whose entropy is at or below "
            "entropy_target, lower it otherwise, and apply it only at or below (Skywork-OR1)."
        },
    )
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Least weight of the adaptive bonus."})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Greatest weight of the adaptive bonus."})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "Step of the weight of the adaptive bonus."})
    entropy_target: float = field(
        default=0.2, metadata={"help": "Entropy that the adaptive bonus holds, in nats per token that is trained on."}
    )

    # --- fields of our own --------------------------------------------------------------------------------------------
    loss_aggregation: str | None = field(
        default=None,
        metadata={
            "help": "How the losses of tokens become one number, in place of what loss_type stands for: one of "
            f"{', '.join(AGGREGATIONS)}."
        },
    )
    advantage_estimator: str | None = field(
        default=None,
        metadata={
            "help": "From rewards to advantages, in place of what scale_rewards stands for: one of "
            f"{', '.join(ADVANTAGES)}; or a function of your own as pkg.mod:fn."
        },
    )
    gmpo_epsilon: float = field(
        default=0.4,
        metadata={"help": "Lower clip distance of gmpo, in nats: ratios are kept above exp(-gmpo_epsilon)."},
    )
    gmpo_epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip distance of gmpo, in nats; None takes gmpo_epsilon."}
    )

    def check_variant(self) -> None:
        """Checks the fields that choose the objective, each alone and together.

        Raises:
            ValueError: if a name is unknown, a number illegal, or two fields contradict each other.
        """
        self._check_loss()
        self._check_numbers_of_variants()
        self._try_loss()
        self._check_advantage()
        self.check_divergence()
        self._check_entropy()

    def notes_on_variant(self) -> list[str]:
        """What is legal and yet probably not meant, in words.

        Returns:
            Sentences, possibly none.
        """
        notes = self.notes_on_divergence()
        aggregation = self.loss_aggregation or recipe_of(self.loss_type).aggregation
        level = LEVEL_OF_PAPER.get(self.loss_type, self.importance_sampling_level)
        if level != self.importance_sampling_level and self.importance_sampling_level == "token":
            notes.append(
                f"loss_type={self.loss_type!r} with importance_sampling_level='token' clips token by token, as in TRL: "
                f"{self.loss_type.upper()} itself is importance_sampling_level={level!r}"
            )
        weighs_by_length = aggregation not in ("sequence_mean", "sequence_sum")
        if self.importance_sampling_level != "token" and weighs_by_length:
            notes.append(
                f"importance_sampling_level={self.importance_sampling_level!r} with loss_type={self.loss_type!r} "
                "counts a completion as often as it has tokens: GSPO itself is loss_type='grpo'"
            )
        if self.off_policy_mask_threshold is not None and not self.batch_plan().rollout_outlives_step:
            notes.append(
                f"off_policy_mask_threshold={self.off_policy_mask_threshold} drops nothing: each rollout is trained on "
                "once, by the policy that sampled it. It acts with num_iterations or steps_per_generation above that"
            )
        return notes

    def batch_plan(self) -> BatchPlan:
        """The arithmetic of rollouts and micro-batches, which the whole configuration knows."""
        raise NotImplementedError

    def _check_numbers_of_variants(self) -> None:
        above, least = 0.0, -math.inf
        rules: list[tuple[str, float, bool]] = [  # name, bound, whether the bound itself is legal
            *((f"sapo_temperature_{side}", above, False) for side in ("neg", "pos")),
            *((f"vespo_lambda_{side}", above, False) for side in ("neg", "pos")),
            *((f"vespo_k_{side}", least, False) for side in ("neg", "pos")),
            *((name, 0.0, True) for name in ("gmpo_epsilon", "gmpo_epsilon_high", "top_entropy_quantile")),
            *((name, 0.0, False) for name in ("off_policy_mask_threshold", "entropy_coef_delta", "entropy_target")),
            *((name, least, False) for name in ("entropy_coef", "entropy_coef_min", "entropy_coef_max")),
        ]
        optional = {f.name for f in dataclasses.fields(self) if f.default is None}
        for name, bound, closed in rules:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
            if not math.isfinite(value) or not (value > bound or (closed and value == bound)):
                rule = "a finite number" if bound == least else f"{bound:g} or above" if closed else f"above {bound:g}"
                raise ValueError(f"{name}={value} must be {rule}")

    def _check_loss(self) -> None:
        self._check_name("importance_sampling_level", RATIOS)
        if self.loss_aggregation is not None:
            self._check_name_or_path("loss_aggregation", AGGREGATIONS)
        loss_type = self.loss_type
        if not isinstance(loss_type, str):
            raise ValueError(f"loss_type={loss_type!r} must be a name, not {type(loss_type).__name__}")
        taken = knobs_of(loss_type)
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        idle = [n for n in POLICY_LOSS_FIELDS if n not in taken and getattr(self, n) != defaults[n]]
        if idle:
            legal = ", ".join(n for n in POLICY_LOSS_FIELDS if n in taken) or "none"
            raise ValueError(
                f"{idle[0]}={getattr(self, idle[0])} has nothing to act on: loss_type={loss_type!r} does not know it. "
                f"Leave it out; what that loss knows: {legal}"
            )
        if self.importance_sampling_level != "token" and "importance_sampling_level" not in taken:
            raise ValueError(
                f"importance_sampling_level={self.importance_sampling_level!r} has nothing to act on: "
                f"loss_type={loss_type!r} weighs tokens in a way of its own. Leave it at 'token', or take another loss"
            )

    def _try_loss(self) -> None:
        """Lets a loss of the package refuse the knobs that it is given, on one token."""
        name = recipe_of(self.loss_type).policy_loss
        if name in POLICY_LOSSES:
            given = {n: getattr(self, n) for n in POLICY_LOSS_FIELDS if getattr(self, n) is not None}
            token = torch.zeros(1, 1)
            POLICY_LOSSES[name](
                token, None, token[0], torch.ones_like(token), **only_accepted(POLICY_LOSSES[name], given)
            )

    def _check_advantage(self) -> None:
        self._check_name("multi_objective_aggregation", MULTI_OBJECTIVE_AGGREGATIONS)
        named, scale, joint = self.advantage_estimator, self.scale_rewards, self.multi_objective_aggregation
        if named is not None:
            self._check_name_or_path("advantage_estimator", ADVANTAGES)
            if scale != "group" and SCALE_REWARDS[scale] != named:
                raise ValueError(
                    f"scale_rewards={scale!r} stands for advantage_estimator={SCALE_REWARDS[scale]!r}, and "
                    f"advantage_estimator={named!r} says something else: give one of them"
                )
        if joint == "sum_then_normalize":
            return
        for name, value, rest in (("advantage_estimator", named, None), ("scale_rewards", scale, "group")):
            if value != rest:
                raise ValueError(
                    f"{name}={value!r} has nothing to act on: multi_objective_aggregation={joint!r} divides each "
                    f"reward by the deviation of its group, and their sum by that of the batch. "
                    f"Leave {name} at {rest!r}"
                )

    def _check_entropy(self) -> None:
        if self.top_entropy_quantile > 1:
            raise ValueError(
                f"top_entropy_quantile={self.top_entropy_quantile} must be a share of the tokens, in [0, 1]; 0.2 "
                "trains on a fifth of them, 1 on all"
            )
        low, first, high = self.entropy_coef_min, self.entropy_coef, self.entropy_coef_max
        if self.use_adaptive_entropy and not low <= first <= high:
            raise ValueError(
                f"entropy_coef={first}, where the adaptive weight begins, must be between entropy_coef_min={low} and "
                f"entropy_coef_max={high}"
            )
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        idle = [n for n in _ADAPTIVE_FIELDS if getattr(self, n) != defaults[n]]
        if idle and not self.use_adaptive_entropy:
            raise ValueError(
                f"{idle[0]}={getattr(self, idle[0])} has nothing to act on: the weight of the entropy bonus is fixed. "
                f"Set use_adaptive_entropy=True, or leave {idle[0]} out"
            )
