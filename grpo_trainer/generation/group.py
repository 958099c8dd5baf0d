"""The group engine: the policy decodes whole groups itself, step by step.

::

    prompts ──prefill once──> cache of P prompts ──copied G times──> cache of the rows in flight ──┐
       ▲                                                             one token per row and step <──┘
       │ free places                                                 rows that end leave at once
       └──────────────────────────────────────────────────────────────────────────┘

The loop is in ``decoding``. How rows lie in the cache is told in ``cache``, which rows are in flight in ``schedule``,
how a token is drawn in ``sampling`` and ``randomness``, what is done to the weights in ``weights``, and when
``generate`` has to be used in ``support``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from grpo_trainer.generation.base import Observer
from grpo_trainer.generation.decoding import Decoding
from grpo_trainer.generation.hf import check_prompts, generation_config
from grpo_trainer.generation.memory import default_cache_tokens
from grpo_trainer.generation.randomness import row_keys
from grpo_trainer.generation.sampling import Shaper
from grpo_trainer.generation.schedule import Schedule
from grpo_trainer.generation.state import inference_state
from grpo_trainer.generation.support import why_not_group, why_not_rules
from grpo_trainer.generation.weights import ready_weights
from grpo_trainer.loading import base_model
from grpo_trainer.types import Completions, SamplingParams


class GroupGenerator:
    """Draws completions with the policy itself: each prompt is prefilled once, rows that end leave the batch.

    Every row owns its random numbers, so a completion does not depend on what it is computed with: not on the batch,
    the order, the process, or the room in the cache. (Sums of other shapes may differ in their last bits, and in
    bfloat16 that can turn a draw.) The log-probs of the tokens are captured as they are drawn.

    Args:
        policy: returns the module that is trained, unwrapped. A function, since a trainer may replace its model.
        autocast: returns the context of mixed precision.
        max_cache_tokens: most tokens, over all rows in flight, that keys and values are kept of; None: as many as take
            the memory of the model's weights, see ``memory``.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        max_cache_tokens: int | None = None,
    ) -> None:
        if max_cache_tokens is not None and max_cache_tokens < 1:
            raise ValueError(f"max_cache_tokens is {max_cache_tokens}; give a number from 1 up, or None")
        self._policy = policy
        self._autocast = autocast
        self._max_cache_tokens = max_cache_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        row_ids: Sequence[tuple[int, int]] | None = None,
        observer: Observer | None = None,
    ) -> Completions:
        """Draws completions; see ``Generator.generate``.

        Args:
            prompts: P prompts as token ids, none of them empty.
            num_samples: for each prompt how many completions to draw.
            sampling: how to draw them; a temperature of 0 takes the likeliest token.
            seed: fixes, with ``row_ids``, every random number that is used.
            row_ids: for each completion its pair (prompt, completion); None counts within this call.
            observer: is told of every completion as soon as it has ended.

        Returns:
            The completions with their sampling log-probs, group-major.

        Raises:
            ValueError: if a prompt is empty, ``max_cache_tokens`` has no room for one completion, or the model cannot
                be decoded by this engine.
        """
        drawn = self.attempt(prompts, num_samples, sampling, seed=seed, row_ids=row_ids, observer=observer)
        if isinstance(drawn, str):
            raise ValueError(f"generation_engine='group' cannot be used because {drawn}; set generation_engine='auto'")
        return drawn

    def attempt(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        row_ids: Sequence[tuple[int, int]] | None = None,
        observer: Observer | None = None,
    ) -> Completions | str:
        """Draws completions, or says why another engine has to.

        Args:
            prompts: as in ``generate``.
            num_samples: as in ``generate``.
            sampling: as in ``generate``.
            seed: as in ``generate``.
            row_ids: as in ``generate``.
            observer: as in ``generate``.

        Returns:
            The completions, or the end of a sentence that begins with "because".

        Raises:
            ValueError: if a prompt is empty, or ``max_cache_tokens`` has no room for one completion.
        """
        check_prompts(prompts)
        own = [(p, c) for p, n in zip(range(len(prompts)), num_samples, strict=True) for c in range(n)]
        row_ids = own if row_ids is None else row_ids
        if len(row_ids) != len(own):
            raise ValueError(f"{len(row_ids)} row_ids for {len(own)} completions; give one pair for each")
        if not own:
            return Completions(ids=(), finished=(), sampling_logprobs=())
        policy, config = self._policy(), generation_config(sampling)
        longest = max(len(prompts[p]) for p, _ in own) + sampling.max_new_tokens
        reason = why_not_group(policy, config, longest)
        if reason is not None:
            return reason
        device = next(policy.parameters()).device
        with torch.no_grad(), inference_state(policy), self._autocast():
            shaper = Shaper(base_model(policy), config, len(prompts[own[0][0]]), device, sampling.tokenizer)
            reason = why_not_rules(shaper.processors, shaper.criteria)
            if reason is not None:
                return reason
            room = default_cache_tokens(policy, device) if self._max_cache_tokens is None else self._max_cache_tokens
            room = max(room, longest) if self._max_cache_tokens is None else room
            schedule = Schedule([len(p) for p in prompts], num_samples, sampling.max_new_tokens, room)
            with ready_weights(policy, passes=sampling.max_new_tokens):
                rows = dict(zip(own, row_keys(seed, row_ids).tolist(), strict=True))
                decoding = Decoding(policy, prompts, rows, sampling, shaper, schedule, observer or Observer())
                return decoding.run()
