"""From logits to tokens: transformers' own processors, then one uniform number per row.

The processors are those that ``generate`` of transformers builds from the same configuration, in its order. They are
asked for through ``custom_generate``, its public door for other decoding loops, so nothing is written twice here.

A processor sees each row as if it was alone: without padding, and with as many tokens as it has. Rows of equal prompt
and completion length therefore go through them together; processors that look only at the scores, or only at which
tokens occur, take all rows at once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc

_BLOCK = 256
"""Vocabulary entries whose probabilities are summed first: a draw then looks at two short lists, not at a long one."""

SCORES_ONLY = (
    *(lp.TemperatureLogitsWarper, lp.TopKLogitsWarper, lp.TopPLogitsWarper, lp.MinPLogitsWarper),
    *(lp.TypicalLogitsWarper, lp.EpsilonLogitsWarper, lp.EtaLogitsWarper, lp.SuppressTokensLogitsProcessor),
    *(lp.TopHLogitsWarper, lp.InfNanRemoveLogitsProcessor, lp.LogitNormalization),
)
"""Processors of each row's scores and nothing else."""

OCCURRENCE = (lp.RepetitionPenaltyLogitsProcessor,)
"""Processors that ask only which tokens occur in a row."""

SEQUENCE = (
    *(lp.MinLengthLogitsProcessor, lp.MinNewTokensLengthLogitsProcessor, lp.NoRepeatNGramLogitsProcessor),
    *(lp.SequenceBiasLogitsProcessor, lp.NoBadWordsLogitsProcessor, lp.ForcedBOSTokenLogitsProcessor),
    *(lp.ForcedEOSTokenLogitsProcessor, lp.ExponentialDecayLengthPenalty, lp.SuppressTokensAtBeginLogitsProcessor),
)
"""Processors that ask for a row's tokens or their number, and keep nothing from one call to the next."""


class Rules(NamedTuple):
    """What ``generate`` would have applied.

    Attributes:
        processors: of the scores, in order.
        criteria: for stopping.
    """

    processors: lp.LogitsProcessorList
    criteria: sc.StoppingCriteriaList


def rules_of(
    model: Any, config: GenerationConfig, prompt_length: int, device: torch.device, tokenizer: Any = None
) -> Rules:
    """The processors and criteria that ``generate`` builds for prompts of one length.

    Args:
        model: a ``PreTrainedModel``, with a blank generation config of its own.
        config: what is asked for.
        prompt_length: tokens of each prompt.
        device: where scores will be.
        tokenizer: needed for stop strings.

    Returns:
        Both lists.
    """
    ids = torch.zeros(1, prompt_length, dtype=torch.int64, device=device)
    own = sc.StoppingCriteriaList()
    if config.stop_strings:  # the door takes no tokenizer, so this one is made here
        own.append(sc.StopStringCriteria(tokenizer=tokenizer, stop_strings=config.stop_strings))
        config = copy.deepcopy(config)
        config.stop_strings = None
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        stopping_criteria=own,
        custom_generate=_give_back,
    )


def _give_back(
    model: Any,
    input_ids: Tensor,
    logits_processor: lp.LogitsProcessorList,
    stopping_criteria: sc.StoppingCriteriaList,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Rules:
    return Rules(logits_processor, stopping_criteria)


class Draw(NamedTuple):
    """A token of each row.

    Attributes:
        tokens: (B,) int64.
        logprobs: (B,) float64, of the distribution that the token was drawn from; NaN where there was none.
    """

    tokens: Tensor
    logprobs: Tensor


def draw_tokens(scores: Tensor, uniform: Tensor) -> Draw:
    """Draws from softmax(scores): the first token whose cumulative probability exceeds the uniform number.

    The sums are float64 and taken over blocks, then inside one block, so that unlikely tokens keep their probability in
    a vocabulary of any size. A token with a score of -inf is never drawn.

    Args:
        scores: (B, V) float32.
        uniform: (B,) float64 in (0, 1).

    Returns:
        The tokens.

    Example:
        >>> scores = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, -1)
        >>> draw_tokens(scores, torch.tensor([0.49, 0.51, 0.81], dtype=torch.float64)).tokens.tolist()
        [0, 1, 2]
    """
    probabilities = scores.softmax(dim=-1)
    missing = -scores.shape[1] % _BLOCK
    blocks = (nn.functional.pad(probabilities, (0, missing)) if missing else probabilities).unflatten(1, (-1, _BLOCK))
    totals = blocks.sum(dim=-1).double().cumsum(dim=-1)  # (B, blocks)
    aim = uniform[:, None] * totals[:, -1:]
    block = _first_above(totals, aim)
    rows = torch.arange(len(scores), device=scores.device)
    before = totals.gather(1, (block - 1).clamp(min=0)).where(block > 0, 0.0)
    inside = blocks[rows, block[:, 0]].double().cumsum(dim=-1)  # (B, _BLOCK)
    tokens = block * _BLOCK + _first_above(inside, aim - before)  # (B, 1)
    logprobs = (probabilities.gather(1, tokens).double() / totals[:, -1:]).log()
    return Draw(tokens[:, 0], logprobs[:, 0])


def _first_above(sums: Tensor, aim: Tensor) -> Tensor:
    """(B, 1), the first entry above ``aim`` of sums that never fall; if rounding left none, the last that rose."""
    above = (sums <= aim).sum(dim=-1, keepdim=True)
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(above, last)


def pick_tokens(scores: Tensor) -> Draw:
    """The likeliest token of each row.

    Args:
        scores: (B, V) float32.

    Returns:
        The tokens, with their log-probs under softmax(scores).
    """
    tokens = scores.argmax(dim=-1)
    return Draw(tokens, scores.double().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0])


