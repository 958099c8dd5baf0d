"""The fields of the configuration that choose a published variant of the objective, and what may not be combined."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.not_yet import NotYet
from grpo_trainer.objective import LOSS_TYPES, knobs_of, recipe_of
from grpo_trainer.registry import suggest

POLICY_LOSS_FIELDS = (
    *("epsilon", "epsilon_high", "delta", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg", "gmpo_epsilon", "gmpo_epsilon_high"),
)
"""Fields that are handed to the policy loss as they are, if it takes them."""


@dataclass
class Variants(NotYet):
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
        metadata={"help": f"One of {', '.join(LOSS_TYPES)}; or a policy loss of your own as pkg.mod:fn."},
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

    # --- fields of our own --------------------------------------------------------------------------------------------
    loss_aggregation: str | None = field(
        default=None,
        metadata={
            "help": "How the losses of tokens become one number, in place of what loss_type stands for: one of "
            f"{', '.join(AGGREGATIONS)}."
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

    def notes_on_variant(self) -> list[str]:
        """What is legal and yet probably not meant, in words.

        Returns:
            Sentences, possibly none.
        """
        notes = []
        aggregation = self.loss_aggregation or recipe_of(self.loss_type).aggregation
        if self.loss_type == "luspo" and self.importance_sampling_level == "token":
            notes.append(
                "loss_type='luspo' with importance_sampling_level='token' clips token by token, as in TRL: LUSPO itself "
                "is importance_sampling_level='sequence'"
            )
        weighs_by_length = aggregation not in ("sequence_mean", "sequence_sum")
        if self.importance_sampling_level != "token" and weighs_by_length:
            notes.append(
                f"importance_sampling_level={self.importance_sampling_level!r} with loss_type={self.loss_type!r} counts "
                "a completion as often as it has tokens: GSPO itself is loss_type='grpo'"
            )
        return notes

    def _check_numbers_of_variants(self) -> None:
        above, least = 0.0, -math.inf
        rules: list[tuple[str, float, bool]] = [  # name, bound, whether the bound itself is legal
            *((f"sapo_temperature_{side}", above, False) for side in ("neg", "pos")),
            *((f"vespo_lambda_{side}", above, False) for side in ("neg", "pos")),
            *((f"vespo_k_{side}", least, False) for side in ("neg", "pos")),
            *((name, 0.0, True) for name in ("gmpo_epsilon", "gmpo_epsilon_high")),
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
        if self.loss_aggregation is not None and ":" not in self.loss_aggregation:
            self._check_name("loss_aggregation", AGGREGATIONS)
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
        if loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            raise ValueError(
                f"epsilon_high={self.epsilon_high} would shrink every token: with loss_type='cispo' it is the greatest "
                "ratio itself, as in TRL, not a distance from 1. Leave it out (5.0), or give a number of at least 1"
            )

    def _check_name(self, name: str, legal: Iterable[str]) -> None:
        value, known = getattr(self, name), list(legal)
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}={value!r} is unknown.{suggest(str(value), known)} Legal: {', '.join(known)}.")
