"""A sequence classifier as a reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class RewardModel:
    """Scores the text of prompt and completion with a one-label sequence classifier.

    A score is that of the text alone: padding is on the right, masked, and positions are the text's own, so a text has
    the same score in any batch.

    Args:
        model: returns logits (N, 1).
        tokenizer: has a padding token and pads on the right.
        render: ``(prompt, completion) -> text`` with special tokens, for conversational and for plain rows.
        name: under which figures are logged.
        max_rows: most texts in one forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        render: Callable[[Any, Any], str],
        *,
        name: str,
        max_rows: int = 16,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.render = render
        self.max_rows = max_rows
        self.__name__ = name

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        """Scores N completions.

        Args:
            prompts: N prompts.
            completions: N completions.

        Returns:
            N scores.
        """
        texts = [self.render(p, c) for p, c in zip(prompts, completions, strict=True)]
        if not texts:
            return []
        lengths = [len(ids) for ids in self.tokenizer(texts, add_special_tokens=False)["input_ids"]]
        # texts of like length together, so that little is padding; the longest first, so that memory runs out at once
        order = sorted(range(len(texts)), key=lambda row: -lengths[row])
        device = next(self.model.parameters()).device
        scores = [0.0] * len(texts)
        self.model.eval()
        for start in range(0, len(texts), self.max_rows):
            rows = order[start : start + self.max_rows]
            batch = self.tokenizer(
                [texts[row] for row in rows],
                return_tensors="pt",
                padding=True,
                padding_side="right",
                add_special_tokens=False,
            ).to(device)
            with torch.inference_mode():
                found = self.model(**batch).logits[:, 0].float().tolist()
            for row, score in zip(rows, found, strict=True):
                scores[row] = score
        return scores
