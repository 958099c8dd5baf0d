"""The fields about two distances of the policy: to its reference, and to the sampler that drew its completions."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.not_yet import NotYet
from grpo_trainer.objective import COMPARES_WITH_SAMPLER, recipe_of
from grpo_trainer.registry import resolve, suggest

KL_PLACEMENTS = {
    "loss": "a term of each token's loss",
    "reward": "taken off the reward of each completion, before the advantage",
}
"""Every value of ``kl_placement`` and what it means."""

KL_ESTIMATOR_OF = {"loss": "k3", "reward": "k1"}
"""The estimator where none is named: in the loss the usual one, in the reward the only one that pulls at the KL."""

_CLIP_FIELDS = tuple(f"vllm_importance_sampling_{what}" for what in ("mode", "clip_max", "clip_min"))
_NEUTRAL = {"top_p": (1, None), "top_k": (0, None), "min_p": (0, None), "repetition_penalty": (1, None)}


@dataclass
class Divergence(NotYet):
    """The fields, those of TRL with TRL's defaults, then those of our own."""

    beta: float = field(default=0.0, metadata={"help": "Price of a nat of KL to the reference; 0 needs no reference."})
    use_bias_correction_kl: bool = field(
        default=True, metadata={"help": "Multiply the KL in the loss by the importance ratio (DeepSeek-V3.2)."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=True, metadata={"help": "Of use_vllm, which is not there yet; see sampler_correction."}
    )
    vllm_importance_sampling_mode: str = field(
        default="sequence_mask",
        metadata={
            "help": "With sampler_correction, what the policy loss is weighted by: one of "
            f"{', '.join(CORRECTIONS)}; or pkg.mod:fn."
        },
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Greatest weight of a correction; None sets none."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Least weight of a correction; None sets none."}
    )
    vllm_importance_sampling_cap: float | None = field(
        default=None, metadata={"help": "The old name of vllm_importance_sampling_clip_max."}
    )

    # --- fields of our own --------------------------------------------------------------------------------------------
    kl_estimator: str | None = field(
        default=None,
        metadata={
            "help": f"Estimator of the KL: one of {', '.join(KL_ESTIMATORS)}; or pkg.mod:fn. None takes k3 in the "
            "loss and k1 in the reward."
        },
    )
    kl_placement: str = field(
        default="loss",
        metadata={
            "help": "Where beta times the KL stands: " + "; ".join(f"{k}: {v}" for k, v in KL_PLACEMENTS.items())
        },
    )
    kl_target: float | None = field(
        default=None,
        metadata={
            "help": "KL to hold, in nats per token, as the figure kl has it: beta then follows it from step to step "
            "(Ziegler et al.). None leaves beta as it is."
        },
    )
    kl_gain: float = field(
        default=0.1, metadata={"help": "With kl_target, the share of the relative error that beta is moved by."}
    )
    sampler_correction: bool = field(
        default=False,
        metadata={
            "help": "Weigh the policy loss by how much likelier a completion is to the trainer than to the engine that "
            "drew it, in the way of the fields vllm_importance_sampling_*."
        },
    )

    def check_divergence(self) -> None:
        """Checks these fields, each alone and together.

        Raises:
            ValueError: if a name is unknown, a number illegal, or two fields contradict each other.
        """
        self._check_kl()
        self._check_sampler_correction()

    def notes_on_divergence(self) -> list[str]:
        """What is legal and yet probably not meant, in words.

        Returns:
            Sentences, possibly none.
        """
        name, notes = self.kl_estimator_used, []
        if self.kl_placement == "loss" and name == "k2" and self.use_bias_correction_kl:
            notes.append(
                "kl_estimator='k2' with use_bias_correction_kl=True has the gradient of half the mean squared "
                "log-ratio; that of the KL itself it has with use_bias_correction_kl=False"
            )
        if self.kl_placement == "reward" and name in ("k2", "k3"):
            notes.append(
                f"kl_estimator={name!r} with kl_placement='reward' does not pull at the KL to the reference: in the "
                "reward only k1 does"
            )
        return notes

    @property
    def kl_estimator_used(self) -> str:
        """The estimator by name, also where none was named."""
        return KL_ESTIMATOR_OF[self.kl_placement] if self.kl_estimator is None else self.kl_estimator

    def _check_kl(self) -> None:
        self._check_name("kl_placement", KL_PLACEMENTS)
        if self.kl_estimator is not None:
            self._check_name_or_path("kl_estimator", KL_ESTIMATORS)
        self._check_number("kl_target", optional=True, above=0.0)
        self._check_number("kl_gain", above=0.0)
        self._refuse_idle(
            ("kl_estimator", "kl_placement", "kl_target"),
            bool(self.beta),
            f"beta={self.beta} leaves the KL out. Set beta above 0",
        )
        self._refuse_idle(("kl_gain",), self.kl_target is not None, "beta is fixed without kl_target. Set kl_target")
        if self.kl_placement == "reward":
            joint = vars(self)["multi_objective_aggregation"]
            if joint != "sum_then_normalize":
                raise ValueError(
                    f"kl_placement='reward' takes the KL off the weighted sum of the rewards, and "
                    f"multi_objective_aggregation={joint!r} normalises each before there is one. Leave kl_placement at "
                    "'loss', or multi_objective_aggregation at 'sum_then_normalize'"
                )
        elif self.kl_estimator == "k1" and not self.use_bias_correction_kl:
            raise ValueError(
                "kl_estimator='k1' with use_bias_correction_kl=False would pull at nothing: the gradient of the "
                "log-ratio is 0 on average, so beta would add noise alone. Set use_bias_correction_kl=True, take k2 "
                "or k3, or set kl_placement='reward'"
            )

    def _check_sampler_correction(self) -> None:
        if self.vllm_importance_sampling_cap is not None:
            warnings.warn(
                "vllm_importance_sampling_cap is the old name of vllm_importance_sampling_clip_max and is taken for it",
                FutureWarning,
                stacklevel=5,
            )
            self.vllm_importance_sampling_clip_max, self.vllm_importance_sampling_cap = (
                self.vllm_importance_sampling_cap,
                None,
            )
        self._check_name_or_path("vllm_importance_sampling_mode", CORRECTIONS)
        self._check_number("vllm_importance_sampling_clip_max", optional=True, above=0.0)
        self._check_number("vllm_importance_sampling_clip_min", optional=True, above=0.0)
        mode, high, low = (getattr(self, name) for name in _CLIP_FIELDS)
        self._refuse_idle(_CLIP_FIELDS, self.sampler_correction, "nothing is corrected. Set sampler_correction=True")
        if not self.sampler_correction:
            return
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min={low} must be below vllm_importance_sampling_clip_max={high}, or "
                "no weight lies between them"
            )
        if mode.endswith("_truncate") and low is None and high is None:
            raise ValueError(
                f"vllm_importance_sampling_mode={mode!r} has nothing to truncate at: set "
                "vllm_importance_sampling_clip_max (3.0 is the default), or vllm_importance_sampling_clip_min"
            )
        loss_type = vars(self)["loss_type"]
        self._refuse_idle(
            _CLIP_FIELDS,
            recipe_of(loss_type).policy_loss not in COMPARES_WITH_SAMPLER,
            f"loss_type={loss_type!r} weighs completions against the sampler itself. Take another loss",
        )
        self._check_sampler()

    def _check_sampler(self) -> None:
        """The sampler's log-probs must be there, and be of the distribution that the trainer computes."""
        settings = vars(self)
        if settings["generation_engine"] == "generate":
            raise ValueError(
                "sampler_correction=True needs the log-probs of the sampler, which generation_engine='generate' does "
                "not tell. Set generation_engine='group'"
            )
        asked = {name: settings[name] for name in _NEUTRAL} | (settings["generation_kwargs"] or {})
        moved = [name for name, value in asked.items() if value not in _NEUTRAL.get(name, ())]
        if moved:
            raise ValueError(
                f"sampler_correction=True compares the probabilities that a completion was drawn with and those of the "
                f"loss, which are of the whole vocabulary at the temperature. {moved[0]}={asked[moved[0]]!r} changes "
                f"the former, so that every weight would be off. Leave out {moved[0]}, or sampler_correction"
            )

    # --- how a field is checked ---------------------------------------------------------------------------------------

    def _refuse_idle(self, names: Iterable[str], active: bool, reason: str) -> None:
        """Refuses fields that are not at their default although nothing reads them."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        idle = [name for name in names if getattr(self, name) != defaults[name]]
        if idle and not active:
            raise ValueError(
                f"{idle[0]}={getattr(self, idle[0])!r} has nothing to act on: {reason}, or leave {idle[0]} out"
            )

    def _check_number(self, name: str, *, above: float, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}={value!r} must be a number, not {type(value).__name__}")
        if not (math.isfinite(value) and value > above):
            raise ValueError(f"{name}={value} must be above {above:g}")

    def _check_name_or_path(self, name: str, known: Mapping[str, Callable]) -> None:
        value = getattr(self, name)
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r} must be a name, not {type(value).__name__}")
        resolve(value, known, name)

    def _check_name(self, name: str, legal: Iterable[str]) -> None:
        value, known = getattr(self, name), list(legal)
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name}={value!r} is unknown.{suggest(str(value), known)} Legal: {', '.join(known)}.")
