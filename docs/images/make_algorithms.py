"""Draws the pictures of docs/algorithms.md from the package's own functions.

    python docs/images/make_algorithms.py [FOLDER]

writes algorithms_losses.png, algorithms_weights.png and algorithms_kl.png into FOLDER (this one).
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.functional.losses import POLICY_LOSSES

UP, DOWN, GREY = "#1b7837", "#b2182b", "#777777"
OLD_LOGPROB = -2.0  # of the one token: it decides the value of those losses that are a constant times a log-prob
LENGTHS, LONGEST = (2, 4, 8, 16), 16
NOTES = {
    "clipped": "epsilon 0.2",
    "clipped_sequence": "epsilon 3e-4, 4e-4",
    "clipped_sequence_token": "epsilon 3e-4, 4e-4",
    "cispo": "epsilon_high 5",
    "sapo": "temperatures 1, 1.05",
    "vespo": "k 2, 3; lambda 3, 2",
    "gmpo": "gmpo_epsilon 0.4",
    "reinforce": "weighted",
}
SCORES = {"cispo", "vespo", "reinforce"}  # a constant times log π: only their slopes mean something
COLOURS = {"k1": "#2166ac", "k2": "#e08214", "k3": UP}


def loss_and_slope(name: str, log_ratios: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """The loss of completions of one token, and its slope in the log-prob of that token."""
    logprobs = (log_ratios + OLD_LOGPROB)[:, None].requires_grad_()
    old, ones = torch.full_like(logprobs, OLD_LOGPROB), torch.ones_like(logprobs)
    loss = POLICY_LOSSES[name](logprobs, old, advantage * ones[:, 0], ones).loss
    return loss.detach()[:, 0], torch.autograd.grad(loss.sum(), logprobs)[0][:, 0]


def draw_losses(path: Path) -> None:
    """Loss and, below it, gradient against the ratio, for A = +1 and A = -1, side by side for all policy losses."""
    log_ratios = torch.linspace(math.log(0.1), math.log(10.0), 4001, dtype=torch.float64)
    columns = math.ceil(len(POLICY_LOSSES) / 2)
    figure, axes = plt.subplots(4, columns, figsize=(2.9 * columns, 9.4), sharex=True)
    for number, name in enumerate(POLICY_LOSSES):
        above, below = axes[number // columns * 2 : number // columns * 2 + 2, number % columns]
        for sign, colour in ((1.0, UP), (-1.0, DOWN)):
            for axis, values in zip((above, below), loss_and_slope(name, log_ratios, sign), strict=True):
                dashed = axis is above and name in SCORES
                label = f"A = {sign:+.0f}".replace("-", "−")
                axis.plot(log_ratios.exp(), values, color=colour, lw=1.6, ls="--" if dashed else "-", label=label)
        above.set_title(f"{name}\n{NOTES.get(name, '')}", fontsize=10)
        for axis, limit in ((above, 8), (below, 6.5)):
            axis.axvline(1.0, color=GREY, lw=0.6, ls=":")
            axis.axhline(0.0, color=GREY, lw=0.6, ls=":")
            axis.set_ylim(-limit, limit)
            axis.set_xscale("log")
            axis.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
            axis.tick_params(labelsize=8)
        below.set_xlabel("ratio", fontsize=9)
        if number % columns == 0:
            above.set_ylabel("loss", fontsize=9)
            below.set_ylabel("slope in log π", fontsize=9)
    axes[0, 0].legend(fontsize=8, loc="upper left", frameon=False)
    save(figure, path)


def draw_weights(path: Path) -> None:
    """What one token's loss is multiplied by, w / Z, in completions of four lengths."""
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    shares = {}
    for name, aggregation in AGGREGATIONS.items():
        weights, items = aggregation(mask, **({"length": LONGEST} if name == "fixed_length" else {}))
        shares[name] = weights / items
    colour = matplotlib.colors.LogNorm(1 / 128, 1)
    figure, axes = plt.subplots(1, len(shares), figsize=(2.9 * len(shares), 2.5), sharey=True)
    for axis, (name, share) in zip(axes, shares.items(), strict=True):
        for row, length in enumerate(LENGTHS):
            weight = share[row, 0].item()
            shade = plt.cm.Blues(colour(weight))
            axis.barh([row] * length, 1, left=range(length), height=0.8, color=shade, edgecolor="white", lw=1)
            axis.text(length + 0.5, row, f"{weight:.3f} each, {weight * length:.2f} in all", va="center", fontsize=7)
        axis.set_title(name, fontsize=9)
        axis.set_xlim(0, 2.1 * LONGEST)
        axis.set_xticks([])
        axis.set_yticks(range(len(LENGTHS)), [f"{n} tokens" for n in LENGTHS], fontsize=8)
        axis.tick_params(length=0)
        axis.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes[0].invert_yaxis()
    save(figure, path)


def draw_kl(path: Path) -> None:
    """Mean and spread of the three estimators, as multiples of the true KL, for two Gaussians of variance 1."""
    x = torch.linspace(-12, 12, 20001, dtype=torch.float64)
    density = (-x.square() / 2).exp()
    density /= density.sum()
    divergences = torch.logspace(-3, 0.6, 80, dtype=torch.float64)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4))
    for name, estimator in KL_ESTIMATORS.items():
        means, spreads = [], []
        for kl in divergences:
            shift = (2 * kl).sqrt()  # KL(N(0, 1) || N(shift, 1)) = shift^2 / 2
            values = estimator((-x.square() / 2)[None], (-(x - shift).square() / 2)[None])[0]
            mean = (density * values).sum()
            means.append((mean / kl).item())
            spreads.append(((density * (values - mean).square()).sum().sqrt() / kl).item())
        for axis, line in ((left, means), (right, spreads)):
            axis.plot(divergences, line, color=COLOURS[name], lw=1.8, label=name, ls="--" if name == "k3" else "-")
    left.set_ylabel("mean / KL")
    left.set_ylim(0.9, 2.1)
    right.set_ylabel("standard deviation / KL")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_xlabel("KL, nats")
        axis.legend(frameon=False)
    save(figure, path)


def save(figure: plt.Figure, path: Path) -> None:
    """Writes a figure, the same bytes each time."""
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


PICTURES = {"losses": draw_losses, "weights": draw_weights, "kl": draw_kl}


def main(folder: Path) -> list[Path]:
    """Draws all of them into a folder."""
    paths = {name: folder / f"algorithms_{name}.png" for name in PICTURES}
    for name, draw in PICTURES.items():
        draw(paths[name])
    return list(paths.values())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
