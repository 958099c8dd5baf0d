"""One training run with a clock: ``accuracy_worker.py SIDE TASK SEED MAX_STEPS EVERY THRESHOLD FULL FOLDER``.

SIDE is ``trl`` or ``ours``; both train with the settings of the quickstart's recipe, from the same weights, on the same
rows. Before the first step and after every EVERY-th the held-out reward is measured, by the same code for both sides,
with the clock standing still. The run ends when it reaches THRESHOLD, unless FULL is 1. Writes FOLDER/result.json.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from workloads import model_source

from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.data import PromptRenderer
from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.loading import end_of_sequence_ids
from grpo_trainer.rewards import last_integer
from grpo_trainer.tasks import load_task
from grpo_trainer.types import SamplingParams

RECIPE = "quickstart/smollm2-135m-sums"
SAMPLES_PER_PROMPT = 4
LARGEST, HELDOUT = 20, 64


def pairs(question: str, answer: Callable[[int, int], int], seed: int) -> tuple[Dataset, Dataset]:
    """A question about each ordered pair of numbers from 1 to 20: 336 rows to train on, 64 held out."""
    chosen = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    random.Random(seed).shuffle(chosen)
    rows = [
        {"prompt": [{"role": "user", "content": question.format(a=a, b=b)}], "answer": answer(a, b)} for a, b in chosen
    ]
    return Dataset.from_list(rows[HELDOUT:]), Dataset.from_list(rows[:HELDOUT])


TASKS: dict[str, Callable[[int], tuple[Dataset, Dataset]]] = {
    "sums": lambda seed: load_task("builtin:sums", seed),
    "gcd": lambda seed: pairs(
        "What is the greatest common divisor of {a} and {b}? Answer with a number.", math.gcd, seed
    ),
    "differences": lambda seed: pairs("What is {a} - {b}? Answer with a number.", lambda a, b: a - b, seed),
}
"""Task -> ``seed -> (rows to train on, held-out rows)``."""


class Stopwatch(TrainerCallback):
    """The seconds of training, and the held-out reward after so many of them.

    Args:
        measure: returns the held-out reward of the policy as it is.
        every: steps from one measure to the next.
        threshold: the reward at which training ends; None: never.
    """

    def __init__(self, measure: Callable[[], float], every: int, threshold: float | None) -> None:
        self.measure, self.every, self.threshold = measure, every, threshold
        self.steps: list[int] = []
        self.seconds: list[float] = []
        self.rewards: list[float] = []
        self._trained = self._started = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """The reward before training."""
        self._note(0)
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the clock, measures if it is time to, and starts it again."""
        self._trained += time.perf_counter() - self._started
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._note(state.global_step)
            if self.threshold is not None and self.rewards[-1] >= self.threshold:
                control.should_training_stop = True
        self._started = time.perf_counter()

    def _note(self, step: int) -> None:
        self.steps.append(step)
        self.seconds.append(self._trained)
        self.rewards.append(self.measure())


class HeldOut:
    """The held-out reward: 4 samples of each prompt at temperature 1, with the same random numbers every time.

    Args:
        trainer: returns the trainer, of either side.
        rows: held-out rows.
        tokenizer: of the model.
        longest: most tokens of a completion.
    """

    def __init__(self, trainer: Callable[[], Any], rows: Dataset, tokenizer: Any, longest: int) -> None:
        self._trainer, self._rows, self._tokenizer, self._longest = trainer, list(rows), tokenizer, longest
        self._renderer = PromptRenderer(tokenizer)

    def __call__(self) -> float:
        """The mean reward of the policy as it is."""
        trainer = self._trainer()
        sampling = SamplingParams(
            max_new_tokens=self._longest,
            eos_token_ids=end_of_sequence_ids(trainer.model, self._tokenizer),
            pad_token_id=self._tokenizer.pad_token_id,
            temperature=1.0,
        )
        generator = GroupGenerator(lambda: trainer.model, trainer.accelerator.autocast)
        prompts = [self._renderer(row).ids for row in self._rows]
        drawn = generator.generate(prompts, [SAMPLES_PER_PROMPT] * len(prompts), sampling, seed=0)
        texts = self._tokenizer.batch_decode([list(ids) for ids in drawn.ids], skip_special_tokens=True)
        answers = [row["answer"] for row in self._rows for _ in range(SAMPLES_PER_PROMPT)]
        rewards = [reward for reward in last_integer(texts, answers) if reward is not None]
        return sum(rewards) / len(rewards)


def settings_of(folder: str, seed: int, max_steps: int) -> dict[str, Any]:
    """The fields of both configurations: the quickstart's, with what each side would settle by itself written out."""
    recipe = load_recipe(RECIPE)
    config = recipe.config(output_dir=folder, seed=seed, max_steps=max_steps, disable_tqdm=True, logging_steps=1000)
    return {
        **recipe.settings,
        **{
            name: getattr(config, name) for name in ("output_dir", "seed", "max_steps", "disable_tqdm", "logging_steps")
        },
        **{name: getattr(config, name) for name in ("bf16", "use_cpu")},
    }


def main(side: str, task: str, seed: str, max_steps: str, every: str, threshold: str, full: str, folder: str) -> None:
    """Trains, and writes down what was reached when."""
    if side == "ours":
        from grpo_trainer import GRPOConfig, GRPOTrainer
    else:
        from trl import GRPOConfig, GRPOTrainer
    settings = settings_of(folder, int(seed), int(max_steps))
    train, heldout = TASKS[task](int(seed))
    source = model_source()
    tokenizer = AutoTokenizer.from_pretrained(source)
    holder: list[Any] = []
    measure = HeldOut(lambda: holder[0], heldout, tokenizer, settings["max_completion_length"])
    stopwatch = Stopwatch(measure, int(every), None if full == "1" else float(threshold))
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        last_integer,
        GRPOConfig(**settings),
        train,
        processing_class=tokenizer,
        callbacks=[stopwatch],
    )
    holder.append(trainer)
    trainer.train()
    curve = {"steps": stopwatch.steps, "seconds": stopwatch.seconds, "rewards": stopwatch.rewards}
    Path(folder, "result.json").write_text(json.dumps(curve), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
