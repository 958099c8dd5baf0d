"""Memory of how often each prompt is solved, and orders of prompts that make use of it.

A prompt that is always solved, or never, has no signal now, and one that is solved half of the time has the most: the
variance of a reward of 0 or 1 is p(1 - p). What is remembered is the share of its completions that passed when it was
last drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_trainer.sampler import RolloutSampler, Ticket

PROMPT_SAMPLING = {
    "uniform": "each prompt once per epoch, whatever is remembered",
    "skip_solved_and_hopeless": "as uniform, but a prompt all or none of whose completions passed is left out of the "
    "next prompt_skip_epochs epochs",
    "variance": "each rollout draws its prompts with weights p(1 - p); one that was not drawn yet has p = 1/2",
}
"""Every value of ``prompt_sampling`` and what it means."""

PSEUDO = 0.5
"""Passes and failures that the weights of ``variance`` add to those of the last group, so that no weight is 0."""


class PromptMemory:
    """Pass rates of the prompts of a dataset, and the order in which they are drawn.

    It depends on nothing but what it has been told, which every process is told alike.

    Args:
        sampler: the order of an epoch.
        how: one of ``PROMPT_SAMPLING``.
        pass_reward: a completion passes if its total reward is at least that.
        skip_epochs: k of ``skip_solved_and_hopeless``.
    """

    def __init__(self, sampler: RolloutSampler, how: str, *, pass_reward: float, skip_epochs: int) -> None:
        self._sampler = sampler
        self._how = how
        self._pass_reward = pass_reward
        self._skip_epochs = skip_epochs
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        count = self._sampler.num_prompts
        self.passed = torch.zeros(count, dtype=torch.long)  # of the last group
        self.scored = torch.zeros(count, dtype=torch.long)  # likewise; 0: not drawn yet, or nothing could be scored
        self.visits = torch.zeros(count, dtype=torch.long)
        self.last_step = torch.full((count,), -1)
        self._skipped_until = torch.zeros(count, dtype=torch.long)  # epoch in which it may be drawn again
        self._epoch, self._place, self._rollouts = 0, 0, 0

    @property
    def pass_rate(self) -> Tensor:
        """(N,) float64, NaN where a prompt was not drawn yet."""
        return self.passed.double() / self.scored

    def rollout(self, number: int) -> Ticket:
        """The prompts of the next rollout.

        Args:
            number: of the rollout; not needed here, since what comes next depends on what has been.

        Returns:
            Its ticket.
        """
        size = self._sampler.plan.prompts_per_rollout
        self._rollouts += 1
        if self._how == "variance":
            generator = torch.Generator().manual_seed(self._sampler.seed + self._rollouts)
            return Ticket(0, torch.multinomial(self.weights(), size, generator=generator).tolist())
        while True:  # after skip_epochs epochs every prompt may be drawn again
            order = self._sampler.order(self._epoch)[self._place :]
            usable = [(i, p) for i, p in enumerate(order) if self._skipped_until[p] <= self._epoch][:size]
            if len(usable) == size:
                self._place += usable[-1][0] + 1
                return Ticket(0, [p for _, p in usable])
            self._epoch, self._place = self._epoch + 1, 0

    def weights(self) -> Tensor:
        """(N,) float64: p(1 - p) with ``PSEUDO`` passes and failures added, so 1/4 where nothing is known."""
        rate = (self.passed + PSEUDO) / (self.scored + 2 * PSEUDO)
        return rate.double() * (1 - rate.double())

    def count(self, prompts: list[int], totals: Tensor, step: int) -> None:
        """Remembers what the groups of a rollout earned.

        Args:
            prompts: P indices.
            totals: (P, G) total rewards, NaN = unscorable.
            step: the optimizer step, counted from 0.
        """
        known = ~totals.isnan()
        where = torch.tensor(prompts)
        self.passed[where] = (totals >= self._pass_reward).sum(dim=1)
        self.scored[where] = known.sum(dim=1)
        self.visits[where] += 1
        self.last_step[where] = step
        if self._how == "skip_solved_and_hopeless":
            done = (self.passed[where] == self.scored[where]) | (self.passed[where] == 0)
            done &= self.scored[where] > 0
            again = torch.where(done, self._epoch + 1 + self._skip_epochs, 0)
            self._skipped_until[where] = again

    def figures(self) -> dict[str, float]:
        """Name -> value, over the prompts that were drawn: how many of all, and how many pass always, never, how often.

        Returns:
            The figures; none before anything could be scored.
        """
        seen = self.scored > 0
        if not seen.any():
            return {}
        rate = self.pass_rate[seen]
        return {
            "prompts/frac_seen": seen.double().mean().item(),
            "prompts/frac_solved": (rate == 1).double().mean().item(),
            "prompts/frac_hopeless": (rate == 0).double().mean().item(),
            "prompts/pass_rate": rate.mean().item(),
        }

    def table(self) -> dict[str, list[Any]]:
        """Column -> one entry per prompt that was drawn, in the order of the dataset."""
        seen = self.visits.nonzero().flatten()
        rates = [rate if rate == rate else None for rate in self.pass_rate[seen].tolist()]
        columns = {"visits": self.visits, "last_step": self.last_step}
        return {"row": seen.tolist(), "pass_rate": rates, **{k: v[seen].tolist() for k, v in columns.items()}}

    def state_dict(self) -> dict[str, Any]:
        """All that it holds, in values that a checkpoint can hold."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what ``state_dict`` gave; an empty state is that of a new run.

        Args:
            state: the values.
        """
        self.clear()
        for name, value in state.items():
            setattr(self, name, value)


_STATE = ("passed", "scored", "visits", "last_step", "_skipped_until", "_epoch", "_place", "_rollouts")
