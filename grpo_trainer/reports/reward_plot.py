"""The reward curve in a notebook, drawn anew at each log while the run goes on."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.guard import Guard
from grpo_trainer.reports.notebook import Output, in_notebook

logger = logging.getLogger(__name__)

_COLOURS = ("#4477aa", "#cc3311", "#228833", "#aa3377", "#ccbb44", "#66ccee")  # told apart by colour-blind readers too


class RewardPlot(TrainerCallback):
    """Plots the mean reward of each log against the optimizer step, below the cell that trains.

    The rewards of evaluations are in it too, each set under its own name. A run that is resumed shows all its parts.
    Outside a notebook, or without matplotlib, there is no plot, which is said once.

    Args:
        name: the figure to plot, e.g. ``"rewards/correct/mean"``; with it goes ``eval_<name>``.

    ::

        GRPOTrainer(..., callbacks=[RewardPlot()]).train()
    """

    def __init__(self, name: str = "reward") -> None:
        self.name = name
        self._output: Output | None = None
        self._said = False
        self._guard = Guard("the reward is not plotted")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins a new plot, if there is where to show it."""
        self._output = None
        if not state.is_world_process_zero:
            return
        reason = _why_not()
        if reason is None:
            self._output = Output()
        elif not self._said:
            self._said = True
            logger.warning("RewardPlot draws nothing: %s", reason)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Draws it anew."""
        if self._output is None or not any(_is_wanted(name, self.name) for name in logs or {}):
            return
        with self._guard:
            curves = curves_of(state.log_history, self.name)
            latest = ", ".join(f"{name} {values[-1]:.3f}" for name, (_, values) in curves.items())
            self._output.show(draw(curves, self.name), f"step {state.global_step}: {latest}")


def curves_of(history: Sequence[Mapping[str, Any]], name: str) -> dict[str, tuple[list[int], list[float]]]:
    """A figure over a run, in training and in each evaluation.

    Args:
        history: the log history of the trainer's state.
        name: the figure.

    Returns:
        For each name that was logged its steps and values.

    Example:
        >>> curves_of([{"step": 5, "reward": 0.5}, {"step": 5, "eval_hard_reward": 0.2}, {"step": 6}], "reward")
        {'reward': ([5], [0.5]), 'eval_hard_reward': ([5], [0.2])}
    """
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for entry in history:
        for key in entry:
            if _is_wanted(key, name):
                steps, values = curves.setdefault(key, ([], []))
                steps.append(entry["step"])
                values.append(float(entry[key]))
    return curves


def draw(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], name: str) -> bytes:
    """Draws curves.

    Args:
        curves: name -> steps and values.
        name: of the vertical axis.

    Returns:
        A picture as PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 3.5), dpi=100, layout="constrained")  # pyplot would show it a second time
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (label, (steps, values)) in enumerate(curves.items()):
        axes.plot(steps, values, "o-", color=_COLOURS[i % len(_COLOURS)], markersize=4, linewidth=1.2, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if len(curves) > 1:
        axes.legend(frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _is_wanted(key: str, name: str) -> bool:
    return key == name or (key.startswith("eval_") and (key == f"eval_{name}" or key.endswith(f"_{name}")))


def _why_not() -> str | None:
    if not in_notebook():
        return "this is no notebook. The figures are in trainer.state.log_history"
    if importlib.util.find_spec("matplotlib") is None:
        return "matplotlib is not installed: pip install matplotlib"
    return None
