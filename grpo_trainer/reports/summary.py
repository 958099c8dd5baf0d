"""The figures of a run: a mean with its interval, totals over the log history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Interval(NamedTuple):
    """A mean with its 95 % interval.

    Attributes:
        mean: the mean.
        low: lower end of the interval; not cut at the smallest possible reward.
        high: upper end of the interval.
        n: prompts that it rests on.
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_and_interval(rewards: Tensor) -> Interval:
    """The mean reward and its 95 % interval over prompts.

    Samples of one prompt are correlated, an easy sum is easy every time, so the P·G rewards are not independent. The
    prompts are. So the interval is that of the mean of the P means per prompt, m_p::

        mean ± t(0.975, P − 1) · s / √P,   s² = Σ (m_p − mean)² / (P − 1)

    with Student's t. It covers both sources of chance: which prompts were held out, and how they were answered.

    Args:
        rewards: (P, G), NaN = unscorable. A prompt with no scorable sample is left out.

    Returns:
        Mean, interval, and the number of prompts that they rest on.

    Raises:
        ValueError: if ``rewards`` is not (P, G), or fewer than two prompts have a scorable sample.

    Example:
        >>> import torch
        >>> print(mean_and_interval(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 1.0]])))
        0.500 [-0.742, 1.742]
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be (P, G), one row per prompt, but has the shape {tuple(rewards.shape)}")
    per_prompt = rewards.double().nanmean(dim=1)  # (P,)
    per_prompt = per_prompt[~per_prompt.isnan()]
    n = len(per_prompt)
    if n < 2:
        raise ValueError(f"an interval needs at least 2 prompts with a scorable sample, but there is {n}")
    mean = per_prompt.mean().item()
    half = student_t_quantile(n - 1) * per_prompt.std(correction=1).item() / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def student_t_quantile(freedom: int, coverage: float = 0.95) -> float:
    """The t for which a Student variable lies in [-t, t] with probability ``coverage``.

    The probability is a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), with
    θ = atan(t / √ν); t is found by bisection.

    Args:
        freedom: degrees of freedom ν, at least 1.
        coverage: probability, between 0 and 1.

    Returns:
        The two-sided quantile, to 1e-9.

    Example:
        >>> round(student_t_quantile(9), 3)
        2.262
    """
    low, high = 0.0, 1.0
    while _student_coverage(high, freedom) < coverage:
        low, high = high, 2 * high
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_coverage(middle, freedom) < coverage else (low, middle)
    return high


def _student_coverage(t: float, freedom: int) -> float:
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(1 + odd, freedom, 2):  # odd: cos + 2/3 cos^3 + ...; even: 1 + 1/2 cos^2 + ...
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def total_over_steps(history: Iterable[Mapping[str, Any]], key: str) -> float:
    """A figure that is logged per optimizer step, added up over a run.

    Args:
        history: the log history of the trainer's state; an entry speaks for all the steps since the one before.
        key: the figure, e.g. ``"time/generation"`` in seconds per step.

    Returns:
        The total, in the unit of the figure without "per step"; 0.0 if it was never logged.

    Example:
        >>> total_over_steps([{"step": 2, "a": 1.5}, {"step": 2, "b": 9.0}, {"step": 3, "a": 4.0}], "a")
        7.0
    """
    total, last = 0.0, 0
    for entry in history:
        if key in entry:
            total += float(entry[key]) * (int(entry["step"]) - last)
            last = int(entry["step"])
    return total