class Shaper:
    """Applies the processors to the scores of rows that may be at different places.

    Attributes:
        processors: of the scores, for prompts of the length given.
        reads_tokens: whether any of them looks at the tokens of a row.
        criteria: for stopping, besides the end-of-sequence token and the limit.

    Args:
        model: as in ``rules_of``.
        config: what is asked for.
        prompt_length: tokens of one of the prompts.
        device: where scores will be.
        tokenizer: needed for stop strings.
    """

    def __init__(
        self, model: Any, config: GenerationConfig, prompt_length: int, device: torch.device, tokenizer: Any = None
    ) -> None:
        self._model, self._config, self._device, self._tokenizer = model, config, device, tokenizer
        self._rules: dict[int, Rules] = {}
        self.processors, criteria = self._rules_for(prompt_length)
        kinds = {type(processor) for processor in self.processors}
        self.criteria = [c for c in criteria if type(c) not in (sc.MaxLengthCriteria, sc.EosTokenCriteria)]
        self._strings = [c for c in self.criteria if type(c) is sc.StopStringCriteria]
        self.reads_tokens = not kinds <= set(SCORES_ONLY) or bool(self._strings)
        self._together = kinds <= {*SCORES_ONLY, *OCCURRENCE}

    def __call__(self, scores: Tensor, tokens: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Processes scores.

        Args:
            scores: (B, V) float32; may be written to.
            tokens: (B, L) each row's tokens from the left, filled up with any that occur in it; L may be 0 if no
                processor reads them.
            places: for each row its prompt's and its completion's tokens so far.

        Returns:
            (B, V) processed.
        """
        if self._together:
            return self.processors(tokens, scores)
        alike: dict[tuple[int, int], list[int]] = {}
        for row, place in enumerate(places):
            alike.setdefault(place, []).append(row)
        out = torch.empty_like(scores)
        for (prompt, drawn), members in alike.items():
            rows = torch.tensor(members, device=scores.device)
            out[rows] = self._rules_for(prompt).processors(tokens[rows, : prompt + drawn], scores[rows])
        return out

    def out_of_time(self, tokens: Tensor) -> bool:
        """Whether a criterion ends the whole call.

        Args:
            tokens: (B, 1) the token drawn last.

        Returns:
            True if no row goes on.
        """
        return any(bool(c(tokens, None).any()) for c in self.criteria if c not in self._strings)

    def at_stop_string(self, tokens: Tensor, lengths: Sequence[int]) -> list[bool]:
        """Which rows end with a stop string.

        Args:
            tokens: (B, L) as for the scores, the token drawn last included.
            lengths: of each row.

        Returns:
            B flags.
        """
        ended = [False] * len(lengths)
        if not self._strings:
            return ended
        alike: dict[int, list[int]] = {}
        for row, length in enumerate(lengths):
            alike.setdefault(length, []).append(row)
        for criterion in self._strings:
            for length, members in alike.items():
                for row, end in zip(members, criterion(tokens[members, :length], None).tolist(), strict=True):
                    ended[row] |= end
        return ended

    def _rules_for(self, prompt_length: int) -> Rules:
        if prompt_length not in self._rules:
            self._rules[prompt_length] = rules_of(
                self._model, self._config, prompt_length, self._device, self._tokenizer
            )
        return self._rules[prompt_length]
