"""Rewards for the form of a completion: R1's tags, a pattern, JSON, XML."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainer.rewards.options import reward
from grpo_trainer.rewards.text import outside_thinking, text_of

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FENCE = re.compile(r"\s*```[^\n`]*\n(.*?)\n?```\s*", re.DOTALL)
PATTERN_SECONDS = 1.0
"""Seconds that a pattern may take on one text."""


def think_answer_format(
    completions: Sequence[Any], prompts: Sequence[Any] | None = None, *, opened: bool | None = None, **kwargs: Any
) -> list[float]:
    """1.0 for ``<think>…</think> <answer>…</answer>`` and nothing else, 0.0 elsewhere.

    Each tag stands exactly once, in this order; there is text in both, and only white space before, between and after.
    This is the form that R1-Zero's template asks for (DeepSeek-R1, arXiv:2501.12948, table 1).

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        prompts: N prompts; where one ends with ``<think>``, the completion begins inside and must not open it again.
        opened: whether the prompt opens ``<think>``, for a chat template that does so out of sight; None looks at the
            prompts.
        **kwargs: the other columns, unused.

    Returns:
        N rewards.

    Example:
        >>> think_answer_format(["<think>3 + 4</think> <answer>7</answer>", "3 + 4</think><answer>7</answer>"])
        [1.0, 0.0]
        >>> think_answer_format(["3 + 4</think><answer>7</answer>"], ["What is 3 + 4? <think>"])
        [1.0]
    """
    return [
        float(_is_think_answer(text, begun))
        for text, begun in zip(map(text_of, completions), _opened(prompts, opened, len(completions)), strict=True)
    ]


def tag_counts(
    completions: Sequence[Any], prompts: Sequence[Any] | None = None, *, opened: bool | None = None, **kwargs: Any
) -> list[float]:
    """A quarter for each of ``<think>``, ``</think>``, ``<answer>``, ``</answer>`` that stands exactly once.

    A denser signal than `think_answer_format` for a model that does not know the form yet. Open-R1's function of this
    name also asks for line breaks around the tags.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        prompts: N prompts; where one ends with ``<think>``, that tag counts as there.
        opened: as in `think_answer_format`.
        **kwargs: the other columns, unused.

    Returns:
        N rewards: 0, 0.25, 0.5, 0.75 or 1.

    Example:
        >>> tag_counts(["<think>3 + 4</think> 7", "<answer>7</answer><answer>"])
        [0.5, 0.25]
    """
    return [
        sum(("<think>" if begun else "").count(tag) + text.count(tag) == 1 for tag in TAGS) / 4
        for text, begun in zip(map(text_of, completions), _opened(prompts, opened, len(completions)), strict=True)
    ]


@reward(isolation="process", time_limit=30.0, rows_per_call=16)
def matches(
    completions: Sequence[Any],
    *,
    pattern: str,
    full: bool = False,
    log_metric: Callable[..., None] | None = None,
    **kwargs: Any,
) -> list[float]:
    """1.0 where a pattern is found in the completion, 0.0 elsewhere.

    A text on which the pattern takes more than a second does not match. Patterns are the ``regex`` library's, which
    takes those of ``re``.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        pattern: a regular expression.
        full: the pattern must cover the whole text.
        log_metric: the contract's; gets ``matches/timeouts``, the share of texts that took too long.
        **kwargs: the other columns, unused.

    Returns:
        N rewards.

    Raises:
        ValueError: if the pattern is no regular expression.

    Example:
        >>> matches(["Answer: 7", "seven"], pattern=r"^Answer: [0-9]+$")
        [1.0, 0.0]
    """
    import regex

    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"matches: pattern {pattern!r} is no regular expression: {error}") from error
    look = compiled.fullmatch if full else compiled.search
    rewards, slow = [], 0
    for completion in completions:
        try:
            rewards.append(float(look(text_of(completion), timeout=PATTERN_SECONDS) is not None))
        except TimeoutError:
            rewards.append(0.0)
            slow += 1
    if log_metric is not None and rewards:
        log_metric("matches/timeouts", slow / len(rewards))
    return rewards


@reward(isolation="process", time_limit=5.0, rows_per_call=16, memory_limit=4 << 30)
def json_schema(completions: Sequence[Any], *, schema: Mapping[str, Any] | str, **kwargs: Any) -> list[float]:
    """1.0 where the completion is JSON that fits a schema, 0.0 elsewhere.

    What is read is what follows the thinking, or in it the last ``<answer>…</answer>``; a code fence around all of it
    is taken off. JSON is that of RFC 8259: no ``NaN``, no comments. References to other documents are not fetched.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        schema: a JSON schema, as a mapping or as JSON; the newest draft unless it names another.
        **kwargs: the other columns, unused.

    Returns:
        N rewards.

    Raises:
        ValueError: if the schema is none.
        ImportError: if jsonschema is not installed.

    Example:
        >>> json_schema(['{"x": 1}', '{"x": "1"}', "x"], schema={"properties": {"x": {"type": "integer"}}})
        [1.0, 0.0, 0.0]
    """
    try:
        import jsonschema
        import referencing
    except ImportError as error:
        raise ImportError("json_schema uses jsonschema: pip install 'grpo-trainer[rewards]'") from error
    try:
        wanted = json.loads(schema) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(wanted, default=jsonschema.Draft202012Validator)
        kind.check_schema(wanted)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ValueError(f"json_schema: schema is no JSON schema: {str(error).splitlines()[0]}") from error
    validator = kind(wanted, registry=referencing.Registry())
    rewards = []
    for completion in completions:
        try:
            value = json.loads(_payload(text_of(completion)), parse_constant=_refuse)
            rewards.append(float(validator.is_valid(value)))
        except (ValueError, RecursionError):
            rewards.append(0.0)
    return rewards


@reward(isolation="process", time_limit=5.0, rows_per_call=16, memory_limit=4 << 30)
def xml(completions: Sequence[Any], *, root: str | None = None, **kwargs: Any) -> list[float]:
    """1.0 where the completion is a well-formed XML document, 0.0 elsewhere.

    What is read is the same as in `json_schema`, but with ``<answer>`` left in place. Documents that declare entities
    are refused (defusedxml), so none grows or fetches anything.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        root: the name that the outermost element must have; None takes any.
        **kwargs: the other columns, unused.

    Returns:
        N rewards.

    Raises:
        ImportError: if defusedxml is not installed.

    Example:
        >>> xml(["<a><b/></a>", "<a><b></a>", "<a/>"], root="a")
        [1.0, 0.0, 1.0]
    """
    try:
        from defusedxml import DefusedXmlException
        from defusedxml.ElementTree import ParseError, fromstring
    except ImportError as error:
        raise ImportError("xml uses defusedxml: pip install 'grpo-trainer[rewards]'") from error
    rewards = []
    for completion in completions:
        text = outside_thinking(text_of(completion))
        fenced = _FENCE.fullmatch(text)
        try:
            element = fromstring((fenced[1] if fenced else text).strip())
            rewards.append(float(root is None or element.tag == root))
        except (ParseError, DefusedXmlException, ValueError, RecursionError):
            rewards.append(0.0)
    return rewards


def _is_think_answer(text: str, begun: bool) -> bool:
    """Whether a text, after ``<think>`` if the prompt has begun with it, has the form."""
    text = f"<think>{text}" if begun else text
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    before, _, rest = text.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    between, _, rest = rest.partition("<answer>")
    answer, closed, after = rest.partition("</answer>")
    return bool(closed and thought.strip() and answer.strip()) and not (before + between + after).strip()


def _opened(prompts: Sequence[Any] | None, opened: bool | None, count: int) -> list[bool]:
    """For each completion, whether it begins inside ``<think>``."""
    if opened is not None:
        return [opened] * count
    if prompts is None:
        return [False] * count
    return [text_of(prompt).rstrip().endswith("<think>") for prompt in prompts]


def _payload(text: str) -> str:
    """What a completion hands over: after its thinking, out of its answer tags and its code fence."""
    text = outside_thinking(text)
    _, tag, inside = text.rpartition("<answer>")
    if tag and "</answer>" in inside:
        text = inside.partition("</answer>")[0]
    fenced = _FENCE.fullmatch(text)
    return (fenced[1] if fenced else text).strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
