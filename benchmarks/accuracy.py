"""How long it takes to learn: ``accuracy.py [--task NAME,…] [--seeds N,…] [--sides trl,ours]``, against TRL.

For each task both trainers start from the same weights with the same settings, those of the quickstart, once per seed,
each run in a process of its own with the same environment; the two sides take turns. What counts is the seconds of
training until the held-out reward, measured every few steps with the clock standing still, first reaches the threshold.

Writes benchmarks/results/accuracy.json, one entry per task, and a picture of both curves over time and over steps. A
run is written as soon as it has ended, and one that is there already with the same settings is not made again: the
whole can be measured in slices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import RESULTS, run, write_json

SIDES = ("trl", "ours")
LABELS = {"trl": "TRL", "ours": "grpo_trainer"}
COLOURS = {"trl": "#cc3311", "ours": "#4477aa"}  # told apart by colour-blind readers too


def crossing(curve: dict[str, Any], threshold: float, what: str = "seconds") -> float | None:
    """Where the reward first reaches the threshold; None if it never does.

    Args:
        curve: ``steps``, ``seconds`` and ``rewards`` of equal length.
        threshold: the reward.
        what: ``seconds`` or ``steps``.

    Returns:
        Seconds or steps of training.
    """
    return next((x for x, y in zip(curve[what], curve["rewards"], strict=True) if y >= threshold), None)


def summary(task: str, settings: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of one task.

    Args:
        task: its name.
        settings: that all its runs have in common.
        runs: ``side``, ``seed`` and the curve of each.

    Returns:
        With seconds and steps of each side's runs in the order of their seeds, None where the threshold was not
        reached; and the ratio of the medians, None as long as a side has no median.
    """
    runs = sorted(runs, key=lambda r: (r["side"], r["seed"]))
    out: dict[str, Any] = {"task": task, **settings}
    for side in SIDES:
        mine = [r for r in runs if r["side"] == side]
        for what in ("seconds", "steps"):
            out[f"{side}_{what}"] = [crossing(r, settings["threshold"], what) for r in mine]
        out[f"{side}_seeds"] = [r["seed"] for r in mine]
    for name, what in (("ratio", "seconds"), ("ratio_of_steps", "steps")):
        trl, ours = (_median(out[f"{side}_{what}"]) for side in SIDES)
        out[name] = trl / ours if trl and ours else None
    return {**out, "runs": runs}


def _median(values: Sequence[float | None]) -> float | None:
    """The median, where what was never reached counts as infinitely long; None if that is the median."""
    if not values:
        return None
    middle = statistics.median(float("inf") if value is None else value for value in values)
    return None if middle == float("inf") else middle


def draw(path: Path, entry: dict[str, Any]) -> None:
    """Both sides' held-out reward over minutes and over steps, a line per seed.

    Args:
        path: the PNG to write.
        entry: of one task.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what, unit in ((panels[0], "seconds", 60), (panels[1], "steps", 1)):
        named: set[str] = set()
        for one in entry["runs"]:
            label = None if one["side"] in named else LABELS[one["side"]]
            named.add(one["side"])
            x = [value / unit for value in one[what]]
            axes.plot(x, one["rewards"], "o-", color=COLOURS[one["side"]], markersize=3, linewidth=1.2, label=label)
        axes.axhline(entry["threshold"], color="#555555", linestyle="--", linewidth=1)
        axes.set_xlabel("minutes of training" if what == "seconds" else "optimizer steps")
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out reward")
    panels[0].legend(loc="lower right")
    figure.suptitle(f"{entry['task']}: held-out reward, a line per seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure(asked: argparse.Namespace, task: str, known: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes the runs of a task that are missing, and writes all entries after each."""
    settings = {"threshold": asked.threshold, "max_steps": asked.max_steps, "every": asked.every, "model": asked.model}
    old = next((entry for entry in known if entry["task"] == task), None)
    runs: list[dict[str, Any]] = []
    if old is not None and all(old.get(name) == value for name, value in settings.items()):
        runs = old["runs"]
    elif old is not None:
        print(f"{task}: the {len(old['runs'])} runs in {asked.results} had other settings, and are left out")
    for turn, seed in enumerate(asked.seeds):
        for side in asked.sides if turn % 2 == 0 else asked.sides[::-1]:
            if not asked.again and any((r["side"], r["seed"]) == (side, seed) for r in runs):
                continue
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as scratch:
                words = [side, task, seed, asked.max_steps, asked.every, asked.threshold, int(asked.full)]
                curve = run("accuracy_worker.py", words, Path(scratch), asked.model)
            runs = [r for r in runs if (r["side"], r["seed"]) != (side, seed)]
            runs.append({"side": side, "seed": seed, **curve})
            entry = summary(task, settings, runs)
            known = [e for e in known if e["task"] != task] + [entry]
            write_json(asked.results, known)
            draw(asked.results.with_name(f"{asked.results.stem}_{task}.png"), entry)
            print(f"{task:12} {side:4} seed {seed}: {_story(curve, asked.threshold)}", end="")
            print(f"  ({time.perf_counter() - start:.0f} s in all)", flush=True)
    for entry in known:
        if entry["task"] == task and entry["ratio"] is not None:
            print(f"{task:12} ratio of the median seconds {entry['ratio']:.2f}, of steps {entry['ratio_of_steps']:.2f}")
    return known


def _story(curve: dict[str, Any], threshold: float) -> str:
    seconds, steps = (crossing(curve, threshold, what) for what in ("seconds", "steps"))
    start = f"{curve['rewards'][0]:.2f} -> {curve['rewards'][-1]:.2f}"
    if seconds is None:
        return f"{start}, {threshold} not reached in {curve['steps'][-1]} steps, {curve['seconds'][-1]:.0f} s"
    return f"{start}, {threshold} reached after {steps} steps, {seconds:.0f} s"


def main() -> None:
    """Makes the runs that were asked for and are not there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="sums,gcd", help="of sums,gcd,differences")
    parser.add_argument("--seeds", default="0,1,2", help="with commas")
    parser.add_argument("--sides", default="trl,ours", help="of trl,ours")
    parser.add_argument("--max-steps", type=int, default=60, help="of a run; the learning rate falls to 0 over them")
    parser.add_argument("--every", type=int, default=3, help="steps from one measure to the next")
    parser.add_argument("--threshold", type=float, default=0.75, help="held-out reward to reach")
    parser.add_argument("--full", action="store_true", help="go on to the last step after reaching it")
    parser.add_argument("--again", action="store_true", help="make runs anew that are there already")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct: a name or a folder")
    parser.add_argument("--results", type=Path, default=RESULTS / "accuracy.json", help="the file to write")
    asked = parser.parse_args()
    asked.seeds, asked.sides = [int(seed) for seed in asked.seeds.split(",")], asked.sides.split(",")
    if unknown := set(asked.sides) - set(SIDES):
        raise SystemExit(f"unknown side {', '.join(unknown)}; legal: {', '.join(SIDES)}")
    known = json.loads(asked.results.read_text(encoding="utf-8")) if asked.results.exists() else []
    for task in asked.task.split(","):
        known = measure(asked, task, known)


if __name__ == "__main__":
    main()
