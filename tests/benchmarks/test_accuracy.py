from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("accuracy")


def curve(*rewards, pace=10.0):
    return {
        "steps": [3 * i for i in range(len(rewards))],
        "seconds": [3 * i * pace for i in range(len(rewards))],
        "rewards": list(rewards),
    }


def test_time_to_accuracy_is_the_first_measure_at_or_above_the_threshold(accuracy):
    assert accuracy.crossing(curve(0.2, 0.75, 0.7, 0.8), 0.75) == 30.0
    assert accuracy.crossing(curve(0.2, 0.75, 0.7, 0.8), 0.75, "steps") == 3
    assert accuracy.crossing(curve(0.2, 0.7), 0.75) is None


def test_ratio_is_of_medians_and_a_run_that_never_gets_there_counts_as_endless(accuracy):
    settings = {"threshold": 0.75}
    slow = [{"side": "trl", "seed": s, **curve(0.1, 0.5, 0.8, pace=p)} for s, p in ((2, 8.0), (0, 10.0), (1, 9.0))]
    fast = [{"side": "ours", "seed": 0, **curve(0.1, 0.8)}, {"side": "ours", "seed": 1, **curve(0.1, 0.2)}]
    entry = accuracy.summary("sums", settings, slow + fast)
    assert entry["trl_seeds"] == [0, 1, 2]
    assert entry["trl_seconds"] == [60.0, 54.0, 48.0]  # 6 steps
    assert entry["ours_seconds"] == [30.0, None]
    assert entry["ratio"] is None  # the median of 30 s and never
    fast.append({"side": "ours", "seed": 2, **curve(0.1, 0.9, pace=9.0)})
    entry = accuracy.summary("sums", settings, slow + fast)
    assert entry["ratio"] == pytest.approx(54 / 30)  # 27, 30, never
    assert entry["ratio_of_steps"] == pytest.approx(6 / 3)


def test_slices_are_merged_and_runs_that_are_there_are_not_made_again(accuracy, tmp_path, monkeypatch):
    made = []

    def run(script, words, folder, model):
        made.append(tuple(words[:3]))
        return curve(0.1, 0.8)

    monkeypatch.setattr(accuracy, "run", run)
    results = tmp_path / "accuracy.json"
    asked = Namespace(threshold=0.75, max_steps=6, every=3, model=None, full=False, again=False, results=results)

    def slice_of(seeds, sides):
        asked.seeds, asked.sides = seeds, sides
        return accuracy.measure(asked, "sums", json.loads(results.read_text()) if results.exists() else [])

    slice_of([0], ["ours"])
    slice_of([0, 1], ["trl", "ours"])
    assert made == [("ours", "sums", 0), ("trl", "sums", 0), ("ours", "sums", 1), ("trl", "sums", 1)]
    (entry,) = json.loads(results.read_text())
    assert (entry["trl_seeds"], entry["ours_seeds"]) == ([0, 1], [0, 1])
    assert entry["ratio"] == 1.0
    assert (tmp_path / "accuracy_sums.png").stat().st_size > 1000
    asked.max_steps = 60  # other settings: nothing of before can be used
    slice_of([0], ["ours"])
    (entry,) = json.loads(results.read_text())
    assert (entry["trl_seeds"], entry["ours_seeds"]) == ([], [0])
