"""The first prompt of a run, as the model reads it: the quickest way to see a template that went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.guard import Guard

HEAD, TAIL = "--- the first prompt, as the model reads it ---", "--- here its completions begin ---"
MOST = 4000
"""Characters that are shown; a longer prompt loses its middle."""


class FirstPrompt(TrainerCallback):
    """Prints the first prompt of a run once, special tokens included, on the main process only."""

    def __init__(self) -> None:
        # an attribute, and gone after the first rollout: completions are gathered for as long as somebody listens
        self.on_rollout = self._show

    def _show(self, args: Any, state: Any, control: Any, table: Mapping[str, Sequence[Any]], **kwargs: Any) -> None:
        del self.on_rollout
        if state.is_world_process_zero and table["prompt"]:
            with Guard("the first prompt is not shown"):
                print(HEAD, printable(table["prompt"][0]), TAIL, sep="\n", flush=True)


def printable(text: str) -> str:
    r"""A text fit for a terminal, on its own lines: a dataset can hold control sequences, which would act on it.

    Args:
        text: any text.

    Returns:
        The text, without its middle if it is long, and with ``\ufffd`` for what cannot be printed.

    Example:
        >>> printable("<s>a\n\tb\x1b[2J")
        '<s>a\n\tb�[2J'
    """
    if len(text) > MOST:
        half = MOST // 2
        text = f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
