from __future__ import annotations

import struct

import pytest

from grpo_trainer.reports.curve import draw_reward_curve
from grpo_trainer.reports.summary import Interval

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("steps", [[], [1], list(range(1, 26))])
def test_the_curve_is_a_png_of_the_size_that_was_drawn(tmp_path, steps):
    path = tmp_path / "reward_curve.png"
    rewards = [step / 25 for step in steps]
    draw_reward_curve(path, steps, rewards, Interval(0.1, 0.05, 0.15, 64), Interval(0.9, 0.85, 0.95, 64), title="sums")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1050, 630)  # 7 x 4.2 inches at 150 dots per inch


def test_no_global_state_of_matplotlib_is_touched(tmp_path):
    import matplotlib

    backend = matplotlib.rcParams._get_backend_or_none()
    draw_reward_curve(tmp_path / "a.png", [1], [0.5], Interval(0, 0, 0, 2), Interval(1, 1, 1, 2))
    assert matplotlib.rcParams._get_backend_or_none() == backend
