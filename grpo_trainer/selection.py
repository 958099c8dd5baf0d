"""The fields about which prompts a step is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_trainer.dynamic import AT_CAP
from grpo_trainer.variants import Variants


@dataclass
class Selection(Variants):
    """The fields, all of our own."""

    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Replace groups whose completions all earn the same by freshly sampled prompts, until the rollout "
            "is full of groups with a signal (DAPO); what is left over waits for the next one."
        },
    )
    dynamic_sampling_max_rounds: int = field(
        default=10, metadata={"help": "Most rounds for one rollout, each of as many prompts as a rollout has."}
    )
    dynamic_sampling_at_cap: str = field(
        default="fill",
        metadata={
            "help": "When the rounds are used up and the rollout is not full: "
            + "; ".join(f"{name}: {what}" for name, what in AT_CAP.items())
            + "."
        },
    )
    dynamic_sampling_max_age: int = field(
        default=4, metadata={"help": "Most optimizer steps that a group that was left over waits; 0 keeps none."}
    )

    def check_selection(self) -> None:
        """Checks these fields, each alone and together.

        Raises:
            ValueError: if a name is unknown, a number illegal, or two fields contradict each other.
        """
        self._check_name("dynamic_sampling_at_cap", AT_CAP)
        for name, least in (("dynamic_sampling_max_rounds", 1), ("dynamic_sampling_max_age", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, {least} or more")
        knobs = ("max_rounds", "at_cap", "max_age")
        self._refuse_idle(
            [f"dynamic_sampling_{knob}" for knob in knobs],
            self.dynamic_sampling,
            "no group is replaced. Set dynamic_sampling=True",
        )
        if self.dynamic_sampling and self.kl_placement == "reward":
            raise ValueError(
                "dynamic_sampling=True leaves out groups whose rewards are equal, but with kl_placement='reward' they "
                "differ by the KL and do carry a signal. Set kl_placement='loss', or dynamic_sampling=False"
            )
