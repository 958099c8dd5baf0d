"""Which tokens and completions are trained on.

Two kinds. ``without_truncated`` changes the mask of credited tokens itself: what it drops is out of the loss and out of
the count. ``off_policy_sequence_mask`` and ``high_entropy_mask`` multiply the policy loss: what they drop adds 0 to it
and still counts, as their papers have it; the KL term is not theirs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import row_mean
from grpo_trainer.functional.ratios import log_ratio
from grpo_trainer.functional.shapes import check_shapes


def without_truncated(mask: Tensor, finished: Tensor) -> Tensor:
    """Overlong filtering: no token of a completion that was cut off is credited.

    DAPO (arXiv:2503.14476): a completion that ran out of room is punished for its length and not for what it says.

    Args:
        mask: (B, T) bool, True on credited tokens.
        finished: (B,) bool, True where the completion ended by itself.

    Returns:
        (B, T) bool.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_shapes("B", finished=finished, rows=mask.any(dim=1))
    return mask.bool() & finished.bool()[:, None]


def off_policy_sequence_mask(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Which completions may still teach: all but the bad ones that the policy has left behind.

    DeepSeek-V3.2 (arXiv:2512.02556), off-policy sequence masking: keep if ``A >= 0`` or
    ``mean_t(log pi_old - log pi_theta) <= threshold``. The mean is the log of a geometric mean ratio: at a threshold of
    0.5 the tokens of a dropped completion have become 1.65 times less likely on average. pi_old is the policy that
    sampled: the sampler's own log-probs where there are any. The paper gives no value; TRL suggests 0.5.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, NaN where unknown (such a token counts as 0); None if that is
            the current policy, which keeps everything.
        advantages: (B,) one per completion.
        mask: (B, T), nonzero on credited tokens; the mean is over those.
        threshold: in nats per token, above 0.

    Returns:
        (B, 1) bool, True on completions that are kept.

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> now = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]])
        >>> then = torch.tensor([[-0.1, -0.1], [-0.1, -0.1], [-0.9, -0.9]])  # .9, .9 and .1 nats likelier
        >>> off_policy_sequence_mask(now, then, torch.tensor([1.0, -1.0, -1.0]), torch.ones(3, 2), threshold=0.5)
        tensor([[ True],
                [False],
                [ True]])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    drift = -log_ratio(logprobs, old_logprobs).detach()
    return (advantages[:, None] >= 0) | (row_mean(drift.nan_to_num(nan=0.0), mask) <= threshold)


def entropy_threshold(entropy: Tensor, mask: Tensor, *, top: float) -> Tensor:
    """The entropy that the given share of the credited tokens reaches: their ``1 - top`` quantile, interpolated.

    "Beyond the 80/20 Rule" (arXiv:2506.01939) takes it over the whole batch, so give it all tokens that are trained on
    together: a threshold of every micro-batch for itself depends on how the step was cut.

    Args:
        entropy: (B, T) in nats.
        mask: (B, T), nonzero on credited tokens; no other one enters.
        top: share of the tokens to keep, in [0, 1]; the paper's value is 0.2.

    Returns:
        () the threshold in nats; infinite if no token is credited.

    Raises:
        ValueError: if the shapes differ, or the share is not in [0, 1].

    Example:
        >>> entropy = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0]])
        >>> entropy_threshold(entropy, torch.tensor([[1, 1, 1, 1, 0]]), top=0.5)
        tensor(2.5000)
    """
    check_shapes("B T", entropy=entropy, mask=mask)
    if not 0 <= top <= 1:
        raise ValueError(f"the share of high-entropy tokens must be between 0 and 1, got {top}.")
    ordered = entropy.detach()[mask.bool()].sort().values  # torch.quantile refuses more than 16 million values
    if not len(ordered):
        return entropy.new_tensor(math.inf)
    place = (1 - top) * (len(ordered) - 1)
    below, share = int(place), place - int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], share)


def high_entropy_mask(entropy: Tensor, mask: Tensor, threshold: Tensor | float) -> Tensor:
    """The credited tokens at or above an entropy: (B, T) bool, for entropies and a mask (B, T) and a threshold ()."""
    check_shapes("B T", entropy=entropy, mask=mask)
    return (entropy.detach() >= threshold) & mask.bool()
