"""The backward passes of one optimizer step, part by part, exact also where memory runs out in one of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_trainer.policy.parts import Rows, fitting, num_tokens, share_out, split
from grpo_trainer.types import RolloutBatch

AUTO = "auto"
"""As many tokens as the micro-batches of the configuration have when each row is as long as the longest."""


@dataclass(kw_only=True)
class Arrangement:
    """How a process shares rows out over forward passes. Equal rows are always shared out alike.

    Attributes:
        max_tokens: most tokens of a part; ``AUTO``; or None: the micro-batches of the configuration.
        micro_batch: rows of one of those.
        block: rows that are shared out together: as many micro-batches as lie in one optimizer step whatever it is.
        packed: whether the model computes packed rows.
        whole: why a micro-batch must not be cut, for a message; None if it may.
        fits: found out: most tokens of a part for which memory suffices; None if it has not run out.
    """

    max_tokens: int | str | None
    micro_batch: int
    block: int
    packed: Callable[[], bool] = lambda: True
    whole: str | None = None
    fits: int | None = None

    def __call__(self, batch: RolloutBatch, rows: Sequence[int]) -> list[Rows]:
        """Shares some rows of a batch out.

        Args:
            batch: whole blocks.
            rows: indices into it, ascending.

        Returns:
            The parts.
        """
        blocks: dict[int, Rows] = {}
        for row in rows:
            blocks.setdefault(row // self.block, []).append(row)
        return [[block[i] for i in part] for block in blocks.values() for part in self._block(batch.select(block))]

    def _block(self, batch: RolloutBatch) -> list[Rows]:
        limit, packed = self._limit(batch), self.packed()
        if limit is None:
            return [
                list(range(i, min(i + self.micro_batch, len(batch)))) for i in range(0, len(batch), self.micro_batch)
            ]
        return share_out(batch, limit, packed=packed)

    def _limit(self, batch: RolloutBatch) -> int | None:
        limit = self.max_tokens
        if limit == AUTO:
            longest = max(len(batch.prompt_ids[p]) + n for p, n in zip(batch.prompt_of_row, batch.lengths, strict=True))
            limit = self.micro_batch * longest if self.packed() else None
        assert not isinstance(limit, str)
        if self.fits is None:
            return limit
        return min(self.fits, math.inf if limit is None else limit)  # type: ignore[return-value]


@dataclass(kw_only=True)
class Accumulation:
    """Adds up the gradient of one optimizer step.

    When memory runs out, what the backward pass that broke off has added to some of the gradients cannot be told from
    the rest. So all that the step has added so far is taken back and done again, in smaller parts.

    Attributes:
        book: writes down the figures of the part that ``step`` has done, or forgets them.
        take_back: clears the gradients.
        arrangement: is told what fits.
        say: warns.
        step: does the forward and the backward pass of a part, and says its loss (); the flag tells whether it is the
            last of its micro-step.
        done: parts whose gradient has been added up since the step began.
    """

    book: Callable[[bool], None]
    take_back: Callable[[], None]
    arrangement: Arrangement
    say: Callable[[str], None]
    step: Callable[[RolloutBatch, bool], Tensor] = field(init=False)
    done: list[RolloutBatch] = field(default_factory=list)

    def begin(self) -> None:
        """A new optimizer step."""
        self.done = []

    def add(self, parts: Sequence[RolloutBatch], device: torch.device) -> Tensor:
        """The parts of one micro-step.

        Args:
            parts: any number, none included.
            device: where the loss is to be.

        Returns:
            Their loss, ().

        Raises:
            MemoryError: if memory runs out over a single completion.
        """
        total = torch.zeros((), device=device)
        waiting = self._fitting([(part, False) for part in parts])  # and whether it has been counted
        while waiting:
            part, counted = waiting.popleft()
            last = not waiting
            loss = fitting(functools.partial(self.step, part, last))
            if loss is not None:
                self.done.append(part)
                total = total if counted else total + loss
                self.book(not counted)
                continue
            self.book(False)
            if self.arrangement.whole:
                raise MemoryError(
                    f"memory ran out over a micro-batch of {len(part)} completions, which cannot be cut, because "
                    f"{self.arrangement.whole}. Lower per_device_train_batch_size (raise gradient_accumulation_steps "
                    "to keep the step as large)"
                )
            smaller = [part.select(rows) for rows in split(part)]
            self._note(part, smaller)
            self.take_back()
            again = [(each, True) for each in self.done]
            waiting = self._fitting([*again, *((each, counted) for each in smaller), *waiting])
            self.done = []
        return total

    def _note(self, part: RolloutBatch, smaller: Sequence[RolloutBatch]) -> None:
        packed = self.arrangement.packed()
        tokens, *rest = (num_tokens(each, range(len(each)), packed=packed) for each in (part, *smaller))
        limit = max(rest)
        self.say(
            f"memory ran out over {len(part)} completions of {tokens} tokens together; from here on at most {limit} "
            "tokens are computed at once, which changes nothing but the time. "
            f"max_tokens_per_microbatch={limit} has it so from the start."
        )
        self.arrangement.fits = min(limit, self.arrangement.fits or limit)

    def _fitting(self, waiting: Sequence[tuple[RolloutBatch, bool]]) -> deque[tuple[RolloutBatch, bool]]:
        """What is too large by what is known now, in smaller parts."""
        limit, packed = self.arrangement.fits, self.arrangement.packed()
        if limit is None:
            return deque(waiting)
        return deque(
            (part.select(rows), counted) for part, counted in waiting for rows in share_out(part, limit, packed=packed)
        )


def spread(parts: Sequence[RolloutBatch], steps: int) -> list[list[RolloutBatch]]:
    """Parts over micro-steps, as evenly as they go; the last micro-step has one if any has.

    Args:
        parts: in order.
        steps: how many micro-steps.

    Returns:
        For each micro-step its parts.

    Example:
        >>> spread(["a", "b", "c"], 2), spread(["a"], 3)
        ([['a'], ['b', 'c']], [[], [], ['a']])
    """
    cuts = [len(parts) * i // steps for i in range(steps + 1)]
    return [list(parts[a:b]) for a, b in itertools.pairwise(cuts)]
