"""One call of the group engine, token by token."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from grpo_trainer.generation.base import Observer
from grpo_trainer.generation.cache import RowCache
from grpo_trainer.generation.flight import Flight, Row
from grpo_trainer.generation.memory import stored_dtype
from grpo_trainer.generation.prefill import Prefill
from grpo_trainer.generation.randomness import uniforms
from grpo_trainer.generation.sampling import Draw, Shaper, draw_tokens, pick_tokens
from grpo_trainer.generation.schedule import Batch, Schedule, prefill_batches
from grpo_trainer.generation.support import cache_argument, text_config
from grpo_trainer.loading import base_model
from grpo_trainer.types import Completions, SamplingParams


class Decoding:
    """From prompts to completions; the policy is in eval mode, without gradients, under autocast if there is any.

    Args:
        policy: the policy.
        prompts: P prompts as token ids.
        keys: (prompt, completion) -> key of the row's random numbers, in the order that completions come back in.
        sampling: how to draw.
        shaper: of the scores.
        schedule: which rows begin when.
        observer: is told of what is drawn as it is.
    """

    def __init__(
        self,
        policy: Any,
        prompts: Sequence[Sequence[int]],
        keys: Mapping[tuple[int, int], int],
        sampling: SamplingParams,
        shaper: Shaper,
        schedule: Schedule,
        observer: Observer,
    ) -> None:
        self._policy, self._model = policy, base_model(policy)
        self._device = next(policy.parameters()).device
        self._prompts, self._keys, self._sampling = prompts, keys, sampling
        self._shaper, self._schedule = shaper, schedule
        self._observer = observer
        self._ends = set(sampling.eos_token_ids)
        self._width = max(map(len, prompts)) + sampling.max_new_tokens if shaper.reads_tokens else 0
        self._cache_name = cache_argument(self._model) or ""
        self._keeps_one = "logits_to_keep" in inspect.signature(type(self._model).forward).parameters
        used = [prompts[p] for p in dict.fromkeys(p for p, _ in keys)]
        self._prefill = Prefill(self._forward, text_config(self._model), used, self._device)
        self._cache: RowCache | None = None
        self._flight: Flight | None = None
        self._done: dict[tuple[int, int], tuple[Row, bool]] = {}

    def run(self) -> Completions:
        """Decodes until nothing is left.

        Returns:
            The completions.

        Raises:
            ValueError: if a token cannot be drawn, since the policy's scores are not numbers.
        """
        while self._flight is not None or self._schedule.waiting:
            rows = self._flight.rows if self._flight is not None else []
            begin = self._schedule.next_rows(len(rows), max((row.prompt_length for row in rows), default=0))
            for part in prefill_batches(begin, [len(p) for p in self._prompts], self._prefill.shared):
                self._begin(part)
            if not self._schedule.waiting:
                self._prefill.clear()
            if self._flight is not None:
                self._step(self._flight)
        ends = [self._done[key] for key in self._keys]  # in the order that was asked for
        return Completions(
            ids=tuple(tuple(row.ids) for row, _ in ends),
            finished=tuple(finished for _, finished in ends),
            sampling_logprobs=tuple(tuple(row.logprobs) for row, _ in ends),
        )

    def _begin(self, part: Sequence[Batch]) -> None:
        """Prefills some prompts, draws the first token of their rows, and takes those that go on into the cache."""
        logits, filled = self._prefill([self._prompts[batch.prompt] for batch in part])  # (P, V)
        new = self._new_rows(part)
        source = torch.tensor([i for i, batch in enumerate(part) for _ in batch.completions], device=self._device)
        gone = set(self._draw(logits[source], new))
        stay = [i for i in range(len(new.rows)) if i not in gone]
        if stay:
            if self._cache is None:
                self._cache = RowCache(filled, stored_dtype(self._model, self._device))
            new = new.chosen(stay)
            self._cache.add(filled, source[stay], max(row.prompt_length for row in new.rows))
            self._flight = new if self._flight is None else self._flight.joined(new)

    def _step(self, flight: Flight) -> None:
        """One token for every row in flight; rows that end leave."""
        assert self._cache is not None
        width = max(row.length for row in flight.rows)  # columns, the new token's included
        padded = min(row.length for row in flight.rows) < width
        mask = None
        if padded:
            columns = torch.arange(width, device=self._device)
            mask = (columns >= width - flight.lengths[:, None]).long()
        logits = self._forward(flight.last[:, None], mask, flight.lengths[:, None] - 1, self._cache)
        gone = self._draw(logits, flight)
        if len(gone) == len(flight.rows):
            self._flight = None
            self._cache.clear()
        elif gone:
            leaving = set(gone)
            longest = max(row.length for i, row in enumerate(flight.rows) if i not in leaving)
            order = self._cache.remove(gone, longest - 1)  # the last token is not in the cache yet
            self._flight = flight.chosen(order)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """(B, V) logits of each row's last token."""
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions, self._cache_name: cache}
        if mask is not None:
            inputs["attention_mask"] = mask
        if self._keeps_one:
            inputs["logits_to_keep"] = 1
        return self._policy(**inputs, use_cache=True, return_dict=True).logits[:, -1]

    def _new_rows(self, part: Sequence[Batch]) -> Flight:
        rows = [Row(b.prompt, c, len(self._prompts[b.prompt])) for b in part for c in b.completions]
        lengths = [row.prompt_length for row in rows]
        keys = [self._keys[row.prompt, row.completion] for row in rows]
        tokens = []
        for row in rows if self._width else ():
            prompt = list(self._prompts[row.prompt])
            tokens.append(prompt + prompt[:1] * (self._width - len(prompt)))
        none = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        return Flight(
            rows,
            torch.tensor(keys, device=self._device),
            last=none,
            lengths=torch.tensor(lengths, device=self._device),
            counts=none,
            tokens=torch.tensor(tokens, device=self._device) if tokens else none.new_zeros(len(rows), 0),
        )

    def _draw(self, logits: Tensor, flight: Flight) -> list[int]:
        """Draws a token for each row, and says which rows have ended with it."""
        places = [(row.prompt_length, len(row.ids)) for row in flight.rows] if self._width else []
        scores = self._shaper(logits.float(), flight.tokens[:, : max(map(sum, places), default=0)], places)
        draws = self._sampling.temperature > 0
        draw = draw_tokens(scores, uniforms(flight.keys, flight.counts)) if draws else pick_tokens(scores)
        flight.append(draw.tokens)
        return self._settle(draw, flight)

    def _settle(self, draw: Draw, flight: Flight) -> list[int]:
        """Takes the drawn tokens to the host: the one place where it waits for the device."""
        tokens, logprobs = torch.stack([draw.tokens.double(), draw.logprobs]).tolist()
        out_of_time = self._shaper.out_of_time(flight.last[:, None])
        stopped = self._shaper.at_stop_string(flight.tokens, [row.length + 1 for row in flight.rows])
        self._observer.tick(len(flight.rows))
        gone = []
        for place, (row, token, logprob) in enumerate(zip(flight.rows, map(int, tokens), logprobs, strict=True)):
            if math.isnan(logprob):
                raise ValueError(
                    f"token {len(row.ids)} of completion {row.completion} of prompt {row.prompt} cannot be drawn: the "
                    "policy's scores are not numbers, or every token is forbidden; check its weights and "
                    "generation_kwargs"
                )
            row.ids.append(token)
            row.logprobs.append(logprob)
            finished = token in self._ends or stopped[place]
            if finished or out_of_time or len(row.ids) == self._sampling.max_new_tokens:
                self._done[row.prompt, row.completion] = (row, finished)
                self._observer.finished(row.prompt, row.completion, tuple(row.ids), finished)
                gone.append(place)
        return gone
