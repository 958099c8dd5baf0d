"""The fields about which prompts a step is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from grpo_trainer.difficulty import PROMPT_SAMPLING
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
    prompt_sampling: str | None = field(
        default=None,
        metadata={
            "help": "Remember how often each prompt is solved, and draw prompts by it: "
            + "; ".join(f"{name}: {what}" for name, what in PROMPT_SAMPLING.items())
            + ". None remembers nothing."
        },
    )
    prompt_pass_reward: float = field(
        default=1.0,
        metadata={"help": "With prompt_sampling: total reward from which a completion counts as passed."},
    )
    prompt_skip_epochs: int = field(
        default=1, metadata={"help": "With skip_solved_and_hopeless: for how many epochs such a prompt is left out."}
    )

    def check_selection(self) -> None:
        """Checks these fields, each alone and together.

        Raises:
            ValueError: if a name is unknown, a number illegal, or two fields contradict each other.
        """
        self._check_name("dynamic_sampling_at_cap", AT_CAP)
        for name, least in (
            ("dynamic_sampling_max_rounds", 1),
            ("dynamic_sampling_max_age", 0),
            ("prompt_skip_epochs", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, {least} or more")
        knobs = ("max_rounds", "at_cap", "max_age")
        self._refuse_idle(
            [f"dynamic_sampling_{knob}" for knob in knobs],
            self.dynamic_sampling,
            "no group is replaced. Set dynamic_sampling=True",
        )
        if self.prompt_sampling is not None:
            self._check_name("prompt_sampling", PROMPT_SAMPLING)
        self._check_number("prompt_pass_reward", above=-math.inf)
        skips = self.prompt_sampling == "skip_solved_and_hopeless"
        self._refuse_idle(
            ["prompt_pass_reward"], self.prompt_sampling is not None, "nothing is remembered. Set prompt_sampling"
        )
        self._refuse_idle(
            ["prompt_skip_epochs"], skips, "no prompt is left out. Set prompt_sampling='skip_solved_and_hopeless'"
        )
        if self.dynamic_sampling and self.kl_placement == "reward":
            raise ValueError(
                "dynamic_sampling=True leaves out groups whose rewards are equal, but with kl_placement='reward' they "
                "differ by the KL and do carry a signal. Set kl_placement='loss', or dynamic_sampling=False"
            )
