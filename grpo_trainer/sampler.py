"""Which prompts a rollout holds, and how a rollout is cut into micro-batches.

Notation: b rows per micro-batch and process (``per_device_train_batch_size``), W processes, S micro-batches per
rollout (``steps_per_generation``), A micro-batches per optimizer step (``gradient_accumulation_steps``), mu passes
over a rollout (``num_iterations``), G completions per prompt (``num_generations``).

A rollout has N = b*W*S completions of N/G prompts, group-major. Each process cuts its share into S micro-batches and
passes over them mu times: S*mu micro-steps. Micro-steps are then taken A at a time, whatever rollout they belong to:
that is an optimizer step.

Which rows a process holds is settled so that an optimizer step consists of the same completions however many processes
there are. Steps and passes both begin at multiples of c = gcd(S, A) micro-steps; so the rollout is dealt out in blocks
of c*b*W consecutive rows, and of each block every process takes c*b consecutive rows. A group is then on one process
whenever c*b is a multiple of G, as it is when S = A and the process's share is whole groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from grpo_trainer.types import Row


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The arithmetic of a run, checked.

    Attributes:
        per_device_train_batch_size: b.
        world_size: W.
        steps_per_generation: S.
        gradient_accumulation_steps: A.
        num_iterations: mu.
        num_generations: G.

    Raises:
        ValueError: if a figure is below its least, or a rollout is not a whole number of groups.
    """

    per_device_train_batch_size: int
    world_size: int
    steps_per_generation: int
    gradient_accumulation_steps: int
    num_iterations: int
    num_generations: int

    def __post_init__(self) -> None:
        for name, least in [
            ("per_device_train_batch_size", 1),
            ("steps_per_generation", 1),
            ("gradient_accumulation_steps", 1),
            ("num_iterations", 1),
            ("num_generations", 2),
        ]:
            value = getattr(self, name)
            if value < least:
                why = " (a group of one has no spread to learn from)" if name == "num_generations" else ""
                raise ValueError(f"{name}={value} must be at least {least}{why}")
        if self.completions_per_rollout % self.num_generations:
            raise ValueError(self._not_whole())

    def _not_whole(self) -> str:
        total, group = self.completions_per_rollout, self.num_generations
        per_step = self.per_device_train_batch_size * self.world_size
        fit = next(s for s in range(self.steps_per_generation, 10**9) if per_step * s % group == 0)
        divisors = [d for d in range(2, total + 1) if total % d == 0]
        return (
            f"a rollout holds {total} completions (per_device_train_batch_size="
            f"{self.per_device_train_batch_size} x {self.world_size} processes x steps_per_generation="
            f"{self.steps_per_generation}), which is not a whole number of groups of num_generations={group}. "
            f"Set steps_per_generation={fit}, or num_generations to one of {divisors}."
            if divisors
            else f"a rollout holds {total} completion, too few for a group of num_generations={group}. "
            f"Set steps_per_generation={fit}, or raise per_device_train_batch_size or gradient_accumulation_steps."
        )

    @property
    def completions_per_rollout(self) -> int:
        """N, over all processes."""
        return self.per_device_train_batch_size * self.world_size * self.steps_per_generation

    @property
    def prompts_per_rollout(self) -> int:
        """P, over all processes."""
        return self.completions_per_rollout // self.num_generations

    @property
    def micro_steps_per_rollout(self) -> int:
        """How many micro-batches, counted over all passes, a process draws from one rollout."""
        return self.steps_per_generation * self.num_iterations

    @property
    def rollout_outlives_step(self) -> bool:
        """Whether some micro-batch is trained on after the policy has moved since it was sampled.

        Optimizer steps and rollouts both start with an epoch. If each step holds whole rollouts, no rollout outlives
        its step, and the sampling policy is the current policy throughout.
        """
        return self.gradient_accumulation_steps % self.micro_steps_per_rollout != 0

    def rows(self, rank: int) -> list[int]:
        """The rows of a rollout that a process holds, in the order of its micro-batches.

        Args:
            rank: the process, from 0.

        Returns:
            b*S indices into the N rows of the rollout, ascending.
        """
        steps = math.gcd(self.steps_per_generation, self.gradient_accumulation_steps)
        share = steps * self.per_device_train_batch_size
        starts = range(rank * share, self.completions_per_rollout, share * self.world_size)
        return [row for start in starts for row in range(start, start + share)]

    def local_groups(self, rank: int) -> list[tuple[int, int]]:
        """What a process generates: (index of the prompt within the rollout, number of its completions), in order.

        A group whose rows span two processes is generated in part by each; its statistics are always those of the
        whole group.

        Args:
            rank: the process, from 0.

        Returns:
            The pairs; the numbers add up to b*S.
        """
        return list(Counter(row // self.num_generations for row in self.rows(rank)).items())

    def micro_batches(self) -> list[range]:
        """The rows of a process's share of a rollout, by micro-batch, in the order of one pass."""
        b = self.per_device_train_batch_size
        return [range(s * b, (s + 1) * b) for s in range(self.steps_per_generation)]


class Ticket(NamedTuple):
    """What one micro-step draws from.

    Attributes:
        micro_step: its place within its rollout, counted over all passes, from 0.
        prompts: indices of all P prompts of its rollout in the dataset, or positions in the stream.
        rows: their rows, if they come from a stream; None: to be read from the dataset.
    """

    micro_step: int
    prompts: list[int]
    rows: list[Row] | None = None


class RolloutSampler(Sampler[Ticket]):
    """A ticket for each micro-step of an epoch, the same on every process.

    Prompts are drawn in chunks of one rollout; the last chunk of an epoch is dropped if it is incomplete, as TRL does.
    The order of epoch e is the permutation drawn from seed + e, so it depends on nothing that happened before.

    Args:
        num_prompts: rows of the dataset.
        plan: the arithmetic of the run.
        shuffle: False keeps the order of the dataset.
        seed: of the permutations.

    Raises:
        ValueError: if the dataset has fewer rows than one rollout needs.
    """

    def __init__(self, num_prompts: int, plan: BatchPlan, *, shuffle: bool, seed: int) -> None:
        if num_prompts < plan.prompts_per_rollout:
            raise ValueError(
                f"train_dataset has {num_prompts} rows, but one rollout needs {plan.prompts_per_rollout} prompts "
                f"({plan.completions_per_rollout} completions / num_generations={plan.num_generations}). Use more "
                "data, or lower per_device_train_batch_size or steps_per_generation (gradient_accumulation_steps)."
            )
        self.num_prompts = num_prompts
        self.plan = plan
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Ticket]:
        order = self.order(self.epoch)
        size = self.plan.prompts_per_rollout
        for rollout in range(self.num_prompts // size):
            chunk = order[rollout * size : (rollout + 1) * size]
            for micro_step in range(self.plan.micro_steps_per_rollout):
                yield Ticket(micro_step, chunk)

    def __len__(self) -> int:
        return self.num_prompts // self.plan.prompts_per_rollout * self.plan.micro_steps_per_rollout

    def order(self, epoch: int) -> list[int]:
        """The order in which an epoch goes through the dataset, the rows that it drops at its end included.

        Args:
            epoch: from 0.

        Returns:
            All indices once.
        """
        if not self.shuffle:
            return list(range(self.num_prompts))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.num_prompts, generator=generator).tolist()


class PromptOrder:
    """The prompts of a dataset, rollout after rollout and epoch after epoch, for a run that asks for them itself.

    Args:
        sampler: whose order it is.
    """

    def __init__(self, sampler: RolloutSampler) -> None:
        self._sampler = sampler
        self._epoch, self._order = -1, [0]

    def rollout(self, number: int) -> Ticket:
        """The prompts of a rollout.

        Args:
            number: of the rollout, counted over the whole run, from 0.

        Returns:
            Its ticket.
        """
        size = self._sampler.plan.prompts_per_rollout
        epoch, nth = divmod(number, self._sampler.num_prompts // size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._sampler.order(epoch)
        return Ticket(0, self._order[nth * size : (nth + 1) * size])


class _Tickets(Dataset):
    """Stands in for the dataset, whose rows are read when their rollout is collected: a ticket stands for itself."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def __getitems__(self, ticket: Ticket) -> Ticket:
        return ticket


class RolloutLoader(DataLoader):
    """A data loader whose batches are tickets: one per micro-step, so whoever counts or skips batches counts those.

    Args:
        sampler: gives the tickets.
    """

    def __init__(self, sampler: RolloutSampler) -> None:
        super().__init__(_Tickets(sampler.num_prompts), batch_sampler=sampler, collate_fn=_as_is)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation of the next iteration."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _as_is(batch: Any) -> Any:
    return batch
