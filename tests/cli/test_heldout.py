from __future__ import annotations

from types import SimpleNamespace

import torch
from rich.console import Console

from grpo_trainer.cli.heldout import Measure, before_after_table, measure
from grpo_trainer.reports.summary import Interval


def shown(item) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(item)
    return capture.get()


def test_a_measure_samples_every_heldout_prompt_several_times_at_temperature_1(capsys):
    rows = [{"prompt": [{"role": "user", "content": f"question {i}"}], "answer": i} for i in range(10)]
    asked = {}

    def sample(dataset, num_generations, *, temperature, seed):
        asked.update(rows=len(dataset), num_generations=num_generations, temperature=temperature, seed=seed)
        rewards = torch.zeros(10, num_generations, dtype=torch.float64)
        rewards[:5] = 1.0
        return SimpleNamespace(
            rows=rows, completions=[[f"text {i}"] * num_generations for i in range(10)], rewards=rewards
        )

    measured = measure(SimpleNamespace(sample=sample), rows, 7, Console(), "before training")
    assert asked == {"rows": 10, "num_generations": 4, "temperature": 1.0, "seed": 7}
    assert (measured.reward.mean, measured.reward.n) == (0.5, 10)
    assert measured.examples[0] == ["question 0", "text 0", 1.0]
    assert measured.examples[-1] == ["question 5", "text 5", 0.0]
    assert "held-out reward before training: 0.500 [" in capsys.readouterr().out


def test_the_same_questions_stand_side_by_side():
    interval = Interval(0.25, 0.2, 0.3, 8)
    before = Measure(reward=interval, examples=[["What is 7 + 12?", "I\nthink [18]", 0.0]], seconds=1.0)
    after = Measure(reward=interval._replace(mean=0.9), examples=[["What is 7 + 12?", "19", 1.0]], seconds=1.0)
    (line,) = [line for line in shown(before_after_table(before, after)).splitlines() if "What is 7 + 12?" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["What is 7 + 12?", "I think [18]", "0", "19", "1"]
    assert "before: mean reward 0.25" in shown(before_after_table(before, after))
