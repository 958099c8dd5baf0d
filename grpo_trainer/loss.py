"""The loss of one micro-batch: the bound choices of an objective, evaluated.

Terms are taken in this order::

    policy loss -> off-policy mask -> high-entropy tokens -> sampler's correction -> + beta * KL -> weights -> sum

so the KL term is on every credited token, and nothing that is dropped changes what the sum is divided by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_trainer.functional.correction import mismatch_stats
from grpo_trainer.functional.masks import entropy_threshold, high_entropy_mask, off_policy_sequence_mask
from grpo_trainer.functional.numeric import wide
from grpo_trainer.functional.ratios import ratio_at
from grpo_trainer.functional.shapes import check_shapes
from grpo_trainer.types import (
    AdvantageFn,
    AggregationFn,
    CorrectionFn,
    JointAdvantageFn,
    KLFn,
    PolicyLossFn,
    RolloutBatch,
)

Pool = Callable[[Tensor], Tensor]
"""``values (n,) of this process -> (m,) of all``."""


class ObjectiveOutput(NamedTuple):
    """What the objective says about one micro-batch.

    Attributes:
        loss: () the sum of ``w * loss`` over the micro-batch; divide by Z, the items of the whole optimizer step.
        stats: name -> (sum, count), two () tensors; their quotient, after both are added up, is a mean over tokens, or
            over completions where a completion has one figure.
        extremes: name -> () least or greatest value, as the end of the name says, ``min`` or ``max``; infinite where
            there was none.
        bonus: the sum () of the entropy, in nats, over the tokens that a bonus is about, and their number (); the bonus
            is the sum over ``Objective.bonus_items`` of the whole optimizer step. None if no entropy was given.
    """

    loss: Tensor
    stats: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor]
    bonus: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The four choices, bound.

    Attributes:
        advantage: rewards (P, G) -> advantages (P, G).
        joint_advantage: rewards of several functions (P, G, R), with ``weights`` (R,) -> advantages (P, G); takes the
            place of ``advantage``, which sees their weighted sum only. None: there is none.
        policy_loss: log-probs and advantages -> loss per token.
        aggregation: mask (B, T) -> weights (B, T) and items ().
        kl: log-probs -> KL estimate per token.
        beta: weight of the KL term, in loss per nat; 0 leaves it out, and no reference is needed.
        kl_importance_weighted: multiply the KL estimate by the importance ratio, which makes its gradient that of the
            true KL (DeepSeek-V3.2, arXiv:2512.02556, equation 7).
        importance_sampling_level: which ratio that is, a key of ``RATIOS``; the policy loss has its own bound.
        top_entropy: share of the tokens, those of the highest entropy, that the policy loss is about; 1 for all.
        off_policy_threshold: nats per token beyond which a bad completion that the policy has left behind is dropped;
            None drops none.
        correction: weights of completions that another engine sampled; None corrects nothing.
        compares_with_sampler: whether the policy loss takes the sampler's own log-probs in place of the old policy's,
            and no other correction.
        keeps_silent_rows: whether rows without an advantage have to be computed all the same: a policy loss of someone
            else's making may do anything with them.
    """

    advantage: AdvantageFn
    policy_loss: PolicyLossFn
    aggregation: AggregationFn
    kl: KLFn
    beta: float = 0.0
    joint_advantage: JointAdvantageFn | None = None
    kl_importance_weighted: bool = True
    importance_sampling_level: str = "token"
    top_entropy: float = 1.0
    off_policy_threshold: float | None = None
    correction: CorrectionFn | None = None
    compares_with_sampler: bool = False
    keeps_silent_rows: bool = False

    def items(self, batch: RolloutBatch) -> Tensor:
        """What the batch adds to Z, the normaliser of the optimizer step: ()."""
        return self.aggregation(batch.mask)[1]

    def bonus_items(self, batch: RolloutBatch) -> Tensor:
        """What the batch adds to the divisor of the entropy bonus: (), the credited tokens that it is about."""
        return batch.mask.sum() * self.top_entropy

    def weighted(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch with its token weights written down, so that its rows may be computed apart from each other.

        Args:
            batch: B rows.

        Returns:
            The same rows; any part of them has the loss that it has among all.
        """
        if batch.token_weights is not None:
            return batch
        return dataclasses.replace(batch, token_weights=self.aggregation(batch.mask)[0])

    def silent_stats(self, batch: RolloutBatch, live: Sequence[int]) -> dict[str, tuple[Tensor, Tensor]]:
        """The figures of the policy loss over the rows that need not be computed.

        They need no forward pass: what has no advantage is never clipped, and on policy every ratio is 1.

        Args:
            batch: B rows.
            live: those that are computed.

        Returns:
            name -> (sum, count), as in ``ObjectiveOutput``; empty if every row is live. Of rows that an earlier policy
            sampled, only the clip ratios.
        """
        computed = set(live)
        silent = batch.select([i for i in range(len(batch)) if i not in computed])
        if not len(silent):
            return {}
        logprobs = torch.zeros(silent.mask.shape, device=silent.mask.device)
        stats = self.policy_loss(logprobs, None, silent.advantages, silent.mask).stats
        known = {name: v for name, v in stats.items() if batch.old_logprobs is None or name.startswith("clip_ratio/")}
        return {name: masked_sum(value, silent.mask) for name, value in known.items()}

    def live_rows(self, batch: RolloutBatch) -> list[int]:
        """The rows that have to be computed.

        A completion whose advantage is 0, and one without a token, adds exactly 0 to loss and gradient as long as
        there is no KL term. What it adds to Z has to be asked before: ``items`` is about all rows.

        Args:
            batch: B rows; its advantages are known.

        Returns:
            Indices, ascending: those rows; all if there is a KL term, a share of tokens by entropy, an off-policy mask,
            or ``keeps_silent_rows``; one row if none carries a gradient, so that there is something to run a backward
            pass on.
        """
        every_row_matters = (
            self.beta
            or self.top_entropy < 1
            or self.off_policy_threshold is not None
            or (self.compares_with_sampler and batch.sampling_logprobs is not None)
        )
        if every_row_matters or self.keeps_silent_rows:
            return list(range(len(batch)))
        advantages = batch.advantages.tolist()
        live = [i for i, length in enumerate(batch.lengths) if length and advantages[i]]
        return live or sorted(range(len(batch)), key=batch.lengths.__getitem__)[:1]

    def __call__(
        self,
        logprobs: Tensor,
        batch: RolloutBatch,
        *,
        entropy: Tensor | None = None,
        pool: Pool = lambda values: values,
    ) -> ObjectiveOutput:
        """The loss of one micro-batch, as a sum yet to be divided by Z.

        Args:
            logprobs: (B, T) of the completion tokens under the current policy.
            batch: the constants.
            entropy: (B, T) in nats, with its gradient if there is a bonus; needed if ``top_entropy`` is below 1.
            pool: the entropies (n,) of this process -> (m,) of all, among which those at the top are told.

        Returns:
            The weighted sum of the token losses, the figures to log, and the entropy.

        Raises:
            ValueError: if the shapes differ, or ``beta`` is not 0 and the batch has no reference log-probs.
        """
        check_shapes("B T", logprobs=logprobs, mask=batch.mask)
        mask = batch.mask

        def credited(values: Tensor | None) -> Tensor | None:
            """Nothing outside the mask reaches a sum or, through it, a gradient: not even a NaN."""
            return None if values is None else torch.where(mask, values, 0.0)

        batch = dataclasses.replace(
            batch,
            old_logprobs=credited(batch.old_logprobs),
            ref_logprobs=credited(batch.ref_logprobs),
            sampling_logprobs=credited(batch.sampling_logprobs),
        )
        logprobs = torch.where(mask, logprobs, 0.0)
        trained = self._trained(entropy, mask, pool)
        loss, stats = self._policy_term(logprobs, batch, trained)
        if self.beta:
            kl = self._kl_term(logprobs, batch)
            loss = loss + self.beta * kl
            stats["kl"] = kl.detach()
        weights = self.aggregation(mask)[0] if batch.token_weights is None else batch.token_weights
        total = torch.where(mask, loss * weights, 0.0).sum()
        figures = {name: masked_sum(value, mask) for name, value in stats.items()}
        extremes: dict[str, Tensor] = {}
        if batch.sampling_logprobs is not None:
            means, extremes = self._mismatch(logprobs, batch)
            figures.update(means)
        return ObjectiveOutput(total, figures, extremes, None if entropy is None else masked_sum(entropy, trained))

    def _trained(self, entropy: Tensor | None, mask: Tensor, pool: Pool) -> Tensor:
        """(B, T) bool: the tokens that the policy loss is about."""
        if self.top_entropy >= 1:
            return mask
        if entropy is None:
            raise ValueError(f"top_entropy={self.top_entropy} needs the entropy of each token, and none was given")
        pooled = pool(entropy.detach()[mask])[None]
        threshold = entropy_threshold(pooled, torch.ones_like(pooled), top=self.top_entropy)
        return high_entropy_mask(entropy, mask, threshold)

    def _policy_term(self, logprobs: Tensor, batch: RolloutBatch, trained: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The policy loss (B, T), with all that multiplies it, and its figures."""
        old, sampled, mask = batch.old_logprobs, batch.sampling_logprobs, batch.mask
        sampler = old
        if sampled is not None:  # the policy that sampled, as far as its own log-probs are known
            sampler = torch.where(sampled.isnan(), logprobs.detach() if old is None else old, sampled)
        token = self.policy_loss(logprobs, sampler if self.compares_with_sampler else old, batch.advantages, mask)
        loss, stats = token.loss, dict(token.stats)
        if self.off_policy_threshold is not None:
            kept = off_policy_sequence_mask(
                logprobs, sampler, batch.advantages, mask, threshold=self.off_policy_threshold
            )
            loss, stats["off_policy_masked"] = loss * kept, (~kept).float()
        if trained is not mask:
            loss = loss * trained
        if sampled is not None and self._corrects:
            assert self.correction is not None
            loss = loss * self.correction(logprobs.detach() if old is None else old, sampled, mask)
        return loss, stats

    def _kl_term(self, logprobs: Tensor, batch: RolloutBatch) -> Tensor:
        if batch.ref_logprobs is None:
            raise ValueError(f"beta={self.beta} needs reference log-probs, and the batch has none")
        kl = self.kl(logprobs, batch.ref_logprobs)
        if not self.kl_importance_weighted:
            return kl
        return kl * ratio_at(self.importance_sampling_level, logprobs, batch.old_logprobs, batch.mask)

    @property
    def _corrects(self) -> bool:
        return self.correction is not None and not self.compares_with_sampler

    def _mismatch(
        self, logprobs: Tensor, batch: RolloutBatch
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Figures about a sampler whose probabilities are not quite the trainer's: means, and extremes."""
        trainer = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        assert batch.sampling_logprobs is not None
        given = torch.ones_like(trainer)
        if self.correction is not None:
            given = self.correction(trainer, batch.sampling_logprobs, batch.mask)
        found = mismatch_stats(trainer, batch.sampling_logprobs, batch.mask, given)
        apart, ratio = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"
        means = {f"{apart}/mean": (found.difference_sum, found.difference_count)}
        extremes = {f"{apart}/max": torch.where(found.difference_count > 0, found.difference_max, -torch.inf)}
        if self._corrects:
            means[f"{ratio}/mean"] = (found.ratio_sum, found.ratio_count)
            extremes |= {f"{ratio}/min": found.ratio_min, f"{ratio}/max": found.ratio_max}
        return means, extremes


def masked_sum(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values under the mask and their number.

    Args:
        values: (B, T), or (B, 1): one per completion, counted where the completion has a credited token.
        mask: (B, T) bool.

    Returns:
        Two () tensors, in float32 or wider.
    """
    if values.shape != mask.shape:
        mask = mask.any(dim=1, keepdim=True)
    return torch.where(mask, wide(values), 0.0).sum(), mask.sum().float()
