"""From a dataset row to the prompt that the model sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_trainer.trl_door import is_conversational
from grpo_trainer.types import Prompt, Row


class PromptRenderer:
    """Renders the ``prompt`` of a row, a string or a list of messages, and turns it into ids, once.

    A plain string is tokenised as the tokenizer does by default. Messages go through the chat template, and the text is
    tokenised without further special tokens, so a template that writes its own beginning-of-sequence token is not
    given a second one; if the tokenizer puts one before plain text and the template wrote none, it is put there.

    Args:
        tokenizer: with a chat template if there are conversational prompts.
        chat_template_kwargs: further arguments of the template.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        probe = tokenizer("a")["input_ids"]
        bos = tokenizer.bos_token_id
        self._bos = bos if bos is not None and probe and probe[0] == bos else None

    def __call__(self, row: Row, where: str = "the dataset") -> Prompt:
        """The prompt of one row.

        Args:
            row: holds ``prompt``.
            where: names the row in an error.

        Returns:
            Text and ids.

        Raises:
            ValueError: if the prompt is missing, empty, or neither a string nor a list of messages, or if it is
                conversational and the tokenizer has no chat template.
        """
        if "prompt" not in row:
            raise ValueError(f"{where} has no column 'prompt'; its columns: {', '.join(row) or 'none'}")
        prompt = row["prompt"]
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError(f"{where}: the prompt is empty; every prompt needs at least one token")
            text, ids = prompt, list(self.tokenizer(prompt)["input_ids"])
        elif isinstance(prompt, list) and prompt and is_conversational(prompt):
            text, ids = self._render_chat(prompt, where)
        else:
            raise ValueError(
                f"{where}: 'prompt' must be a string or a non-empty list of messages with 'role' and 'content', "
                f"got {type(prompt).__name__}: {str(prompt)[:80]!r}"
            )
        if not ids:
            raise ValueError(f"{where}: the prompt {text!r} has no tokens; every prompt needs at least one")
        return Prompt(ids=tuple(ids), text=text, conversational=not isinstance(prompt, str))

    def _render_chat(self, messages: list[dict[str, Any]], where: str) -> tuple[str, list[int]]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat template. Set "
                "tokenizer.chat_template, use the tokenizer of an instruction-tuned model, or give prompts as strings"
            )
        continues = messages[-1].get("role") == "assistant"
        text = self.tokenizer.apply_chat_template(
            [without_none(m) for m in messages],
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **self.chat_template_kwargs,
        )
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return text, ids

    def reward_text(self, prompt: Any, completion: Any) -> str:
        """Prompt and completion as one text, as a reward model reads it.

        Args:
            prompt: a string or messages.
            completion: a string or messages, of the same kind.

        Returns:
            The text.
        """
        if isinstance(prompt, str):
            return prompt + completion
        messages = [without_none(m) for m in [*prompt, *completion]]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self.chat_template_kwargs)


@dataclass(frozen=True, kw_only=True)
class ContextLimit:
    """What a model has room for.

    Attributes:
        context: most tokens that its positions allow; None if they have no bound.
        max_completion_length: tokens that have to be left for a completion.

    Raises:
        ValueError: if not even a prompt of one token fits.
    """

    context: int | None
    max_completion_length: int

    def __post_init__(self) -> None:
        if self.context is not None and self.max_completion_length >= self.context:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} leaves no room for a prompt in the model's "
                f"context of {self.context} tokens; set it to at most {self.context - 1} less the longest prompt"
            )

    def check(self, prompt: Prompt, where: str) -> None:
        """Checks that a completion fits behind a prompt.

        Args:
            prompt: the prompt.
            where: names its row in an error.

        Raises:
            ValueError: if it does not fit.
        """
        length = len(prompt.ids)
        if self.context is not None and length + self.max_completion_length > self.context:
            raise ValueError(
                f"{where}: the prompt has {length} tokens, and with max_completion_length="
                f"{self.max_completion_length} it overruns the model's context of {self.context} tokens. Set "
                f"max_completion_length to at most {max(self.context - length, 0)}, or leave out longer prompts"
            )


def without_none(value: Any) -> Any:
    """The value without dictionary keys that hold None, at any depth: Arrow fills missing keys with None.

    Args:
        value: anything; lists and mappings are walked.

    Returns:
        A copy.

    Example:
        >>> without_none({"role": "user", "content": "hi", "name": None, "parts": [{"a": None, "b": 1}]})
        {'role': 'user', 'content': 'hi', 'parts': [{'b': 1}]}
    """
    if isinstance(value, Mapping):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_none(v) for v in value]
    return value
