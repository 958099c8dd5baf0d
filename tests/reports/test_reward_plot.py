from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import pytest

from grpo_trainer.reports import reward_plot
from grpo_trainer.reports.reward_plot import RewardPlot, curves_of

pytest.importorskip("matplotlib")


def play(plot, steps=3, main=True, first=0):
    """Logs training at each step and an evaluation at each second one."""
    history = [{"step": step, "reward": 0.1 * step} for step in range(1, first + 1)]
    state = SimpleNamespace(global_step=first, is_world_process_zero=main, log_history=history)
    plot.on_train_begin(None, state, None)
    for step in range(first + 1, steps + 1):
        state.global_step = step
        for logs in [{"loss": 0.0, "reward": 0.1 * step}] + [{"eval_reward": 0.05}] * (step % 2 == 0):
            history.append({**logs, "step": step})
            plot.on_log(None, state, None, logs=logs)


def test_one_picture_is_drawn_anew_at_each_log(notebook):
    play(RewardPlot())
    (bundle,) = notebook.shown
    assert notebook.drawn == 4  # 3 logs of training, 1 evaluation
    assert bundle["image/png"][:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", bundle["image/png"][16:24]) == (700, 350)
    assert bundle["text/plain"] == "step 3: reward 0.300, eval_reward 0.050"


def test_the_curve_of_a_resumed_run_has_all_its_parts(notebook, monkeypatch):
    drawn = []
    monkeypatch.setattr(reward_plot, "draw", lambda curves, name: drawn.append(curves) or b"")
    play(RewardPlot(), steps=3, first=2)
    (curves,) = drawn
    assert curves["reward"] == ([1, 2, 3], [0.1, 0.2, pytest.approx(0.3)])


def test_each_run_of_the_cell_has_a_picture_of_its_own(notebook):
    plot = RewardPlot()
    play(plot)
    play(plot)
    assert len(notebook.shown) == 2


def test_another_figure_can_be_plotted():
    history = [{"step": 1, "rewards/a/mean": 0.5, "reward": 1.0}, {"step": 1, "eval_hard_rewards/a/mean": 0.25}]
    assert curves_of(history, "rewards/a/mean") == {
        "rewards/a/mean": ([1], [0.5]),
        "eval_hard_rewards/a/mean": ([1], [0.25]),
    }


def test_outside_a_notebook_the_reason_is_said_once(caplog, capsys):
    plot = RewardPlot()
    play(plot)
    play(plot)
    (record,) = caplog.records
    assert "RewardPlot draws nothing: this is no notebook" in record.getMessage()
    assert "log_history" in record.getMessage()


def test_without_matplotlib_the_reason_is_said(notebook, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    play(RewardPlot())
    (record,) = caplog.records
    assert "pip install matplotlib" in record.getMessage()
    assert notebook.shown == []


def test_only_the_main_process_draws(notebook, caplog):
    play(RewardPlot(), main=False)
    assert notebook.shown == [] and caplog.records == []
