"""Completions through continuous batching of transformers, on the very module that is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from grpo_trainer.generation.base import Observer
from grpo_trainer.generation.hf import check_prompts, generation_config, seeded
from grpo_trainer.generation.memory import default_cache_tokens
from grpo_trainer.generation.randomness import row_keys
from grpo_trainer.generation.sampling import rules_of
from grpo_trainer.generation.state import inference_state
from grpo_trainer.generation.support import why_not_batches
from grpo_trainer.loading import base_model
from grpo_trainer.registry import suggest
from grpo_trainer.types import Completions, SamplingParams

PAGE = 16
"""Tokens of a page of the cache, so that short rows waste little of their last one."""
MOST_TOKENS = 2048
"""Tokens of one forward pass: all rows in flight, or as much of the prompts."""


class ContinuousGenerator:
    """Draws completions with ``generate_batch`` of transformers: rows come and go, the cache is in pages.

    Unless the configuration says otherwise, the cache has room for what is drawn, and not for what the machine's memory
    would hold, since every step reads all of it on a CPU. The log-probs of the tokens are captured. The weights are
    used as they are: transformers decodes in a thread of its own, in which the trainer's autocast is not on.

    Args:
        policy: returns the module that is trained, unwrapped.
        config: fields of ``transformers.ContinuousBatchingConfig``, which win over ours.
        max_cache_tokens: most tokens that keys and values are kept of; None: as for the group engine.

    Raises:
        ValueError: if ``config`` holds what transformers does not know.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        config: Mapping[str, Any] | None = None,
        max_cache_tokens: int | None = None,
    ) -> None:
        from transformers.generation import ContinuousBatchingConfig

        self._policy, self._config, self._max_cache_tokens = policy, dict(config or {}), max_cache_tokens
        self._kind = ContinuousBatchingConfig
        known = ContinuousBatchingConfig.__dataclass_fields__
        for name in self._config:
            if name not in known:
                raise ValueError(
                    f"transformers_continuous_batching_config: {name!r} is no field of ContinuousBatchingConfig."
                    f"{suggest(name, known)}"
                )

    def check(self, sampling: SamplingParams) -> None:
        """Checks that continuous batching can draw from this model, and as it is asked to: it would leave out what it
        cannot, and go on.

        Args:
            sampling: how to draw.

        Raises:
            ValueError: naming what it cannot do, and an engine that can.
        """
        policy = self._policy()
        reason = why_not_batches(policy)
        if reason is not None:
            raise ValueError(
                f"generation_engine='continuous_batching' cannot be used because {reason}; set generation_engine='auto'"
            )
        model, config = base_model(policy), generation_config(sampling)
        strange = ["stop_strings"] if sampling.extra.get("stop_strings") else []
        if not strange:
            with torch.no_grad():
                rules = rules_of(model, config, 1, next(model.parameters()).device)
            strange = [type(p).__name__ for p in rules.processors if not getattr(p, "supports_continuous_batching", 0)]
        if strange:
            raise ValueError(
                f"generation_engine='continuous_batching' cannot draw with {', '.join(strange)}; leave out what asks "
                "for it, or set generation_engine='auto'"
            )

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
            sampling: how to draw them.
            seed: fixes every random number that is used.
            row_ids: there is one stream of random numbers for all rows; the first row's identity starts it.
            observer: is told of nothing.

        Returns:
            The completions with their sampling log-probs, group-major.

        Raises:
            ValueError: if a prompt is empty, or ``check`` has something against ``sampling``.
            RuntimeError: if transformers could not complete a prompt.
        """
        check_prompts(prompts)
        rows = [list(p) for p, n in zip(prompts, num_samples, strict=True) for _ in range(n)]
        if not rows:
            return Completions(ids=(), finished=(), sampling_logprobs=())
        policy = self._policy()
        model = base_model(policy)
        seed = int(row_keys(seed, [(0, 0)] if row_ids is None else row_ids[:1])) % 2**63
        device = next(policy.parameters()).device
        with torch.no_grad(), inference_state(policy), seeded(seed, device), contextlib.ExitStack() as stack:
            self.check(sampling)
            stack.callback(setattr, model.config, "_attn_implementation", model.config._attn_implementation)
            config = self._kind(**{**self._bounds(policy, rows, sampling), **self._config})
            config.seed = seed
            outputs = policy.generate_batch(
                rows,
                generation_config=generation_config(sampling),
                continuous_batching_config=config,
                progress_bar=False,
            )
        if len(outputs) != len(rows):
            raise RuntimeError(f"continuous batching completed {len(outputs)} of {len(rows)} rows")
        ordered = [outputs[name] for name in sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))]
        for row, out in zip(rows, ordered, strict=True):
            if out.error is not None or list(out.prompt_ids) != row:
                raise RuntimeError(f"continuous batching could not complete a prompt of {len(row)} tokens: {out.error}")
        ends = set(sampling.eos_token_ids)
        ids = [tuple(out.generated_tokens) for out in ordered]
        return Completions(
            ids=tuple(ids),
            finished=tuple(bool(row) and row[-1] in ends for row in ids),
            sampling_logprobs=tuple(tuple(out.logprobs) for out in ordered),
        )

    def _bounds(self, policy: Any, rows: Sequence[Sequence[int]], sampling: SamplingParams) -> dict[str, Any]:
        """Room for what is drawn, and no more than there may be."""
        device = next(policy.parameters()).device
        most = self._max_cache_tokens or default_cache_tokens(policy, device)
        pages = [-(-(len(row) + sampling.max_new_tokens) // PAGE) + 1 for row in rows]
        return {
            "page_size": PAGE,
            "num_blocks": max(min(sum(pages), most // PAGE), max(pages)),
            "max_batch_tokens": min(max(len(rows), max(map(len, rows))), MOST_TOKENS),
            "return_logprobs": True,
        }
