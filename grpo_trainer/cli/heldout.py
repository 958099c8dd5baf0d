"""The held-out measure: the same prompts before and after training, with an interval and examples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from grpo_trainer.reports.summary import Interval

SAMPLES_PER_PROMPT = 4
EXAMPLES = 6


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Held-out reward at one moment.

    Attributes:
        reward: mean and 95 % interval.
        examples: for the first few held-out prompts ``[question, completion, reward]``.
        seconds: how long it took.
    """

    reward: Interval
    examples: list[list[Any]]
    seconds: float


def measure(
    trainer: Any, heldout: Any, seed: int, console: Console, when: str, noun: str = "sums", measured: str | None = None
) -> Measure:
    """The held-out reward of the policy as it is: several samples of each prompt at temperature 1.

    Args:
        trainer: has ``sample``.
        heldout: P rows.
        seed: of the sampling; the same before and after.
        console: where to say so.
        when: for the line that it says.
        noun: what the rows are.
        measured: name of the reward that counts; None: all of them together.

    Returns:
        The measure.
    """
    from grpo_trainer.reports.summary import mean_and_interval

    start = time.monotonic()
    with console.status(f"measuring the held-out reward {when} …"):
        result = trainer.sample(heldout, num_generations=SAMPLES_PER_PROMPT, temperature=1.0, seed=seed)
    scores = result.rewards if measured is None else result.by_function[measured]
    reward = mean_and_interval(scores)
    examples = [
        [_question(row["prompt"]), texts[0], rewards[0]]
        for row, texts, rewards in zip(result.rows[:EXAMPLES], result.completions, scores.tolist(), strict=False)
    ]
    console.print(
        f"held-out reward {when}: {reward}  (95 % interval, {reward.n} {noun} x {SAMPLES_PER_PROMPT} samples)",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return Measure(reward=reward, examples=examples, seconds=time.monotonic() - start)


def _question(prompt: Any) -> str:
    """What was asked: the last message, or the last paragraph of a text."""
    return prompt.rpartition("\n\n")[2] if isinstance(prompt, str) else prompt[-1]["content"]


def before_after_table(before: Measure, after: Measure, noun: str = "sums") -> Table:
    """The same prompts answered before and after.

    Args:
        before: the measure before training.
        after: the measure after training, of the same prompts in the same order.
        noun: what the prompts are.

    Returns:
        A rich table.
    """
    from rich.table import Table
    from rich.text import Text

    from grpo_trainer.reports.tables import one_line

    table = Table(title=f"Held-out {noun}, one sample of each", title_justify="left", pad_edge=False)
    table.add_column("question", ratio=3)
    for name, measured in (("before", before), ("after", after)):
        table.add_column(f"{name}: mean reward {measured.reward.mean:.2f}", ratio=4, overflow="fold")
        table.add_column("", justify="right")
    for (question, *first), (_, *second) in zip(before.examples, after.examples, strict=True):
        cells = [Text(one_line(question))]
        for text, reward in (first, second):
            cells += [Text(one_line(text)), Text(f"{reward:.0f}", style="green" if reward else "red")]
        table.add_row(*cells)
    return table
