"""From a dataset row to the prompt that the model sees: rendered, tokenised once, and of a legal length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from grpo_trainer.trl_door import is_conversational
from grpo_trainer.types import Prompt, Row

OVERLONG_PROMPTS = {
    "filter": "its row is left out of the dataset",
    "truncate_left": "it keeps its last max_prompt_length tokens",
    "error": "it is refused, by its row",
}
"""What becomes of a prompt with more than ``max_prompt_length`` tokens."""


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
                conversational and the tokenizer has no chat template, or one that does not take these messages.
        """
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} is a {type(row).__name__}, not a mapping of columns such as {{'prompt': ...}}")
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

    def _render_chat(self, messages: list[Any], where: str) -> tuple[str, list[int]]:
        if self.tokenizer.chat_template is None:
            raise ValueError(
                f"{where}: the prompt is a list of messages, but the tokenizer has no chat template. Set "
                "tokenizer.chat_template, use the tokenizer of an instruction-tuned model, or give prompts as strings"
            )
        for i, message in enumerate(messages):
            if fault := _fault_of(message):
                raise ValueError(
                    f"{where}: message {i} of the prompt {fault}; a message is {{'role': 'user', 'content': 'a text'}}"
                )
        continues = messages[-1]["role"] == "assistant"
        try:
            text = self.tokenizer.apply_chat_template(
                [without_none(m) for m in messages],
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **self.chat_template_kwargs,
            )
        except Exception as error:  # its author's own, jinja's, or that of an expression in it
            raise ValueError(
                f"{where}: the chat template does not take the prompt's messages (roles: "
                f"{', '.join(m['role'] for m in messages)}): {error}. Bring them into the form that it asks for, set "
                "another tokenizer.chat_template, or give prompts as strings"
            ) from error
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
class PromptLimit:
    """How long a prompt may be, and what becomes of a longer one.

    Two limits: ``max_prompt_length``, with a policy, and what the model's context leaves beside a completion. A prompt
    that overruns the second is an error, after the policy has done its part.

    Attributes:
        context: most tokens that the model's positions allow; None if they have no bound.
        max_completion_length: tokens that have to be left for a completion.
        max_prompt_length: most tokens of a prompt, all special tokens included; None: the context alone decides.
        overlong: the policy, a name in ``OVERLONG_PROMPTS``.
        tokenizer: gives the text of a prompt that was cut.

    Raises:
        ValueError: if not even a prompt of one token fits.
    """

    context: int | None = None
    max_completion_length: int = 1
    max_prompt_length: int | None = None
    overlong: str = "truncate_left"
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.context is not None and self.max_completion_length >= self.context:
            raise ValueError(
                f"max_completion_length={self.max_completion_length} leaves no room for a prompt in the model's "
                f"context of {self.context} tokens; set it to at most {self.context - 1} less the longest prompt"
            )

    @property
    def filters(self) -> bool:
        """Whether rows may be left out."""
        return self.max_prompt_length is not None and self.overlong == "filter"

    @property
    def needs_every_prompt(self) -> bool:
        """Whether all rows of a dataset have to be looked at before one is used."""
        return self.max_prompt_length is not None and self.overlong != "truncate_left"

    def keeps(self, prompt: Prompt) -> bool:
        """Whether the row of a prompt stays in its dataset.

        Args:
            prompt: rendered in full.

        Returns:
            False only under ``filter``, for a prompt that is longer than one of the two limits.
        """
        return not (self.filters and (self._is_overlong(prompt) or self._overruns(prompt)))

    def fit(self, prompt: Prompt, where: str) -> Prompt:
        """The prompt as it is fed to the model, with room for a completion behind it.

        Args:
            prompt: rendered in full.
            where: names its row in an error.

        Returns:
            The prompt itself, or under ``truncate_left`` its last ``max_prompt_length`` ids, as they are.

        Raises:
            ValueError: if it is too long and may not be cut, or a completion does not fit behind it.
        """
        if self._is_overlong(prompt):
            if self.overlong != "truncate_left":
                others = "'truncate_left'" if self.filters else "'truncate_left' or 'filter'"
                raise ValueError(
                    f"{where}: the prompt has {len(prompt.ids)} tokens, more than max_prompt_length="
                    f"{self.max_prompt_length}. Raise max_prompt_length, take the row out, or set overlong_prompts to "
                    f"{others}"
                )
            ids = prompt.ids[-self.max_prompt_length :]  # type: ignore[operator]
            # for people to read: the ids are never made from it
            prompt = replace(prompt, ids=ids, text=self.tokenizer.decode(list(ids), skip_special_tokens=False))
        if self._overruns(prompt):
            length, room = len(prompt.ids), self.context - self.max_completion_length  # type: ignore[operator]
            left = room + self.max_completion_length - length
            shorter = f"max_completion_length to at most {left}, or " if left > 0 else ""
            raise ValueError(
                f"{where}: the prompt has {length} tokens, and with max_completion_length="
                f"{self.max_completion_length} it overruns the model's context of {self.context} tokens. Set "
                f"{shorter}max_prompt_length to at most {room}"
            )
        return prompt

    def _is_overlong(self, prompt: Prompt) -> bool:
        return self.max_prompt_length is not None and len(prompt.ids) > self.max_prompt_length

    def _overruns(self, prompt: Prompt) -> bool:
        return self.context is not None and len(prompt.ids) + self.max_completion_length > self.context


class OneFormat:
    """Sees to it that prompts are all strings or all lists of messages, as a reward function may expect."""

    def __init__(self) -> None:
        self._first: dict[bool, str] = {}

    def check(self, prompt: Prompt, where: str) -> None:
        """Checks one more prompt.

        Args:
            prompt: of the dataset.
            where: names its row in an error.

        Raises:
            ValueError: if an earlier one was of the other format.
        """
        self.check_kind(prompt.conversational, where)

    def check_kind(self, conversational: bool, where: str) -> None:
        """As ``check``, of a prompt that has not been rendered.

        Args:
            conversational: whether it is a list of messages.
            where: names its row in an error.

        Raises:
            ValueError: if an earlier one was of the other format.
        """
        self._first.setdefault(conversational, where)
        if len(self._first) > 1:
            raise ValueError(
                f"the dataset mixes prompts that are strings ({self._first[False]}) and lists of messages "
                f"({self._first[True]}), so a reward function would be given both kinds of completions; bring all into "
                "one form"
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


def _fault_of(message: Any) -> str | None:
    """What is wrong with a message, for the end of a sentence; None if nothing is."""
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        return "has no 'role'" if role is None else f"has the role {role!r}, which is no name"
    if content is None:  # an assistant that called a tool may have said nothing
        return None if message.get("tool_calls") else f"(role {role!r}) has no 'content'"
    if not isinstance(content, (str, list)):
        return f"(role {role!r}) has a {type(content).__name__} for its 'content'"
    parts = content if isinstance(content, list) else []
    others = [part for part in parts if not isinstance(part, Mapping) or part.get("type") != "text"]
    return f"(role {role!r}) holds a part that is not text, which is not supported yet" if others else None
