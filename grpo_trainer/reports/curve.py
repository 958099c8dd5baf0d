"""The picture of a run: training reward per step, with the held-out reward before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_trainer.reports.summary import Interval

_TRAINING, _HELDOUT = "#4477aa", "#cc3311"  # told apart by colour-blind readers too


def draw_reward_curve(
    path: Path,
    steps: Sequence[int],
    rewards: Sequence[float],
    before: Interval,
    after: Interval,
    *,
    title: str = "",
) -> None:
    """Draws the reward curve as a PNG.

    Args:
        path: the file to write; its folder must exist.
        steps: optimizer steps, ascending.
        rewards: mean training reward of each step.
        before: held-out reward before step 1, drawn at step 0.
        after: held-out reward after the last step.
        title: the picture's title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # A figure of its own, without pyplot: no display is needed and no global state is touched.
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, "o-", color=_TRAINING, markersize=4, linewidth=1.2, label="training, mean of each step")
    last = steps[-1] if steps else 0
    points = ((0, before), (last + 0.5, after))
    axes.errorbar(
        [x for x, _ in points],
        [i.mean for _, i in points],
        yerr=[[i.mean - i.low for _, i in points], [i.high - i.mean for _, i in points]],
        fmt="D",
        color=_HELDOUT,
        markersize=6,
        capsize=5,
        linewidth=1.5,
        zorder=3,
        label=f"held out, before and after (95 % interval, {after.n} prompts)",
    )
    for x, interval in points:
        axes.annotate(
            f"{interval.mean:.2f}",
            (x, interval.mean),
            xytext=(-9, 0) if x == 0 else (9, 0),  # outside, where no curve is
            textcoords="offset points",
            ha="right" if x == 0 else "left",
            va="center",
            color=_HELDOUT,
            fontweight="bold",
        )
    axes.set_xlabel("optimizer step (0: before training)")
    axes.set_ylabel("mean reward")
    axes.set_title(title)
    axes.set_xlim(-0.09 * last - 0.4, 1.09 * last + 0.9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= last])
    values = [*rewards, before.low, before.high, after.low, after.high]
    if min(rewards, default=0.0) >= 0.0 and max(rewards, default=1.0) <= 1.0:
        axes.set_ylim(min(-0.03, *values), max(1.03, *values))  # a reward from 0 to 1 is shown on its whole scale
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)  # where it hides no point
    figure.savefig(path, format="png")
